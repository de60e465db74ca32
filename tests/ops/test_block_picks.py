"""Blocks that an indexer picks against a loop over tokens in float64, and the same for steps, trees and chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.indexer import spec
from draftwing.ops.indexer.blocks import BlockIndex, block_picks, write_blocks

HEADS, SIZE, TURNED, LENGTH, RATIO, TOPK, EPS = 5, 32, 8, 60, 4, 3, 1e-6


class Text:
    """A row's tokens: queries, keys and turns of each, and the slots where the latter two lie."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(0)
        self.q = torch.randn(LENGTH, HEADS, SIZE, generator=rng).to(dtype)
        self.keys = torch.randn(LENGTH, SIZE, generator=rng).to(dtype)
        angles = torch.arange(LENGTH)[:, None] * 0.3 ** torch.arange(TURNED // 2)
        self.turn = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
        self.norm = torch.rand(SIZE, generator=rng) + 0.5
        self.table = 1 + torch.randperm(2 * LENGTH, generator=rng)[None, :LENGTH]
        self.kept = torch.full((2 * LENGTH + 1, SIZE + TURNED), torch.nan, dtype=dtype)

    def best(self, query: int, seen: Sequence[int], place: int) -> list[int]:
        """Tokens that a query at position `place` attends to of those on its path, in order of the path."""
        q = _turned(self.q[query].double(), self.turn[place].double())
        whole = len(seen) // RATIO
        scores = []
        for block in range(whole):
            mean = self.keys[list(seen[block * RATIO : (block + 1) * RATIO])].double().mean(0)
            key = _turned(mean * (mean.square().mean() + EPS).rsqrt() * self.norm, self.turn[block * RATIO].double())
            scores.append((q @ key.to(self.keys.dtype).double()).clamp(min=0).sum().item())
        chosen = sorted(sorted(range(whole), key=lambda block: -scores[block])[:TOPK])
        return [*(seen[block * RATIO + i] for block in chosen for i in range(RATIO)), *seen[whole * RATIO :]]

    def picked(self, batch: Batch, tokens: Sequence[int], places: Sequence[int]) -> list[list[int]]:
        """tokens: of the batch's queries."""
        owner = {slot: token for token, slot in enumerate(self.table[0].tolist())}
        blocks, found = BlockIndex(TOPK, RATIO, self.norm, EPS), []
        write_blocks(batch, self.kept, self.keys[list(tokens)], self.turn[list(places)], blocks)
        for part in block_picks(batch, self.kept, self.q[list(tokens)], self.turn[list(places)], blocks):
            assert part.queries.start == len(found) and part.table.shape[1] == blocks.width == 15
            rows = zip(part.table.tolist(), (part.last + 1).tolist(), strict=True)
            found += [[owner[slot] for slot in row[:count]] for row, count in rows]
        return found

    def chunk(self, start: int, end: int) -> list[list[int]]:
        chunk, places = ChunkSpan(0, 0, start, end - start), range(start, end)
        return self.picked(self.batch(places, start, chunks=(chunk,), bound=end), places, places)

    def batch(self, places: Sequence[int], start: int, **how: object) -> Batch:
        """places: of the queries, which lie one after the other behind `start`."""
        none, slots = torch.zeros(len(places), dtype=torch.int64), self.table[0, start : start + len(places)]
        row = torch.tensor([0]), none, torch.tensor(places), slots, self.table, torch.tensor([start])
        return Batch(*row, **how)  # type: ignore[arg-type]


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.complex(x[..., : TURNED // 2], x[..., TURNED // 2 : TURNED])
    pairs = pairs * torch.complex(turn[: TURNED // 2], turn[TURNED // 2 :])
    return torch.cat((pairs.real, pairs.imag, x[..., TURNED:]), -1)


@pytest.mark.parametrize("room", [1, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_pick_as_a_loop(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, room: int) -> None:
    monkeypatch.setattr(spec, "_SCORES", room)
    text = Text(dtype)
    expected = [text.best(i, range(i + 1), i) for i in range(LENGTH)]
    for start, end in itertools.pairwise((0, 13, 40, 41, 55)):
        assert text.chunk(start, end) == expected[start:end]


@pytest.mark.parametrize("start", [1, 12, 19, 20, 41, 50])
@pytest.mark.parametrize("bound", [0, 9])
def test_a_node_picks_on_its_own_path(start: int, bound: int) -> None:
    """Whose block may begin before the tree, be of nodes alone, or lack tokens. bound: beyond the committed tokens."""
    text = Text()
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], [0, 2, 3, 5], [0, 2, 3, 5, 6], [0, 2, 3, 5, 6, 7]]
    path = torch.tensor([[*nodes, *[0] * (6 - len(nodes))] for nodes in paths])[None]
    lengths = torch.tensor([list(map(len, paths))])
    how = {"path": path, "path_len": lengths, "window": len(paths), "bound": bound and start + bound}
    places = [start + len(nodes) - 1 for nodes in paths]
    text.chunk(0, start)
    found = text.picked(text.batch(places, start, **how), [start + nodes[-1] for nodes in paths], places)
    for nodes, place, picked in zip(paths, places, found, strict=True):
        seen = [*range(start), *(start + node for node in nodes)]
        assert picked == text.best(start + nodes[-1], seen, place), nodes
