"""Reading JSON: whatever is wrong with a file is one of two errors."""

from pathlib import Path

import pytest

from draftwing.files import load_json, write_json


@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\xfe", b"[" * 100_000 + b"]" * 100_000, b"1" * 5000])
def test_what_is_no_json_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(ValueError):
        load_json(file)


def test_what_cannot_be_read_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_json(tmp_path / "a.json")
    with pytest.raises(OSError):
        load_json(tmp_path)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    content = {"a": [1, 2.5, None, "é\u2028"]}
    write_json(tmp_path / "new" / "a.json", content)
    assert load_json(tmp_path / "new" / "a.json") == content
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.json"]  # nothing half written is left
