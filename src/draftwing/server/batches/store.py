"""What is kept of files and batches in the folder of `--batches-dir`, so that a server that starts again has it.

`files/ID.json` says what a file is, `files/ID.jsonl` holds it; a file without the former is not there, or not yet.
`batches/ID.json` is a batch. Both are replaced as a whole. Results of a batch that runs are appended to the files that
it will have, line by line: after a stop at any moment a line is there, or is asked again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from draftwing.errors import ConfigError, NotFound, RequestError
from draftwing.files import PARTIAL, load_json, lock_file, make_private, remove_partial, replace_file, write_json

logger = logging.getLogger(__name__)
MAX_FILE_BYTES = 200 * 2**20  # of a file that is sent, and `MAX_LINES`: as OpenAI's
MAX_LINES = 50_000
MAX_KEPT_BYTES = 10 * 2**30  # of all files of a key
MAX_KEPT_FILES = 10_000
MAX_WAITING = 100  # batches of a key that have not ended
MAX_ENDED = 1000  # batches of a key that are remembered
DAY = 24 * 3600
ENDED = ("completed", "failed", "expired", "cancelled")
_CONTENT = ".jsonl"


class Record:
    """A file or a batch. owner: name of the key that it belongs to.  made: when, seconds.  shown: as clients see it."""

    def __init__(self, owner: str, made: float, shown: dict[str, Any], outputs: list[str] | None = None) -> None:
        """outputs: ids of the files that a batch will have, for results and errors."""
        self.owner, self.made, self.shown, self.outputs = owner, made, shown, outputs or []

    @property
    def id(self) -> str:
        return str(self.shown["id"])

    @property
    def status(self) -> str:
        return str(self.shown["status"])

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class Store:
    """Belongs to one process at a time, and to its event loop."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder that cannot be used."""
        self._files, self._batches = folder / "files", folder / "batches"
        try:
            for one in (self._files, self._batches):
                make_private(one)
            self._lock = lock_file(folder / "lock")
            self.files, self.batches = _load(self._files), _load(self._batches)
            self._clean()
        except BlockingIOError:
            raise ConfigError(f"batches_dir {str(folder)!r} is in use by another server; name another folder") from None
        except OSError as error:
            raise ConfigError(f"batches_dir {str(folder)!r} cannot be used: {error.strerror}") from None
        self._writing = asyncio.Lock()
        self._coming: Counter[str] = Counter()  # bytes of files that are being sent, by owner

    def close(self) -> None:
        self._lock.close()

    def _clean(self) -> None:
        """Removes what a server that was stopped left of files that nobody will have."""
        remove_partial(self._files)
        remove_partial(self._batches)
        unfinished = {id for batch in self.batches.values() if not batch.ended for id in batch.outputs}
        for path in self._files.glob(f"*{_CONTENT}"):
            if path.stem not in self.files and path.stem not in unfinished:
                path.unlink()

    def content(self, id: str) -> Path:
        return self._files / f"{id}{_CONTENT}"

    def file(self, owner: str, id: str) -> Record:
        """Raises NotFound, also for a file of another owner."""
        return _owned(self.files, owner, id, "file")

    def batch(self, owner: str, id: str) -> Record:
        """Raises NotFound, also for a batch of another owner."""
        return _owned(self.batches, owner, id, "batch")

    # -- files ---------------------------------------------------------------------------------------------------------

    def begin_upload(self) -> Path:
        """Returns where to write a file that is being sent."""
        return self._files / f"{uuid.uuid4().hex}{PARTIAL}"

    def reserve(self, owner: str, size: int) -> None:
        """Counts bytes of a file that is being sent. Raises RequestError where an owner has no room for more."""
        self._coming[owner] += size
        own = [one for one in self.files.values() if one.owner == owner]
        if len(own) >= MAX_KEPT_FILES:
            raise RequestError(f"at most {MAX_KEPT_FILES} files are kept; delete some first", "file")
        if sum(one.shown["bytes"] for one in own) + self._coming[owner] > MAX_KEPT_BYTES:
            raise RequestError(f"files together have at most {MAX_KEPT_BYTES} bytes; delete some first", "file")

    def release(self, owner: str, size: int) -> None:
        """Ends what `reserve` counts of a file."""
        self._coming[owner] -= size

    async def add_file(
        self, owner: str, name: str, purpose: str, partial: Path | None = None, id: str | None = None
    ) -> Record:
        """Makes a file known that is complete. partial: as of `begin_upload`.  id: of one that lies in its place."""
        id = id or f"file-{uuid.uuid4().hex}"
        path, now = self.content(id), time.time()

        def written() -> Record:
            replace_file(partial or path, path)
            shown = {
                "id": id, "object": "file", "bytes": path.stat().st_size, "created_at": int(now), "expires_at": None,
                "filename": name, "purpose": purpose, "status": "processed", "status_details": None,
            }  # fmt: skip
            return self._write(self._files, Record(owner, now, shown))

        record = self.files[id] = await asyncio.to_thread(written)
        return record

    def delete_file(self, record: Record) -> None:
        """Raises RequestError for the input of a batch that has not ended."""
        for batch in self.batches.values():
            if batch.shown["input_file_id"] == record.id and not batch.ended:
                raise RequestError(f"{record.id} is the input of {batch.id}; cancel that first", "file_id")
        del self.files[record.id]
        (self._files / f"{record.id}.json").unlink(missing_ok=True)
        self.content(record.id).unlink(missing_ok=True)

    # -- batches -------------------------------------------------------------------------------------------------------

    async def add_batch(self, owner: str, input: Record, endpoint: str, metadata: dict[str, str] | None) -> Record:
        """Raises RequestError where too many of the owner have not ended."""
        own = sorted((one for one in self.batches.values() if one.owner == owner), key=lambda one: one.made)
        ended = [one for one in own if one.ended]
        if len(own) - len(ended) >= MAX_WAITING:
            raise RequestError(f"at most {MAX_WAITING} batches wait or run; try again when some have ended")
        for old in ended[: max(len(ended) - MAX_ENDED + 1, 0)]:
            del self.batches[old.id]
            (self._batches / f"{old.id}.json").unlink(missing_ok=True)
        now = time.time()
        steps = ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at")
        shown = {
            "id": f"batch_{uuid.uuid4().hex}", "object": "batch", "endpoint": endpoint, "errors": None,
            "input_file_id": input.id, "completion_window": "24h", "status": "validating", "output_file_id": None,
            "error_file_id": None, "created_at": int(now), "expires_at": int(now) + DAY,
            **dict.fromkeys((*steps, "cancelled_at")), "metadata": metadata,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }  # fmt: skip
        record = Record(owner, now, shown, [f"file-{uuid.uuid4().hex}" for _ in range(2)])
        self.batches[record.id] = record
        await self.save(record)
        return record

    async def save(self, batch: Record, status: str | None = None) -> None:
        """Writes a batch as it is now, in another state if one is given."""
        if status is not None:
            batch.shown |= {"status": status, f"{status}_at": int(time.time())}
        async with self._writing:
            await asyncio.to_thread(self._write, self._batches, batch)

    def _write(self, folder: Path, record: Record) -> Record:
        kept = {"owner": record.owner, "made": record.made, "shown": record.shown, "outputs": record.outputs}
        write_json(folder / f"{record.id}.json", kept, private=True)
        return record


def _load(folder: Path) -> dict[str, Record]:
    found: dict[str, Record] = {}
    for path in folder.glob("*.json"):
        try:
            record = Record(**load_json(path))
            if record.id != path.stem or not record.status:
                raise ValueError(f"it is of {record.id!r}")
            found[record.id] = record
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("%s is left out: %s", path, error)
    return found


def _owned(records: dict[str, Record], owner: str, id: str, kind: str) -> Record:
    found = records.get(id)
    if found is None or found.owner != owner:
        raise NotFound(f"there is no {kind} {id[:100]!r}; GET /v1/{kind}{'es' * (kind == 'batch') or 's'} lists them")
    return found


class Results:
    """The two files that grow while a batch runs. Raises OSError where one cannot be written."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Goes on with what is there: what comes after the first line that is not whole is cut off."""
        self.done: set[str] = set()  # custom ids
        self.counts = [0, 0]  # of output and errors
        self._paths = (output, errors)
        self._numbers = [os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600) for path in self._paths]
        for i, path in enumerate(self._paths):
            whole = 0
            for end, id in _whole_lines(path):
                self.done.add(id)
                self.counts[i] += 1
                whole = end
            os.ftruncate(self._numbers[i], whole)

    def add(self, id: str, line: bytes, failed: bool) -> None:
        """Appends a line, which ends with its only line end, all of it or nothing."""
        number = self._numbers[failed]
        before = os.fstat(number).st_size
        if os.write(number, line) < len(line):
            os.ftruncate(number, before)
            raise OSError("the disk is full")
        self.done.add(id)
        self.counts[failed] += 1

    def close(self) -> None:
        for number in self._numbers:
            os.close(number)


def _whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields where each line of results ends, and its custom id."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                id = json.loads(line)["custom_id"]
            except (ValueError, KeyError, TypeError):
                return
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield end, id


def page(
    records: dict[str, Record], owner: str, after: str | None, limit: int, order: str, wanted: Callable[[Record], bool]
) -> dict[str, Any]:
    """Returns a list as OpenAI's clients page through it. Raises RequestError for an `after` that is not there."""
    own = [one for one in records.values() if one.owner == owner and wanted(one)]
    own.sort(key=lambda one: (one.made, one.id), reverse=order == "desc")
    if after is not None:
        at = next((i for i, one in enumerate(own) if one.id == after), None)
        if at is None:
            raise RequestError(f"after must be an id of the list; found {after[:100]!r}", "after")
        own = own[at + 1 :]
    shown = [one.shown for one in own[:limit]]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, "has_more": len(own) > limit, **ends}
