"""How pictures become what towers read: their sizes, what stands for them in a prompt, and limits. An `ImageProcessor`
is plain data, which goes to the process that decodes. What it does it does with Pillow alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from draftwing.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image, Resampling

MAX_IMAGES: Final = 64  # of a prompt
MAX_BYTES: Final = 20 << 20  # of a picture, encoded
MAX_PIXELS: Final = 1 << 26  # of a picture, by its header
MAX_RATIO: Final = 200  # of a picture's sides
SECONDS: Final = 10.0  # of a processor, to decode one
MEMORY: Final = 3 << 29  # bytes of address space of the process that decodes
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")


class Tile(NamedTuple):
    """Pixels of one image, or of a tile of one: [height, width, 3] bytes. grid: rows and columns of its tokens."""

    width: int
    height: int
    pixels: bytes | memoryview
    grid: tuple[int, int]


Piece = str | Tile  # what stands in the prompt in place of a picture


@dataclass(frozen=True)
class ImageProcessor:
    """token, text: what stands for a position of an image in prompts, its id and how it is written.  placeholder: what
    chat templates write for a picture.  mutual: as of `RequestImage`."""

    token: int
    text: str
    placeholder: str
    mutual: bool = field(default=False, kw_only=True)

    def pieces(self, picture: Image) -> list[Piece]:
        """Returns what stands in the prompt for a picture in RGB. Raises RequestError for one that the model cannot
        read."""
        raise NotImplementedError


@dataclass(frozen=True)
class PatchProcessor(ImageProcessor):
    """One image of any size, whose sides are rounded to whole blocks of patches. block: pixels of a token's side.
    least, most: pixels of an image. resample: as Pillow numbers ways to resize."""

    block: int = 32
    least: int = 65536
    most: int = 16777216
    resample: int = 3

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of what the tower sees."""
        check_ratio(width, height)
        block, area = self.block, width * height
        wide, high = (round(side / block) * block for side in (width, height))
        if wide * high > self.most:
            shrink = math.sqrt(area / self.most)
            wide, high = (max(block, math.floor(side / shrink / block) * block) for side in (width, height))
        elif wide * high < self.least:
            grow = math.sqrt(self.least / area)
            wide, high = (math.ceil(side * grow / block) * block for side in (width, height))
        return wide, high

    def pieces(self, picture: Image) -> list[Piece]:
        return [tile(picture, self.size(*picture.size), self.resample, self.block)]


def check_ratio(width: int, height: int) -> None:
    """Raises RequestError for a picture that is too narrow."""
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_RATIO:
        raise RequestError(f"it has {width} x {height} pixels: expected sides that differ at most {MAX_RATIO} times")


def tile(picture: Image, size: tuple[int, int], resample: int, block: int) -> Tile:
    """Returns a picture in another size (width, height); a token for each block of pixels."""
    width, height = size
    how: Resampling = resample  # type: ignore[assignment]  # they are these numbers
    sized = picture if picture.size == size else picture.resize(size, how)
    return Tile(width, height, sized.tobytes(), (height // block, width // block))


@dataclass(frozen=True)
class BudgetProcessor(ImageProcessor):
    """One image, made as large as a number of tokens lets it be. block: pixels of a token's side.  budget: most tokens.
    before, after: texts around them."""

    block: int = 48
    budget: int = 280
    before: str = ""
    after: str = ""
    resample: int = 3

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Returns width and height of what the tower sees."""
        check_ratio(width, height)
        block = self.block
        grow = math.sqrt(self.budget * block**2 / (width * height))
        wide, high = (math.floor(grow * side / block) * block for side in (width, height))
        if not wide and not high:
            raise RequestError(f"it has {width} x {height} pixels, too few for a model with {self.budget} tokens")
        if not high:
            return min(math.floor(width / height), self.budget) * block, block
        if not wide:
            return block, min(math.floor(height / width), self.budget) * block
        return wide, high

    def pieces(self, picture: Image) -> list[Piece]:
        return [self.before, tile(picture, self.size(*picture.size), self.resample, self.block), self.after]


@dataclass(frozen=True)
class FixedProcessor(ImageProcessor):
    """One image of one size, whatever the picture's sides are. side: its pixels.  block: of a token's side.  before,
    after: texts around it."""

    side: int = 896
    block: int = 56
    before: str = ""
    after: str = ""
    resample: int = 2

    def pieces(self, picture: Image) -> list[Piece]:
        check_ratio(*picture.size)
        return [self.before, tile(picture, (self.side, self.side), self.resample, self.block), self.after]
