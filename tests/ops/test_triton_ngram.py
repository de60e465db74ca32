"""N-gram kernels against the torch code on the CPU: the same memory, candidates, hints and trees all along."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from draftwing.core import MAX_HINT, PLAIN, TreeShape
from draftwing.ops.attention import Batch, ChunkSpan
from draftwing.ops.cpu import ngram as cpu_ngram
from draftwing.ops.triton import ngram as kernels
from draftwing.spec.drafter import Draft
from draftwing.spec.ngram import memory as ngram_memory
from draftwing.spec.ngram.drafter import OWN, NGramDrafter
from draftwing.spec.ngram.memory import NGramMemory
from draftwing.spec.ngram.tree import TreeBuilder

CPU = torch.device("cpu")
MANY = 1 if torch.cuda.is_available() else 5  # interpreted tests are this many times shorter
SHAPES = [TreeShape(5, 3, 8), TreeShape(3, 1, 4), TreeShape(9, 4, 40), TreeShape(2, 2, 64), PLAIN]
_on_kernels = False


@contextmanager
def on_kernels() -> Iterator[None]:
    """Inside, the drafter runs kernels, be it interpreted."""
    global _on_kernels
    _on_kernels = True
    yield
    _on_kernels = False


@pytest.fixture(autouse=True)
def dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_memory, "use_triton", lambda tensor: _on_kernels)
    monkeypatch.setattr(cpu_ngram, "take", lambda tensor: False)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short context is searched by several programs, each with several chunks."""
    monkeypatch.setattr(kernels.outlook, "__defaults__", (32,))
    monkeypatch.setattr(kernels, "MAX_SPLITS", 4)


class Slots(NamedTuple):
    tokens: Tensor
    kv_len: Tensor
    last: Tensor
    salt: Tensor


class Pair:
    """A drafter on torch and one on kernels, with a slot table each, shown the same."""

    def __init__(self, device: torch.device, rows: int, context: int, **options: int) -> None:
        self.device, self.rows = device, rows

        def slots(where: torch.device) -> Slots:
            sizes = [(rows + 1, context), (rows + 1,), (rows + 1,), (rows + 1,)]
            return Slots(*(torch.zeros(s, dtype=torch.int64, device=where) for s in sizes))

        self.sides = [(NGramDrafter(rows + 1, where, **options), slots(where)) for where in (CPU, device)]
        self.history: list[list[int]] = [[] for _ in range(rows + 1)]
        garbage = torch.randint(0, 5, (rows, context), generator=torch.Generator().manual_seed(1))
        for _, s in self.sides:
            s.tokens[:rows] = garbage

    def write(self, row: int, history: list[int], salt: int) -> None:
        self.history[row] = history
        for _, s in self.sides:
            s.tokens[row, : len(history)] = torch.tensor(history)
            s.kv_len[row], s.last[row], s.salt[row] = len(history) - 1, history[-1], salt

    def begin(self, row: int, prompt: list[int], salt: int) -> None:
        self.write(row, prompt, salt)
        rows = torch.tensor([row])
        for drafter, s in self.sides:
            at = rows.to(s.tokens.device)
            batch = Batch(at, at, at, at, at, at, chunks=(ChunkSpan(0, 0, 0, len(prompt)),))
            drafter.observe(s, batch, None, at, None)

    def step(self, rows: list[int], new: dict[int, list[int]], limit: int, salts: list[int], shape: TreeShape) -> int:
        """A step that generated `new`, then the outlook and the next draft; returns live draft nodes."""
        prefix = [len(self.history[r]) - 1 if r < self.rows else 0 for r in rows]
        for row, tokens in new.items():
            self.write(row, self.history[row] + tokens, salts[row])
        counts = [len(new.get(r, [1])) for r in rows]
        bound = max(len(self.history[r]) - 1 for r in new)
        results = []
        for side, kernel in zip(self.sides, (False, True), strict=True):
            numbers = [torch.tensor(x, device=side[1].tokens.device) for x in (rows, prefix, counts)]
            with on_kernels() if kernel else nullcontext():
                results.append(self.run(*side, *numbers, limit, bound, shape))
        real = len(new)
        (hint, draft), (got_hint, got) = results
        assert torch.equal(got_hint[:real], hint[:real])
        for one, two in zip(got, draft, strict=True):
            assert one.dtype == two.dtype and torch.equal(one[:real], two[:real])
        assert not got_hint[real:].any() and (got.alive[real:].sum(1) == 1).all()  # the dummy row proposes nothing
        self.check()
        return int(got.alive[:real].sum()) - real

    def run(
        self, drafter: NGramDrafter, slots: Slots, rows: Tensor, before: Tensor, count: Tensor, limit: int, bound: int,
        shape: TreeShape,
    ) -> tuple[Tensor, Draft]:  # fmt: skip
        none = rows[:0]
        ids = rows.new_zeros(rows.numel() * limit)
        drafter.observe(slots, Batch(rows, none, none, none, none, before), None, ids, count)
        hint = drafter.outlook(slots, rows, bound)
        return hint.cpu(), Draft(*(x.cpu() for x in drafter.propose(slots, rows, shape, bound)))

    def check(self) -> None:
        (expected, _), (got, _) = self.sides
        a, b = expected.memory, got.memory
        end = int(a.row[self.rows, 0])  # the dummy row's own ring is nobody's
        assert torch.equal(b.log[:end].cpu(), a.log[:end]) and not b.log[end:].any()
        assert torch.equal(b.table.cpu(), a.table)
        assert torch.equal(b.clock.cpu(), a.clock) and not b.ticket.any() and not got.tickets.any()
        assert torch.equal(b.row[: self.rows].cpu(), a.row[: self.rows])
        assert torch.equal(got.gap[: self.rows].cpu(), expected.gap[: self.rows])
        match = expected.match[: self.rows]
        assert torch.equal(got.match[: self.rows].cpu(), match)
        found = (match > 0)[:, None]  # the rest is garbage
        assert torch.equal(
            got.candidates[: self.rows].cpu() * found, expected.candidates[: self.rows] * found
        )  # fmt: skip


def live(pair: Pair, seed: int, steps: int, vocab: int, limit: int, copies: float) -> tuple[int, int]:
    """Random requests that come and go, some of them copying from what was said before."""
    rng = random.Random(seed)
    context = pair.sides[0][1].tokens.shape[1]
    salts = [0] * (pair.rows + 1)
    drafts = hints = 0
    for row in range(pair.rows):
        pair.begin(row, [rng.randrange(vocab) for _ in range(rng.randint(1, 12))], 0)
    for at in range(steps):
        running = rng.sample(range(pair.rows), rng.randint(1, pair.rows))
        new = {}
        for row in running:
            if rng.random() < 0.05 or len(pair.history[row]) + limit >= context - 1:
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
        hints += at % len(SHAPES) != len(SHAPES) - 1
        if at == steps // 2:
            for drafter, _ in pair.sides:
                drafter.flush()
    return drafts, hints


@pytest.mark.parametrize("low, high", [(1, 12), (2, 5), (4, 7), (1, 1)])
def test_lives_agree(low: int, high: int, device: torch.device, small_chunks: None) -> None:
    pair = Pair(device, 3, 300, min_window=low, max_window=high, branch_length=9, capacity=10_000)
    drafts, steps = live(pair, seed=low * 100 + high, steps=60 // MANY, vocab=4, limit=6, copies=0.4)
    assert drafts > steps


def test_long_branches_and_defaults(device: torch.device) -> None:
    pair = Pair(device, 2, 500, capacity=10_000)
    drafts, steps = live(pair, seed=5, steps=40 // MANY, vocab=30, limit=19, copies=0.8)
    assert drafts > steps


def test_rings_wrap(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NGramMemory.__init__, "__defaults__", (20,))
    pair = Pair(device, 2, 200, max_window=6, branch_length=7, capacity=1)
    live(pair, seed=6, steps=100 // MANY, vocab=3, limit=5, copies=0.3)
    assert int(pair.sides[1][0].memory.row[:-1, -1].min()) > 40  # twice around


def test_many_rows_meet_in_one_bucket(device: torch.device) -> None:
    """Every row says the same in the same step: their windows fight for the same entries."""
    rows = 25 // MANY
    pair = Pair(device, rows, 64, capacity=1)
    for row in range(rows):
        pair.begin(row, [1, 2, 3], 0)
    text = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6]
    for at in range(0, 10, 2):
        new = dict.fromkeys(range(rows), text[at : at + 2])
        pair.step([*new, rows, rows], new, 3, [0] * (rows + 1), SHAPES[0])


def test_length_grows_past_a_chunk(device: torch.device) -> None:
    """The number of programs that take part follows the text, at the chunk's own size."""
    pair = Pair(device, 1, 2 * kernels.CHUNK + 100, capacity=1)
    rng = random.Random(2)
    for length in (kernels.CHUNK - 2, 2 * kernels.CHUNK - 1):
        prompt = [rng.randrange(200) for _ in range(length)]
        prompt[-5:] = prompt[10:15]
        pair.begin(0, prompt, 0)
        for at in range(3):
            pair.step([0], {0: prompt[15 + at : 16 + at]}, 2, [0, 0], SHAPES[0])
        assert int(pair.sides[1][0].gap[0]) > length - 30


def test_hints_go_into_a_strided_column(device: torch.device) -> None:
    drafter = NGramDrafter(3, device, capacity=1)
    tokens = torch.tensor([[1, 2, 3, 1, 2, 0], [4, 4, 4, 0, 0, 0], [0] * 6], device=device)
    slots = Slots(tokens, torch.tensor([4, 2, 0], device=device), tokens[:, 0], tokens[:, 5])
    packed = torch.full((3, 5), -1, dtype=torch.int64, device=device)
    with on_kernels():
        drafter.outlook(slots, torch.arange(3, device=device), 4, packed[:, 2])
    assert packed[:, 2].tolist() == [2, 2, 0]
    assert (packed[:, [0, 1, 3, 4]] == -1).all()
    assert kernels.OWN == OWN and MAX_HINT == 31


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
def test_captured_step_follows_the_device_lengths(device: torch.device) -> None:
    """One graph, captured when the text was short, replayed while it grows past several chunks."""
    limit, shape, rows = 700, SHAPES[0], [0, 1, 2, 2]
    pair = Pair(device, 2, 5000, capacity=1)
    rng = random.Random(3)
    for row in range(2):
        pair.begin(row, [rng.randrange(50) for _ in range(4)], 0)
    (expected, reference), (drafter, slots) = pair.sides
    at = torch.tensor(rows, device=device)
    before, count, ids = torch.zeros_like(at), torch.ones_like(at), at.new_zeros(len(rows) * limit)

    def step() -> tuple[Tensor, Draft]:
        drafter.observe(slots, Batch(at, at, at, at, at, before), None, ids, count)
        return drafter.outlook(slots, at, 10), drafter.propose(slots, at, shape, 10)

    kept = [x.clone() for x in (drafter.memory.row, drafter.memory.log, drafter.memory.table, drafter.gap)]
    state = drafter.memory.row, drafter.memory.log, drafter.memory.table, drafter.gap
    with on_kernels():
        step()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            hint, draft = step()
    for x, old in zip(state, kept, strict=True):
        x.copy_(old)
    drafter.memory.clock.zero_()
    found = 0
    for _ in range(6):
        prefix = [len(pair.history[r]) - 1 if r < 2 else 0 for r in rows]
        for row in range(2):
            history = pair.history[row]
            new = history[: rng.randint(1, 30)] + [rng.randrange(50) for _ in range(rng.randint(1, 600))]
            pair.write(row, history + new, 0)
        counts = [len(pair.history[r]) - 1 - p if r < 2 else 1 for r, p in zip(rows, prefix, strict=True)]
        before.copy_(torch.tensor(prefix))
        count.copy_(torch.tensor(counts))
        graph.replay()
        numbers = torch.tensor(rows), torch.tensor(prefix), torch.tensor(counts)
        bound = max(len(history) for history in pair.history)
        want_hint, want = pair.run(expected, reference, *numbers, limit, bound, shape)
        assert torch.equal(hint[:2].cpu(), want_hint[:2]) and not hint[2:].any()
        for one, two in zip(draft, want, strict=True):
            assert torch.equal(one[:2].cpu(), two[:2])
        pair.check()
        found += int(want.alive[:2].sum()) - 2
    assert found > 10


def random_candidates(rng: random.Random, rows: int, depth: int, ways: int, window: int) -> tuple[Tensor, Tensor]:
    """Ranked by match, sharing prefixes, ending early."""
    candidates = torch.full((rows, depth, ways), -1, dtype=torch.int64)
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
            candidates[row, :size, c] = torch.tensor([rng.randrange(names) for _ in range(size)])
    return candidates, match


@pytest.mark.parametrize("depth, nodes", [(1, 2), (1, 20), (4, 6), (5, 8), (8, 16), (9, 64), (7, 130)])
def test_build(depth: int, nodes: int, device: torch.device) -> None:
    rng = random.Random(nodes)
    ways, window, branch, rows = 16, 12, 9, 40
    for breadths in ((1, 10), (1, 1), (3, 16)):
        builder = TreeBuilder(ways, branch, window, *breadths, CPU)
        candidates, match = random_candidates(rng, rows, branch, ways, window)
        last = torch.randint(0, 1000, (rows,), generator=torch.Generator().manual_seed(nodes))
        picked = torch.tensor(rng.sample(range(rows), 25))
        expected = builder.build(
            candidates[picked][:, :depth], match[picked], last[picked], TreeShape(depth, 1, nodes)
        )  # fmt: skip
        inputs = (x.to(device) for x in (candidates, match, last, picked, builder.weight))
        got = kernels.build(*inputs, depth, nodes)
        for one, two in zip(got, expected, strict=True):
            assert one.dtype == two.dtype and torch.equal(one.cpu(), two)
