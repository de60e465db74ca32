"""Cached prefixes in host memory: parts that are copied there while the device computes, and back.

The memory is taken once, in *pages*, so parts of different sizes leave no gaps. A copy is on its way until the device
says that it is done, for which nobody waits: a part counts as there from then on, and the pages of one that goes are
free when no copy of before is on its way any more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from draftwing.kv.prefix_index import Entry, PrefixIndex, Stored

SLAB = 1 << 30  # bytes that are asked for at once at most: page-locked memory comes in powers of two


class HostCopies(Protocol):
    """What a device has of it (`engine.devices.base`)."""

    def host_memory(self, size: int) -> Tensor:
        """Returns [size] uint8 that copies go from and to while the host goes on."""

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], bool]:
        """Starts copies to the host."""

    def copy_in(self, parts: Sequence[Tensor]) -> tuple[Tensor, Callable[[], bool]]:
        """Starts copies from the host."""


class HostPages:
    """Host memory of one rank, in pages of one size that are known by number."""

    def __init__(self, copies: HostCopies, size: int, count: int) -> None:
        """size: of a page, bytes. Raises RuntimeError where the memory cannot be had."""
        self._copies, self._size = copies, size
        self._pages = list[Tensor]()
        while len(self._pages) < count:
            slab = min(1 << ((count - len(self._pages)) * size).bit_length() - 1, SLAB)
            self._pages += copies.host_memory(max(slab // size, 1) * size).split(size)

    def copy_out(self, rows: Tensor, places: Sequence[Sequence[int]]) -> Callable[[], bool]:
        """Starts to copy the first of rows [parts, bytes] on the device to the pages of each. Returns whether they have
        arrived, when it is called."""
        assert all(rows.shape[1] <= len(pages) * self._size for pages in places)
        return self._copies.copy_out(
            [
                (part, self._pages[page][: len(part)])
                for row, pages in zip(rows, places, strict=False)
                for part, page in zip(row.split(self._size), pages, strict=False)
            ]
        )

    def copy_in(self, places: Sequence[Sequence[int]], size: int) -> tuple[Tensor, Callable[[], bool]]:
        """Starts to copy parts of `size` bytes to the device -> [parts, size] uint8 there, and whether they have
        arrived, when it is called."""
        parts = list[Tensor]()
        for pages in places:
            left = size
            for page in pages:
                parts.append(self._pages[page][: min(left, self._size)])
                left -= len(parts[-1])
        found, done = self._copies.copy_in(parts)
        return found.view(len(places), size), done

    def content(self, pages: Sequence[int], size: int) -> bytes:
        """Returns the bytes of a part of that size."""
        return b"".join(self._pages[page].numpy().data for page in pages)[:size]


class _Place(NamedTuple):
    """pages: numbers, from the first byte on.  size: bytes.  note: as of `HostPrefixes.write`."""

    pages: list[int]
    size: int
    note: Any


@dataclass(eq=False)
class _Flight:
    """Copies on their way. done: whether they have arrived.  size: bytes.  held: what has to stay meanwhile.  parts:
    that are there when they have."""

    done: Callable[[], bool]
    size: int
    held: object = None
    parts: Sequence[Stored] = ()


class HostPrefixes(PrefixIndex):
    """One thread at a time may call it, and of what starts copies the engine's alone."""

    def __init__(self, copies: HostCopies, page: int, limit: int) -> None:
        """page: bytes.  limit: of all of them. Raises RuntimeError where the memory cannot be had."""
        count = limit // page
        super().__init__(count * page)
        self._page, self.count = page, count
        self._memory = HostPages(copies, page, count)
        self._free = list(range(count))
        self._at: dict[bytes, _Place] = {}  # of parts that are there or on their way
        self._arriving: dict[bytes, Stored] = {}
        self._out, self._in = deque[_Flight](), deque[_Flight]()
        self._resting = deque[tuple[list[int], list[_Flight]]]()  # pages, and copies of when they were given up

    def __contains__(self, digest: bytes) -> bool:
        return super().__contains__(digest) and digest not in self._arriving

    def knows(self, digest: bytes) -> bool:
        """Returns whether a part is there, or on its way."""
        return super().__contains__(digest)

    @property
    def leaving(self) -> int:
        """Returns the bytes on their way to the host."""
        return sum(flight.size for flight in self._out)

    @property
    def returning(self) -> int:
        """Returns the bytes on their way to the device."""
        return sum(flight.size for flight in self._in)

    @property
    def resting(self) -> bool:
        """Returns whether pages will be free when copies have arrived."""
        return bool(self._resting)

    def poll(self) -> None:
        """Takes note of copies that have arrived."""
        for flights in (self._out, self._in):
            while flights and flights[0].done():
                flight = flights.popleft()
                for stored in flight.parts:
                    if self._arriving.get(stored.entry.digest) is stored:
                        del self._arriving[stored.entry.digest]
        while self._resting and not any(one in self._out or one in self._in for one in self._resting[0][1]):
            self._free += self._resting.popleft()[0]

    def write(
        self, entries: Sequence[Entry], rows: Tensor, keep: Collection[bytes] = (), notes: Sequence[Any] = ()
    ) -> int:
        """Starts to copy parts, none of which is there or on its way, as far as there is room.

        rows [entries, bytes] uint8 on the device: what nobody changes any more.  keep: digests that may not go for it,
        theirs among them.  notes: what `note` returns of each. Returns how many; fewer also where pages are not free
        yet (`resting`)."""
        size, parts = rows.shape[1], list[Stored]()
        need, now, keep = -(-size // self._page), time.time(), {*keep, *self._arriving}
        for entry, note in zip(entries, notes or [None] * len(entries), strict=True):
            if not self._make_room(need * self._page, keep) or need > len(self._free):
                break
            pages = [self._free.pop() for _ in range(need)]
            stored = Stored(self._name, entry, need * self._page, now)
            self._at[entry.digest] = _Place(pages, size, note)
            self._arriving[entry.digest] = stored
            self._add(stored)
            parts.append(stored)
        if parts:
            try:
                done = self._memory.copy_out(rows, self.places([stored.entry.digest for stored in parts]))
            except BaseException:  # such as for want of memory: what is not copied is not kept
                for stored in parts:
                    self._remove(stored)
                raise
            self._out.append(_Flight(done, len(parts) * size, rows, parts))
        return len(parts)

    def read(self, digests: Sequence[bytes]) -> Tensor:
        """Starts to copy parts that are there, all of one size, to the device -> [digests, bytes] uint8 there."""
        found, done = self._memory.copy_in(self.places(digests), self._at[digests[0]].size)
        self._in.append(_Flight(done, found.numel()))
        return found

    def places(self, digests: Sequence[bytes]) -> list[list[int]]:
        """Returns the pages of each of these parts, which are there or on their way."""
        return [self._at[digest].pages for digest in digests]

    def note(self, digest: bytes) -> Any:
        """Returns what `write` was given with a part."""
        return self._at[digest].note

    def content(self, digest: bytes) -> bytes:
        """Returns the bytes of a part that is there."""
        pages, size, _ = self._at[digest]
        return self._memory.content(pages, size)

    def delete(self, owner: bytes | None = None) -> None:
        """Removes an owner's parts; None: all."""
        for stored in [one for one in self._files.values() if owner in (None, one.entry.owner)]:
            self._remove(stored)

    def check_integrity(self) -> None:
        """Asserts that each page is free, of one part, or given up. For tests."""
        pages = [*self._free, *_all(place.pages for place in self._at.values()), *_all(one[0] for one in self._resting)]
        assert sorted(pages) == list(range(self.count)), "a page was lost, or has two owners"
        assert self.size == sum(len(place.pages) for place in self._at.values()) * self._page <= self._limit
        assert {entry.entry.digest for entry in self._files.values()} == set(self._at) >= set(self._arriving)

    def _remove(self, stored: Stored) -> None:
        digest = stored.entry.digest
        pages = self._at.pop(digest).pages
        self._arriving.pop(digest, None)
        flights = [*deque(self._out, 1), *deque(self._in, 1)]
        if flights:
            self._resting.append((pages, flights))
        else:
            self._free += pages
        self._drop(stored)


def _all(lists: Iterable[list[int]]) -> list[int]:
    return [page for pages in lists for page in pages]
