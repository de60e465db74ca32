"""Which parts of texts a store of cached prefixes has, and which of them go for others.

A part is a block of `BLOCK` positions, or a snapshot of recurrent states at the end of one. It is found by a digest of
all tokens up to its end: that of the block before and of its own keys; the first one before is that of a *namespace*:
client, salt and adapter.
"""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Final, NamedTuple

from draftwing.core import IntArray

BLOCK: Final = (
    64  # positions of a part; snapshots of recurrent states lie at multiples of it, too (`state_slots.GRAIN`)
)
DIGEST: Final = 16  # bytes
OWNER: Final = 8
_AGE: Final = 60.0  # seconds that are nothing: what was used within the last minute is all as new
_SPARE: Final = 0.05  # of the limit that is freed at once, where something has to go
Key = tuple[str, bytes]  # of a part: its folder, and its digest


class Entry(NamedTuple):
    """A part. digest: of all tokens up to its end.  parent: the same of the block before, or of a state's own block.
    owner: a digest of the client.  end: positions up to its end."""

    digest: bytes
    parent: bytes
    owner: bytes
    end: int


class Stored(NamedTuple):
    """A part that is there. folder: its name, of a file.  used: when it was written or read last, seconds since
    1970."""

    folder: str
    entry: Entry
    size: int
    used: float


def digest_of(*parts: bytes, size: int = DIGEST) -> bytes:
    """Returns a digest of parts, none of which can be taken for another."""
    found = blake2b(digest_size=size)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def owner_of(client: str) -> bytes:
    """Returns `Entry.owner` of a client's files."""
    return digest_of(b"owner", client.encode(), size=OWNER)


def block_digests(namespace: bytes, keys: IntArray) -> Iterator[bytes]:
    """Yields the digest of each whole block of a text. keys [positions, window] int64: as of the prefix cache."""
    before = namespace
    for at in range(0, len(keys) - BLOCK + 1, BLOCK):
        before = digest_of(before, keys[at : at + BLOCK].tobytes())
        yield before


def state_digest(block: bytes) -> bytes:
    """Returns the digest of a snapshot of recurrent states at the end of a block."""
    return digest_of(b"state", block)


def kept_in(levels: Sequence[PrefixIndex], digest: bytes) -> bool:
    """Returns whether any of these has a part."""
    return any(digest in level for level in levels)


def reachable(digests: Iterable[bytes], levels: Sequence[PrefixIndex], stateful: bool) -> list[bytes]:
    """Returns of a text's blocks those that are in any of the levels, up to where a request can begin: with recurrent
    layers (stateful), at a snapshot."""
    found = list(takewhile(lambda digest: kept_in(levels, digest), digests))
    while found and stateful and not kept_in(levels, state_digest(found[-1])):
        found.pop()
    return found


class PrefixIndex(ABC):
    """Parts within a budget. size: bytes of all of them."""

    def __init__(self, limit: int, folder: str = "") -> None:
        """limit: bytes.  folder: of those that are found by their digests; others have a share in the budget alone."""
        self._limit, self._name = limit, folder
        self._files: dict[Key, Stored] = {}
        self.size = 0

    def __contains__(self, digest: bytes) -> bool:
        return (self._name, digest) in self._files

    def __len__(self) -> int:
        return sum(folder == self._name for folder, _ in self._files)

    def use(self, digests: Sequence[bytes]) -> None:
        """Notes that parts are of use now."""
        now = time.time()
        for digest in digests:
            if (stored := self._files.get((self._name, digest))) is not None:
                self._files[self._name, digest] = stored._replace(used=now)

    @abstractmethod
    def _remove(self, stored: Stored) -> None:
        """Removes a part."""

    def _staying(self) -> Collection[Key]:
        """Returns what goes for nothing else."""
        return frozenset()

    def _make_room(self, size: int, keep: Collection[bytes]) -> bool:
        """Removes parts until there is room for so many bytes: those first that save least, tokens by time since they
        were used. The end of a text goes before what it goes on from, and what stays where the limit has become a
        smaller one alone. keep: digests of what may not go."""
        if self.size + size <= self._limit:
            return True
        kept = frozenset((self._name, digest) for digest in keep)
        staying = kept.union(self._staying())
        least = size + sum(stored.size for key, stored in self._files.items() if key in staying)
        if self.size <= self._limit < least:
            return False  # nothing goes in vain
        self._remove_least(self._limit * (1 - _SPARE) - size, staying)
        if self.size > self._limit:
            self._remove_least(self._limit, kept)
        return self.size + size <= self._limit

    def _remove_least(self, aim: float, kept: Collection[Key]) -> None:
        """Removes parts until all have so many bytes, but for those of `kept`."""
        now = time.time()

        def rank(one: Stored) -> tuple[float, str, bytes]:
            return one.entry.end / (max(now - one.used, 0.0) + _AGE), one.folder, one.entry.digest

        children = Counter((one.folder, one.entry.parent) for one in self._files.values())
        ends = [rank(one) for key, one in self._files.items() if not children[key] and key not in kept]
        heapq.heapify(ends)
        while self.size > aim and ends:
            _, folder, digest = heapq.heappop(ends)
            stored = self._files[folder, digest]
            self._remove(stored)
            before = stored.folder, stored.entry.parent
            children[before] -= 1
            if not children[before] and before in self._files and before not in kept:
                heapq.heappush(ends, rank(self._files[before]))

    def _add(self, stored: Stored) -> None:
        key = stored.folder, stored.entry.digest
        if key in self._files:
            self.size -= self._files[key].size
        self._files[key] = stored
        self.size += stored.size

    def _drop(self, stored: Stored) -> None:
        del self._files[stored.folder, stored.entry.digest]
        self.size -= stored.size
