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
