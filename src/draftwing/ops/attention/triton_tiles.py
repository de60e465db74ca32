"""How the attention of prefill chunks is cut into blocks, on the host.

A tile is so many rows of a chunk, with all of their keys. A multiprocessor runs one, and with eight key heads 640
tokens of an 8B model are 160: 132 run at once, and then 28, for as long. Behind 12,000 tokens, 640 take as long as
1,024 do. So the keys of the tiles that would come last are cut into pieces, which fill the device. Each piece has a
softmax of its own; whoever of a tile's pieces ends last merges them, in their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 6  # of a tile
PIECES = 512  # blocks that leave partial results, at most: 64 KB each, of 128 rows and head_dim
CUTS = (2, 3, 4, 6, 8)  # into how many pieces the longest is cut
# Units of the longest piece, at least. Others of its tile then have three or more, and each row a key in each of them:
# without one its maximum would be -inf, and its sums not numbers.
LEAST = 4
# Swept in docs/dev/gpu_kernels.md.
ENDS = 2.0  # units that take as long as to begin and to end a block
WORTH = 0.98  # of the time, at most, that more pieces must leave


class Room(NamedTuple):
    """What there is for tiles, for each key head. unit: positions that a block takes at a time; at_once: tiles that
    run at a time; pieces: of tiles, at most, 0: none is cut."""

    unit: int
    at_once: int
    pieces: int

    @classmethod
    def of(cls, unit: int, processors: int, kv_heads: int) -> Room:
        return cls(unit, max(processors // kv_heads, 1), PIECES // kv_heads)


WHOLE = Room(1, 1, 0)


def prefill_tiles(spans: Sequence[tuple[int, int, int, int]], group: int, rows: int, room: Room = WHOLE) -> Tensor:
    """Returns the tiles of `prefill_attention`, [T, 6] int32 on the CPU, those with most keys first: they take longest.

    spans: (batch row, first query, start, length) of each chunk. Columns are the batch row, the chunk's first query in
    q, its position and its length, the first row of the tile in the chunk, and what `_packed` makes of pieces."""
    tiles = [
        (row, offset, at, length, first)
        for row, offset, at, length in spans
        for first in range(0, length * group, rows)
    ]
    tiles.sort(key=lambda tile: tile[2] + tile[4] // group, reverse=True)
    counts = [1] * len(tiles)
    if room.pieces:
        ends = [at + min((first + rows - 1) // group + 1, length) for _, _, at, length, first in tiles]
        counts = pieces_of([-(-end // room.unit) for end in ends], room)
    cut, place = list[tuple[int, ...]](), 0
    for tile, count in zip(tiles, counts, strict=True):
        cut += [(*tile, _packed(place, piece, count)) for piece in range(count)]
        place += count if count > 1 else 0
    return torch.tensor(cut, dtype=torch.int32).view(-1, COLUMNS)


def pieces_of(units: Sequence[int], room: Room) -> list[int]:
    """Returns into how many pieces each tile is cut. units: of the tiles, most first."""
    counts = [1] * len(units)
    best, rounds = _seconds(units, counts, room.at_once), len(units) // room.at_once
    for keep in {rounds * room.at_once, max(rounds - 1, 0) * room.at_once}:
        for cut in CUTS if keep < len(units) else ():
            longest = -(-units[keep] // cut)
            tried = [1] * keep + [-(-one // longest) for one in units[keep:]]
            if longest < LEAST or sum(count for count in tried if count > 1) > room.pieces:
                break
            seconds = _seconds(units, tried, room.at_once)
            if seconds < WORTH * best:
                best, counts = seconds, tried
    return counts


def _packed(place: int, piece: int, pieces: int) -> int:
    """place: of the tile's first piece among partial results."""
    return place << 10 | piece << 5 | pieces


def _seconds(units: Sequence[int], counts: Sequence[int], at_once: int) -> float:
    """Returns when the last of all pieces ends, in units, where each begins as soon as one before it has ended."""
    ends = [0.0] * at_once
    for one, count in zip(units, counts, strict=True):
        for _ in range(count):
            heapq.heappushpop(ends, ends[0] + one / count + ENDS)
    return max(ends)
