"""The tree builder against a dictionary of prefixes."""

import random
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.types import Draft

WAYS, DEPTH, WINDOW = 16, 7, 5
SHAPES = [TreeShape(d, 3, n) for d in (1, 2, 4, 7) for n in (2, 3, 6, 12, 60)]

Path = tuple[int, ...]


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


def prefix_scores(candidates: list[list[int]], match: list[int], depth: int, low: int, high: int) -> dict[Path, float]:
    """Every allowed prefix and its score, by the definition in `TreeBuilder`."""
    breadth = high - (high - low) * max(match[0] - 1, 0) // (WINDOW - 1)
    scores: dict[Path, float] = {}
    for rank, (ids, m) in enumerate(zip(candidates[:breadth], match, strict=False)):
        known = ids[: ids.index(-1)] if -1 in ids else ids
        for d in range(min(depth, len(known)) if m else 0):
            path = tuple(ids[: d + 1])
            scores[path] = scores.get(path, 0.0) + m * m * 0.8**rank * (1 - 1 / (m + 2)) ** d
    return scores


def paths(draft: Draft, row: int) -> list[Path]:
    """Paths of the live nodes; checks the rules of `Draft` on the way."""
    tokens, parent, alive = (x[row].tolist() for x in draft[:3])
    assert alive[0] and parent[0] == 0
    found: list[Path] = [()]
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
@pytest.mark.further(ops="triton", shape=[shape for shape in SHAPES if shape.depth in (1, 4)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("breadth", [(1, 1), (1, 4), (2, 6)])
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
