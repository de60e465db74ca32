"""The n-gram index of every implementation against torch's, the same memory, candidates, confidences and trees all
along; and its trees against a dictionary of prefixes. What torch's memory is held to is in test_ngram_memory.py."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from lookup_slots import Slots
from torch import Tensor

from draftwing.config.trees import MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.ops.ngram import spec as ngram_memory
from draftwing.ops.ngram.spec import NGramIndex
from draftwing.ops.table import TorchOps
from draftwing.ops.types import Draft

CPU = torch.device("cpu")
SHAPES = [TreeShape(5, 3, 8), TreeShape(3, 1, 4), TreeShape(9, 4, 40), TreeShape(2, 2, 64), TreeShape(1, 2, 2), PLAIN]
WINDOWS = [(1, 12), (2, 5), (4, 7), (1, 1), (1, MAX_CONFIDENCE)]


@pytest.fixture(autouse=True)
def only_the_others(ops: TorchOps) -> None:
    if ops.name == "torch":
        pytest.skip("it is what the others are compared with")


@pytest.fixture
def few(ops: TorchOps) -> int:
    """By how much tests of this implementation are shorter: the interpreter takes its time."""
    return 8 if ops.name == "triton" and ops.device.type == "cpu" else 1


@pytest.fixture
def small_chunks(ops: TorchOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short context is searched by several programs, each with several chunks."""
    if ops.name == "triton":
        from draftwing.ops.ngram import triton as kernels

        monkeypatch.setattr(kernels, "CHUNK", 32)
        monkeypatch.setattr(kernels, "MAX_SPLITS", 4)


def slots_on(ops: TorchOps, rows: int, context: int) -> Slots:
    """Garbage; the dummy row is empty."""
    garbage = torch.randint(0, 5, (rows + 1, context), generator=torch.Generator().manual_seed(1))
    garbage[rows] = 0
    zeros = torch.zeros(3, rows + 1, dtype=torch.int64, device=ops.device)
    return Slots(garbage.to(ops.device, ops.table_dtype), *zeros)


class Pair:
    """Torch's index and another, with a row table each, shown the same."""

    def __init__(self, ops: TorchOps, rows: int, context: int, **options: int) -> None:
        self.rows, self.context = rows, context
        self.sides: list[tuple[NGramIndex, Slots]] = [
            (there.ngram_index(rows + 1, there.device, **options), slots_on(there, rows, context))
            for there in (TorchOps(CPU), ops)
        ]
        self.history: list[list[int]] = [[] for _ in range(rows + 1)]
        self.images = 0  # tokens of some in what was generated

    def write(self, row: int, history: list[int], salt: int) -> None:
        self.history[row] = history
        for _, s in self.sides:
            s.tokens[row, : len(history)] = torch.tensor(history)
            s.kv_len[row], s.last[row], s.salt[row] = len(history) - 1, history[-1], salt

    def begin(self, row: int, prompt: list[int], salt: int) -> None:
        self.write(row, prompt, salt)
        for index, s in self.sides:
            index.begin(s, torch.tensor([row], device=s.tokens.device))

    def step(self, rows: list[int], new: dict[int, list[int]], limit: int, salts: list[int], shape: TreeShape) -> int:
        """A step that generated `new`, then the confidence and the next draft; returns live draft nodes."""
        prefix = [len(self.history[r]) - 1 if r < self.rows else 0 for r in rows]
        for row, tokens in new.items():
            self.write(row, self.history[row] + tokens, salts[row])
        counts = [len(new.get(r, [1])) for r in rows]
        bound = max(len(self.history[r]) - 1 for r in new)
        results = []
        for index, s in self.sides:
            at, before, count = (torch.tensor(x, device=s.tokens.device) for x in (rows, prefix, counts))
            index.insert(s, at, before, count, limit)
            confidence = index.confidence(s, at, bound)
            results.append((confidence.cpu(), Draft(*(x.cpu() for x in index.propose(s, at, shape)[:3]))))
        real = len(new)
        self.images += sum(tokens.count(self.sides[0][0].image_token) for tokens in new.values())
        (confidence, draft), (got_hint, got) = results
        assert torch.equal(got_hint[:real], confidence[:real])
        assert not (got.alive[:real] & (got.tokens[:real] == index.image_token))[:, 1:].any()
        for one, two in zip(got[:3], draft[:3], strict=True):
            assert one.dtype == two.dtype and torch.equal(one[:real], two[:real])
        assert not got_hint[real:].any() and (got.alive[real:].sum(1) == 1).all()  # the dummy row proposes nothing
        self.check()
        return int(got.alive[:real].sum()) - real

    def check(self) -> None:
        """All state but the dummy row's, which nobody reads, and candidates behind the last match."""
        (expected, _), (got, _) = self.sides
        a, b, rows = expected.memory, got.memory, self.rows
        end = int(a.row[rows, 0])  # the dummy row's own ring
        assert torch.equal(b.log[:end].cpu(), a.log[:end]) and not b.log[end:].any()
        assert torch.equal(b.table.cpu(), a.table) and torch.equal(b.clock.cpu(), a.clock)
        assert torch.equal(b.row[:rows].cpu(), a.row[:rows])
        for name in ("ticket", "tickets"):  # of Triton's kernels, between launches
            assert not getattr(got, name, b.clock[:0]).any()
        assert torch.equal(got.gap[:rows].cpu(), expected.gap[:rows])
        match = expected.match[:rows]
        assert torch.equal(got.match[:rows].cpu(), match)
        found = (match > 0)[:, None]
        assert torch.equal(got.candidates[:rows].cpu() * found, expected.candidates[:rows] * found)


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
            for index, _ in pair.sides:
                index.flush()
                assert not index.match.any()
    return drafts / steps


@pytest.mark.slow
@pytest.mark.further(ops="triton", high=[1, 5, 7, 12])
@pytest.mark.parametrize("low, high", WINDOWS)
def test_lives_agree(ops: TorchOps, few: int, small_chunks: None, low: int, high: int) -> None:
    pair = Pair(ops, 5 if few == 1 else 3, 300, min_window=low, max_window=high, branch_length=9, capacity=10_000)
    assert live(pair, seed=low * 100 + high, steps=120 // few, vocab=4, limit=6, copies=0.4) > 0.8


def test_lives_with_images(ops: TorchOps, few: int, small_chunks: None) -> None:
    options = {"branch_length": 9, "capacity": 10_000, "image_token": 2}
    pair = Pair(ops, 5 if few == 1 else 3, 300, **options)
    assert live(pair, seed=5, steps=60 // few, vocab=4, limit=6, copies=0.4) > 0.8
    assert pair.images > 3


@pytest.mark.slow
@pytest.mark.further(ops="triton")
def test_long_branches_and_defaults(ops: TorchOps, few: int) -> None:
    assert live(Pair(ops, 3, 500, capacity=10_000), seed=5, steps=80 // few, vocab=30, limit=19, copies=0.8) > 1


@pytest.mark.slow
@pytest.mark.further(ops="triton")
def test_rings_wrap(ops: TorchOps, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_memory.NGramMemory.__init__, "__defaults__", (20, -1))
    pair = Pair(ops, 2, 200, max_window=6, branch_length=7, capacity=1)
    live(pair, seed=6, steps=160 // few, vocab=3, limit=5, copies=0.3)
    assert int(pair.sides[1][0].memory.row[:-1, -1].min()) > 40  # twice around


def test_what_is_remembered(ops: TorchOps) -> None:
    """More tokens than go into the memory at once, rows of other lengths, one of them without any."""
    pair, rng, salts = Pair(ops, 3, 200, capacity=10_000), random.Random(6), [5, 6, 5, 0]
    texts = [[rng.randrange(5000) for _ in range(length)] for length in (100, 70, 2)]
    for row, text in enumerate(texts):
        pair.write(row, text, salts[row])
    for index, slots in pair.sides:
        rows, before, count = (torch.tensor(x, device=slots.tokens.device) for x in ([0, 1, 2], [3, 1, 1], [96, 68, 0]))
        index.remember(slots, rows, before, count, 96)
    pair.check()
    pair.begin(2, texts[0][20:40], 5)
    assert pair.step([2], {2: texts[0][40:43]}, 3, salts, SHAPES[0]) > 3
    pair.begin(2, texts[0][20:40], 6)
    assert pair.step([2], {2: texts[0][40:43]}, 3, [5, 6, 6, 0], SHAPES[0]) == 0


def test_everything_collides(ops: TorchOps, few: int) -> None:
    """A table of four buckets: places of other windows and of overwritten ones fill it."""
    pair = Pair(ops, 4, 300, max_window=8, branch_length=5, capacity=1)
    for index, _ in pair.sides:
        index.memory.mask = 12
    assert live(pair, seed=7, steps=120 // few, vocab=5, limit=4, copies=0.3) > 0.5


@pytest.mark.further(ops="triton")
def test_many_rows_meet_in_one_bucket(ops: TorchOps, few: int) -> None:
    """Every row says the same in the same step: their windows fight for the same entries."""
    rows = 25 if few == 1 else 5
    pair = Pair(ops, rows, 64, capacity=1)
    for row in range(rows):
        pair.begin(row, [1, 2, 3], 0)
    text = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6]
    drafts = 0
    for at in range(0, 10, 2):
        new = dict.fromkeys(range(rows), text[at : at + 2])
        drafts += pair.step([*new, rows, rows], new, 3, [0] * (rows + 1), SHAPES[0])
    assert drafts > 4 * rows


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


@pytest.mark.slow
@pytest.mark.further(ops="triton", high=[1, 5, 7])
@pytest.mark.parametrize("low, high", WINDOWS)
@pytest.mark.parametrize("longest", [14, 99, 400])
@pytest.mark.covering("ops")
def test_search(ops: TorchOps, few: int, small_chunks: None, low: int, high: int, longest: int) -> None:
    """Many histories, each searched from where its row may have been copying from."""
    rng, rows, total = random.Random(longest + high), 300 if few == 1 else 5, 0
    pair = Pair(ops, rows, longest + 1, min_window=low, max_window=high, branch_length=7, capacity=1)
    for _ in range(3 if few == 1 else 1):
        source = torch.tensor([[rng.randint(-1, longest)] for _ in range(rows + 1)])
        confidences = []
        for row, text in enumerate(histories(rng, rows, longest)):
            pair.write(row, text, 0)
        for index, s in pair.sides:
            index.gap.copy_(source)
            confidences.append(index.confidence(s, torch.arange(rows, device=s.tokens.device), longest - 1).cpu())
        assert torch.equal(*confidences)
        pair.check()
        total += int((confidences[0] > 0).sum())
    assert total > rows // 3


def test_a_row_copies_nothing_at_first(ops: TorchOps) -> None:
    """Whatever the request before it copied: of equal matches the most recent counts, until one has gone on."""
    index, s = ops.ngram_index(2, ops.device, capacity=1), slots_on(ops, 1, 30)
    row = torch.tensor([0], device=ops.device)

    def found(text: list[int]) -> tuple[int, list[int]]:
        """The confidence, and the newest token with the best that may follow."""
        s.tokens[0, : len(text)] = torch.tensor(text)
        s.kv_len[0], s.last[0] = len(text) - 1, text[-1]
        confidence = int(index.confidence(s, row, len(text) - 1))
        return confidence, index.propose(s, row, TreeShape(1, 1, 2)).tokens[0].tolist()

    one, two = [*range(20, 30), 20, 21, 22], [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3]
    index.begin(s, row)
    assert found(one) == (3, [22, 23])
    assert found([*one, 23]) == (12 + 4, [23, 24]), "it goes on"
    index.begin(s, row)
    assert found(two) == (3, [3, 6]), "ten tokens before the newest, as in the first text, 4 followed"
    assert found([*two, 6]) == (12 + 4, [6, 7])


def test_long_context(ops: TorchOps) -> None:
    """8000 tokens: nothing to find, the same token all along, and a copy from far away."""
    pair, rng = Pair(ops, 4, 8001, capacity=1), random.Random(3)
    new = [rng.randrange(100) for _ in range(8000)]
    far = list(range(8000))
    far[-6:] = far[:6]
    for row, text in enumerate((list(range(8000)), [7] * 8000, new, far)):
        pair.begin(row, text[:-1], 0)
    last = {0: [7999], 1: [7], 2: new[-1:], 3: far[-1:]}
    assert pair.step([0, 1, 2, 3], last, 1, [0] * 5, TreeShape(4, 4, 12)) > 15
    assert pair.sides[1][0].gap.flatten().tolist() == [-1, 0, -1, 7993, -1]


def test_strided_arguments(ops: TorchOps) -> None:
    """A column of a packed result takes the confidences; others may come from one."""
    index = ops.ngram_index(3, ops.device, capacity=1)
    tokens = torch.tensor([[1, 2, 3, 1, 2, 0], [4, 4, 4, 0, 0, 0], [0] * 6], device=ops.device)
    kv_len, last = torch.tensor([[4, 2, 0], [2, 4, 0]], device=ops.device)
    slots = Slots(tokens, kv_len, last, torch.zeros_like(last))
    packed = torch.full((3, 5), -1, dtype=torch.int64, device=ops.device)
    index.confidence(slots, torch.arange(3, device=ops.device), 4, packed[:, 2])
    assert packed[:, 2].tolist() == [2, 2, 0]
    assert (packed[:, [0, 1, 3, 4]] == -1).all()

    numbers = torch.tensor([[0, 3, 1], [1, 1, 1]], device=ops.device)  # row, prefix, count
    columns = numbers.unbind(1) if ops.name == "cpu" else numbers.t().contiguous().unbind(0)
    index.insert(slots, *columns, 2)
    assert index.memory.row[:, 3:].tolist() == [[4, 2], [2, 2], [-1, -1]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")
def test_captured_step_follows_the_device_lengths(ops: TorchOps) -> None:
    """One graph, captured when the text was short, replayed while it grows past several chunks."""
    if ops.device.type != "cuda":
        pytest.skip("for the GPU")
    limit, shape, rows = 700, SHAPES[0], [0, 1, 2, 2]
    pair, rng = Pair(ops, 2, 5000, capacity=1), random.Random(3)
    for row in range(2):
        pair.begin(row, [rng.randrange(50) for _ in range(4)], 0)
    (expected, reference), (index, slots) = pair.sides
    at = torch.tensor(rows, device=ops.device)
    before, count = torch.zeros_like(at), torch.ones_like(at)

    def step() -> tuple[Tensor, Draft]:
        index.insert(slots, at, before, count, limit)
        return index.confidence(slots, at, 10), index.propose(slots, at, shape)

    state = index.memory.row, index.memory.log, index.memory.table, index.gap
    kept = [x.clone() for x in state]
    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        confidence, draft = step()
    for x, old in zip(state, kept, strict=True):
        x.copy_(old)
    index.memory.clock.zero_()
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
        here = torch.tensor(rows)
        expected.insert(reference, here, torch.tensor(prefix), torch.tensor(counts), limit)
        want_hint = expected.confidence(reference, here, max(len(history) for history in pair.history))
        want = expected.propose(reference, here, shape)
        assert torch.equal(confidence[:2].cpu(), want_hint[:2]) and not confidence[2:].any()
        for one, two in zip(draft[:3], want[:3], strict=True):
            assert torch.equal(one[:2].cpu(), two[:2])
        pair.check()
        found += int(want.alive[:2].sum()) - 2
    assert found > 10


# -- trees of candidates ----------------------------------------------------------------------------------------------

WAYS, DEPTH, WINDOW = 16, 7, 5
TREE_SHAPES = [TreeShape(d, 3, n) for d in (1, 2, 4, 7) for n in (2, 3, 6, 12, 60)]
Prefix = tuple[int, ...]


class LastTokens(NamedTuple):
    """What is read of the row table."""

    last: Tensor


def build(
    ops: TorchOps, window: int, breadth: tuple[int, int], candidates: Tensor, match: Tensor, last: Tensor,
    shape: TreeShape,
) -> Draft:  # fmt: skip
    """Trees of candidates [B, D, C] that an index has found, of every second of its rows."""
    size, branch, ways = candidates.shape
    index = ops.ngram_index(
        2 * size + 1, ops.device, max_window=window, min_breadth=breadth[0], max_breadth=breadth[1],
        branch_length=branch, capacity=1,
    )  # fmt: skip
    rows = torch.arange(size, device=ops.device) * 2
    index.candidates[rows, :, :ways], index.match[rows, :ways] = candidates.to(ops.device), match.to(ops.device)
    every = torch.full((2 * size + 1,), -1, device=ops.device)
    every[rows] = last.to(ops.device)
    return Draft(*(part.cpu() for part in index.build(LastTokens(every), rows, shape.depth, shape.nodes)))


def random_candidates(rng: random.Random, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Candidates in rank order that share prefixes, some cut short, some missing."""
    match = sorted((rng.randint(0, WINDOW) for _ in range(WAYS)), reverse=True)
    stem = [rng.randrange(vocab) for _ in range(DEPTH)]
    out = []
    for m in match:
        keep = rng.randint(0, DEPTH)
        ids = stem[:keep] + [rng.randrange(vocab) for _ in range(DEPTH - keep)]
        known = rng.randint(1, DEPTH) if m else 0
        out.append(ids[:known] + [-1] * (DEPTH - known))
    return out, match


def prefix_scores(
    candidates: list[list[int]], match: list[int], depth: int, low: int, high: int
) -> dict[Prefix, float]:
    """Every allowed prefix and its score, by the definition in `TreeBuilder`."""
    breadth = high - (high - low) * max(match[0] - 1, 0) // (WINDOW - 1)
    scores: dict[Prefix, float] = {}
    for rank, (ids, m) in enumerate(zip(candidates[:breadth], match, strict=False)):
        known = ids[: ids.index(-1)] if -1 in ids else ids
        for d in range(min(depth, len(known)) if m else 0):
            path = tuple(ids[: d + 1])
            scores[path] = scores.get(path, 0.0) + m * m * 0.8**rank * (1 - 1 / (m + 2)) ** d
    return scores


def paths(draft: Draft, row: int) -> list[Prefix]:
    """Paths of the live nodes; checks the rules of `Draft` on the way."""
    tokens, parent, alive = (x[row].tolist() for x in draft[:3])
    assert alive[0] and parent[0] == 0
    found: list[Prefix] = [()]
    for i in range(1, len(tokens)):
        assert 0 <= parent[i] < i and tokens[i] >= 0
        if alive[i]:
            assert alive[parent[i]]
            found.append((*found[parent[i]], tokens[i]))
        else:
            assert parent[i] == 0 and tokens[i] == tokens[0]
            found.append((-1,))
    live = [p for p, a in zip(found, alive, strict=True) if a]
    assert len(set(live)) == len(live)  # distinct siblings
    assert live[1:] == sorted(live[1:], key=len)
    return live[1:]


@pytest.mark.slow
@pytest.mark.further(breadth=(1, 4))
@pytest.mark.further(ops="triton", shape=[shape for shape in TREE_SHAPES if shape.depth in (1, 4)])
@pytest.mark.parametrize("shape", TREE_SHAPES)
@pytest.mark.parametrize("breadth", [(1, 1), (1, 4), (2, 6)])
@pytest.mark.covering("ops")
def test_keeps_the_best_allowed_prefixes(ops: TorchOps, shape: TreeShape, breadth: tuple[int, int]) -> None:
    rng = random.Random(shape.depth * 100 + shape.nodes)
    cases = [random_candidates(rng, rng.choice((2, 5, 100))) for _ in range(6 if ops.name == "triton" else 25)]
    candidates = torch.tensor([c for c, _ in cases]).transpose(1, 2)
    last = torch.arange(len(cases)) + 1000
    draft = build(ops, WINDOW, breadth, candidates, torch.tensor([m for _, m in cases]), last, shape)
    assert draft.tokens.shape == draft.parent.shape == draft.alive.shape == (len(cases), shape.nodes)
    assert torch.equal(draft.tokens[:, 0], last)
    kept = 0
    for row, (ids, match) in enumerate(cases):
        scores = prefix_scores(ids, match, shape.depth, *breadth)
        found = paths(draft, row)
        assert all(len(p) <= shape.depth for p in found)
        best = sorted(scores.values(), reverse=True)[: shape.nodes - 1]
        got = sorted((scores[p] for p in found), reverse=True)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(best), rtol=1e-5, atol=0)
        children = Counter(p[:-1] for p in found)
        assert all(n <= breadth[1] for n in children.values())
        kept += len(found)
        assert draft.grade is not None
        for path, grade in zip(found, draft.grade[row, 1:].tolist(), strict=False):
            rank = next(r for r, line in enumerate(ids) if tuple(line[: len(path)]) == path)  # of its first candidate
            assert grade == 32 + (min(match[rank] // 3, 3) if rank else min(match[0] + 3, 15))
        assert not draft.grade[row, 0] and not draft.grade[row, len(found) + 1 :].any()
    assert kept >= len(cases) // 2


def test_a_long_match_drafts_a_chain(ops: TorchOps) -> None:
    stray = [[9] * 11, [8] * 11, [7] * 11]
    candidates = torch.tensor([[list(range(11)), *stray]]).transpose(1, 2)
    draft = build(
        ops, 12, (1, 10), candidates, torch.tensor([[12, 12, 11, 3]]), torch.tensor([1]), TreeShape(11, 10, 12)
    )
    assert draft.parent.tolist() == [[0, *range(11)]]
    assert draft.tokens.tolist() == [[1, *range(11)]]
    bush = build(ops, 12, (1, 10), candidates, torch.tensor([[1, 1, 1, 1]]), torch.tensor([1]), TreeShape(11, 10, 12))
    assert bush.parent[0].eq(0).sum() >= 4  # the root and three children at least


def test_no_candidates_are_all_dead(ops: TorchOps) -> None:
    nothing = torch.full((2, DEPTH, WAYS), -1)
    match = torch.zeros(2, WAYS, dtype=torch.int64)
    draft = build(ops, WINDOW, (1, 4), nothing, match, torch.tensor([5, 6]), TreeShape(7, 1, 8))
    assert draft.alive.tolist() == [[True] + [False] * 7] * 2
    assert draft.tokens.tolist() == [[5] * 8, [6] * 8]
    assert not draft.parent.any()
