"""Images of a request: the pixels that a tower reads, which positions of the prompt stand for them, the keys of these
positions in the prefix cache, and where they stand for a rotary embedding in three axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_MASK = (1 << 62) - 1
_STEP = 0x9E3779B97F4A7C15 & _MASK  # odd, so that the keys of one image are all different


class RequestImage(NamedTuple):
    """An image, or a tile of one, that a run of the prompt's tokens stands for.

    start: position of the first of them.  grid: their rows and columns.  pixels: [height, width, 3] uint8, as the
    tower wants them but for their range.  digest: of the pixels and of how they were made.  mutual: whether its tokens
    see each other: then no chunk of a prompt ends within it.
    """

    start: int
    grid: tuple[int, int]
    pixels: npt.NDArray[np.uint8]
    digest: bytes
    mutual: bool = False

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        """Returns the position behind its tokens."""
        return self.start + self.tokens


def with_keys(tokens: IntArray, images: Sequence[RequestImage]) -> IntArray:
    """Returns what the prefix cache compares: tokens [n] with other numbers in place of those of images, made of the
    digest and below 0, so that an image matches itself alone."""
    keys = tokens.copy()
    for image in images:
        end = min(image.end, len(keys))
        if image.start < end:
            first = int.from_bytes(image.digest[:8], "big")
            numbers = (np.arange(end - image.start, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(first)) & _MASK
            keys[image.start : end] = -1 - numbers.astype(np.int64)
    return keys


def axes_of(images: Sequence[RequestImage], length: int) -> tuple[IntArray, int]:
    """Returns time, height and width [3, length] of positions for a rotary embedding in three axes (M-RoPE), and what
    is to be added to all positions behind the last image, 0 or less.

    All three are alike in text. An image stands still in time, its tokens differ in height and width, and what follows
    goes on behind the larger of both.
    """
    axes = np.empty((3, length), np.int64)
    at = place = 0
    for image in images:
        axes[:, at : image.start] = place + np.arange(image.start - at)
        place += image.start - at
        rows, columns = image.grid
        axes[0, image.start : image.end] = place
        axes[1, image.start : image.end] = place + np.repeat(np.arange(rows), columns)
        axes[2, image.start : image.end] = place + np.tile(np.arange(columns), rows)
        place += max(rows, columns)
        at = image.end
    axes[:, at:] = place + np.arange(length - at)
    return axes, place - at
