"""Reads JSON, and writes files so that they are whole or not there, whenever the process or the machine stops."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import IO, Any


def cache_folder() -> Path:
    """Returns the folder for what is kept between runs and can be made again, `$XDG_CACHE_HOME/draftwing`."""
    # The specification of XDG_CACHE_HOME says that relative paths are to be ignored.
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "draftwing"


def make_private(folder: Path) -> None:
    """Makes a folder that no other user can look into, and those above it that are missing."""
    for one in (*reversed(folder.parents), folder):  # `parents` of mkdir has another mode
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """Opens as an `opener` does, what no other user can read."""
    return os.open(path, flags, 0o600)


def lock_file(path: Path, seconds: float = 0.0) -> IO[str]:
    """Opens a file that nobody else has, until it is closed. Raises BlockingIOError where another still has it after so
    many seconds."""
    file = os.fdopen(open_private(str(path), os.O_WRONLY | os.O_CREAT), "w")
    until = time.monotonic() + seconds
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


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Writes `path`, and its folder where there is none. private: no other user can read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", encoding="utf-8", opener=open_private if private else None) as file:
        file.write(text)
    replace_file(partial, path)


_LFS = b"version https://git-lfs"


def pointer(path: Path) -> str:
    """Returns what a file is in place of its content where a repository was cloned without Git LFS, else nothing."""
    with open(path, "rb") as file:
        found = file.read(len(_LFS)) == _LFS
    return "it is a pointer of Git LFS in place of the file: run git lfs pull in the folder" if found else ""


def load_json(path: Path) -> Any:
    """Returns what a file of JSON holds. Raises OSError, and ValueError for what is not JSON in UTF-8."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(pointer(path) or str(error)) from None


def write_json(path: Path, content: Any, indent: int | None = 1, private: bool = False) -> None:
    """Writes `content` as `write_text` does."""
    write_text(path, json.dumps(content, indent=indent), private)


PARTIAL = ".partial"  # ends names of files and folders that are not yet, or no longer, there


def remove_folder(folder: Path) -> None:
    """Removes a folder with all that is in it: at once for who looks for it, whenever this is stopped."""
    gone = folder.with_name(f".{folder.name}{PARTIAL}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    sync_folder(folder.parent)
    shutil.rmtree(gone)


def remove_partial(folder: Path) -> None:
    """Removes what a process that was stopped left of files and folders in `folder`."""
    for path in folder.glob(f"*{PARTIAL}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
