"""Penalties and biases: of drafts against a loop in float64, and those of the C sampler against those in torch, which
tests/sampling/test_edits.py holds to float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from draftwing.core import TOKEN
from draftwing.engine.devices import pick_device
from draftwing.engine.row_table import RowTable
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.sampling.spec import CANDIDATES
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Level, LogitEditor, NoiseKey, Rescoring, SampleInputs, SamplingGroups, Tree
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sampling.edits import EditTable, Nodes

TARGET, PROMPT, LENGTH = 90, 12, 40  # tokens of the target, of prompts, and of the longest text
ASKED_OF_DRAFTS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": {3: 4.0, 11: -100.0, 40: 0.5, 80: 3.0}},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.5, "logit_bias": {7: 1.5, 8: -1.5}},
    {"dry_multiplier": 3.0, "dry_base": 1.5, "dry_allowed_length": 1, "repetition_penalty": 1.2},
]


class DraftCase:
    """Rows of `ASKED` in another order, with texts of few tokens, so that many come several times."""

    def __init__(self, ops: TorchOps, mapped: bool) -> None:
        g, count, device = torch.Generator().manual_seed(1), len(ASKED_OF_DRAFTS), ops.device
        self.ops, self.table = ops, RowTable(count, LENGTH, pick_device(device.type, ops=ops))
        self.table.tokens[:] = torch.randint(0, 30, self.table.tokens.shape, generator=g)
        self.table.kv_len[:count] = torch.randint(PROMPT, LENGTH, (count,), generator=g)
        self.edits = EditTable(count + 1, TARGET, device)
        for row, asked in enumerate(ASKED_OF_DRAFTS):
            self.edits.write(row, SamplingParams(**asked), PROMPT, ())
        self.rows = torch.tensor([4, 0, 5, 1, 3, 2])
        # A head with some of the target's tokens in an order of its own, or its first ones.
        self.ids = torch.randperm(TARGET, generator=g)[:64] if mapped else torch.arange(64)
        draft_ids = torch.full((TARGET,), -1).index_copy_(0, self.ids, torch.arange(64))
        self.draft_ids = draft_ids.to(device) if mapped else None

    def editor(self, at: list[int] | None = None, rows: Tensor | None = None) -> LogitEditor:
        device = self.ops.device
        which = None if at is None else torch.tensor(at, device=device)
        rows = (self.rows if rows is None else rows).to(device)
        return self.ops.logit_editor(self.table, rows, self.edits.of_rows(which), LENGTH - 1, 64, self.draft_ids)

    def expected(self, logits: Tensor, rows: Tensor, below: list[list[list[int]]] | None = None) -> Tensor:
        """logits [B, K, V] -> float64. below: tokens from below the root down to each node; None: these are roots."""
        found = logits.double().clone()
        for b, row in enumerate(rows.tolist()):
            asked = ASKED_OF_DRAFTS[row]
            text = self.table.tokens[row, : int(self.table.kv_len[row]) + 1].tolist()
            for place, token in enumerate(self.ids.tolist()):
                x, repetition = found[b, :, place], asked.get("repetition_penalty", 1.0)
                if token in text:
                    x = torch.where(x > 0, x / repetition, x * repetition)
                if token in text[PROMPT:]:
                    x = x - asked.get("presence_penalty", 0.0)
                x = x - text[PROMPT:].count(token) * asked.get("frequency_penalty", 0.0)
                found[b, :, place] = x + asked.get("logit_bias", {}).get(token, 0.0)
                for k in range(found.shape[1]):
                    answer = text[PROMPT:] + (below[b][k] if below else [])
                    found[b, k, place] -= repeated(answer, token, **asked)
        return found


def repeated(
    answer: list[int], token: int, dry_multiplier: float = 0.0, dry_base: float = 1.75, dry_allowed_length: int = 2,
    **_: object,
) -> float:  # fmt: skip
    """What a token costs that goes on with the longest end of an answer that was there before, by its definition."""
    longest = 0
    for at, other in enumerate(answer):
        if other == token:
            sizes = [n for n in range(1, at + 1) if answer[at - n : at] == answer[len(answer) - n :]]
            longest = max(longest, *sizes, 0)
    return dry_multiplier * dry_base ** (longest - dry_allowed_length) if longest >= dry_allowed_length else 0.0


def made(dtype: torch.dtype, rows: int, seed: int = 0) -> Tensor:
    return (torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


@pytest.mark.slower(dtype=torch.float16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mapped", "nodes"), [(False, 3), (True, 1)])
@pytest.mark.covering("ops")
def test_logits_are_edited_by_the_text(ops: TorchOps, dtype: torch.dtype, mapped: bool, nodes: int) -> None:
    case = DraftCase(ops, mapped)
    logits = made(dtype, 6 * nodes)
    wanted = case.expected(logits.view(6, nodes, 64), case.rows).flatten(0, 1)
    assert not torch.equal(wanted, logits.double())
    wide = torch.zeros(6 * nodes, 70, dtype=dtype)  # rows of logits are apart
    wide[:, :64] = logits
    for at in (None, [0, 2, 3, 4, 5]):  # of which row 1 of the batch, without edits, is none
        found = wide.clone().to(ops.device)
        case.editor(at).apply(found[:, :64])
        torch.testing.assert_close(found[:, :64].cpu().double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert not found[:, 64:].any()


TREE = (  # of each level tokens and parents of 3 nodes in 3 rows; branches swap
    ([[2, 3, 1], [4, 5, 6], [7, 8, 9]], [0, 0, 0]),
    ([[1, 3, 2], [4, 4, 5], [1, 2, 3]], [2, 0, 0]),
    ([[3, 1, 9], [4, 4, 5], [3, 2, 3]], [1, 0, 1]),
)


@pytest.mark.parametrize("mapped", [False, True])
def test_repetitions_cost_by_the_path(ops: TorchOps, mapped: bool) -> None:
    """Of a row with penalties of repetitions, one without edits, and one with others."""
    case, rows, device = DraftCase(ops, mapped), torch.tensor([5, 0, 2]), ops.device
    case.table.tokens[5, PROMPT:] = torch.tensor([1, 2, 3]).repeat(10)[: LENGTH - PROMPT]
    case.table.kv_len[5] = 27
    editor, below = case.editor(rows=rows), [[[], [], []] for _ in rows]
    for depth, (ids, parents) in enumerate(TREE):
        editor.follow(Level(torch.tensor(ids, device=device), torch.tensor([parents] * 3, device=device)))
        below = [[[*below[b][parents[k]], ids[b][k]] for k in range(3)] for b in range(3)]
        logits = made(torch.float32, 9, depth)
        found = logits.clone().to(device)
        editor.apply(found)
        wanted = case.expected(logits.view(3, 3, 64), rows, below)
        torch.testing.assert_close(found.cpu().double().view(3, 3, 64), wanted, rtol=1e-6, atol=1e-5)
        assert not torch.equal(wanted[0], case.expected(logits.view(3, 3, 64), rows)[0]), "the path matters"
    one_for_all, asked = made(torch.float32, 3, 7), ASKED_OF_DRAFTS[5]
    found = one_for_all.clone().to(device)
    editor.apply(found)
    assert torch.equal(found[1].cpu(), one_for_all[1])
    own = case.expected(one_for_all.view(3, 1, 64), rows)[0, 0]
    own += torch.tensor([repeated([1, 2, 3] * 5 + [1], token, **asked) for token in case.ids.tolist()])
    torch.testing.assert_close(found[0].cpu().double(), own, rtol=1e-6, atol=1e-5)


def test_rows_without_edits_keep_their_bits(ops: TorchOps) -> None:
    case, logits = DraftCase(ops, True), made(torch.bfloat16, 2)
    found = logits.clone().to(ops.device)
    case.editor(rows=torch.tensor([0, 0])).apply(found)
    assert torch.equal(found.cpu(), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mapped", "threads"), [(False, 3), (True, 1), (True, 2)])
def test_a_head_edits_before_it_chooses(dtype: torch.dtype, mapped: bool, threads: int) -> None:
    """Against its parts, of which each is tested alone: GEMM, edits, choice; with noise and without, in any threads."""
    if load_extension() is None:
        pytest.skip("the C kernels were not built")
    from draftwing.ops.cpu.arena import Arena
    from draftwing.ops.cpu.ops import CpuOps
    from draftwing.ops.cpu.workers import Workers
    from draftwing.ops.gemm.cpu import HeadTopK
    from draftwing.ops.gemm.cpu_blocks import BlockedGemm

    ops = CpuOps(torch.device("cpu"))
    case, g = DraftCase(ops, mapped), torch.Generator().manual_seed(2)
    weight, states = (torch.randn(n, 96, generator=g).to(dtype) for n in (64, 6))
    gemm = BlockedGemm([ops.quantize(weight, "Q8_0")], dtype, Workers(), Arena())
    readout = HeadTopK(gemm, None, None, case.ids if mapped else None)
    rows = torch.tensor([5, 0, 4])
    floats = torch.tensor([[0.7, 0.0, 1.3], [1.0, 1.0, 1.0], [0.2, 0.1, 0.0]])
    keys = NoiseKey(torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3]), floats)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for key in (None, keys):
            logits = gemm.linear(states, None)
            unedited = logits.clone()
            case.editor(rows=rows).apply(logits)
            assert not torch.equal(logits[:2], unedited[:2]) and torch.equal(logits[2:4], unedited[2:4])
            best, logp = ops.top_tokens(logits, 3, 4, key, case.ids)
            ids, scores = torch.zeros(6, 4, dtype=torch.int64), torch.zeros(6, 4)
            readout.best(states, None, ids, scores, key, case.editor(rows=rows))
            assert torch.equal(ids, case.ids[best])
            torch.testing.assert_close(scores, logp)
    finally:
        torch.set_num_threads(before)


# -- of the target, in C ----------------------------------------------------------------------------------------------

NONE = torch.empty(0, dtype=torch.int64)
NODES, SIZE, DEPTH = 5, 64, 2
ASKED = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"logit_bias": {3: 4.0, 11: -100.0, 40: 0.5}},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.5, "logit_bias": {7: 1.5, 8: -1.5}},
    {"presence_penalty": 2.0},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {
        "dry_multiplier": 0.7,
        "dry_base": 3.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "logit_bias": {4: 2.0},
    },
]


class Case(NamedTuple):
    table: RowTable
    edits: EditTable
    rows: Tensor
    logits: Tensor
    hidden: Tensor
    weight: Tensor
    tokens: Tensor
    tree: Tree

    @property
    def positions(self) -> Tensor:
        return self.table.kv_len[self.rows].unsqueeze(1) + self.tree.depth

    def drawn(self, cpu_ops: CpuOps, rescored: bool, edits: bool = True) -> Tensor:
        rescoring = Rescoring(self.hidden, self.weight, lambda x, ids: cpu_ops.exact_logits(x, self.weight, ids))
        asked = SamplingGroups(NONE, NONE, NONE), True, rescoring if rescored else None
        drawn = SampleInputs(
            self.rows, self.logits, self.hidden, self.positions, self.tree.depth, DEPTH, self.tokens, self.tree.path,
            self.tree.path_len,
        )  # fmt: skip
        return cpu_ops.draw(drawn, self.table, *asked, self.edits.of_rows() if edits else None)


def make_case(cpu_ops: CpuOps, dtype: torch.dtype, vocab: int, temperature: float, filters: dict[str, float]) -> Case:
    """Rows of `ASKED` in another order, with texts of few tokens, so that many come several times."""
    generator = torch.Generator().manual_seed(vocab)
    count = len(ASKED)
    table = RowTable(count, 60, pick_device("cpu", ops=cpu_ops))
    table.tokens[:] = torch.randint(0, 30, table.tokens.shape, generator=generator)
    table.kv_len[:count] = torch.randint(20, 50, (count,), generator=generator)
    table.seed[:] = torch.randint(-(2**62), 2**62, (count + 1,), generator=generator)
    table.floats[:, 0], table.floats[:, 1] = temperature, filters.get("top_p", 1.0)
    table.floats[:, 2], table.top_k[:] = filters.get("min_p", 0.0), int(filters.get("top_k", 0))
    table.ban_until[1], table.ban_ids[:] = 10**6, -1
    table.ban_ids[1, :2] = torch.tensor([5, 9])
    edits = EditTable(count + 1, vocab, torch.device("cpu"))
    for row, asked in enumerate(ASKED):
        edits.write(row, SamplingParams(**asked), 15, ())
    rows = torch.randperm(count, generator=generator)
    parent = torch.tensor([[0, 0, 0, 1, 1]]).expand(count, NODES).contiguous()
    tokens = torch.randint(0, 30, (count, NODES), generator=generator)
    tokens[:, 0] = table.tokens[rows, table.kv_len[rows]]
    tree = Tree(
        torch.tensor([[0, 1, 1, 2, 2]]).expand(count, -1).contiguous(),
        torch.tensor([[[0, 0, 0], [0, 1, 1], [0, 2, 2], [0, 1, 3], [0, 1, 4]]]).expand(count, -1, -1).contiguous(),
        torch.tensor([[1, 2, 2, 3, 3]]).expand(count, -1).contiguous(),
    )
    assert (tree.depth.gather(1, parent) + 1 == tree.depth)[:, 1:].all()
    hidden = torch.randn(count, NODES, SIZE, generator=generator).to(dtype)
    weight = (torch.randn(vocab, SIZE, generator=generator) * 0.4).to(dtype)
    logits = (hidden.double() @ weight.double().T).to(dtype)
    return Case(table, edits, rows, logits, hidden, weight, tokens, tree)


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(0.0, {}), (0.7, {}), (0.7, {"min_p": 0.1}), (0.7, {"top_k": 12, "top_p": 0.8})],
    ids=["greedy", "none", "min p", "k, p"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slower(threads=1)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_is_that_of_the_edits_in_torch(
    cpu_ops: CpuOps, dtype: torch.dtype, temperature: float, filters: dict[str, float], threads: int
) -> None:
    """Bit for bit: a request that is prefilled again goes on with these."""
    case, before = make_case(cpu_ops, dtype, 333, temperature, filters), torch.get_num_threads()
    every, table = torch.arange(len(ASKED)), case.table
    newest = table.kv_len[case.rows]
    features = case.edits.features(case.rows.tolist())
    nodes = Nodes(case.rows, table.tokens, newest, 59, case.tokens, case.tree.path, case.tree.path_len)
    edit = case.edits.apply(case.logits.float(), features, nodes)

    def exact(ids: Tensor, only: Tensor | None) -> Tensor:
        assert only is None
        return edit.at(cpu_ops.exact_logits(case.hidden, case.weight, ids), ids, only)

    expected = cpu_ops.sample(
        edit.logits, case.positions, case.tree.depth, DEPTH, table.sampling(case.rows), every,
        every if filters else NONE, (case.rows == 1).nonzero().flatten(), exact,
    )  # fmt: skip
    try:
        torch.set_num_threads(threads)
        assert torch.equal(case.drawn(cpu_ops, rescored=True), expected)
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(case.drawn(cpu_ops, rescored=True, edits=False) & TOKEN, expected)
    assert CANDIDATES < 333
