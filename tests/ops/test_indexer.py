"""Picks of an indexer against a loop over tokens in exact arithmetic, and the same for steps, trees and chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops.attention.batch import Batch, ChunkSpan, Ragged
from draftwing.ops.attention.cpu import CpuAttend, NativeAttention
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.indexer import cpu, spec
from draftwing.ops.indexer.spec import Picks, picks, rounded, scores

HEADS, SIZE, LENGTH = 3, 32, 40
KERNELS = load_extension()
both = pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=pytest.mark.skipif(KERNELS is None, reason="C was not built"))]
)


def picked(batch: Batch, kept: Tensor, q: Tensor, weights: Tensor, topk: int, native: bool) -> Iterator[Picks]:
    """By torch, or by the kernel in C."""
    if not native:
        yield from picks(batch, kept, q, weights, topk)
        return
    assert KERNELS is not None
    attn = NativeAttention(KVPool([KVSpec(1, 16)], len(kept) - 1, kept.dtype, torch.device("cpu")), KERNELS, Workers())
    bound = attn.bind(batch, 0)
    assert isinstance(bound, CpuAttend)
    yield cpu.pick(KERNELS, attn.spare, attn.workers, batch, bound.who, kept, q, weights, topk)


class Text:
    """A row's tokens: queries, weights and keys of each, and the slots where keys lie."""

    def __init__(self, dtype: torch.dtype = torch.float32, whole: bool = False) -> None:
        """whole: small whole numbers, so that many scores are equal."""
        rng = torch.Generator().manual_seed(0)

        def made(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=rng)
            return (values.round().clamp(-1, 1) if whole else values).to(dtype)

        self.q, self.weights, keys = made(LENGTH, HEADS, SIZE), made(LENGTH, HEADS).float(), made(LENGTH, SIZE)
        self.table = 1 + torch.randperm(2 * LENGTH, generator=rng)[None, :LENGTH]
        self.kept = torch.full((2 * LENGTH + 1, SIZE), torch.nan, dtype=dtype)
        self.kept[self.table[0]] = keys
        self.keys = keys

    def best(self, query: int, seen: Sequence[int], topk: int) -> list[int]:
        """Tokens that a query picks of those on its path, in order of the path."""
        keys, q = rounded(self.keys), rounded(self.q)

        def score(token: int) -> Fraction:
            total = Fraction(0)
            for head, weight in enumerate(self.weights[query].tolist()):
                pairs = zip(q[query, head].tolist(), keys[token].tolist(), strict=True)
                total += Fraction(weight) * max(sum(Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
            return total

        order = sorted(range(len(seen)), key=lambda at: (-score(seen[at]), at))
        return [seen[at] for at in sorted(order[:topk])]

    def picked(self, batch: Batch, tokens: Sequence[int], topk: int, native: bool = False) -> list[list[int]]:
        """tokens: of the batch's queries."""
        owner = {slot: token for token, slot in enumerate(self.table[0].tolist())}
        found: list[list[int]] = []
        for part in picked(batch, self.kept, self.q[list(tokens)], self.weights[list(tokens)], topk, native):
            assert part.queries.start == len(found) and part.table.shape[1] == topk
            rows = zip(part.table.tolist(), (part.last + 1).tolist(), strict=True)
            found += [[owner[slot] for slot in row[:count]] for row, count in rows]
        return found

    def chunk(self, start: int, end: int) -> Batch:
        return self._batch(end - start, start, chunks=(ChunkSpan(0, 0, start, end - start),), bound=end)

    def tree(self, start: int, paths: Sequence[Sequence[int]], bound: int = 0) -> Batch:
        depth = max(map(len, paths))
        path = torch.tensor([[*nodes, *[0] * (depth - len(nodes))] for nodes in paths])[None]
        lengths = torch.tensor([list(map(len, paths))])
        return self._batch(len(paths), start, path=path, path_len=lengths, window=len(paths), bound=bound)

    def _batch(self, count: int, start: int, **how: object) -> Batch:
        none = torch.zeros(count, dtype=torch.int64)
        return Batch(torch.tensor([0]), none, none, none, self.table, torch.tensor([start]), **how)  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.covering("native")
def test_picks_are_those_of_a_loop(dtype: torch.dtype, whole: bool, native: bool) -> None:
    text = Text(dtype, whole)
    expected = [text.best(i, range(i + 1), 7) for i in range(20)]
    assert text.picked(text.chunk(0, 20), range(20), 7, native) == expected


@both
@pytest.mark.parametrize("bound", [0, 26])
def test_a_node_picks_on_its_own_path(bound: int, native: bool) -> None:
    text, paths = Text(whole=True), [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], [0, 2, 3, 5]]
    expected = [text.best(20 + path[-1], [*range(20), *(20 + node for node in path)], 9) for path in paths]
    assert text.picked(text.tree(20, paths, bound), range(20, 26), 9, native) == expected


@both
@pytest.mark.parametrize("room", [1, 1 << 20])
def test_rows_pick_by_themselves(monkeypatch: pytest.MonkeyPatch, room: int, native: bool) -> None:
    """Trees of several rows of a batch, the same ones as of different sizes, and chunks of several rows."""
    monkeypatch.setattr(spec, "_SCORES", room)
    monkeypatch.setattr(cpu, "_ROOM", room)
    text, paths = Text(whole=True), [[0], [0, 1], [0, 2]]
    starts, none = (0, 2, 17, 30), torch.zeros(12, dtype=torch.int64)
    tokens = [start + node for start in starts for node in range(3)]
    expected = [text.best(start + path[-1], [*range(start), *(start + node for node in path)], 5)
                for start in starts for path in paths]  # fmt: skip
    rows = torch.tensor([2, 0, 1, 3])
    prefix, table = torch.tensor(starts), text.table.expand(4, -1).contiguous()
    path, lengths = torch.tensor([[0, 0], [0, 1], [0, 2]]).expand(4, -1, -1), torch.tensor([1, 2, 2]).expand(4, -1)
    trees = Batch(rows, none, none, none, table, prefix, path.contiguous(), lengths.contiguous(), window=3)
    assert text.picked(trees, tokens, 5, native) == expected
    of_sizes = Batch(
        rows.repeat_interleave(3), none, none, none, table, prefix.repeat_interleave(3),
        path.reshape(12, 1, 2), lengths.reshape(12, 1), window=3,
        ragged=Ragged(rows, prefix, torch.arange(0, 13, 3), 3, 3),
    )  # fmt: skip
    assert text.picked(of_sizes, tokens, 5, native) == expected
    spans = ChunkSpan(1, 0, 9, 4), ChunkSpan(0, 4, 0, 7)
    chunks = Batch(rows[:2], none[:11], none[:11], none[:11], table, prefix[:2], chunks=spans, bound=13)
    asked = [*range(9, 13), *range(7)]
    assert text.picked(chunks, asked, 5, native) == [text.best(i, range(i + 1), 5) for i in asked]


@both
@pytest.mark.parametrize(("heads", "size", "length"), [(64, 128, 700), (1, 96, 300), (20, 512, 260), (33, 32, 1025)])
def test_the_best_of_many(heads: int, size: int, length: int, native: bool) -> None:
    """Near ties aside, of which sums in another order may pick the other."""
    rng = torch.Generator().manual_seed(heads)
    q, weights = torch.randn(3, heads, size, generator=rng), torch.randn(3, heads, generator=rng)
    kept, table = torch.randn(2 * length, size, generator=rng), torch.randperm(2 * length, generator=rng)[None, :length]
    lengths = torch.tensor([[1, 2, 3]])
    path = torch.arange(3).expand(1, 3, 3).contiguous()
    none = torch.zeros(3, dtype=torch.int64)
    batch = Batch(none[:1], none, none, none, table, torch.tensor([length - 3]), path, lengths, window=3)
    (part,) = picked(batch, kept, q, weights, 100, native)
    dots = torch.einsum("nhd,ld->nhl", q.double(), kept[table[0]].double()).clamp(min=0)
    exact = (dots * weights.double().unsqueeze(2)).sum(1)
    for i in range(3):
        seen = exact[i, : length - 2 + i]
        mine = torch.isin(table[0, : len(seen)], part.table[i])
        assert part.last[i] == 99 and mine.sum() == 100
        assert torch.equal(part.table[i], table[0, : len(seen)][mine])
        assert seen[mine].min() > seen[~mine].max() - 1e-4 * dots[i].max()


@both
def test_a_node_that_is_none_picks_nothing_outside(native: bool) -> None:
    text = Text()
    batch = text.tree(0, [[0]])._replace(path_len=torch.zeros(1, 1, dtype=torch.int64))
    (part,) = picked(batch, text.kept, text.q[:1], text.weights[:1], 4, native)
    assert part.last.tolist() == [0] and part.table.tolist() == [[0] * 4]


@both
def test_it_does_not_matter_how_tokens_come(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    text, tokens = Text(whole=True), range(12, 24)
    expected = [text.best(i, range(i + 1), 5) for i in tokens]
    chain = [list(range(node + 1)) for node in range(len(tokens))]
    assert text.picked(text.tree(12, chain), tokens, 5, native) == expected
    assert [text.picked(text.tree(i, [[0]]), [i], 5, native)[0] for i in tokens] == expected
    monkeypatch.setattr(spec, "_SCORES", 1)  # each query by itself
    monkeypatch.setattr(cpu, "_ROOM", 1)
    assert text.picked(text.chunk(12, 24), tokens, 5, native) == expected


def test_scores_have_the_same_bits_in_any_batch() -> None:
    rng = torch.Generator().manual_seed(1)
    q, keys = rounded(torch.randn(9, 4, 512, generator=rng)), rounded(torch.randn(70, 512, generator=rng).exp())
    weights = torch.randn(9, 4, generator=rng).double()
    whole = scores(q, weights, keys)
    for query in range(9):
        for first in range(0, 70, 17):
            part = scores(q[query : query + 1], weights[query : query + 1], keys[first : first + 17])
            assert torch.equal(part[0], whole[query, first : first + 17])
    backwards = scores(q.flip(2), weights, keys.flip(1))  # sums in another order
    assert torch.equal(backwards, whole)


def test_products_with_weights_are_exact() -> None:
    """So that a compiler may fuse them with sums."""
    rng = torch.Generator().manual_seed(3)
    q, keys = rounded(torch.randn(5, 2, 128, generator=rng)), rounded(torch.randn(20, 128, generator=rng))
    weights = torch.randn(5, 2, generator=rng).double()
    found = scores(q, weights, keys)
    dots = torch.einsum("nhd,ld->nhl", q, keys).clamp(min=0).float()
    for n in range(5):
        for token in range(20):
            heads = zip(weights[n].tolist(), dots[n, :, token].tolist(), strict=True)
            assert found[n, token].item() == float(sum(Fraction(w) * Fraction(s) for w, s in heads))  # rounded once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 32, generator=torch.Generator().manual_seed(2)) * 10).exp().clamp(max=6e4).to(dtype)
    x[3] = 0
    found, most = rounded(x), x.double().abs().amax(1, keepdim=True)
    assert ((found - x.double()).abs() <= most * 2.0**-22).all() and (found[3] == 0).all()
    step = torch.exp2(most.clamp(min=1e-300).log2().floor() - 21)
    assert torch.equal(found / step, (found / step).round())


@both
def test_what_is_not_finite_is_picked_like_zero(native: bool) -> None:
    text = Text()
    text.kept[text.table[0, 4]] = torch.nan
    text.kept[text.table[0, 6]] = torch.inf
    text.weights = -text.weights.abs()  # others are hardly better
    (last,) = text.picked(text.tree(30, [[0]]), [30], 31, native)
    assert last == list(range(31))
    rows = text.picked(text.chunk(0, 20), range(20), 8, native)
    assert all(len(row) == min(i + 1, 8) for i, row in enumerate(rows))
    assert all({4, 6} <= {*row} for row in rows[6:])
