"""Memory for weights, in large pages where the system has them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_CHUNK = 64 << 20  # bytes that are asked for at once: taken from the system as they are written
_LARGE = _CHUNK // 4  # bytes of a piece that has an array of its own: what is left of the others stays in use
_LINE = 64  # bytes of a cache line, with which every piece begins


class Arena:
    """Hands out pieces of large arrays, for which numpy asks Linux for pages of 2 MB.

    A step reads all weights. In pages of 4 KB it waits for addresses to be translated, most of all on virtual machines,
    which translate them twice. A matrix alone may be smaller than a large page.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int) -> Tensor:
        """Returns bytes of this shape, with anything in them. They are freed with the last piece of their array."""
        size = math.prod(shape)
        whole = -(-size // _LINE) * _LINE
        if whole >= _LARGE:
            return _array(whole)[:size].view(shape)
        if len(self._left) < whole:
            self._left = _array(_CHUNK)
        piece, self._left = self._left[:size], self._left[whole:]
        return piece.view(shape)


def _array(size: int) -> Tensor:
    memory = torch.from_numpy(np.empty(size + _LINE, np.uint8))
    return memory[-memory.data_ptr() % _LINE :]
