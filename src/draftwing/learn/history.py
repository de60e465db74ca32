"""Draft heads that were trained one from another, with what is known of each: `DIR/heads/<number>/`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Any

from draftwing.errors import ConfigError, DraftwingError
from draftwing.files import (
    PARTIAL,
    load_json,
    lock_file,
    make_private,
    remove_folder,
    remove_partial,
    sync_folder,
    write_json,
    write_text,
)

FACTS = "head.json"
# For which whoever changes something is waited for: it may copy a large head, a gigabyte at 100 MB a second. A process
# that learns in idle time stands still while requests run, in such a copy too, until its server says so, which must not
# wait for ever. Not swept: any value between these two does.
LOCK_SECONDS = 20.0


@dataclass(frozen=True)
class HeadRecord:
    """A head. folder: as `--speculative-draft-model-path` takes it.  parent: the number of the head that it was trained
    from, None for the command line's.  algorithm: of `draftwing train`.  made: unix seconds.  data: exchanges that it
    was trained with, by client, and their times.  figures: of the judge.  deleted: clients whose exchanges were deleted
    since.  sha256: of its files.  adapter: digest of the one whose own head it is, "": the model's."""

    number: int
    folder: Path
    parent: int | None
    algorithm: str
    made: float
    data: dict[str, Any]
    figures: dict[str, Any]
    deleted: tuple[str, ...]
    sha256: str
    adapter: str = ""


class HeadHistory:
    """The heads of a folder, the model's and adapters' own. Each change is whole or did not happen, whenever the
    process is stopped, and several processes may make some. Numbers begin at 1 and are never given twice."""

    def __init__(self, folder: Path) -> None:
        """folder: `DIR/heads`, which need not be there."""
        self.folder = Path(folder)

    def add(self, head: Path, facts: Mapping[str, Any]) -> int:
        """Copies a head and returns its number. It is not served yet.

        head: a folder as `draftwing train` writes it; folders in it are left out.  facts: `parent`, `algorithm`,
        `data`, `figures` and `adapter` of `HeadRecord`, each of which may be left out, as JSON has them.
        """
        unknown = set(facts) - {"parent", "algorithm", "data", "figures", "adapter"}
        if unknown:
            raise ValueError(f"unknown facts: {', '.join(sorted(unknown))}")
        with self._locked():
            remove_partial(self.folder)
            number = 1 + max([self._last(), *self._numbers()])
            partial = self.folder / f".{number}{PARTIAL}"
            partial.mkdir(mode=0o700)
            for path in _files(head):
                shutil.copyfile(path, partial / path.name)
                (partial / path.name).chmod(0o600)
                with (partial / path.name).open("rb") as file:
                    os.fsync(file.fileno())
            write_json(partial / FACTS, {**facts, "made": time.time(), "sha256": _digest(partial)}, private=True)
            write_text(self.folder / "last", f"{number}\n", private=True)
            partial.rename(self.folder / str(number))
            sync_folder(self.folder)
            return number

    def list(self, adapter: str | None = None) -> Sequence[HeadRecord]:
        """Returns heads, the oldest first: all, or those of an adapter, by its digest, or of the model ("")."""
        return [one for one in map(self.get, self._numbers()) if adapter in (None, one.adapter)]

    def get(self, number: int) -> HeadRecord:
        """Returns a head. Raises ConfigError where there is none, or what is known of it cannot be read."""
        folder = self._folder(number)
        try:
            facts = load_json(folder / FACTS)
            return HeadRecord(
                number, folder, facts.get("parent"), facts.get("algorithm", ""), facts["made"], facts.get("data", {}),
                facts.get("figures", {}), tuple(facts.get("deleted", ())), facts["sha256"], facts.get("adapter", ""),
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{folder / FACTS} cannot be read ({error}): remove {folder}") from None

    def current(self, adapter: str = "") -> int | None:
        """Returns the number of the head that is served, None for the command line's. adapter: digest of the one whose
        own head it is; None is that of its files then."""
        try:
            number = int(self._current(adapter).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return number if number in self._numbers() else None

    def served(self, number: int) -> bool:
        """Returns whether a head, or what is left of one, is the current one of the model or of an adapter."""
        names = (path.name.removeprefix("current").removeprefix("-") for path in self.folder.glob("current*"))
        return any(self.current(adapter) == number for adapter in names if not adapter.endswith(PARTIAL))

    def use(self, number: int | None, adapter: str = "") -> None:
        """Says which head is served, for the model or for the adapter whose it is; None: that of the command line, or
        of the adapter's files. Raises ConfigError for one that is not there, whose files have changed, or which is no
        head of this, and for an adapter that has none."""
        with self._locked():
            self._use(number, adapter)

    def use_instead(self, number: int | None, before: int | None, adapter: str = "") -> bool:
        """Has `number` take the place of `before`, as `use`. Returns False where by now another head is served."""
        with self._locked():
            if self.current(adapter) != before:
                return False
            self._use(number, adapter)
            return True

    def remove(self, number: int) -> None:
        """Removes a head, or what is left of one. Raises ConfigError where there is none, or it is served."""
        with self._locked():
            folder = self._folder(number)
            if self.served(number):
                raise ConfigError(f"head {number} is served: use another one first")
            remove_folder(folder)

    def keep(self, count: int, adapter: str = "") -> None:
        """Removes the oldest of an adapter or of the model beyond so many, but for the one that is served and the one
        that it was trained from."""
        with self._locked():
            records, current = self.list(adapter), self.current(adapter)
            needed = {current, *(record.parent for record in records if record.number == current)}
            for record in [one for one in records if one.number not in needed][: max(len(records) - count, 0)]:
                remove_folder(record.folder)

    def mark_deleted(self, client: str) -> Sequence[int]:
        """Notes that a client's exchanges were deleted. Returns the heads that were trained with them, which have their
        weights from them still."""
        found = []
        with self._locked():
            for number in self._numbers():
                with suppress(ConfigError):  # where nothing is known of it
                    record = self.get(number)
                    if client in record.data.get("clients", {}):
                        path = record.folder / FACTS
                        facts = load_json(path)
                        write_json(path, {**facts, "deleted": sorted({*record.deleted, client})}, private=True)
                        found.append(number)
        return found

    def _locked(self) -> IO[str]:
        """Held while something changes: others wait until it is closed. Raises DraftwingError where that takes
        long."""
        make_private(self.folder)
        try:
            return lock_file(self.folder / "lock", LOCK_SECONDS)
        except BlockingIOError:
            raise DraftwingError(f"another process is changing {self.folder}: try again later") from None

    def _current(self, adapter: str) -> Path:
        return self.folder / (f"current-{adapter}" if adapter else "current")

    def _use(self, number: int | None, adapter: str) -> None:
        if number is None:
            if adapter and not self.list(adapter):
                raise ConfigError(f"{self.folder} has no head of an adapter {adapter}")
            self._current(adapter).unlink(missing_ok=True)
            return
        record = self.get(number)
        if record.adapter != adapter:
            whose = f"the adapter {record.adapter}" if record.adapter else "the model"
            raise ConfigError(f"head {number} is of {whose}: expected one of {adapter or 'the model'}")
        if _digest(record.folder) != record.sha256:
            raise ConfigError(f"{record.folder} is damaged: its files have changed since it was made")
        write_text(self._current(adapter), f"{number}\n", private=True)

    def _folder(self, number: int) -> Path:
        if number not in self._numbers():
            known = ", ".join(map(str, self._numbers())) or "none"
            raise ConfigError(f"no head {number} in {self.folder}; found {known}")
        return self.folder / str(number)

    def _numbers(self) -> Sequence[int]:
        return sorted(int(path.name) for path in self.folder.glob("*") if path.name.isdecimal())

    def _last(self) -> int:
        """The highest number that was ever given."""
        try:
            return int((self.folder / "last").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return 0


def _files(head: Path) -> list[Path]:
    return sorted(path for path in head.iterdir() if path.is_file() and path.name != FACTS)


def _digest(head: Path) -> str:
    """A hash of all files with their names."""
    digest = sha256()
    for path in _files(head):
        with path.open("rb") as file:
            digest.update(f"{path.name} {file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
