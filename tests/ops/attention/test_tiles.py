"""How prefill chunks are cut into blocks: each key of each row once, and in less time than whole tiles take."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise

import pytest

from draftwing.ops.attention.triton_tiles import WHOLE, Room, pieces_of, prefill_tiles

H100 = Room.of(128, 132, 8)  # of an 8B Llama, of which a tile has 32 tokens
Spans = list[tuple[int, int, int, int]]


def blocks(spans: Spans, room: Room) -> list[tuple[tuple[int, ...], int, int, int]]:
    """(tile, piece, pieces, place) in the order in which they begin."""
    found = []
    for *tile, cut in prefill_tiles(spans, 4, 128, room).tolist():
        found.append((tuple(tile), cut // 32 % 32, cut % 32, cut // 1024))
    return found


def seconds(spans: Spans, room: Room) -> float:
    """When the last block ends, of 132 multiprocessors that take the next one each, in units of 128 keys."""
    ends = [0.0] * 132
    for (_, _, start, length, first), piece, pieces, _ in blocks(spans, room):
        units = -(-(start + min(first // 4 + 32, length)) // 128)
        own = units * (piece + 1) // pieces - units * piece // pieces
        for _ in range(8):
            at = ends.index(min(ends))
            ends[at] += own + 2
    return max(ends)


@pytest.mark.slower(seed=[*range(4, 20)])
@pytest.mark.parametrize("seed", range(20))
def test_every_key_is_some_pieces(seed: int) -> None:
    rng, spans = random.Random(seed), Spans()
    for row in range(rng.randrange(1, 5)):
        length = rng.randrange(1, 500)
        spans.append((row, sum(span[3] for span in spans), rng.choice((0, 30, 5_000, 16_000)), length))
    room = rng.choice((H100, Room(64, 5, 12), Room(128, 132, 512)))
    found = blocks(spans, room)
    whole = [tile for tile, *_ in blocks(spans, WHOLE)]
    assert list(dict.fromkeys(tile for tile, *_ in found)) == whole
    places = set[int]()
    for tile in whole:
        its = [(piece, pieces, place) for other, piece, pieces, place in found if other == tile]
        pieces, place = its[0][1:]
        assert its == [(piece, pieces, place) for piece in range(pieces)]
        _, _, start, length, first = tile
        units = -(-(start + min((first + 127) // 4 + 1, length)) // room.unit)
        borders = [units * piece // pieces for piece in range(pieces + 1)]
        assert pieces == 1 or min(b - a for a, b in pairwise(borders)) >= 3
        if pieces > 1:
            own = set(range(place, place + pieces))
            assert not own & places
            places |= own
    assert not places or max(places) < room.pieces
    queries = sum(length for *_, length in spans)
    assert len(found) <= queries * 4 // 128 + len(spans) + room.pieces, "more than `max_tiles` of a backend"


@pytest.mark.parametrize("group", [1, 2, 5, 8])
def test_each_row_has_a_key_in_each_piece(group: int) -> None:
    """The maximum of none is -inf, and what it makes of sums is no number."""
    cuts, room = set[int](), Room(128, 40, 512)
    for start, length in itertools.product(range(0, 3000, 37), (1, 63, 129, 400)):
        for *_, at, count, first, cut in prefill_tiles([(0, 0, start, length)], group, 128, room).tolist():
            piece, pieces = cut // 32 % 32, cut % 32
            units = -(-(at + min((first + 127) // group + 1, count)) // 128)
            assert units * piece // pieces * 128 <= at + first // group
            cuts.add(pieces)
    assert max(cuts) > 2


@pytest.mark.parametrize(
    "tokens, start, share",
    [(640, 12000, 0.70), (760, 8000, 0.80), (248, 12000, 0.55), (888, 8000, 0.96), (512, 8000, 1), (1024, 8000, 1)],
)
def test_what_would_come_last_fills_the_device(tokens: int, start: int, share: float) -> None:
    spans = [(0, 0, start, tokens)]
    assert seconds(spans, H100) <= share * seconds(spans, WHOLE)


def test_short_ones_stay_whole() -> None:
    assert all(pieces == 1 for _, _, pieces, _ in blocks([(0, 0, 0, 700), (1, 700, 0, 40)], H100))
    assert pieces_of([], H100) == []
