"""Files of a client's exchanges, each a line of JSON: `<unix seconds>.jsonl` in the client's folder.

A line goes to the system in one write, so a process that is killed loses no line that was written. After a crash of
the machine a file may end with half a line, or hold blocks that were never written: `Segments` cuts such lines out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from draftwing.files import PARTIAL, make_private, remove_partial, replace_file, sync_folder

_HEAD, _IDENTITY, _ANSWER, _TAIL = b'{"at":', b'"client":', b'"answer":', b"]}\n"  # of every line, in this order


MIN_BYTES = 1024  # that a line counts, for what the index has of it is in memory


class Entry(NamedTuple):
    """What is known of a line. at: unix seconds.  size: bytes that it counts.  exchange, answer: hashes of these."""

    at: float
    size: int
    exchange: bytes
    answer: bytes


def entry_of(line: bytes) -> Entry | None:
    """Returns the entry of a line with its line end; None if it is none that was written whole."""
    if not (line.startswith(_HEAD) and line.endswith(_TAIL)):
        return None
    before, _, identity = line.partition(_IDENTITY)
    answer = identity.rpartition(_ANSWER)[2]
    try:
        at = float(before[len(_HEAD) : before.index(b",")])
    except ValueError:
        return None
    return Entry(at, max(len(line), MIN_BYTES), _hash(identity), _hash(answer))


def segment_files(folder: Path) -> list[Path]:
    """Returns a client's segments, the oldest first."""
    return sorted((p for p in folder.glob("*.jsonl") if p.stem.isdecimal()), key=lambda path: int(path.stem))


class Segments:
    """A client's exchanges. bytes: what all lines count.  answers: how often each answer is there, by its hash.
    newest: the time of the newest exchange, 0 where there is none."""

    def __init__(self, folder: Path, file_size: int) -> None:
        """Reads what is in `folder`, which need not be there, and mends it. file_size: most bytes of a file with
        several lines."""
        self._folder, self._file_size = folder, file_size
        self._load()

    def _load(self) -> None:
        self._exchanges: set[bytes] = set()
        self._unsynced: set[Path] = set()
        self.answers: Counter[bytes] = Counter()
        self.bytes, self.newest = 0, 0.0
        remove_partial(self._folder)
        self._files = segment_files(self._folder)  # the oldest first
        for path in self._files:
            lines = path.read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if entry_of(line) is not None]
            if len(whole) < len(lines):
                self._write(path, whole)
            for entry in map(entry_of, whole):
                self._count(entry)

    def __len__(self) -> int:
        return len(self._exchanges)

    def __contains__(self, entry: Entry) -> bool:
        return entry.exchange in self._exchanges

    def append(self, line: bytes, entry: Entry) -> None:
        """Adds a line that is not there yet, and not older than others."""
        if self._files and not self._files[-1].exists():  # somebody removed files
            self._load()
        path = self._files[-1] if self._files else None
        if path is None or path.stat().st_size + len(line) > self._file_size:
            number = int(entry.at) if path is None else max(int(entry.at), int(path.stem) + 1)
            path = self._folder / f"{number}.jsonl"
            make_private(self._folder)
            self._files.append(path)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            before = os.fstat(file).st_size
            if os.write(file, line) < len(line):  # the disk is full
                os.ftruncate(file, before)
                raise OSError(f"{path}: no room for {len(line)} bytes")
        finally:
            os.close(file)
        self._unsynced.add(path)
        self._count(entry)

    def drop_oldest(self) -> None:
        """Removes the oldest file, or of the only one the older half."""
        if not self._files[0].exists():  # somebody removed files
            self._load()
            return
        lines = self._lines(self._files[0])
        self._drop(lines, len(lines) if len(self._files) > 1 else (len(lines) + 1) // 2)

    def drop_outside(self, since: float, until: float) -> None:
        """Removes what is older than `since`, or newer than `until`, which a wrong clock has written."""
        old = True
        while self._files and old:
            lines = self._lines(self._files[0])
            times = [entry.at for entry in map(entry_of, lines) if entry is not None]
            count = next((i for i, at in enumerate(times) if since <= at <= until), len(lines))
            self._drop(lines, count)
            old = count == len(lines)

    def sync(self) -> None:
        """Waits until all lines are on the disk."""
        with suppress(FileNotFoundError):
            for path in self._unsynced:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            if self._unsynced:
                sync_folder(self._folder)
        self._unsynced.clear()

    def _count(self, entry: Entry | None) -> None:
        assert entry is not None
        self._exchanges.add(entry.exchange)
        self.answers[entry.answer] += 1
        self.bytes += entry.size
        self.newest = max(self.newest, entry.at)

    def _lines(self, path: Path) -> list[bytes]:
        return path.read_bytes().splitlines(keepends=True) if path.exists() else []

    def _drop(self, lines: list[bytes], count: int) -> None:
        """Removes the first lines of the oldest file, which has these."""
        if count == len(lines):
            self._files[0].unlink(missing_ok=True)
            self._unsynced.discard(self._files.pop(0))
        elif count:
            self._write(self._files[0], lines[count:])  # which may fail: then they still count
        gone = [entry for entry in map(entry_of, lines[:count]) if entry is not None]
        self.bytes -= sum(entry.size for entry in gone)
        self._exchanges.difference_update(entry.exchange for entry in gone)
        self.answers -= Counter(entry.answer for entry in gone)

    def _write(self, path: Path, lines: list[bytes]) -> None:
        """Replaces a file."""
        partial = path.with_name(path.name + PARTIAL)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(lines)
        replace_file(partial, path)


def read_lines(folder: Path) -> Iterator[bytes]:
    """Yields whole lines of a client, the oldest first; what is removed meanwhile may be among them."""
    for path in segment_files(folder):
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            continue
        yield from (line for line in lines if entry_of(line) is not None)


def count_since(folder: Path, since: float) -> int:
    """Returns how many lines of a client are not older than `since`. Reads no more files than it takes."""
    count = 0
    for path in reversed(segment_files(folder)):
        with suppress(FileNotFoundError):
            times = [entry.at for entry in map(entry_of, path.read_bytes().splitlines(keepends=True)) if entry]
            count += sum(at >= since for at in times)
            if times and times[0] < since:
                break
    return count


def _hash(part: bytes) -> bytes:
    return blake2b(part, digest_size=8).digest()
