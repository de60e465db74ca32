"""`--hicache-size`: what the prefix cache of a GPU has no room for, in host memory.

When a request has ended, what is cached of it is gathered between two steps, on the compute stream, and goes to the
host beside the steps to come; nobody waits for it. So the pool may evict it at any time. A later prompt that begins
like it gets it back as from the disk (`engine.saved_prefixes`): into free slots, as nodes of the tree. Of several ranks
each keeps its own bytes of every part (`engine.host_share`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from draftwing.core import IntArray
from draftwing.engine.build import Parts
from draftwing.engine.cached_texts import CachedParts, SavedText, WaitingTexts, cached_parts
from draftwing.engine.host_share import bring_parts, keep_parts, open_share, settle_parts
from draftwing.engine.startup.memory import FLYING
from draftwing.errors import ConfigError
from draftwing.kv.host_prefixes import HostPrefixes
from draftwing.kv.prefix_index import BLOCK, Entry
from draftwing.kv.slot_bytes import SlotBytes
from draftwing.machine import free_memory

GROUPS = 4  # in which these go; one of them is on its way back at most, which a step that waits for it hardly notices


class HostLevel:
    """The engine's thread calls it, under the lock of `SavedPrefixes`; `forget` any thread. restored: tokens that came
    from host memory."""

    def __init__(self, parts: Parts, slots: SlotBytes, states: SlotBytes, size: float) -> None:
        """size: of the budget, GB. Raises ConfigError where host memory has no room for it."""
        executor, device, ranks = parts.executor, parts.executor.device, parts.executor.model.ranks
        self._tell, self._ranks = executor.broadcast.call, ranks.size
        self._kv, self._catch_ups, self._upload = parts.sched.kv, parts.sched.catch_ups, device.upload
        self._slots, self._states = slots, states
        self._each = slots.each * BLOCK
        free = free_memory()
        if free is not None and size * 1e9 > free:
            raise ConfigError(f"hicache_size: expected at most {free / 1e9:.1f} GB, which are free; found {size:g}")
        try:
            self.store = HostPrefixes(device, self._each or states.each, int(size * 1e9) // ranks.size)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"hicache_size: {size:g} GB of host memory cannot be had: {reason}") from None
        of_state = -(-states.each // (self._each or states.each))  # pages
        if not executor.run_on_all_ranks(open_share, self.store.count, of_state):
            raise ConfigError(f"hicache_size: {size:g} GB of host memory cannot be had by all {ranks.size} ranks")
        self._texts = WaitingTexts(2 * parts.sched.config.slots)
        self._most = max(device.total_memory() // FLYING, self._each)

    @property
    def _blocks_at_once(self) -> int:
        return max(self._most // GROUPS // max(self._each, 1), 1)

    @property
    def pending(self) -> bool:
        """Returns whether there is something to copy to the host, or on its way there."""
        return bool(self._texts or self.store.leaving)

    @property
    def size(self) -> int:
        """Returns the bytes that all ranks keep."""
        return self.store.size * self._ranks

    @property
    def busy(self) -> bool:
        """Returns whether enough is on its way back."""
        return self.store.returning >= self._most // GROUPS

    def cached(self, text: SavedText, first: bool = False) -> None:
        """Has a text kept. first: before all that wait."""
        self._texts.add(text, first)

    # -- to the host --------------------------------------------------------------------------------------------------

    def keep_some(self) -> None:
        """Starts copies, as many as may be on their way."""
        self.store.poll()
        while self._texts and self.store.leaving < self._most:
            text, copied = self._texts.oldest, True
            with cached_parts(self._kv, text) as parts:
                keep = {entry.digest for entry in parts.entries}
                self.store.use(list(keep))
                while copied and self.store.leaving < self._most:
                    copied = self._copy_group(parts, keep)
            if not copied:
                if self.store.resting:  # there will be room
                    return
                self._texts.drop(text)

    def give_up(self) -> None:
        """Forgets the text that is next, for want of memory."""
        if self._texts:
            self._texts.drop(self._texts.oldest)

    def _copy_group(self, parts: CachedParts, keep: set[bytes]) -> bool:
        """Returns whether anything was copied. keep: digests of all of them."""
        whole = len(parts.entries) - (parts.state > 0)
        lacking = [at for at, entry in enumerate(parts.entries) if not self.store.knows(entry.digest)]
        if not lacking:
            return False
        if lacking[0] == whole:
            state = np.asarray([parts.state], np.int64)
            found = self.store.write(parts.entries[whole:], self._states.gather(self._upload(state)), keep)
            self._tell_kept(True, state, parts.entries[whole : whole + found])
            return found > 0
        most = self._blocks_at_once
        blocks = [at for at in lacking[:most] if at < whole]
        slots = np.concatenate([parts.slots_of(at) for at in blocks])
        entries = [parts.entries[at] for at in blocks]
        rows = self._slots.gather(self._upload(slots), len(blocks))
        seen = self._catch_ups.prompts.seen(slots).reshape(-1, BLOCK)  # by the drafter
        found = self.store.write(entries, rows, keep, list(seen))
        self._tell_kept(False, slots[: found * BLOCK], entries[:found])
        return found > 0

    def _tell_kept(self, of_state: bool, slots: IntArray, entries: Sequence[Entry]) -> None:
        """Has other ranks keep their bytes of these parts."""
        if entries:
            self._tell(keep_parts, of_state, slots, self.store.places([entry.digest for entry in entries]))

    def settle(self) -> None:
        """Has other ranks wait for their copies, none of which this one waits for."""
        self._tell(settle_parts)

    # -- back ---------------------------------------------------------------------------------------------------------

    def fill(self, digests: Sequence[bytes], first: int, slots: IntArray) -> int:
        """Starts to copy blocks to slots: of the first one what is behind `first`. Returns how many slots; 0 where the
        block is not there."""
        most = 1 if first else self._blocks_at_once
        wanted = digests[: min(most, -(-(first + len(slots)) // BLOCK))]
        found = list(takewhile(self.store.__contains__, wanted))
        if not found:
            return 0
        at = slots[: len(found) * BLOCK - first]
        if self._each:  # else no layer keeps anything of tokens
            self._slots.scatter(self._upload(at), self.store.read(found), first)
            self._tell(bring_parts, False, at, self.store.places(found), first)
        seen = np.concatenate([self.store.note(digest) for digest in found])
        self._catch_ups.prompts.note_seen(at, seen[first : first + len(at)])
        return len(at)

    def fill_state(self, digest: bytes, slot: int) -> bool:
        """Starts to copy a snapshot to a state slot. Returns whether it is there."""
        if digest not in self.store:
            return False
        at = np.asarray([slot], np.int64)
        self._states.scatter(self._upload(at), self.store.read([digest]))
        self._tell(bring_parts, True, at, self.store.places([digest]))
        return True

    def content(self, digest: bytes) -> bytes | None:
        """Returns a part as files have it; None where it is not there."""
        if digest not in self.store:
            return None
        seen = self.store.note(digest)
        return self.store.content(digest) + (b"" if seen is None else seen.tobytes())

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, owner: bytes | None = None) -> None:
        """Forgets what is kept of an owner; None: all."""
        self._texts.forget(owner)
        self.store.delete(owner)
