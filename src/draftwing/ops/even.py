"""Numbers of rows that a GPU multiplies outside of graphs.

Its library picks kernels by the number of rows, and loads one when it is first picked. The host waits for all that the
device has been given and for 4 ms more, with it the result of the step before, and with that whoever reads an answer.
So there are few such numbers. They are tried before the first request, or when nothing runs (`engine.startup.warm_up`).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

SIZES: Final = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096),
)
STEP: Final = 1024  # between those beyond: a product of so many takes long whatever it is rounded up to


def even(count: int) -> int:
    """Returns the first of these numbers that is not below `count`."""
    return SIZES[bisect_left(SIZES, count)] if count <= SIZES[-1] else -(-count // STEP) * STEP


def evens(largest: int) -> list[int]:
    """Returns all up to `largest`, ascending."""
    return [*(size for size in SIZES if size <= largest), *range(SIZES[-1] + STEP, largest + 1, STEP)]
