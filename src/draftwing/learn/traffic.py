"""What clients asked and were answered, as token ids in files of one folder: what a draft head can learn from.

`DIR/clients/<client>/` has a line for each exchange, see `learn.segments`, and in it `<digest>/` those of an adapter.
One process writes; others may read meanwhile.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from draftwing.errors import ConfigError
from draftwing.files import PARTIAL, load_json, lock_file, make_private, remove_folder, remove_partial, write_json
from draftwing.learn.segments import Segments, count_since, entry_of, read_lines

RUN = "training"  # a run of `draftwing train` in the works, with hidden states of all clients' texts
ANONYMOUS = "anonymous"  # the client of requests without a key
MIN_ANSWER = 4  # tokens; of fewer a draft saves nothing
MAX_COPIES = 8  # of one answer to different prompts, by client: a head has learnt it by then
_VERSION = 1
_DAY = 86400  # seconds
_SEGMENTS = 64  # the folder's limit is that of so many files: what goes at once where room is made
_MAX_SEGMENT = 4 * 2**20  # bytes
_MAX_NAME = 100  # characters of a folder's name; a file system takes 255 bytes


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer, as token ids. at: unix seconds at which the answer was complete.  client: the name of
    the key.  salt: the request's `cache_salt`.  adapter: digest of the one that answered, "": the model alone."""

    at: float
    client: str
    salt: str | None
    prompt: list[int]
    answer: list[int]
    temperature: float
    adapter: str = ""


@dataclass(frozen=True)
class TrafficLimits:
    """bytes: of all files together, of which an exchange counts at least 1,024.  seconds: age of an exchange after
    which it goes."""

    bytes: int = 256 * 2**20
    seconds: float = 30.0 * _DAY


@dataclass(frozen=True)
class ClientTraffic:
    """What is kept of a client and an adapter, by its digest; "": of the model alone. tokens: of answers.  first, last:
    unix seconds."""

    client: str
    exchanges: int
    tokens: int
    bytes: int
    first: float
    last: float
    adapter: str = ""


def names_of(client: str) -> tuple[str, ...]:
    """Returns the names in requests of what is kept of a client: those without a key have none."""
    return ("", ANONYMOUS) if client in ("", ANONYMOUS) else (client,)


def client_folder(client: str) -> str:
    """Returns the name of a client's folder: the client's own where that is possible, and for each client another."""
    name = quote(client or ANONYMOUS, safe=" @+=,").replace(".", "%2E")
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}-{sha256(client.encode()).hexdigest()[:32]}"


class TrafficStore:
    """Exchanges of all clients. Not for several threads at once.

    Where the folder is full, the oldest exchanges of whoever holds most go, so that no client's traffic drives out
    another's. The first change makes this process the writer, as `open` does.
    """

    def __init__(
        self,
        folder: Path,
        limits: TrafficLimits | None = None,
        vocabulary: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """folder: that of --learn.  vocabulary: a hash of the tokenizer; ConfigError is raised where the folder has
        tokens of another one. Empty: whichever it is, to read or to delete."""
        self.folder, self.limits, self._clock = Path(folder), limits or TrafficLimits(), clock
        self._kept: dict[str, Segments] = {}  # by the folder's name below that of clients
        self._lock: IO[str] | None = None
        self._loaded = False
        self._given = vocabulary
        found = self.vocabulary
        if vocabulary and found and vocabulary != found:
            raise ConfigError(
                f"{self.folder} has traffic of another tokenizer: name another folder, or remove this one"
            )

    @property
    def vocabulary(self) -> str:
        """Returns the hash of the tokenizer whose tokens are kept, an empty one where nothing is kept yet."""
        try:
            facts = load_json(self._facts)
            if facts["version"] != _VERSION:
                raise ConfigError(f"{self._facts}: expected version {_VERSION}, found {facts['version']}")
            return str(facts["vocabulary"])
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._facts} cannot be read: {error}") from None

    def open(self) -> None:
        """Becomes the writer, unless that was done. Raises ConfigError where another process is, where the folder
        cannot be written, or has things of others."""
        if self._lock is not None:
            return
        try:
            make_private(self.folder)
            self._check_own()
            self._lock = lock_file(self.folder / "lock")
            if not self.vocabulary:
                write_json(self._facts, {"version": _VERSION, "vocabulary": self._given}, private=True)
        except BlockingIOError:
            raise ConfigError(f"another process writes to {self.folder}: stop it, or ask it") from None
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror}") from None

    def _check_own(self) -> None:
        """Raises ConfigError for a folder with things of others that would be removed for their names."""
        if not self._facts.exists():
            names = {path.name for path in self.folder.iterdir()} - {f"{self._facts.name}{PARTIAL}"}
            for name in sorted(names):
                if name in (RUN, "clients") or name.endswith(PARTIAL):
                    raise ConfigError(f"{self.folder / name} is not of this server: name an empty folder")

    def load(self) -> None:
        """Reads what is there, as every change does once: some 10 ms for each MB. Raises as `open`."""
        self.open()
        if not self._loaded:
            remove_partial(self.folder)
            remove_partial(self._folder_of(""))
            names = (str(path.relative_to(self._folder_of(""))) for path in self._folders(None))
            self._kept = {name: Segments(self._folder_of(name), self._segment) for name in names}
            self._loaded = True
            self.sweep()

    def add(self, exchange: Exchange) -> bool:
        """Keeps an exchange. Returns False where it is not kept: a duplicate (the same prompt, answer and salt), one
        more of an answer that is there `MAX_COPIES` times, too short, or so long that it alone is more than the
        client's share."""
        if len(exchange.answer) < MIN_ANSWER:
            return False
        self.load()
        name = str(Path(client_folder(exchange.client), exchange.adapter))
        if name not in self._kept:
            self._kept[name] = Segments(self._folder_of(name), self._segment)
        segments = self._kept[name]
        if segments.newest <= self._clock():  # else a wrong clock has written it
            exchange = replace(exchange, at=max(exchange.at, segments.newest))
        line = _line(exchange)
        entry = entry_of(line)
        assert entry is not None
        if entry in segments or segments.answers[entry.answer] >= MAX_COPIES or not self._make_room(name, entry.size):
            return False
        segments.append(line, entry)
        return True

    def read(self, since: float = 0.0, until: float = math.inf, adapter: str = "") -> Iterator[Exchange]:
        """Yields exchanges of an adapter, or of the model alone, with since <= at < until, in order of time. What is
        added or removed meanwhile may be among them or not."""
        clients = [_exchanges(folder, adapter) for folder in self._folders(adapter)]
        for exchange in heapq.merge(*clients, key=lambda one: one.at):
            if since <= exchange.at < until:
                yield exchange

    def count(self, since: float, adapter: str = "") -> int:
        """Returns how many exchanges `read` yields, much faster where few are so new."""
        return sum(count_since(folder, since) for folder in self._folders(adapter))

    def clients(self) -> list[ClientTraffic]:
        """Returns what is kept, by client and adapter."""
        found = []
        for folder in self._folders(None):
            adapter = "" if folder.parent == self._folder_of("") else folder.name
            every = [(one.client, one.at, len(one.answer)) for one in _exchanges(folder, adapter)]
            if every:
                size = sum(len(line) for line in read_lines(folder))
                tokens = sum(count for _, _, count in every)
                found.append(ClientTraffic(every[0][0], len(every), tokens, size, every[0][1], every[-1][1], adapter))
        return sorted(found, key=lambda one: (one.client, one.adapter))

    def delete(self, client: str) -> int:
        """Removes all that is kept of a client. Returns how many exchanges that were. Draft heads that were trained
        with them stay: see `HeadHistory.mark_deleted`."""
        self.load()
        if (self.folder / RUN).is_dir():
            remove_folder(self.folder / RUN)
        name = client_folder(client)
        if self._folder_of(name).is_dir():
            remove_folder(self._folder_of(name))
        return sum(len(self._kept.pop(one)) for one in [one for one in self._kept if _owner(one) == name])

    def sweep(self) -> None:
        """Removes what is older than the limit, or of more than a day ahead: then the clock was wrong."""
        self.load()
        now = self._clock()
        for segments in self._kept.values():
            segments.drop_outside(now - self.limits.seconds, now + _DAY)

    def sync(self) -> None:
        """Waits until all that was added is on the disk. A process that is killed loses nothing of it in any case."""
        for segments in self._kept.values():
            segments.sync()

    def close(self) -> None:
        """Syncs, and lets another process write."""
        self.sync()
        self._kept.clear()
        self._loaded = False
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _facts(self) -> Path:
        return self.folder / "traffic.json"

    @property
    def _segment(self) -> int:
        return min(self.limits.bytes // _SEGMENTS, _MAX_SEGMENT)

    def _folder_of(self, name: str) -> Path:
        return self.folder / "clients" / name

    def _folders(self, adapter: str | None = "") -> list[Path]:
        """Of an adapter's exchanges, by its digest; None: of all."""
        own = {"": ("[!.]*",), None: ("[!.]*", "[!.]*/[!.]*")}.get(adapter, (f"[!.]*/{adapter}",))
        return sorted(path for one in own for path in self._folder_of("").glob(one) if path.is_dir())

    def _make_room(self, name: str, size: int) -> bool:
        """Drops the oldest exchanges of the client that holds most, of what it has most with, counting what is to be
        added. Returns whether there is room then."""
        while sum(one.bytes for one in self._kept.values()) + size > self.limits.bytes:
            held = {other: one.bytes + size * (other == name) for other, one in self._kept.items()}
            clients = Counter[str]()
            for other, count in held.items():
                clients[_owner(other)] += count
            ((client, _),) = clients.most_common(1)
            most = max((other for other in held if _owner(other) == client), key=lambda other: held[other])
            if not self._kept[most].bytes:
                return False
            self._kept[most].drop_oldest()
        return True


def _owner(name: str) -> str:
    """Returns the name of the client's folder, of a folder in it or that itself."""
    return name.partition("/")[0]


def _line(exchange: Exchange) -> bytes:
    """Returns a line as `entry_of` reads it: what makes an exchange another one comes last, the answer at the end."""
    fields: dict[str, Any] = {
        "at": exchange.at,
        "temperature": exchange.temperature,
        "client": exchange.client or ANONYMOUS,
        "salt": exchange.salt,
        "prompt": exchange.prompt,
        "answer": exchange.answer,
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _exchanges(folder: Path, adapter: str) -> Iterator[Exchange]:
    for line in read_lines(folder):
        try:
            yield Exchange(**json.loads(line), adapter=adapter)
        except (ValueError, TypeError):  # a line that a crash of the machine left
            continue
