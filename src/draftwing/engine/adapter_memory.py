"""Adapters, or draft heads of their own, in memory of the host: at most so many of them, the others are read again from
their files when a request comes."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

from draftwing.config.adapters import AdapterCard
from draftwing.models.adapters.adapter import Adapter

log = logging.getLogger("draftwing")


class HeadFile(NamedTuple):
    """A draft head of an adapter's own, and the folder that it was read from."""

    digest: str
    folder: Path


class Held(NamedTuple):
    """What a request has asked for. digest: of the adapter, or of several as one.  parts: with what their scales are
    multiplied with.  head: of the adapter's own."""

    digest: str
    parts: tuple[tuple[AdapterCard, float], ...]
    head: HeadFile | None

    @property
    def head_key(self) -> str:
        """Returns what the head's slot, and all that it makes, are known by; "" without a head."""
        return "" if self.head is None else f"{self.digest}/{self.head.digest}"

    @property
    def names(self) -> str:
        return ", ".join(repr(card.name) for card, _ in self.parts)


class AdapterMemory:
    """By digest. Whoever was not used for longest makes room for others; not what a request needs that has no slot of
    the device yet. Any thread may ask; what is read is read by a thread of its own, one after the other."""

    def __init__(self, most: int | None, wake: Callable[[], None]) -> None:
        """most: that stay, None: all.  wake: is called, by that thread, when something was read or could not be."""
        self._most, self._wake = most, wake
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Adapter] = OrderedDict()  # the one that was used last at the end
        self._needed: Counter[str] = Counter()  # by requests without a slot
        self._reading, self._failed = "", dict[str, Exception]()
        self.reads = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: str) -> bool:
        return digest in self._held

    @property
    def busy(self) -> bool:
        """Returns whether something is being read."""
        return bool(self._reading)

    def put(self, digest: str, adapter: Adapter) -> None:
        """Has an adapter, in place of none with the same digest."""
        with self._lock:
            self._failed.pop(digest, None)
            self._held.setdefault(digest, adapter)
            self._held.move_to_end(digest)
            self._make_room(0)

    def get(self, digest: str) -> Adapter | None:
        with self._lock:
            if digest in self._held:
                self._held.move_to_end(digest)
            return self._held.get(digest)

    def need(self, digest: str) -> None:
        """Notes a request without a slot, which is to `release` once."""
        with self._lock:
            self._needed[digest] += 1

    def release(self, digest: str) -> None:
        with self._lock:
            self._needed[digest] -= 1
            if not self._needed[digest]:
                del self._needed[digest]
                self._make_room(0)

    def keep(self, used: Container[str]) -> None:
        """Forgets all others."""
        with self._lock:
            for digest in [one for one in self._held if one not in used]:
                del self._held[digest]

    def fetch(self, digest: str, read: Callable[[], Adapter], first: bool) -> None:
        """Has something read, unless a read goes on or there is no room. first: whether the one who needs it is the
        first of those that wait, for whom there is always room: others who need what is there could come for ever."""
        with self._lock:
            if self._reading or digest in self._held or digest in self._failed:
                return
            if not (self._make_room(1) or first):
                return
            self._reading = digest
        try:
            threading.Thread(target=self._read, args=(digest, read), name="adapter-read", daemon=True).start()
        except RuntimeError as error:  # there is no thread to be had
            self._ended(digest, None, error)
            self._wake()

    def take_failed(self) -> dict[str, Exception]:
        """Returns what could not be read since the last call, and why."""
        if not self._failed:
            return {}
        with self._lock:
            failed, self._failed = self._failed, {}
            return failed

    def _read(self, digest: str, read: Callable[[], Adapter]) -> None:
        adapter, wrong = None, None
        try:
            adapter = read()
        except Exception as error:  # whatever it is, of this adapter alone
            wrong = error
        self._ended(digest, adapter, wrong)
        self._wake()

    def _ended(self, digest: str, adapter: Adapter | None, wrong: Exception | None) -> None:
        if wrong is not None:
            log.error("an adapter's files cannot be read again: %s", wrong)
        with self._lock:
            self._reading = ""
            if wrong is not None:
                self._failed[digest] = wrong
            elif adapter is not None:
                self._held[digest] = adapter
                self.reads += 1
                self._make_room(0)  # others were loaded meanwhile

    def _make_room(self, count: int) -> bool:
        """Drops what nobody needs until there is room for so many more; returns whether there is."""
        while self._most is not None and len(self._held) + count > self._most:
            unused = next((one for one in self._held if one not in self._needed), None)
            if unused is None:
                return False
            del self._held[unused]
        return True
