"""Files that are made to harm who decodes them: truncated, mutated, with headers that lie, that take long, or much
memory. Each is a picture, or is refused in one sentence; whoever comes next is served."""

from __future__ import annotations

import base64
import io
import random
import struct
import time
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import short_sandbox
from PIL import Image, PngImagePlugin

from draftwing.errors import RequestError
from draftwing.images import reader
from draftwing.images.decode import pieces_of
from draftwing.images.processing import MAX_PIXELS, SECONDS, ImageProcessor, PatchProcessor, Tile
from draftwing.images.reader import Picture, read
from draftwing.images.tiles import GridProcessor
from draftwing.text.sandbox import DONE, PATIENCE, Sandbox

PATCHES = PatchProcessor(257, "<|image_pad|>", "<|image_pad|>", 8, 8 * 8 * 4, 8 * 8 * 48)
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "png": ("PNG", {}), "jpeg": ("JPEG", {}), "progressive": ("JPEG", {"progressive": True}), "gif": ("GIF", {}),
    "webp": ("WEBP", {}), "lossless": ("WEBP", {"lossless": True}), "palette": ("PNG", {}), "cmyk": ("JPEG", {}),
    "animated": ("GIF", {"save_all": True}), "animated webp": ("WEBP", {"save_all": True}),
}  # fmt: skip
MODES = {"palette": "P", "cmyk": "CMYK", "gif": "P"}


def file(kind: str) -> bytes:
    """A file with whatever a reader of it may trip over: an EXIF block, a colour profile, a comment."""
    form, how = KINDS[kind]
    r = np.random.default_rng(7)
    picture = Image.fromarray(r.integers(0, 256, (47, 61, 3)).astype(np.uint8)).convert(MODES.get(kind, "RGB"))
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    if form != "GIF":
        how = how | {"exif": exif}
    if how.get("save_all"):
        how = how | {"append_images": [picture.rotate(90)] * 2}
    out = io.BytesIO()
    picture.save(out, form, **how)
    return out.getvalue()


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A file with bytes changed, cut out, doubled, or cut off; mostly close to its beginning, where headers are."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = min(int(draw.expovariate(1 / 60)) if draw.random() < 0.6 else draw.randrange(len(out)), len(out) - 1)
        kind = draw.randrange(6)
        if kind == 0:
            out[at] = draw.randrange(256)
        elif kind == 1:
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            out[at : at + 4] = draw.choice((b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00"))
        elif kind == 3:
            del out[at : at + draw.randrange(1, 40)]
        elif kind == 4:
            out[at:at] = out[at : at + draw.randrange(1, 40)]
        elif len(out) > 8:
            del out[draw.randrange(4, len(out)) :]
        if not out:
            break
    return bytes(out) or b"\0"


def mended(data: bytes) -> bytes:
    """A file whose chunks, where it is a PNG, have right sums again, so that what is in them is read."""
    out, at = bytearray(data), 8
    while data.startswith(b"\x89PNG") and at + 12 <= len(out):
        end = at + 8 + int.from_bytes(out[at : at + 4])
        if end + 4 > len(out):
            break
        out[end : end + 4] = struct.pack(">I", zlib.crc32(out[at + 4 : end]))
        at = end + 4
    return bytes(out)


def check(data: bytes, processor: ImageProcessor = PATCHES) -> bool:
    """Returns whether a file is a picture. Fails where it is neither that nor refused in one sentence."""
    try:
        pieces = pieces_of(data, processor)
    except RequestError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return False
    assert all(len(one.pixels) == 3 * one.width * one.height for one in pieces if isinstance(one, Tile))
    return True


def fuzz(kind: str, times: int) -> None:
    draw, data = random.Random(f"{kind} {times}"), file(kind)
    assert check(data)
    grid = GridProcessor(257, "<image>", "<image>", 16, 16 * 16, 32 * 32, 32, 2, 4)
    counts = [0, 0]
    for i in range(times):
        one = mended(mutated(data, draw)) if i % 2 else mutated(data, draw)
        counts[check(one, grid if i % 4 == 0 else PATCHES)] += 1
    assert all(counts), "the mutations are too weak, or too strong"


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files(kind: str) -> None:
    fuzz(kind, 150)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_files(kind: str) -> None:
    fuzz(kind, 3000)


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files(kind: str) -> None:
    data = file(kind)
    for end in [*range(1, min(len(data), 400)), *range(400, len(data), 97)]:
        check(data[:end])


# -- bombs -------------------------------------------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, kind: int = 2, data: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(chunks) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@cache
def zeros(count: int) -> bytes:
    return zlib.compress(bytes(count), 9)


def gif(width: int, height: int) -> bytes:
    size = struct.pack("<HH", width, height)
    palette = bytes(6)
    return b"GIF89a" + size + b"\x80\0\0" + palette + b"," + bytes(4) + size + b"\0\x02\x02\x4c\x01\0;"


def webp(width: int, height: int) -> bytes:
    wide, high = (struct.pack("<I", side - 1)[:3] for side in (width, height))
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + b"\0" * 4 + wide + high
    return b"RIFF" + struct.pack("<I", len(body)) + body


def apng(frames: int) -> bytes:
    side = 4000
    return png(side, side, chunk(b"acTL", struct.pack(">II", frames, 0)), data=zeros(side * (3 * side + 1)))


BOMBS: dict[str, Callable[[], bytes]] = {
    "sides of a png": lambda: png(2**31 - 1, 2**31 - 1, data=zeros(1000)),
    "pixels of a png": lambda: png(65535, 65535, data=zeros(100_000_000)),
    "no pixels in a large png": lambda: png(8000, 8000),
    "text that unpacks": lambda: png(8, 8, chunk(b"zTXt", b"a\0\0" + zeros(500_000_000)), data=zeros(8 * 25)),
    "a profile that unpacks": lambda: png(8, 8, chunk(b"iCCP", b"a\0\0" + zeros(500_000_000)), data=zeros(8 * 25)),
    "many chunks": lambda: png(8, 8, *[chunk(b"tEXt", b"a\0b")] * 200_000, data=zeros(8 * 25)),
    "sides of a gif": lambda: gif(65535, 65535),
    "sides of a webp": lambda: webp(1 << 24, 1 << 24),
    "a jpeg of one scan line and the end": lambda: b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\x01\x01\x11\0\xff\xd9",
    "markers and nothing else": lambda: b"\xff\xd8" + b"\xff\xe1\xff\xff" * 5000,
    "exif that points at itself": lambda: (
        b"\xff\xd8\xff\xe1\0\x20Exif\0\0II*\0\x08\0\0\0\x01\0\x69\x87\x04\0\x01\0\0\0\x08\0\0\0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    """In the process with limits, which the next picture finds again."""
    bomb = BOMBS[name]()
    begun = time.monotonic()
    try:
        read(Picture(bomb, "here"), PATCHES)
    except RequestError as error:
        assert str(error).startswith("here: ") and "\n" not in str(error)
    assert time.monotonic() - begun < SECONDS + 5
    assert read(Picture(file("png"), "here"), PATCHES)


def test_an_animation_is_its_first_frame() -> None:
    assert read(Picture(apng(1 << 20), "here"), PATCHES)


@pytest.mark.slow
def test_a_picture_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JPEG of many scans of a large, flat picture: small, and each scan passes over all of its blocks."""
    monkeypatch.setattr(reader, "_sandbox", Sandbox("short_sandbox", short_sandbox.SECONDS, 1 << 30))
    out = io.BytesIO()
    side = int(MAX_PIXELS**0.5) - 8
    Image.new("L", (side, side), 128).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    bomb = data[:-2] + scan * min(4000, (8 << 20) // len(scan)) + b"\xff\xd9"
    begun = time.monotonic()
    with pytest.raises(RequestError, match="here: the picture cannot be read"):
        read(Picture(bomb, "here"), PATCHES)
    assert time.monotonic() - begun < PATIENCE
    assert read(Picture(file("jpeg"), "here"), PATCHES)


def test_text_as_a_picture() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text("a", "b" * 1_000_000, zip=True)
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG", pnginfo=info)
    assert read(Picture(f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}", "here"), PATCHES)
    for data in (b"", b"\0", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", b"P6 9 9 255 ", b"II*\0" * 9):
        with pytest.raises(RequestError, match="expected a PNG, JPEG, WebP or GIF"):
            read(Picture(data, "here"), PATCHES)


@pytest.mark.parametrize(
    "made",
    [
        b"",
        b"[[9, 9, [1, 1]]]\n",
        b"[[1, 1, [9, 9]]]\nabc",
        b'[["a", 1, [1, 1]]]\n',
        b"{}3",
        b"[7]\n",
        b"[[-1, -1, [1, 1]]]\nabc",
    ],
)
def test_a_process_that_was_taken_over(made: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_sandbox", type("Taken", (), {"ask": lambda self, job: (DONE, made)})())
    with pytest.raises(RequestError, match="here: the picture cannot be read"):
        read(Picture(b"a", "here"), PATCHES)
