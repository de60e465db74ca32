"""From pictures of a request to images in its prompt: where they come from, the process that decodes them, and which of
the prompt's tokens stand for them."""

from __future__ import annotations

import base64
import binascii
import json
import operator
import pickle
from collections.abc import Iterator, Sequence
from hashlib import sha256  # processors have instructions for it
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np

from draftwing.errors import RequestError
from draftwing.images.processing import MAX_BYTES, MAX_IMAGES, SECONDS, ImageProcessor, Piece, Tile
from draftwing.requests.images import RequestImage
from draftwing.requests.refusals import show
from draftwing.text.sandbox import DONE, Sandbox

_MODULE = "draftwing.images.sandbox"  # which imports Pillow: this process does not
_sandbox = Sandbox(_MODULE, SECONDS, 1 << 30)
_PIECE = 1 << 18  # characters of base64: half a millisecond, in which Python's other threads wait
_MOST_HEAD = 1 << 16  # bytes before the pixels, of which a tile takes some 40


class Picture(NamedTuple):
    """A picture as a request holds it: encoded, or where it is. where: the field, for errors."""

    data: bytes | str
    where: str

    def encoded(self) -> bytes:
        """Returns its bytes. Raises RequestError for an address, which is not followed, and what is no base64."""
        data = self.data
        if isinstance(data, str):
            data = _of_url(data, self.where)
        if len(data) > MAX_BYTES:
            raise RequestError(
                f"{self.where}: expected a picture of at most {MAX_BYTES >> 20} MiB, found {len(data)} bytes",
                self.where,
            )
        return data


def _of_url(url: str, where: str) -> bytes:
    scheme, _, rest = url.strip().partition(":")
    if scheme.lower() != "data":
        raise RequestError(
            f"{where}: addresses are not followed (--allow-image-urls HOST does); send the picture itself, as "
            f"data:image/png;base64,... (found {show(url)})",
            where,
        )
    kind, found, text = rest.partition(",")
    if not found or not kind.lower().replace(" ", "").endswith(";base64"):
        raise RequestError(f"{where}: expected data:image/png;base64,... ; found {show(url)}", where)
    return of_base64(text, where)


def pasted(text: str, where: str) -> Picture:
    """Returns a picture that is given as base64, or as an address."""
    return Picture(text if ":" in text[:16] else f"data:image/*;base64,{text}", where)


def of_base64(text: str, where: str) -> bytes:
    """Returns the bytes of a picture. Raises RequestError."""
    if len(text) > MAX_BYTES * 3 // 2:
        raise RequestError(f"{where}: expected a picture of at most {MAX_BYTES >> 20} MiB", where)
    try:
        return b"".join(_pieces_of_base64(text))
    except (binascii.Error, ValueError):
        raise RequestError(f"{where}: expected base64, found {show(text)}", where) from None


def _pieces_of_base64(text: str) -> Iterator[bytes]:
    """Decodes in pieces, between which other threads run: also what is written for addresses, percent-encoded (RFC
    2397), or without `=` at its end. Raises ValueError."""
    left, ended, cut = "", False, ""
    for at in range(0, len(text), _PIECE):
        piece = cut + text[at : at + _PIECE]
        whole = len(piece) if at + _PIECE >= len(text) or "%" not in piece[-2:] else piece.rindex("%")
        piece, cut = unquote(piece[:whole]), piece[whole:]  # cut: an escape that goes on in the next piece
        piece = left + "".join(piece.split()).replace("-", "+").replace("_", "/")
        whole = len(piece) - len(piece) % 4
        piece, left = piece[:whole], piece[whole:]
        if ended and piece:
            raise ValueError("text behind the end")
        yield base64.b64decode(piece, validate=True)
        ended = ended or piece.endswith("=")
    if left:
        if ended or "=" in left:
            raise ValueError("an end that is none")
        yield base64.b64decode(left.ljust(4, "="), validate=True)


def check_pictures(pictures: Sequence[Picture], processor: ImageProcessor | None) -> ImageProcessor:
    """Raises RequestError for pictures that a model without a processor, or one prompt, cannot have."""
    if processor is None:
        where = pictures[0].where
        raise RequestError(f"{where}: this model reads no images; send text alone, or serve one that does", where)
    if len(pictures) > MAX_IMAGES:
        where = pictures[MAX_IMAGES].where
        raise RequestError(f"{where}: one prompt takes at most {MAX_IMAGES} images; found {len(pictures)}", where)
    return processor


def read(picture: Picture, processor: ImageProcessor) -> list[Piece]:
    """Returns what stands for a picture in the prompt. Blocks; any thread may call it. Raises RequestError."""
    kind, made = _sandbox.ask(pickle.dumps((processor, picture.encoded())))
    if kind != DONE:
        raise RequestError(f"{picture.where}: the picture cannot be read: {str(made, 'utf-8')}", picture.where)
    try:
        return _pieces(made)
    except (ValueError, TypeError):
        raise RequestError(f"{picture.where}: the picture cannot be read", picture.where) from None


def _pieces(made: memoryview) -> list[Piece]:
    """Reads no pickle and believes nothing: whoever sent the picture may have taken over the process. Raises ValueError
    or TypeError for what `images.sandbox` never answers. Pixels are not copied."""
    head = bytes(made[:_MOST_HEAD]).partition(b"\n")[0]
    pixels = made[len(head) + 1 :]
    pieces: list[Piece] = []
    for piece in json.loads(head):
        if isinstance(piece, str):
            pieces.append(piece)
            continue
        width, height, grid = piece
        width, height, rows, columns = map(operator.index, (width, height, *grid))
        size = 3 * width * height
        if min(width, height, rows, columns) < 1 or size > len(pixels) or rows * columns > width * height:
            raise ValueError("an image without its pixels")
        pieces.append(Tile(width, height, pixels[:size], (rows, columns)))
        pixels = pixels[size:]
    return pieces


class Prompt(NamedTuple):
    """A prompt's text, in which one token is written for each tile of a picture, and what stands for each picture."""

    text: str
    pictures: Sequence[Sequence[Piece]] = ()


def filled(
    text: str,
    pictures: Sequence[Picture],
    processor: ImageProcessor | None,
    known: dict[bytes | str, list[Piece]] | None = None,
) -> Prompt:
    """Returns a prompt with what stands for its pictures in place of what the chat template wrote for them. Blocks as
    `read`. Raises RequestError, also where the text has other places than for these, for it says so itself. known: what
    stands for pictures that were read already, by their data; gets these, too."""
    if not pictures:
        return Prompt(text)
    processor = check_pictures(pictures, processor)
    parts, where = text.split(processor.placeholder), pictures[0].where
    if len(parts) != len(pictures) + 1:
        raise RequestError(
            f"{where}: expected a place for each of {len(pictures)} images in the prompt, found {len(parts) - 1}: the "
            f"chat template must write {processor.placeholder} for each, and no text may hold it",
            where,
        )
    known = {} if known is None else known
    for picture in pictures:
        if picture.data not in known:
            known[picture.data] = read(picture, processor)
    every = [known[picture.data] for picture in pictures]
    made = ["".join(piece if isinstance(piece, str) else processor.text for piece in pieces) for pieces in every]
    return Prompt("".join(one for pair in zip(parts, [*made, ""], strict=True) for one in pair), every)


def placed(
    ids: list[int], prompt: Prompt, processor: ImageProcessor | None
) -> tuple[list[int], tuple[RequestImage, ...]]:
    """Returns the tokens of a prompt that `filled` made, with one for each position of its images, and these."""
    tiles = [piece for pieces in prompt.pictures for piece in pieces if isinstance(piece, Tile)]
    if not tiles:
        return ids, ()
    assert processor is not None, "`filled` has asked"
    settings = repr(processor)
    out: list[int] = []
    images: list[RequestImage] = []
    for token in ids:
        if token != processor.token:
            out.append(token)
            continue
        if len(images) == len(tiles):
            break
        one = tiles[len(images)]
        digest = sha256(repr((settings, one.width, one.height, one.grid)).encode())
        digest.update(one.pixels)
        pixels = np.frombuffer(one.pixels, np.uint8).reshape(one.height, one.width, 3)
        images.append(RequestImage(len(out), one.grid, pixels, digest.digest()[:16], processor.mutual))
        out += [token] * images[-1].tokens
    if sum(token == processor.token for token in ids) != len(tiles):  # a text can be written so that it is one
        raise RequestError(f"no text may hold the model's token for images, {processor.text}", "messages")
    return out, tuple(images)
