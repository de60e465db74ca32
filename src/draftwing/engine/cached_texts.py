"""Texts of requests that have ended, which are in the prefix cache and wait to be kept elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from draftwing.core import IntArray
from draftwing.kv.prefix_index import BLOCK, Entry, block_digests, state_digest
from draftwing.sched.kv_manager import KVManager
from draftwing.sched.radix import RadixCache


@dataclass(eq=False)
class SavedText:
    """What is cached of a request that ended. keys: its tokens as the prefix cache has them.  salt: of its tree."""

    keys: IntArray
    salt: int
    namespace: bytes
    owner: bytes
    radix: RadixCache

    @cached_property
    def digests(self) -> list[bytes]:
        """Of all whole blocks."""
        return list(block_digests(self.namespace, self.radix.windows(self.keys)))

    def entries(self, blocks: int, state: bool) -> list[Entry]:
        """Returns those of its first blocks, and of a snapshot at their end."""
        digests = self.digests[:blocks]
        found = [
            Entry(digest, parent, self.owner, at)
            for digest, parent, at in zip(
                digests, [self.namespace, *digests], range(BLOCK, blocks * BLOCK + 1, BLOCK), strict=False
            )
        ]
        if state:
            found.append(found[-1]._replace(digest=state_digest(digests[-1]), parent=digests[-1]))
        return found


class CachedParts(NamedTuple):
    """Parts of a text that are cached. slots: of positions.  state: slot of the last snapshot at the end of a block, 0:
    there is none.  entries: of whole blocks up to there, and of the snapshot."""

    slots: IntArray
    state: int
    entries: list[Entry]

    def slots_of(self, at: int) -> IntArray:
        """Returns the slots of a block."""
        return self.slots[at * BLOCK : (at + 1) * BLOCK]


@contextmanager
def cached_parts(kv: KVManager, text: SavedText) -> Iterator[CachedParts]:
    """Yields what there is of a text, which stays within."""
    windows = kv.radix.windows(text.keys)
    match = kv.radix.match_kv(text.keys, text.salt, len(windows))
    kv.radix.lock(match.node)
    try:
        whole, state = len(match.slots) // BLOCK, 0
        if kv.states is not None:
            found = [one for one in kv.radix.snapshots(match.node) if one[0] % BLOCK == 0]
            end, state = found[0] if found else (0, 0)
            whole = end // BLOCK
        yield CachedParts(match.slots, state, text.entries(whole, state > 0))
    finally:
        kv.radix.unlock(match.node)


class WaitingTexts:
    """At most so many tokens of texts, or one: those before are forgotten then, since others have taken their places in
    the cache by now."""

    def __init__(self, most: int) -> None:
        self._most, self._tokens = most, 0
        self._texts: deque[SavedText] = deque()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def oldest(self) -> SavedText:
        return self._texts[0]

    @property
    def newest(self) -> SavedText:
        return self._texts[-1]

    def add(self, text: SavedText, first: bool = False) -> None:
        """first: as if it were the oldest."""
        self._tokens += len(text.keys)
        while self._tokens > self._most and self._texts:
            self.drop(self._texts[0])
        (self._texts.appendleft if first else self._texts.append)(text)

    def drop(self, text: SavedText) -> None:
        self._texts.remove(text)
        self._tokens -= len(text.keys)

    def forget(self, owner: bytes | None = None) -> None:
        """Drops an owner's texts; None: all."""
        for text in [one for one in self._texts if owner in (None, one.owner)]:
            self.drop(text)
