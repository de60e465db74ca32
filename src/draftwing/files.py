"""Writes files so that they are whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any


def cache_folder() -> Path:
    """Returns the folder for what is kept between runs and can be made again, `$XDG_CACHE_HOME/draftwing`."""
    # The specification of XDG_CACHE_HOME says that relative paths are to be ignored.
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "draftwing"


def lock_file(path: Path, wait: bool = False) -> IO[str]:
    """Opens a file that nobody else has, until it is closed. Raises BlockingIOError where another has it, unless it is
    to `wait`."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        raise
    return file


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


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Writes `content` as `write_text` does."""
    write_text(path, json.dumps(content, indent=indent))
