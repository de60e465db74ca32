"""Pictures in the forms that Python code has them in: what the model sees is what it sees of the same file."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_models import encoded, picture
from PIL import Image

from draftwing.errors import RequestError
from draftwing.images.decode import decoded
from draftwing.images.given import picture_of

SHOWN = picture(40, 24)
TURNED = Image.Exif()
TURNED[0x0112] = 6
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16", "RGBX", "PA", "La", "RGBa")


def seen(given: Any) -> np.ndarray:
    return np.asarray(decoded(picture_of(given, "here").encoded()))


def in_mode(mode: str) -> Image.Image:
    if mode == "PA":
        return picture(40, 24, 1, "RGBA").quantize(9).convert("PA")
    if mode in ("La", "RGBa"):
        return picture(40, 24, 1, {"La": "LA", "RGBa": "RGBA"}[mode]).convert(mode)
    return SHOWN.convert("I").convert("I;16") if mode == "I;16" else SHOWN.convert(mode)


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_pillows(mode: str) -> None:
    """In each mode, as Pillow makes RGB of them, and transformers puts what is transparent on white."""
    given = in_mode(mode)
    before = given.tobytes()
    clear = {"La": "LA"}.get(mode, mode)
    expected = given.convert(clear)
    if "A" in mode or mode in ("La", "RGBa"):
        over = expected.convert("RGBA")
        expected = Image.alpha_composite(Image.new("RGBA", over.size, (255, 255, 255, 255)), over)
    assert np.array_equal(seen(given), np.asarray(expected.convert("RGB")))
    assert given.tobytes() == before and given.mode == mode


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_what_is_turned_by_its_exif(tmp_path: Path, kind: str) -> None:
    """Is so as Pillow's picture, too, though PNG would leave that out."""
    file = tmp_path / "turned"
    file.write_bytes(encoded(SHOWN, kind, exif=TURNED))
    expected = seen(file)
    assert expected.shape == (40, 24, 3)
    with Image.open(file) as given:
        assert np.array_equal(seen(given), expected)
        assert given.size == (40, 24), "it is the caller's"


def test_all_forms_of_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, data, pixels = tmp_path / "a picture.png", encoded(SHOWN), np.asarray(SHOWN)
    file.write_bytes(data)
    monkeypatch.setenv("HOME", str(tmp_path))
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    forms = (file, str(file), "~/a picture.png", file.as_uri(), data, bytearray(data), memoryview(data), url, SHOWN)
    for form in (*forms, pixels, np.asfortranarray(pixels), np.dstack([pixels, np.full((24, 40), 255, np.uint8)])):
        assert np.array_equal(seen(form), pixels)
    grey = np.asarray(SHOWN.convert("L"))
    assert np.array_equal(seen(grey), np.dstack([grey] * 3))
    assert picture_of("https://example.org/a.png", "here").data == "https://example.org/a.png"


@pytest.mark.parametrize(
    "given",
    ["none.png", ".", "a\0b", "~nobody-here/a.png", None, 3, ["a"], np.zeros((4, 4, 3)), np.zeros((4, 4, 7), np.uint8),
     np.zeros(4, np.uint8), np.zeros((0, 4, 3), np.uint8)],
)  # fmt: skip
def test_what_is_no_picture(given: Any) -> None:
    with pytest.raises(RequestError, match=r"^here: ") as info:
        seen(given)
    assert "\n" not in str(info.value)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture(300, 200))[:9000])
    with Image.open(tmp_path / "a.png") as given, pytest.raises(RequestError, match="here: the picture cannot be read"):
        seen(given)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF"])
def test_a_file_that_is_closed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a").write_bytes(encoded(SHOWN, kind))
    with Image.open(tmp_path / "a") as given:
        pass
    with pytest.raises(RequestError, match="here: the picture cannot be read: "):
        seen(given)
