"""Decodes pictures: PNG, JPEG, WebP, and the first frame of a GIF. Pillow reads what anybody may have sent, so this
runs in a process of its own, with limits (`images.sandbox`)."""

from __future__ import annotations

import io
import warnings

from PIL import Image, ImageOps

from draftwing.errors import RequestError
from draftwing.images.processing import FORMATS, MAX_PIXELS, ImageProcessor, Piece


def decoded(data: bytes) -> Image.Image:
    """Returns the picture in RGB, as it is meant to be seen: turned as its EXIF says, what is transparent on
    white, as transformers' processors have it. Raises RequestError."""
    Image.MAX_IMAGE_PIXELS = None  # there is one limit, ours
    try:
        with warnings.catch_warnings(action="ignore"):
            picture: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise RequestError(f"it has {width} x {height} pixels, expected at most {MAX_PIXELS}")
            turn(picture)
            if "A" in picture.getbands() or picture.info.get("transparency") is not None:
                picture = Image.alpha_composite(
                    Image.new("RGBA", picture.size, (255, 255, 255, 255)), picture.convert("RGBA")
                )
            return picture if picture.mode == "RGB" else picture.convert("RGB")
    except Image.UnidentifiedImageError:
        raise RequestError("expected a PNG, JPEG, WebP or GIF picture") from None
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # what decoders raise of a file that is none
        raise RequestError(f"it cannot be decoded: {error or type(error).__name__}") from None


def turn(picture: Image.Image) -> None:
    """Turns a picture as its EXIF says, and one that has none, or what cannot be read as such, not at all."""
    picture.load()
    try:
        ImageOps.exif_transpose(picture, in_place=True)
    except MemoryError:
        raise
    except Exception:  # of whatever stands in its place; the pixels are there
        pass


def pieces_of(data: bytes, processor: ImageProcessor) -> list[Piece]:
    """Returns what stands for an encoded picture in a prompt. Raises RequestError."""
    return processor.pieces(decoded(data))
