"""`--prefix-cache-dir`: the prefix cache, kept on the disk for the engine after this one; and `--hicache-size`: in host
memory, for as long as this one lives (`engine.host_level`).

The path of the data: a request ends, and what is cached of it waits as a `SavedText`. When nothing runs, whole blocks
of it that the store lacks are read from the pool, drafters' layers and hidden states by slot included, and written; of
a model with recurrent layers those up to the last snapshot at the end of a block, and that. What waits at the end of
the engine is written then. A later engine reads nothing until it gets a request: blocks of its prompt that the store
has, and the tree has not, are copied into free slots and become nodes of the tree, some between each two steps of
others. From there on they are cached as any others are, so the device knows of no disk, and the scheduler only that
the request has to wait. The bytes are the cache's own: a text is what it would be with the cache in memory, which is
what it would be without.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwing.config.options import Options
from draftwing.core import IntArray
from draftwing.engine.build import Parts
from draftwing.engine.cached_texts import SavedText, WaitingTexts, cached_parts
from draftwing.engine.host_level import GROUPS, HostLevel
from draftwing.engine.host_share import slot_bytes
from draftwing.engine.prefix_identity import identity_of, namespace_of
from draftwing.engine.provenance import Provenance
from draftwing.engine.read_ahead import ReadAhead
from draftwing.engine.saved_slots import SavedSlots
from draftwing.engine.startup.memory import FLYING
from draftwing.errors import ConfigError, GenerationError
from draftwing.kv.prefix_index import BLOCK, PrefixIndex, block_digests, kept_in, owner_of, reachable, state_digest
from draftwing.kv.prefix_store import PrefixStore
from draftwing.machine import lacks_memory
from draftwing.sched.req import Req, ReqState

log = logging.getLogger("draftwing")
IDLE_PART = 0.25  # seconds of writing after which the engine looks for something else to do
LOOK_SECONDS = 30.0  # after which it is looked again at what other engines have written
WARN_SECONDS = 600.0  # between two warnings that nothing can be written or read
FAILURES = OSError, MemoryError, RuntimeError  # torch and threads have no type of their own for a lack of memory


@dataclass(eq=False)
class Returning:
    """A waiting request, blocks of whose prompt are read. before: positions that were cached.  end: up to where it was
    read.  failed: whether no more can be."""

    req: Req
    digests: list[bytes]
    before: int = 0
    end: int = 0
    failed: bool = False


class SavedPrefixes:
    """The engine's thread calls it, or one that keeps it from steps; `forget`, `clear` and what `slots` has any thread.
    restored: tokens that came from the disk.  slots: None where nothing is kept there."""

    def __init__(self, store: PrefixStore | None, parts: Parts, host_size: float = 0.0) -> None:
        """store: None where nothing is kept on the disk.  host_size: of the budget in host memory, GB, 0: nothing is
        kept there. Raises ConfigError where it cannot be had."""
        self._store, self._kv, self._sched = store, parts.sched.kv, parts.sched
        self._upload = parts.executor.device.upload
        self._slots, self._states = slot_bytes(parts.executor)
        self._host = HostLevel(parts, self._slots, self._states, host_size) if host_size else None
        device, size = parts.executor.device, (self._slots.each + 1) * BLOCK
        self._ahead = None
        if store is not None and device.has_own_memory:
            self._ahead = ReadAhead(store, device, size, device.total_memory() // FLYING // GROUPS)
        found = (None if self._host is None else self._host.store), store
        self._levels: list[PrefixIndex] = [one for one in found if one is not None]
        most = 2 * parts.sched.config.slots
        self._texts = WaitingTexts(most)  # for the disk
        self._returning: list[Returning] = []
        self._lock = threading.Lock()  # of the store, and of the texts
        self._stateful = self._kv.states is not None
        self.slots = None if store is None else SavedSlots(store, self._lock, most, self._stateful)
        self._warned, self._look = -WARN_SECONDS, time.monotonic() + LOOK_SECONDS
        self.restored = self.restored_from_host = 0

    @classmethod
    def opened(cls, options: Options, parts: Parts, provenance: Provenance | None) -> SavedPrefixes | None:
        """Returns those of an engine; None where it keeps nothing, for a folder with a warning if the model cannot be
        told from others. Raises ConfigError."""
        store = None if options.prefix_cache_dir is None else _store_of(options, parts, provenance)
        return cls(store, parts, options.hicache_size) if store is not None or options.hicache_size else None

    # -- to the disk --------------------------------------------------------------------------------------------------

    def cached(self, req: Req) -> None:
        """Takes note of a request that ended, unless it opts out."""
        if req.private:
            return
        text = self._text_of(req) if req.request.learn and req.kv >= BLOCK else None
        slot = owner_of(req.request.client), req.request.slot
        with self._lock:
            if self._host is not None and text is not None:
                self._host.cached(text)
            if self.slots is not None and text is not None:
                self.slots.hold(slot, text)
                self._texts.add(text)
            elif self.slots is not None:
                self.slots.empty(slot)

    def retracted(self, req: Req) -> None:
        """Has what is cached of a request that waits again copied to the host at once: others need its place."""
        if self._host is None or not req.request.learn or req.kv < BLOCK:
            return
        with self._lock:
            self._host.cached(self._text_of(req), first=True)
        self.keep_some()

    def _text_of(self, req: Req) -> SavedText:
        radix, owner = self._kv.radix, owner_of(req.request.client)
        return SavedText(req.keys(req.kv + radix.window - 1), req.salt, namespace_of(req.request), owner, radix)

    @property
    def pending(self) -> bool:
        """Returns whether there is something to write, or to copy to the host."""
        return bool(self._texts) or (self._host is not None and self._host.pending)

    def write_some(self, comes: Callable[[], bool]) -> None:
        """Writes for a moment, the newest text first. comes: whether there is something else to do."""
        until = time.monotonic() + IDLE_PART
        while self._host is not None and self._host.pending and not comes() and time.monotonic() < until:
            self.keep_some()
            time.sleep(0.001)  # copies go on
        self._write(lambda: comes() or time.monotonic() > until)

    def keep_some(self) -> None:
        """Starts copies to host memory between two steps."""
        if self._host is None or not self._host.pending:
            return
        with self._lock, torch.inference_mode():
            try:
                self._host.keep_some()
            except FAILURES as error:
                self._failed("kept in host memory", error)
                self._host.give_up()

    def write_all(self) -> None:
        """Writes what waits."""
        self._look = 0.0
        self._write(lambda: False)

    def keep_all(self) -> None:
        """Keeps what waits, on the disk and in host memory: the pool may be emptied afterwards."""
        self.write_all()
        while self._host is not None and self._host.pending:
            self.keep_some()
            time.sleep(0.001)  # copies go on
        if self._host is not None:
            self._host.settle()

    def _write(self, stop: Callable[[], bool]) -> None:
        """stop: whether to leave the rest for later, asked before each file."""
        with self._lock, torch.inference_mode():
            while self._store is not None and self._texts and not stop():
                text = self._texts.newest
                try:
                    if time.monotonic() >= self._look:
                        self._store.refresh()
                        self._look = time.monotonic() + LOOK_SECONDS
                    done = self._write_text(self._store, text, stop)
                except FAILURES as error:  # such as for want of room on the disk
                    self._failed("written", error)
                    self._look = 0.0  # perhaps the folder is gone, which makes it anew
                    done = True
                if not done:
                    return
                self._texts.drop(text)

    def write_slot(self, text: SavedText, seconds: float) -> bool:
        """Writes what of a slot is not on the disk, for some time. Returns whether all is. Raises OSError."""
        until = time.monotonic() + seconds
        assert self._store is not None, "there is no folder"
        with self._lock, torch.inference_mode():
            return self._write_text(self._store, text, lambda: time.monotonic() > until)

    def _write_text(self, store: PrefixStore, text: SavedText, stop: Callable[[], bool]) -> bool:
        """Returns whether all of it is done."""
        with cached_parts(self._kv, text) as parts:
            entries, host = parts.entries, self._host
            if host is not None and len(found := reachable(text.digests, [host.store], self._stateful)) * BLOCK > (
                entries[-1].end if entries else 0
            ):  # the pool has evicted its end
                entries = text.entries(len(found), self._stateful)
            whole = len(entries) - (parts.state > 0)
            keep = frozenset(entry.digest for entry in entries)
            store.use(list(keep))
            for at, entry in enumerate(entries):
                if entry.digest in store:
                    continue
                if stop():
                    return False
                data: bytes | memoryview | None = None if host is None else host.content(entry.digest)
                if data is None and entries is not parts.entries:
                    break
                if data is None:
                    data = self._state(parts.state) if at == whole else self._block(parts.slots_of(at))
                if not store.write(entry, data, keep):
                    break
        return True

    def _block(self, slots: IntArray) -> bytes:
        return bytes(self._slots.read(self._upload(slots))) + self._sched.catch_ups.prompts.seen(slots).tobytes()

    def _state(self, slot: int) -> memoryview:
        return self._states.read(self._upload(_one(slot)))

    def _failed(self, what: str, error: Exception) -> None:
        """Warns of an error after which the engine goes on as it would without a disk. Raises any other."""
        full = isinstance(error, torch.OutOfMemoryError) or lacks_memory(error) or "out of memory" in str(error)
        if not full and not isinstance(error, OSError):
            raise error
        now = time.monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            log.warning("a conversation is not %s: %s", what, str(error) or type(error).__name__)

    # -- from the disk ------------------------------------------------------------------------------------------------

    def bring_back(self, req: Req) -> bool:
        """Has what is elsewhere of a request's text cached before it gets a row, and returns whether anything is. It is
        looked for again only where something was evicted since."""
        if req.private or req.looked == self._kv.evicted:
            return False
        req.looked = self._kv.evicted
        windows = self._kv.radix.windows(req.array)[: max(self._kv.may_reuse(req), 0)]
        with self._lock:
            if self._host is not None:
                self._host.store.poll()
            found = reachable(block_digests(namespace_of(req.request), windows), self._levels, self._stateful)
        if found and len(found) * BLOCK >= self._kv.cached(req) + BLOCK:
            req.returning = True
            self._returning.append(Returning(req, found))
        return req.returning

    def bring_some(self) -> None:
        """Reads as long as may be between two steps, one file at least, for the request whose turn it is. When that is
        done others wait until it had a chance to begin: what is read is its own only then."""
        if not self._returning:
            return
        with self._lock:
            if self._full:
                return
        until = time.monotonic() + self._sched.pause
        self._returning = [one for one in self._returning if one.req.state is ReqState.WAITING]
        if not self._returning and self._ahead is not None:
            self._ahead.forget_single()
        while self._returning:
            one = min(self._returning, key=lambda one: one.req.rank)
            begun = one.end
            try:
                with self._lock, torch.inference_mode():
                    done = self._bring_part(one, lambda: self._full or time.monotonic() >= until)
            except FAILURES as error:
                self._failed("read", error)
                done = True
            if done:
                one.req.returning, one.req.looked = False, self._kv.evicted
                self._returning.remove(one)
                if self._ahead is not None:
                    self._ahead.forget_single()
            if not done or one.end > begun or time.monotonic() >= until:
                return

    @property
    def _full(self) -> bool:
        """Returns whether enough is on its way to the device."""
        if self._ahead is not None and self._ahead.full:
            return True
        if self._host is None:
            return False
        self._host.store.poll()
        return self._host.busy

    def _bring_part(self, one: Returning, stop: Callable[[], bool]) -> bool:
        """Returns whether it was the last part. stop: asked after each file."""
        req, found, begun = one.req, one.digests, one.end
        one.before = one.before if begun else self._kv.cached(req)
        state = state_digest(found[-1])
        if self._ahead is not None and self._stateful and not (self._host is not None and state in self._host.store):
            self._ahead.begin_single(state, self._states.each)
        end = self._kv.bring_back(req, len(found) * BLOCK, lambda start, slots: self._fill(one, start, slots, stop))
        one.end = max(end, begun)
        if begun < end < len(found) * BLOCK and not one.failed:
            return False
        used = found[: end // BLOCK]
        if self._stateful:
            used = self._bring_back_state(req, used)
        for level in self._levels:
            level.use(used)
        self.restored += max(self._kv.cached(req) - one.before, 0)
        return True

    def _fill(self, one: Returning, start: int, slots: IntArray, stop: Callable[[], bool]) -> int:
        """`KVManager.bring_back`, fill."""
        end, upto = start, start + len(slots)
        one.failed = start < one.end  # others have taken the slots of what was read: they will do so again
        while end < upto and not one.failed:
            digests, first, left = one.digests[end // BLOCK :], end % BLOCK, slots[end - start :]
            count = 0 if self._host is None else self._host.fill(digests, first, left)
            self.restored_from_host += count
            count = count or self._fill_from_disk(digests, first, left, stop)
            one.failed = not count
            end += count
            if stop():
                break
        return end

    def _fill_from_disk(self, digests: Sequence[bytes], first: int, slots: IntArray, stop: Callable[[], bool]) -> int:
        """Fills slots with the first of these blocks, from a position in it on. Returns how many."""
        if self._store is None:
            return 0
        ahead = None if self._ahead is None else self._ahead.read(digests, BLOCK, stop)
        if ahead is not None:
            slots = slots[: len(ahead[0]) * BLOCK - first]
            self._slots.scatter(self._upload(slots), ahead[0], first)
            self._ahead.placed(ahead[0].nbytes)  # type: ignore[union-attr]  # it has read them
            seen = ahead[1].flatten().numpy()
        else:
            data = self._store.read(digests[0])
            if data is None or len(data) != (self._slots.each + 1) * BLOCK:
                return 0
            slots = slots[: BLOCK - first]
            self._slots.write(self._upload(slots), data[:-BLOCK], first)
            seen = np.frombuffer(data[-BLOCK:], np.uint8)
        self._sched.catch_ups.prompts.note_seen(slots, seen.view(np.bool_)[first : first + len(slots)])
        return len(slots)

    def _bring_back_state(self, req: Req, digests: list[bytes]) -> list[bytes]:
        """Brings back the last snapshot that is there. Returns the digests of what can be begun with then."""

        def fill(slot: int) -> bool:
            digest = state_digest(digests[-1])
            if self._host is not None and self._host.fill_state(digest, slot):
                return True
            data = None if self._ahead is None else self._ahead.take_single(digest)
            if data is None:
                data = None if self._store is None else self._store.read(digest)
            if data is None or len(data) != self._states.each:
                return False
            self._states.write(self._upload(_one(slot)), data)
            return True

        while digests and not (
            kept_in(self._levels, state_digest(digests[-1]))
            and self._kv.bring_back_state(req, len(digests) * BLOCK, fill)
        ):
            digests = digests[:-1]
        return [*digests, *([state_digest(digests[-1])] if digests else ())]

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, client: str) -> None:
        """Removes what is kept of a client, whichever model it asked. Raises OSError."""
        owner = owner_of(client)
        with self._lock:
            self._texts.forget(owner)
            if self._ahead is not None:
                self._ahead.forget()
            if self._host is not None:
                self._host.forget(owner)
            if self.slots is not None:
                self.slots.forget(owner)
            if self._store is not None:
                self._store.delete(owner)

    def clear(self) -> None:
        """Removes all that is kept for this model. Raises OSError."""
        with self._lock:
            self._texts.forget()
            if self._ahead is not None:
                self._ahead.forget()
            if self._host is not None:
                self._host.forget()
            if self.slots is not None:
                self.slots.forget()
            if self._store is not None:
                self._store.delete()

    def spoilt(self) -> None:
        """Does so, since some of it may be what makes logits not finite."""
        try:
            self.clear()
        except OSError as error:
            self._failed("removed", error)

    def stats(self) -> dict[str, Any]:
        """Counts: bytes that are kept, and tokens of prompts that came from there."""
        found: dict[str, Any] = {}
        if self._store is not None:
            found |= {"prefix_cache_bytes": self._store.size, "prefix_cache_restored_tokens": self.restored}
        if self._host is not None:
            found |= {"host_cache_bytes": self._host.size, "host_cache_tokens": self.restored_from_host}
        return found


def _store_of(options: Options, parts: Parts, provenance: Provenance | None) -> PrefixStore | None:
    """Opens the folder; None, with a warning, for a model that cannot be told from others. Raises ConfigError."""
    if provenance is None:
        log.warning("--prefix-cache-dir has no effect: weights or drafts are made up")
        return None
    assert options.prefix_cache_dir is not None
    folder = Path(options.prefix_cache_dir).expanduser()
    try:
        store = PrefixStore(folder, identity_of(parts, provenance), int(options.prefix_cache_size * 1e9))
    except GenerationError as error:
        log.warning("--prefix-cache-dir has no effect: %s", error)
        return None
    except OSError as error:
        raise ConfigError(f"prefix_cache_dir: {folder} cannot be written: {error.strerror}") from None
    log.info("--prefix-cache-dir: %d tokens of this model, %.2f GB of all", len(store) * BLOCK, store.size / 1e9)
    return store


def _one(slot: int) -> IntArray:
    return np.asarray([slot], np.int64)
