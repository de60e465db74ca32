"""N-gram drafting in C against the torch code: the same memory, candidates, hints and trees all along."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftwing.core import MAX_HINT, PLAIN, TreeShape
from draftwing.ops.attention import Batch, ChunkSpan
from draftwing.ops.cpu import ngram as kernels
from draftwing.ops.cpu.extension import load_extension
from draftwing.spec.drafter import Draft
from draftwing.spec.ngram.drafter import OWN, NGramDrafter
from draftwing.spec.ngram.memory import CANDIDATES, NGramMemory, kernels_for
from draftwing.spec.ngram.tree import TreeBuilder

if load_extension() is None:
    pytest.skip("the C kernels were not built", allow_module_level=True)

CPU = torch.device("cpu")
SHAPES = [TreeShape(5, 3, 8), TreeShape(3, 1, 4), TreeShape(9, 4, 40), TreeShape(2, 2, 64), TreeShape(1, 2, 2), PLAIN]
WINDOWS = [(1, 12), (2, 5), (4, 7), (1, 1), (1, MAX_HINT)]


@contextmanager
def on_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "take", lambda tensor: False)
        yield


class Slots(NamedTuple):
    tokens: Tensor
    kv_len: Tensor
    last: Tensor
    salt: Tensor


def assert_same(got: NGramDrafter, expected: NGramDrafter) -> None:
    """All state but the dummy row's, which nobody reads, and candidates behind the last match."""
    a, b = expected.memory, got.memory
    rows = a.row.shape[0] - 1
    end = int(a.row[rows, 0])  # the dummy row's own ring
    assert torch.equal(b.log[:end], a.log[:end]) and not b.log[end:].any()
    assert torch.equal(b.table, a.table) and torch.equal(b.clock, a.clock)
    assert torch.equal(b.row[:rows], a.row[:rows])
    assert torch.equal(got.gap[:rows], expected.gap[:rows])
    match = expected.match[:rows]
    assert torch.equal(got.match[:rows], match)
    found = (match > 0)[:, None]
    assert torch.equal(got.candidates[:rows] * found, expected.candidates[:rows] * found)


class Pair:
    """A drafter on torch and one in C that are shown the same slot table."""

    def __init__(self, rows: int, context: int, **options: int) -> None:
        self.rows, self.context = rows, context
        self.drafters = [NGramDrafter(rows + 1, CPU, **options) for _ in range(2)]
        garbage = torch.randint(0, 5, (rows + 1, context), generator=torch.Generator().manual_seed(1))
        garbage[rows] = 0
        zeros = torch.zeros(3, rows + 1, dtype=torch.int64)
        self.slots = Slots(garbage, *zeros)
        self.history: list[list[int]] = [[] for _ in range(rows + 1)]

    def write(self, row: int, history: list[int], salt: int) -> None:
        self.history[row] = history
        s = self.slots
        s.tokens[row, : len(history)] = torch.tensor(history)
        s.kv_len[row], s.last[row], s.salt[row] = len(history) - 1, history[-1], salt

    def begin(self, row: int, prompt: list[int], salt: int) -> None:
        self.write(row, prompt, salt)
        at = torch.tensor([row])
        for drafter in self.drafters:
            batch = Batch(at, at, at, at, at, at, chunks=(ChunkSpan(0, 0, 0, len(prompt)),))
            drafter.observe(self.slots, batch, None, at, None)

    def step(self, rows: list[int], new: dict[int, list[int]], limit: int, salts: list[int], shape: TreeShape) -> int:
        """A step that generated `new`, then the outlook and the next draft; returns live draft nodes."""
        before = torch.tensor([len(self.history[r]) - 1 if r < self.rows else 0 for r in rows])
        for row, tokens in new.items():
            self.write(row, self.history[row] + tokens, salts[row])
        count = torch.tensor([len(new.get(r, [1])) for r in rows])
        bound = max(len(self.history[r]) - 1 for r in new)
        results = []
        for drafter, where in zip(self.drafters, (on_torch(), nullcontext()), strict=True):
            with where:
                results.append(self.run(drafter, torch.tensor(rows), before, count, limit, bound, shape))
        (hint, draft), (got_hint, got) = results
        real = len(new)
        assert torch.equal(got_hint[:real], hint[:real])
        for one, two in zip(got, draft, strict=True):
            assert one.dtype == two.dtype and torch.equal(one[:real], two[:real])
        assert not got_hint[real:].any() and (got.alive[real:].sum(1) == 1).all()  # the dummy row proposes nothing
        assert_same(self.drafters[1], self.drafters[0])
        return int(got.alive[:real].sum()) - real

    def run(
        self, drafter: NGramDrafter, rows: Tensor, before: Tensor, count: Tensor, limit: int, bound: int,
        shape: TreeShape,
    ) -> tuple[Tensor, Draft]:  # fmt: skip
        none = rows[:0]
        batch = Batch(rows, none, none, none, none, before)
        drafter.observe(self.slots, batch, None, rows.new_zeros(rows.numel() * limit), count)
        hint = drafter.outlook(self.slots, rows, bound)
        return hint, drafter.propose(self.slots, rows, shape, bound)


def live(pair: Pair, seed: int, steps: int, vocab: int, limit: int, copies: float) -> float:
    """Random requests that come and go, some of them copying from what was said before; drafts per step."""
    rng = random.Random(seed)
    salts = [0] * (pair.rows + 1)
    drafts = 0
    for row in range(pair.rows):
        pair.begin(row, [rng.randrange(vocab) for _ in range(rng.randint(1, 12))], 0)
    for at in range(steps):
        running = rng.sample(range(pair.rows), rng.randint(1, pair.rows))
        new = {}
        for row in running:
            if rng.random() < 0.05 or len(pair.history[row]) + limit >= pair.context - 1:
                salts[row] = rng.choice((0, 0, 7, 2**62 + 1))
                source = rng.choice(pair.history[: pair.rows])
                pair.begin(row, source[-rng.randint(1, 30) :], salts[row])
            history = pair.history[row]
            new[row] = [rng.randrange(vocab) for _ in range(rng.randint(1, limit))]
            if rng.random() < copies and len(history) > 20:
                start = rng.randrange(len(history) - 10)
                new[row] = history[start : start + rng.randint(1, limit)]
        rows = running + [pair.rows] * rng.randint(0, 2)
        drafts += pair.step(rows, new, limit, salts, SHAPES[at % len(SHAPES)])
        if at == steps // 2:
            for drafter in pair.drafters:
                drafter.flush()
    return drafts / steps


@pytest.mark.parametrize("low, high", WINDOWS)
def test_lives_agree(low: int, high: int) -> None:
    pair = Pair(5, 300, min_window=low, max_window=high, branch_length=9, capacity=10_000)
    assert live(pair, seed=low * 100 + high, steps=150, vocab=4, limit=6, copies=0.4) > 1


def test_long_branches_and_defaults() -> None:
    assert live(Pair(3, 500, capacity=10_000), seed=5, steps=100, vocab=30, limit=19, copies=0.8) > 1


def test_rings_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NGramMemory.__init__, "__defaults__", (20,))
    pair = Pair(3, 200, max_window=6, branch_length=7, capacity=1)
    live(pair, seed=6, steps=200, vocab=3, limit=5, copies=0.3)
    assert int(pair.drafters[1].memory.row[:-1, -1].min()) > 60  # three times around


def test_everything_collides() -> None:
    """A table of four buckets: places of other windows and of overwritten ones fill it."""
    pair = Pair(4, 300, max_window=8, branch_length=5, capacity=1)
    for drafter in pair.drafters:
        drafter.memory.mask = 12
    assert live(pair, seed=7, steps=150, vocab=5, limit=4, copies=0.3) > 1


def test_many_rows_meet_in_one_bucket() -> None:
    """Every row says the same in the same step: their windows fight for the same entries."""
    pair = Pair(25, 64, capacity=1)
    for row in range(25):
        pair.begin(row, [1, 2, 3], 0)
    text = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6]
    drafts = 0
    for at in range(0, 10, 2):
        new = dict.fromkeys(range(25), text[at : at + 2])
        drafts += pair.step([*new, 25, 25], new, 3, [0] * 26, SHAPES[0])
    assert drafts > 100


def histories(rng: random.Random, rows: int, longest: int) -> list[list[int]]:
    """Random, periodic and constant ones, and those that copy their own beginning."""
    found = []
    for _ in range(rows):
        vocab, length = rng.choice((1, 2, 3, 5, 40)), rng.randint(1, longest)
        text = [rng.randrange(vocab) for _ in range(length)]
        kind = rng.randrange(4)
        if kind == 1:
            period = rng.randint(1, 20)
            text = (text[:period] * length)[:length]
        elif kind == 2:
            start = rng.randrange(length)
            text = (text + text[start : start + rng.randint(1, 40)])[:longest]
        found.append(text)
    return found


@pytest.mark.parametrize("low, high", WINDOWS)
@pytest.mark.parametrize("longest", [14, 99, 400])
def test_search(low: int, high: int, longest: int) -> None:
    """Thousands of histories, each searched from where its row may have been copying from."""
    rng, rows, total = random.Random(longest + high), 300, 0
    pair = Pair(rows, longest + 1, min_window=low, max_window=high, branch_length=7, capacity=1)
    for _ in range(3):
        source = torch.tensor([[rng.randint(-1, longest)] for _ in range(rows + 1)])
        for drafter in pair.drafters:
            drafter.gap.copy_(source)
        for row, text in enumerate(histories(rng, rows, longest)):
            pair.write(row, text, 0)
        every = torch.arange(rows)
        with on_torch():
            hint = pair.drafters[0].outlook(pair.slots, every, longest - 1)
        assert torch.equal(pair.drafters[1].outlook(pair.slots, every, longest - 1), hint)
        assert_same(pair.drafters[1], pair.drafters[0])
        total += int((hint > 0).sum())
    assert total > 100


def test_long_context() -> None:
    """8000 tokens: nothing to find, the same token all along, and a copy from far away."""
    pair = Pair(4, 8001, capacity=1)
    rng = random.Random(3)
    new = [rng.randrange(100) for _ in range(8000)]
    far = list(range(8000))
    far[-6:] = far[:6]
    for row, text in enumerate((list(range(8000)), [7] * 8000, new, far)):
        pair.begin(row, text[:-1], 0)
    last = {0: [7999], 1: [7], 2: new[-1:], 3: far[-1:]}
    assert pair.step([0, 1, 2, 3], last, 1, [0] * 5, TreeShape(4, 4, 12)) > 15
    assert pair.drafters[1].gap.flatten().tolist() == [-1, 0, -1, 7993, -1]


def random_candidates(rng: random.Random, rows: int, depth: int, window: int) -> tuple[Tensor, Tensor]:
    """Ranked by match, sharing prefixes, ending early, with garbage behind the last match."""
    ways = OWN + CANDIDATES
    candidates = torch.randint(-1, 3, (rows, depth, ways), generator=torch.Generator().manual_seed(rows))
    match = torch.zeros(rows, ways, dtype=torch.int64)
    for row in range(rows):
        found = rng.randint(0, ways)
        lengths = sorted((rng.randint(1, window) for _ in range(found)), reverse=True)
        if rng.random() < 0.3:
            lengths = lengths[:1] * found  # many ties
        match[row, :found] = torch.tensor(lengths, dtype=torch.int64)
        names = rng.choice((1, 2, 5, 1000))
        for c in range(found):
            size = rng.randint(1, depth)
            candidates[row, :, c] = -1
            candidates[row, :size, c] = torch.tensor([rng.randrange(names) for _ in range(size)])
    return candidates, match


@pytest.mark.parametrize("depth, nodes", [(1, 2), (1, 20), (4, 6), (5, 8), (8, 16), (9, 64), (7, 130), (9, 200)])
def test_build(depth: int, nodes: int) -> None:
    rng = random.Random(nodes)
    window, branch, rows = 12, 9, 200
    for breadths in ((1, 10), (1, 1), (3, 16), (16, 16)):
        builder = TreeBuilder(OWN + CANDIDATES, branch, window, *breadths, CPU)
        candidates, match = random_candidates(rng, rows, branch, window)
        last = torch.randint(0, 1000, (rows,), generator=torch.Generator().manual_seed(nodes))
        picked = torch.tensor(rng.sample(range(rows), 150))
        shape = TreeShape(depth, 1, nodes)
        expected = builder.build(candidates[picked][:, :depth], match[picked], last[picked], shape)
        got = kernels.build(candidates, match, last, picked, builder.weight, depth, nodes)
        for one, two in zip(got, expected, strict=True):
            assert one.dtype == two.dtype and torch.equal(one, two)


def test_strided_arguments() -> None:
    """A column of a packed result takes the hints; others may come from one."""
    drafter = NGramDrafter(3, CPU, capacity=1)
    tokens = torch.tensor([[1, 2, 3, 1, 2, 0], [4, 4, 4, 0, 0, 0], [0] * 6])
    slots = Slots(tokens, torch.tensor([4, 2, 0]), torch.tensor([2, 4, 0]), torch.zeros(3, dtype=torch.int64))
    packed = torch.full((3, 5), -1, dtype=torch.int64)
    drafter.outlook(slots, torch.arange(3), 4, packed[:, 2])
    assert packed[:, 2].tolist() == [2, 2, 0]
    assert (packed[:, [0, 1, 3, 4]] == -1).all()

    numbers = torch.tensor([[0, 3, 1], [1, 1, 1]])  # row, prefix, count
    drafter.memory.insert(tokens, *numbers.unbind(1), 2)
    assert drafter.memory.row[:, 3:].tolist() == [[4, 2], [2, 2], [-1, -1]]


def test_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data, and where the kernels are not wanted."""
    assert kernels_for(torch.arange(2)) is kernels
    assert not kernels.take(torch.empty(2, device="meta"))
    with FakeTensorMode():
        assert kernels_for(torch.arange(2)) is None
    monkeypatch.setenv("DRAFTWING_NATIVE", "0")
    load_extension.cache_clear()
    try:
        assert kernels_for(torch.arange(2)) is None
    finally:
        load_extension.cache_clear()
