"""Pictures that Python code shows a model, in whichever form it has them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from draftwing.errors import RequestError
from draftwing.images.reader import Picture
from draftwing.requests.refusals import show

_ADDRESSES = ("data:", "http://", "https://")
_WRITTEN = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes that PNG has


def picture_of(given: Any, where: str) -> Picture:
    """Returns a picture that is given as the path of a file, as an address, encoded, as one of Pillow's, or as an array
    [height, width, 3 or 4] or [height, width] of uint8. Raises RequestError. where: the part of a message."""
    if isinstance(given, str) and given[:8].lower().startswith(_ADDRESSES):
        return Picture(given, where)
    if isinstance(given, str | Path):
        return Picture(_of_file(given, where), where)
    if isinstance(given, bytes | bytearray | memoryview):
        return Picture(bytes(given), where)
    if isinstance(given, np.ndarray) or hasattr(given, "getbands"):
        return Picture(_as_png(given, where), where)
    raise RequestError(
        f"{where}: expected a picture: a path, an address, bytes, one of Pillow's, or an array of uint8; found "
        f"{show(given)}",
        "messages",
    )


def _of_file(path: str | Path, where: str) -> bytes:
    if isinstance(path, str) and path.lower().startswith("file://"):
        path = unquote(urlsplit(path).path)
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # also of a NUL, and of a home that is not there
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"{where}: {show(str(path))} cannot be read: {why}", "messages") from None


def _as_png(given: Any, where: str) -> bytes:
    """Returns what is decoded as any other file, and turned as its EXIF says before, which PNG does not get."""
    from PIL import Image

    from draftwing.images.decode import turn  # brings Pillow

    out = io.BytesIO()
    try:
        if isinstance(given, np.ndarray) and (given.dtype != np.uint8 or given.ndim not in (2, 3)):
            raise ValueError(
                f"it is an array {list(given.shape)} of {given.dtype}; expected [height, width, 3] of uint8"
            )
        picture = Image.fromarray(given) if isinstance(given, np.ndarray) else given.copy()
        turn(picture)
        if picture.mode not in _WRITTEN:
            clear = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
            picture = picture.convert(clear.get(picture.mode, "RGB"))
        picture.save(out, "PNG", compress_level=1)
    except MemoryError:
        raise
    except Exception as error:  # what Pillow raises of a file that is broken, or closed
        why = str(error) or type(error).__name__
        raise RequestError(f"{where}: the picture cannot be read: {why}", "messages") from None
    return out.getvalue()
