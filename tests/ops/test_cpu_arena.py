"""Memory for weights: pieces of any size are whole cache lines apart, and nobody writes another's."""

from __future__ import annotations

import gc
import random

from draftwing.ops.cpu.arena import Arena


def test_pieces_do_not_overlap() -> None:
    rng, arena = random.Random(0), Arena()
    pieces = [arena.empty(rng.choice([0, 1, 7]), rng.randrange(1, 1 << rng.randrange(1, 22))) for _ in range(60)]
    pieces.append(arena.empty(65 << 20))  # more than one array has
    pieces.append(arena.empty(64))
    assert all(piece.data_ptr() % 64 == 0 for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    del arena
    gc.collect()
    assert all(bool((piece == number).all()) for number, piece in enumerate(pieces))


def test_arrays_are_mostly_pieces() -> None:
    """Also of pieces of which two do not fit into one array. An array counts as memory under a limit of addresses,
    though what nobody writes is never taken."""
    arena = Arena()
    for size in (15, 17, 33, 65):
        pieces = [piece for _ in range(8) for piece in (arena.empty(size << 20), arena.empty(1 << 10))]
        arrays = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in pieces}
        assert sum(arrays.values()) < 1.3 * sum(piece.nbytes for piece in pieces) + (64 << 20), size
