"""Edits at nodes of trees against plain sequences, edited token list by token list in float64."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from reference.budgets import machine
from reference.trees import path_of, random_trees
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftwing.ops.table import TorchOps
from draftwing.ops.tree.spec import derive
from draftwing.ops.types import SamplingRows, Tree
from draftwing.requests.request import MAX_MARKER, ThinkingBudget
from draftwing.requests.sampling_params import MAX_REPEAT, SamplingParams
from draftwing.sampling.edits import BudgetTable, Edited, EditTable, Features, Nodes

ROWS, LENGTH = 6, 40
NONE = torch.empty(0, dtype=torch.int64)


def reference(
    logits: list[float], tokens: list[int], prompt_len: int, params: SamplingParams, bad: list[list[int]],
    may: set[int] | None,
) -> list[float]:  # fmt: skip
    """The edited logits of what follows `tokens`, the prompt and the answer so far."""
    answer = tokens[prompt_len:]
    x = list(logits)
    for i in set(tokens):
        x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
    for i in set(answer):
        x[i] -= params.frequency_penalty * answer.count(i) + params.presence_penalty
    for i, value in params.logit_bias:
        x[i] += value
    longest: dict[int, int] = {}  # tokens of the answer's end that each token has followed before
    for i, token in enumerate(answer[1:], 1):
        same = [n for n in range(1, min(i, MAX_REPEAT) + 1) if answer[i - n : i] == answer[-n:]]
        longest[token] = max(longest.get(token, 0), *same, 0)
    for token, n in longest.items():
        if n >= params.dry_allowed_length:
            x[token] -= params.dry_multiplier * params.dry_base ** (n - params.dry_allowed_length)
    for i in range(len(x)):
        if (params.allowed_token_ids and i not in params.allowed_token_ids) or (may is not None and i not in may):
            x[i] = -math.inf
    for word in bad:
        if len(word) == 1 or answer[-len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -math.inf
    return x


def random_params(rng: random.Random, vocab: int, kind: str) -> tuple[SamplingParams, list[list[int]]]:
    def has(name: str) -> bool:
        return kind == name or (kind == "all" and rng.random() < 0.8)

    words = [[rng.randrange(vocab // 4) for _ in range(rng.randint(1, 3))] for _ in range(12)] if has("bad") else []
    params = SamplingParams(
        frequency_penalty=rng.choice([0.3, -0.7]) if has("count") else 0.0,
        presence_penalty=rng.choice([0.5, -1.1]) if has("count") else 0.0,
        repetition_penalty=rng.choice([1.3, 0.8]) if has("repetition") else 1.0,
        dry_multiplier=rng.choice([0.4, 3.0]) if has("repeats") else 0.0,
        dry_base=rng.choice([1.0, 1.75]),
        dry_allowed_length=rng.choice([1, 1, 2]),
        logit_bias=tuple((i, rng.uniform(-5, 5)) for i in rng.sample(range(vocab), 5)) if has("bias") else (),
        allowed_token_ids=tuple(rng.sample(range(vocab), vocab // 2)) if has("allowed") else (),
        bad_words=tuple("w" for _ in words),
    )
    return params, words


def pack(may: list[list[set[int]]], vocab: int) -> Tensor:
    bits = np.zeros((len(may), len(may[0]), -(-vocab // 32) * 32), bool)
    for b, row in enumerate(may):
        for n, ids in enumerate(row):
            bits[b, n, list(ids)] = True
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little").view(np.int32))


class Case:
    """A random sub-batch: `rows` of the table, small vocabularies so that tokens meet again and again."""

    def __init__(self, seed: int, kind: str, vocab: int, nodes: int, depth: int, guided: bool) -> None:
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.nodes = vocab, nodes
        self.table = EditTable(ROWS, vocab, torch.device("cpu"))
        self.history = torch.randint(0, vocab // 4, (ROWS, LENGTH), generator=generator)
        self.prompt_len = [rng.randint(1, 12) for _ in range(ROWS)]
        self.newest = torch.tensor([self.prompt_len[r] - 1 + rng.randint(0, 12) for r in range(ROWS)])
        self.params, self.words = {}, {}
        for _ in range(2):  # what the first request of a row left must not be seen
            for r in range(ROWS):
                self.params[r], self.words[r] = random_params(rng, vocab, kind)
                self.table.write(r, self.params[r], self.prompt_len[r], self.words[r])
        self.rows = rng.sample(range(ROWS), 4)
        batch = len(self.rows)
        self.parent, self.alive = random_trees(rng, batch, nodes, depth)
        self.tree: Tree = derive(self.parent, self.alive, depth)
        self.drafts = torch.randint(0, vocab // 4, (batch, nodes), generator=generator)
        self.drafts[:, 0] = self.history[self.rows, self.newest[self.rows]]
        self.logits = torch.randn(batch, nodes, vocab, generator=generator) * 3
        self.may = None
        if guided:
            everything = set(range(vocab))
            self.may = [
                [set(rng.sample(range(vocab), vocab // 3)) if b % 2 else everything for _ in range(nodes)]
                for b in range(batch)
            ]

    def edit(self) -> Edited:
        rows = torch.tensor(self.rows)
        features = self.table.features(self.rows, self.may is not None)
        masks = None if self.may is None else pack(self.may, self.vocab)
        newest = self.newest[rows]
        bound = int(newest.max())
        nodes = Nodes(rows, self.history, newest, bound, self.drafts, self.tree.path, self.tree.path_len)
        return self.table.apply(self.logits, features, nodes, masks)

    def tokens(self, b: int, n: int) -> list[int]:
        row = self.rows[b]
        known = self.history[row, : int(self.newest[row]) + 1].tolist()
        return known + [int(self.drafts[b, i]) for i in path_of(self.parent, b, n)]

    def expected(self, b: int, n: int) -> list[float]:
        row = self.rows[b]
        may = None if self.may is None else self.may[b][n]
        args = self.tokens(b, n), self.prompt_len[row], self.params[row], self.words[row], may
        return reference(self.logits[b, n].double().tolist(), *args)


KINDS = ["count", "repetition", "repeats", "bias", "allowed", "bad", "none", "all"]


@pytest.mark.slow
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "nodes", "depth"), [(40, 9, 3), (96, 1, 0), (71, 5, 4)])
def test_every_node_is_edited_as_its_path(kind: str, guided: bool, vocab: int, nodes: int, depth: int) -> None:
    changed = 0
    for seed in range(4):
        case = Case(seed, kind, vocab, nodes, depth, guided)
        before = case.logits.clone()
        edited = case.edit()
        assert torch.equal(case.logits, before)
        everything = torch.arange(vocab).expand(len(case.rows), nodes, vocab)
        assert torch.equal(edited.at(case.logits, everything)[case.alive], edited.logits[case.alive])
        for b in range(len(case.rows)):
            for n in range(nodes):
                if case.alive[b, n]:
                    want = torch.tensor(case.expected(b, n))
                    torch.testing.assert_close(edited.logits[b, n], want, rtol=1e-5, atol=1e-5)
                    changed += not torch.equal(edited.logits[b, n], case.logits[b, n])
    assert bool(changed) == (kind != "none" or guided)


def test_a_node_equals_the_plain_sequence_bit_for_bit() -> None:
    """The node's path as committed history, and one node: what decoding without drafts does."""
    met = 0
    for seed in range(6):
        case = Case(seed, "all", 64, 8, 4, True)
        edited = case.edit()
        assert case.may is not None
        for b, row in enumerate(case.rows):
            for n in range(case.nodes):
                if not case.alive[b, n]:
                    continue
                tokens = case.tokens(b, n)
                history = torch.full((ROWS, LENGTH), 7)
                history[row, : len(tokens)] = torch.tensor(tokens)
                zero = torch.zeros(1, 1, dtype=torch.int64)
                newest, bound = torch.tensor([len(tokens) - 1]), len(tokens) + 3
                nodes = Nodes(torch.tensor([row]), history, newest, bound, zero, zero[..., None], zero + 1)
                logits, masks = case.logits[b : b + 1, n : n + 1], pack([[case.may[b][n]]], case.vocab)
                alone = case.table.apply(logits, case.table.features([row], True), nodes, masks)
                assert torch.equal(alone.logits[0, 0], edited.logits[b, n])
                met += n > 0
    assert met > 50


def test_selected_rows_of_chosen_ids() -> None:
    case = Case(3, "all", 64, 6, 3, True)
    edited = case.edit()
    only = torch.tensor([3, 1])
    ids = torch.randint(0, 64, (2, 6, 9), generator=torch.Generator().manual_seed(0))
    got = edited.at(case.logits[only].gather(-1, ids), ids, only)
    alive = case.alive[only]
    assert torch.equal(got[alive], edited.logits[only].gather(-1, ids)[alive])
    assert got.isinf().any()


@pytest.mark.slower(temperature=0.0)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_sampling_with_exact_logits_of_half_precision(temperature: float) -> None:
    """Rounded logits and edits of exact ones among the candidates choose what the exact logits choose."""
    differs = 0
    for seed in range(30):
        case = Case(seed, "all", 128, 6, 3, False)
        true = case.logits / 3 + 30
        batch = len(case.rows)
        none, noisy = NONE, torch.arange(batch) if temperature else NONE
        params = SamplingRows(
            seed=torch.arange(batch), temperature=torch.full((batch,), temperature), top_k=torch.full((batch,), -1),
            top_p=torch.ones(batch), min_p=torch.zeros(batch), ban_until=torch.full((batch,), 99),
            ban_ids=torch.tensor([[5, -1]] * batch),
        )  # fmt: skip
        positions = case.newest[torch.tensor(case.rows)][:, None] + case.tree.depth
        picked = []
        for logits in (true, true.bfloat16().float()):
            case.logits = logits
            edit = case.edit()

            def exact(ids: Tensor, only: Tensor | None, edit: Edited = edit, true: Tensor = true) -> Tensor:
                values = (true if only is None else true[only]).gather(-1, ids)
                return edit.at(values, ids, only)

            args = edit.logits, positions, case.tree.depth, 3, params, noisy, none, torch.arange(batch)
            ops = TorchOps()
            picked += [ops.sample(*args), ops.sample(*args, exact)]
        plain, same, blurred, rescored = picked
        assert torch.equal(plain[case.alive], same[case.alive])
        assert torch.equal(plain[case.alive], rescored[case.alive])
        assert not (rescored[case.alive] == 5).any()
        differs += int((blurred != rescored)[case.alive].sum())
    assert differs > 3


def test_rows_without_edits_need_nothing() -> None:
    table = EditTable(3, 50, torch.device("cpu"))
    assert table.features([0, 2]) == Features()
    table.write(1, SamplingParams(frequency_penalty=0.1, logit_bias=((3, 1.0), (4, 1.0))), 4, [])
    table.write(2, SamplingParams(bad_words=("a",)), 4, [[1, 2, 3]])
    assert table.features([0, 1, 2]) == Features(counts=True, biases=2, bad_words=1, bad_tokens=3)
    table.write(1, SamplingParams(repetition_penalty=2.0), 4, [])
    assert table.features([1], guided=True) == Features(seen=True, masks=True)
    table.write(1, SamplingParams(dry_multiplier=0.5), 4, [])
    assert table.features([1]) == Features(repeats=True)


@pytest.mark.parametrize(("period", "allowed"), [(1, 3), (3, 2), (7, 20), (5, 31)])
def test_what_a_loop_goes_on_with_is_the_only_token_that_costs_more(period: int, allowed: int) -> None:
    """A text of all different tokens, then a loop: its next token gets what `MAX_REPEAT` tokens cost, at most."""
    table = EditTable(1, 400, torch.device("cpu"))
    params = SamplingParams(dry_multiplier=0.25, dry_base=1.25, dry_allowed_length=allowed)
    table.write(0, params, 5, [])
    for repeated in range(1, 50):
        text = [*range(5, 40), *range(100, 100 + period)]
        text += [100 + i % period for i in range(repeated)]
        zero = torch.zeros(1, 1, dtype=torch.int64)
        last = len(text) - 1
        nodes = Nodes(zero[0], torch.tensor([text]), zero[0] + last, last, zero, zero[..., None], zero + 1)
        found = table.apply(torch.zeros(1, 1, 400), table.features([0]), nodes).logits[0, 0]
        length = min(repeated, MAX_REPEAT)
        cost = 0.25 * 1.25 ** (length - allowed) if length >= allowed else 0
        assert found[100 + repeated % period].item() == pytest.approx(-cost, rel=1e-5)
        assert found.count_nonzero() == (length >= allowed)


BUDGET_ROWS, BUDGET_LENGTH, VOCAB = 6, 60, 4  # few tokens, so that markers come up by themselves
END = (1,), (1, 2), (1, 1, 2), (1, 2, 1, 3)
BEGIN = (3,), (2, 3), (3, 3, 0)


def random_budget(rng: random.Random) -> ThinkingBudget:
    start = rng.choice(["open", "free", "both"])
    begin = () if start == "open" else rng.choice(BEGIN)
    return ThinkingBudget(rng.randint(0, 12), begin, rng.choice(END), start != "free", rng.random() < 0.4)


class BudgetCase:
    """A random sub-batch: rows of the table with budgets, answers that are somewhere in their blocks, and trees."""

    def __init__(self, seed: int, nodes: int, depth: int) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.table = BudgetTable(BUDGET_ROWS, torch.device("cpu"))
        self.history = torch.randint(0, VOCAB, (BUDGET_ROWS, BUDGET_LENGTH), generator=generator)
        self.prompt_len = [rng.randint(1, 12) for _ in range(BUDGET_ROWS)]
        self.newest = torch.tensor([length - 1 + rng.randint(0, 14) for length in self.prompt_len])
        self.budgets: dict[int, ThinkingBudget] = {}
        for _ in range(2):  # what the first request of a row left must not be seen
            for row in range(BUDGET_ROWS):
                self.budgets[row] = random_budget(rng)
                self.table.write(row, self.budgets[row], self.prompt_len[row])
                begin = self.budgets[row].begin
                if begin and rng.random() < 0.7:  # a block at the beginning
                    at = self.prompt_len[row] + rng.randint(0, 1)
                    self.history[row, at : at + len(begin)] = torch.tensor(begin)
        self.rows = rng.sample(range(BUDGET_ROWS), 4)
        self.parent, self.alive = random_trees(rng, len(self.rows), nodes, depth)
        self.tree = derive(self.parent, self.alive, depth)
        self.drafts = torch.randint(0, VOCAB, (len(self.rows), nodes), generator=generator)
        self.drafts[:, 0] = self.history[self.rows, self.newest[self.rows]]

    def forced(self, slack: int = 0) -> Tensor:
        rows = torch.tensor(self.rows)
        newest = self.newest[rows]
        bound = int(newest.max()) + slack
        nodes = Nodes(rows, self.history, newest, bound, self.drafts, self.tree.path, self.tree.path_len)
        return self.table.forced(self.rows, nodes)

    def answer(self, b: int, n: int) -> list[int]:
        row = self.rows[b]
        known = self.history[row, self.prompt_len[row] : int(self.newest[row]) + 1].tolist()
        return known + [int(self.drafts[b, i]) for i in path_of(self.parent, b, n)]


def test_a_long_prompt_is_not_looked_at() -> None:
    """What stands before the answers is neither read nor copied: no tensor is as wide as the prompts are long."""
    case = BudgetCase(3, 5, 4)
    shift = 1000
    case.prompt_len = [length + shift for length in case.prompt_len]
    expected, case.newest = case.forced(), case.newest + shift
    case.history = torch.cat((torch.full((BUDGET_ROWS, shift), 2), case.history), 1)
    for row, length in enumerate(case.prompt_len):
        case.table.write(row, case.budgets[row], length)
    most = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            out = func(*args, **(kwargs or {}))
            parts = out if isinstance(out, tuple | list) else (out,)
            made = [part for part in parts if isinstance(part, Tensor) and part.is_contiguous()]
            most = max([most, *(part.shape[-1] for part in made if part.dim())])
            return out

    with Sizes():
        forced = case.forced()
    assert torch.equal(forced, expected) and most < 200


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "depth"), [(1, 0), (5, 4), (11, 3), (14, 13)])
def test_every_node_is_told_what_its_path_is_told(nodes: int, depth: int) -> None:
    reported = {True: 0, False: 0}
    for seed in range(120):
        case = BudgetCase(seed, nodes, depth)
        forced = case.forced(slack=seed % 3)
        for b, row in enumerate(case.rows):
            for n in range(nodes):
                if case.alive[b, n]:
                    want = machine(case.answer(b, n), case.budgets[row])
                    assert int(forced[b, n]) == want, (seed, b, n, case.answer(b, n), case.budgets[row])
                    reported[want >= 0] += 1
    assert min(reported.values()) > 40


def test_a_marker_that_the_model_has_begun_is_finished() -> None:
    """With [1, 1, 2] as the end: of 0, 1, 1, 1 the last two are its beginning, and 2 ends it."""
    table, zero = BudgetTable(2, torch.device("cpu")), torch.zeros(1, 1, dtype=torch.int64)

    def following(answer: list[int], tokens: int) -> int:
        table.write(0, ThinkingBudget(tokens, (), (1, 1, 2), True), 2)
        history = torch.tensor([[1, 1, *answer, 0, 0], [0] * (len(answer) + 4)])  # the prompt ends as the marker begins
        newest = torch.tensor([len(answer) + 1])
        nodes = Nodes(zero[0], history, newest, len(answer) + 2, zero, zero[..., None], zero + 1)
        return int(table.forced([0], nodes))

    assert [following([0, 1, 1, 1], 4), following([0, 1, 1, 1], 5)] == [2, -1]
    assert [following([], 0), following([1], 0), following([1, 1], 0), following([1, 1, 2], 0)] == [1, 1, 2, -1]
    assert [following([0, 3, 1], 3), following([0, 1, 3], 3), following([1, 1, 2, 0, 0], 3)] == [1, 1, -1]


@pytest.mark.slow
def test_the_longest_markers_and_fake_tensors() -> None:
    long = tuple(range(100, 100 + MAX_MARKER))
    with FakeTensorMode():
        table = BudgetTable(4, torch.device("cpu"))
        for nodes, depth in ((1, 0), (5, 2)):
            zero = torch.zeros(2, nodes, dtype=torch.int64)
            tree = derive(zero, zero == 0, depth)
            table._longest[0] = len(long)
            history = torch.zeros(4, 30, dtype=torch.int64)
            some = Nodes(zero[:, 0], history, zero[:, 0], 20, zero, tree.path, tree.path_len)
            forced = table.forced([0, 1], some)
            assert forced.shape == (2, nodes)
    table, zero = BudgetTable(1, torch.device("cpu")), torch.zeros(1, 1, dtype=torch.int64)
    table.write(0, ThinkingBudget(3, long, long[::-1], False), 1)
    reported, text = [], [7, *long]
    for _ in range(40):
        history = torch.tensor([[*text, 0]])
        args = zero[0], history, torch.tensor([len(text) - 1]), len(text), zero, zero[..., None], zero + 1
        reported.append(int(table.forced([0], Nodes(*args))))
        text.append(reported[-1] if reported[-1] >= 0 else 9)
    assert reported == [-1, -1, -1, *long[::-1], *[-1] * (40 - 3 - MAX_MARKER)]
