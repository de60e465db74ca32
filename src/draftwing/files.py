"""Reads JSON, and writes files so that they are whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any


def cache_folder() -> Path:
    """Returns the folder for what is kept between runs and can be made again, `$XDG_CACHE_HOME/draftwing`."""
    # The specification of XDG_CACHE_HOME says that relative paths are to be ignored.
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "draftwing"


def lock_file(path: Path, seconds: float = 0.0) -> IO[str]:
    """Opens a file that nobody else has, until it is closed. Raises BlockingIOError where another still has it after so
    many seconds."""
    file, until = path.open("w"), time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= until:
                file.close()
                raise
            time.sleep(0.01)


def replace_file(partial: Path, path: Path) -> None:
    """Renames a complete file to `path`; what is found there is whole even after the machine went down."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def write_text(path: Path, text: str) -> None:
    """Writes `path`, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    replace_file(partial, path)


def load_json(path: Path) -> Any:
    """Returns what a file of JSON holds. Raises OSError, and ValueError for what is not JSON in UTF-8."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Writes `content` as `write_text` does."""
    write_text(path, json.dumps(content, indent=indent))
