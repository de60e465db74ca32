"""Encoded pictures of every kind that somebody may send: sizes, colours, formats, and what turns them."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from image_models import encoded, picture
from PIL import Image, ImageCms, ImageOps

SHOWN = picture(40, 24)


def turned(image: Image.Image, orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif, quality=95)


def with_exif(data: bytes) -> bytes:
    """A PNG with something where EXIF is to be."""
    part = b"eXIf" + data
    chunk = struct.pack(">I", len(data)) + part + struct.pack(">I", zlib.crc32(part))
    whole = encoded(SHOWN)
    return whole[:33] + chunk + whole[33:]


BROKEN_EXIF = {"words": b"no EXIF at all", "an end": b"II*\0\xff\xff\xff\x7f", "a part": b"MM\0*\0\0\0\x08\0\x05\0"}


def deep() -> Image.Image:
    """16 bits of grey."""
    return Image.fromarray(np.asarray(SHOWN.convert("L")).astype(np.uint16) * 257)


def hidden(mode: str) -> Image.Image:
    """Colours behind what is not seen, in part or not at all."""
    image = picture(40, 24, 8).convert(mode)
    image.putalpha(picture(40, 24, 9, "L").point(lambda x: 0 if x < 100 else 255 if x > 160 else x))
    return image


FRAMES = [picture(40, 24, seed).quantize(64) for seed in (5, 6)]
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
LAB = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
PICTURES = {
    "png": encoded(SHOWN),
    "jpeg": encoded(SHOWN, "JPEG"),
    "webp": encoded(SHOWN, "WEBP", lossless=True),
    "webp with losses": encoded(SHOWN, "WEBP", quality=50),
    "gif": encoded(SHOWN, "GIF"),
    "animated gif": encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
    "animated webp": encoded(SHOWN, "WEBP", save_all=True, append_images=[picture(40, 24, 7)]),
    "animated png": encoded(SHOWN, "PNG", save_all=True, append_images=[picture(40, 24, 7)]),
    "interlaced gif": encoded(SHOWN.quantize(64), "GIF", interlace=1),
    "gif with a transparent colour": encoded(SHOWN.quantize(16), "GIF", transparency=3),
    "grey": encoded(SHOWN.convert("L")),
    "grey jpeg": encoded(SHOWN.convert("L"), "JPEG"),
    "16 bits": encoded(deep()),
    "black and white": encoded(SHOWN.convert("1")),
    "alpha": encoded(picture(40, 24, 8, "RGBA")),
    "what is not seen": encoded(hidden("RGB")),
    "webp with alpha": encoded(hidden("RGB"), "WEBP", lossless=True),
    "grey and alpha": encoded(hidden("L")),
    "palette": encoded(SHOWN.quantize(16)),
    "palette of two": encoded(SHOWN.quantize(2)),
    "palette with a transparent colour": encoded(SHOWN.quantize(16), transparency=3),
    "grey with a transparent shade": encoded(SHOWN.convert("L"), transparency=120),
    "a transparent colour": encoded(SHOWN, transparency=SHOWN.getpixel((3, 3))),
    "cmyk": encoded(SHOWN.convert("CMYK"), "JPEG"),
    "ycbcr without subsampling": encoded(SHOWN, "JPEG", subsampling=0),
    "with a profile": encoded(SHOWN, icc_profile=PROFILE),
    "jpeg with a profile": encoded(SHOWN, "JPEG", icc_profile=LAB),
    "progressive": encoded(SHOWN, "JPEG", progressive=True),
    **{f"turned {way}": turned(SHOWN, way) for way in range(1, 9)},
    "turned png": turned(SHOWN, 6, "PNG"),
    "turned webp": turned(SHOWN, 8, "WEBP"),
    "turned to nowhere": turned(SHOWN, 17),
    **{f"with {words} for EXIF": with_exif(data) for words, data in BROKEN_EXIF.items()},
    "200 to 1": encoded(picture(400, 2)),
    "1 to 200": encoded(picture(3, 600)),
    "tall": encoded(picture(17, 90), "JPEG"),
    "large": encoded(picture(900, 700)),
    "one colour": encoded(Image.new("RGB", (33, 21), (200, 30, 60))),
    "one pixel": encoded(picture(1, 1)),
    "two pixels": encoded(picture(2, 1), "GIF"),
}


def seen_by_transformers(data: bytes) -> Image.Image:
    """Returns a picture as transformers turns it, which ends where there is something else for EXIF: then the pixels
    that are there."""
    image = Image.open(io.BytesIO(data))
    try:
        return ImageOps.exif_transpose(image)
    except SyntaxError:
        return image
