"""Pictures that are cut into tiles, of which each is an image, with a small image of the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from draftwing.images.processing import ImageProcessor, Piece, check_ratio, tile

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

_LARGEST = 4096  # pixels of a side


def _resized(picture: Image, width: int, height: int, resample: int) -> Image:
    how: Resampling = resample  # type: ignore[assignment]  # they are these numbers
    return picture.resize((width, height), how)


@dataclass(frozen=True)
class SplitProcessor(ImageProcessor):
    """Tiles of one size, and the whole in that size. size: pixels of a tile's side.  block: of a token's.  longest: the
    longer side that a picture is resized to at first."""

    size: int = 512
    block: int = 64
    longest: int = 2048
    resample: int = 1

    def pieces(self, picture: Image) -> list[Piece]:
        check_ratio(*picture.size)
        around, size = "<fake_token_around_image>", (self.size, self.size)
        picture = _resized(picture, *self._longest(*picture.size), self.resample)
        picture = _resized(picture, *self._whole_tiles(*picture.size), self.resample)
        columns, rows = (side // self.size for side in picture.size)
        pieces: list[Piece] = []
        if rows > 1 or columns > 1:
            for row in range(rows):
                for column in range(columns):
                    left, top = column * self.size, row * self.size
                    part = picture.crop((left, top, left + self.size, top + self.size))
                    pieces.append(f"{around}<row_{row + 1}_col_{column + 1}>")
                    pieces.append(tile(part, size, self.resample, self.block))
                pieces.append("\n")
            pieces.append("\n")
        return [*pieces, f"{around}<global-img>", tile(picture, size, self.resample, self.block), around]

    def _longest(self, width: int, height: int) -> tuple[int, int]:
        ratio = width / height
        if width >= height:
            width = self.longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest
            width = int(height * ratio)
            width += width % 2
        return max(min(width, _LARGEST), 1), max(min(height, _LARGEST), 1)

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        ratio, size = width / height, self.size
        if width >= height:
            width = math.ceil(width / size) * size
            return width, math.ceil(int(width / ratio) / size) * size
        height = math.ceil(height / size) * size
        return math.ceil(int(height * ratio) / size) * size, height


@cache
def _grids(fewest: int, many: int) -> list[tuple[int, int]]:
    """Returns columns and rows of grids with so many tiles, the fewest first."""
    found = {(w, h) for w in range(1, many + 1) for h in range(1, many + 1) if fewest <= w * h <= many}
    every = [(w, h) for n in range(fewest, many + 1) for w in range(1, n + 1) for h in range(1, n + 1)]
    return sorted({one for one in every if one in found}, key=lambda one: one[0] * one[1])


@dataclass(frozen=True)
class GridProcessor(ImageProcessor):
    """One image of any size; of a larger picture a grid of tiles, and one of the whole. block: pixels of a token's
    side.  least, most: pixels of an image.  size: of a tile's side.  fewest, many: tiles.  tolerance: times `most`,
    from which a picture is cut.  thumbnail: whether the whole is there, too."""

    block: int = 32
    least: int = 65536
    most: int = 262144
    size: int = 512
    fewest: int = 2
    many: int = 10
    tolerance: float = 2.0
    thumbnail: bool = True
    resample: int = 2

    def pieces(self, picture: Image) -> list[Piece]:
        check_ratio(*picture.size)
        whole = tile(picture, self._fitting(*picture.size), self.resample, self.block)
        rounded = (max(self.block // 2, round(side / self.block) * self.block) for side in picture.size)
        if math.prod(rounded) <= self.most * self.tolerance or self.many == 1:
            return ["<|image_start|>", whole, "<|image_end|>"]
        columns, rows = self._grid(*picture.size)
        size = (self.size, self.size)
        resized = _resized(picture, columns * self.size, rows * self.size, self.resample)
        pieces: list[Piece] = ["<|image_start|>"]
        for row in range(rows):
            for column in range(columns):
                left, top = column * self.size, row * self.size
                part = resized.crop((left, top, left + self.size, top + self.size))
                pieces.append(f"<|img_row_{row + 1}_col_{column + 1}|>")
                pieces.append(tile(part, size, self.resample, self.block))
        if self.thumbnail:
            pieces += ["<|img_thumbnail|>", whole]
        return [*pieces, "<|image_end|>"]

    def _fitting(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of one image of the whole."""
        block = self.block
        wide, high = (max(block, round(side / block) * block) for side in (width, height))
        if wide * high > self.most:
            shrink = math.sqrt(width * height / self.most)
            wide, high = (max(block, math.floor(side / shrink / block) * block) for side in (width, height))
        elif wide * high < self.least:
            grow = math.sqrt(self.least / (width * height))
            wide, high = (math.ceil(side * grow / block) * block for side in (width, height))
        return wide, high

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Returns columns and rows: of the ratio that is closest to the picture's, of some the larger one that it
        covers more than half of."""
        best, least, ratio = (1, 1), math.inf, width / height
        for grid in _grids(self.fewest, self.many):
            apart = abs(ratio - grid[0] / grid[1])
            if apart < least:
                best, least = grid, apart
            elif apart == least and width * height > 0.5 * self.size**2 * math.prod(grid):
                best = grid
        return best
