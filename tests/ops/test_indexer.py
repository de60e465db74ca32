"""Picks of an indexer against a loop over tokens in exact arithmetic, and the same for steps, trees and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.indexer import spec
from draftwing.ops.indexer.spec import picks, rounded, scores

HEADS, SIZE, LENGTH = 3, 32, 40


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

    def picked(self, batch: Batch, tokens: Sequence[int], topk: int) -> list[list[int]]:
        """tokens: of the batch's queries."""
        owner = {slot: token for token, slot in enumerate(self.table[0].tolist())}
        found: list[list[int]] = []
        for part in picks(batch, self.kept, self.q[list(tokens)], self.weights[list(tokens)], topk):
            assert part.queries.start == len(found) and part.table.shape[1] == topk
            rows = zip(part.table.tolist(), part.counts.tolist(), strict=True)
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


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_picks_are_those_of_a_loop(dtype: torch.dtype, whole: bool) -> None:
    text = Text(dtype, whole)
    expected = [text.best(i, range(i + 1), 7) for i in range(20)]
    assert text.picked(text.chunk(0, 20), range(20), 7) == expected


@pytest.mark.parametrize("bound", [0, 26])
def test_a_node_picks_on_its_own_path(bound: int) -> None:
    text, paths = Text(whole=True), [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], [0, 2, 3, 5]]
    expected = [text.best(20 + path[-1], [*range(20), *(20 + node for node in path)], 9) for path in paths]
    assert text.picked(text.tree(20, paths, bound), range(20, 26), 9) == expected


def test_it_does_not_matter_how_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    text, tokens = Text(whole=True), range(12, 24)
    expected = [text.best(i, range(i + 1), 5) for i in tokens]
    chain = [list(range(node + 1)) for node in range(len(tokens))]
    assert text.picked(text.tree(12, chain), tokens, 5) == expected
    assert [text.picked(text.tree(i, [[0]]), [i], 5)[0] for i in tokens] == expected
    monkeypatch.setattr(spec, "_SCORES", 1)  # each query by itself
    assert text.picked(text.chunk(12, 24), tokens, 5) == expected


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


def test_what_is_not_finite_is_picked_like_zero() -> None:
    text = Text()
    text.kept[text.table[0, 4]] = torch.nan
    text.kept[text.table[0, 6]] = torch.inf
    (last,) = text.picked(text.tree(30, [[0]]), [30], 31)
    assert last == list(range(31))
    assert all(len(row) == min(i + 1, 8) for i, row in enumerate(text.picked(text.chunk(0, 20), range(20), 8)))
