"""The token that ends reasoning, at nodes of trees, against a machine that reads an answer token by token."""

import random

import pytest
import torch
from reference.budgets import machine
from reference.trees import path_of, random_trees
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from draftwing.ops.reference.tree import derive
from draftwing.requests.request import MAX_MARKER, ThinkingBudget
from draftwing.sampling.budgets import BudgetTable
from draftwing.sampling.edits import Nodes

ROWS, LENGTH, VOCAB = 6, 60, 4  # few tokens, so that markers come up by themselves
END = (1,), (1, 2), (1, 1, 2), (1, 2, 1, 3)
BEGIN = (3,), (2, 3), (3, 3, 0)


def random_budget(rng: random.Random) -> ThinkingBudget:
    start = rng.choice(["open", "free", "both"])
    begin = () if start == "open" else rng.choice(BEGIN)
    return ThinkingBudget(rng.randint(0, 12), begin, rng.choice(END), start != "free", rng.random() < 0.4)


class Case:
    """A random sub-batch: rows of the table with budgets, answers that are somewhere in their blocks, and trees."""

    def __init__(self, seed: int, nodes: int, depth: int) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.table = BudgetTable(ROWS, torch.device("cpu"))
        self.history = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
        self.prompt_len = [rng.randint(1, 12) for _ in range(ROWS)]
        self.newest = torch.tensor([length - 1 + rng.randint(0, 14) for length in self.prompt_len])
        self.budgets: dict[int, ThinkingBudget] = {}
        for _ in range(2):  # what the first request of a row left must not be seen
            for row in range(ROWS):
                self.budgets[row] = random_budget(rng)
                self.table.write(row, self.budgets[row], self.prompt_len[row])
                begin = self.budgets[row].begin
                if begin and rng.random() < 0.7:  # a block at the beginning
                    at = self.prompt_len[row] + rng.randint(0, 1)
                    self.history[row, at : at + len(begin)] = torch.tensor(begin)
        self.rows = rng.sample(range(ROWS), 4)
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
    case = Case(3, 5, 4)
    shift = 1000
    case.prompt_len = [length + shift for length in case.prompt_len]
    expected, case.newest = case.forced(), case.newest + shift
    case.history = torch.cat((torch.full((ROWS, shift), 2), case.history), 1)
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
        case = Case(seed, nodes, depth)
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
