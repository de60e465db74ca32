"""Base64 that is decoded in pieces is what Python's own decoder makes of the whole."""

from __future__ import annotations

import base64
import random
from urllib.parse import quote

import pytest

from draftwing.errors import RequestError
from draftwing.images import reader
from draftwing.images.reader import of_base64


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_PIECE", 7)


def test_pieces_are_the_whole() -> None:
    draw = random.Random(3)
    for size in range(64):
        data = draw.randbytes(size)
        text = base64.b64encode(data).decode()
        assert of_base64(text, "here") == data
        spaced = "".join(char + draw.choice(("", "", " ", "\n", "\t\r\n")) for char in text)
        assert of_base64(spaced, "here") == data
        for_addresses = base64.urlsafe_b64encode(data).decode()
        assert of_base64(for_addresses, "here") == of_base64(text.rstrip("="), "here") == data
        assert of_base64(spaced.translate(str.maketrans("+/", "-_", "=")), "here") == data
        assert of_base64(quote(text, safe=""), "here") == of_base64(quote(spaced, safe=""), "here") == data
        escaped = "".join(draw.choice((char, f"%{ord(char):02x}", f"%{ord(char):02X}")) for char in spaced)
        assert of_base64(escaped, "here") == data


@pytest.mark.parametrize(
    "text",
    ["Q", "QQ=", "QUJD" * 4 + "Q", "QQ==QUJD", "QUJDQQ==QUJD", "QQ==Q", "QQ==QQ", "QU?D", "QUJDé", "====", "=",
     "QUJD%", "QUJDQUI%3", "QUJDQUI%%3D", "QUJDQUI%zz", "QQ%3D%3DQUJD", "QUJ%C3%A9", "QUJ%FF", "%2541UJD"],
)  # fmt: skip
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="here: expected base64"):
        of_base64(text, "here")
