"""`--prefix-cache-dir`: the prefix cache, kept on the disk for the engine after this one.

The path of the data: a request ends, and what is cached of it waits as a `SavedText`. When nothing runs, whole blocks
of it that the store lacks are read from the pool, drafters' layers and hidden states by slot included, and written; of
a model with recurrent layers those up to the last snapshot at the end of a block, and that. What waits at the end of
the engine is written then. A later engine reads nothing until it gets a request: blocks of its prompt that the store
has, and the tree has not, are copied into free slots and become nodes of the tree. From there on they are cached as any
others are, so scheduler and device know of no disk. The bytes are the cache's own: a text is what it would be with the
cache in memory, which is what it would be without.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from draftwing.config.options import Options
from draftwing.core import IntArray
from draftwing.engine.build import Parts
from draftwing.engine.provenance import Provenance, StoredFile, digests_of, file_digest
from draftwing.engine.startup.models import draft_path_of
from draftwing.errors import ConfigError, GenerationError
from draftwing.kv.prefix_store import BLOCK, Entry, PrefixStore, block_digests, digest_of, owner_of, state_digest
from draftwing.kv.slot_bytes import SlotBytes
from draftwing.models.towers import projector_file
from draftwing.requests.request import GenerationRequest
from draftwing.sched.req import Req
from draftwing.version import __version__

log = logging.getLogger("draftwing")
IDLE_PART = 0.25  # seconds of writing after which the engine looks for something else to do
LOOK_SECONDS = 30.0  # after which it is looked again at what other engines have written
WARN_SECONDS = 600.0  # between two warnings that nothing can be written


class SavedText(NamedTuple):
    """What is cached of a request that ended. keys: its tokens as the prefix cache has them.  salt: of its tree."""

    keys: IntArray
    salt: int
    namespace: bytes
    owner: bytes


class SavedPrefixes:
    """The engine's thread calls it; `forget` and `clear` any thread. restored: tokens that came from the disk."""

    def __init__(self, store: PrefixStore, parts: Parts) -> None:
        pool = parts.executor.attn.pool
        self._store, self._kv, self._sched = store, parts.sched.kv, parts.sched
        self._upload = parts.executor.device.upload
        self._slots = SlotBytes(parts.executor.by_slot)
        layers = [] if pool.states is None else pool.states.layers.values()
        self._states = SlotBytes([kept for layer in layers for kept in (layer.state, layer.conv)])
        self._most = 2 * parts.sched.config.slots  # tokens of texts that wait: others have left the pool by now
        self._texts: deque[SavedText] = deque()
        self._waiting = 0  # tokens
        self._lock = threading.Lock()  # of the store, and of the texts
        self._warned, self._look = -WARN_SECONDS, time.monotonic() + LOOK_SECONDS
        self.restored = 0

    @classmethod
    def opened(cls, options: Options, parts: Parts, provenance: Provenance | None) -> SavedPrefixes | None:
        """Returns those of an engine with `prefix_cache_dir`; None, with a warning, for a model that cannot be told
        from others. Raises ConfigError."""
        assert options.prefix_cache_dir is not None
        if provenance is None:
            log.warning("--prefix-cache-dir has no effect: weights or drafts are made up")
            return None
        folder = Path(options.prefix_cache_dir).expanduser()
        try:
            identity = identity_of(parts, provenance)
            store = PrefixStore(folder, identity, int(options.prefix_cache_size * 1e9))
        except GenerationError as error:
            log.warning("--prefix-cache-dir has no effect: %s", error)
            return None
        except OSError as error:
            raise ConfigError(f"prefix_cache_dir: {folder} cannot be written: {error.strerror}") from None
        log.info("--prefix-cache-dir: %d tokens of this model, %.2f GB of all", len(store) * BLOCK, store.size / 1e9)
        return cls(store, parts)

    # -- to the disk --------------------------------------------------------------------------------------------------

    def cached(self, req: Req) -> None:
        """Takes note of a request that ended, unless it opts out."""
        if not req.request.learn or req.kv < BLOCK:
            return
        keys = req.keys(req.kv + self._kv.radix.window - 1)
        text = SavedText(keys, req.salt, namespace_of(req.request), owner_of(req.request.client))
        with self._lock:
            self._texts.append(text)
            self._waiting += len(keys)
            while self._waiting > self._most and len(self._texts) > 1:
                self._waiting -= len(self._texts.popleft().keys)

    @property
    def pending(self) -> bool:
        """Returns whether there is something to write."""
        return bool(self._texts)

    def write_some(self, comes: Callable[[], bool]) -> None:
        """Writes for a moment, the newest text first. comes: whether there is something else to do."""
        until = time.monotonic() + IDLE_PART
        self._write(lambda: comes() or time.monotonic() > until)

    def write_all(self) -> None:
        """Writes what waits."""
        self._write(lambda: False)

    def _write(self, stop: Callable[[], bool]) -> None:
        """stop: whether to leave the rest for later, asked before each file."""
        with self._lock, torch.inference_mode():
            while self._texts and not stop():
                try:
                    if time.monotonic() >= self._look:
                        self._store.refresh()
                        self._look = time.monotonic() + LOOK_SECONDS
                    done = self._write_text(self._texts[-1], stop)
                except OSError as error:  # such as for want of room on the disk
                    self._warn(error)
                    done = True
                if not done:
                    return
                self._waiting -= len(self._texts.pop().keys)

    def _write_text(self, text: SavedText, stop: Callable[[], bool]) -> bool:
        """Returns whether all of it is done."""
        radix, store = self._kv.radix, self._store
        windows = radix.windows(text.keys)
        match = radix.match_kv(text.keys, text.salt, len(windows))
        radix.lock(match.node)
        try:
            whole, state = len(match.slots) // BLOCK, 0
            if self._kv.states is not None:
                found = [one for one in radix.snapshots(match.node) if one[0] % BLOCK == 0]
                end, state = found[0] if found else (0, 0)
                whole = end // BLOCK
            digests = list(block_digests(text.namespace, windows[: whole * BLOCK]))
            entries = [
                Entry(digest, parent, text.owner, at)
                for digest, parent, at in zip(
                    digests, [text.namespace, *digests], range(BLOCK, whole * BLOCK + 1, BLOCK), strict=False
                )
            ]
            if state:
                entries.append(entries[-1]._replace(digest=state_digest(digests[-1]), parent=digests[-1]))
            keep = frozenset(entry.digest for entry in entries)
            store.use(list(keep))
            for at, entry in enumerate(entries):
                if entry.digest in store:
                    continue
                if stop():
                    return False
                data = self._state(state) if at == whole else self._block(match.slots[at * BLOCK : (at + 1) * BLOCK])
                if not store.write(entry, data, keep):
                    return True
            return True
        finally:
            radix.unlock(match.node)

    def _block(self, slots: IntArray) -> bytes:
        return bytes(self._slots.read(self._upload(slots))) + self._sched.catch_ups.seen(slots).tobytes()

    def _state(self, slot: int) -> memoryview:
        return self._states.read(self._upload(_one(slot)))

    def _warn(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._warned >= WARN_SECONDS:
            self._warned = now
            log.warning("--prefix-cache-dir: a conversation is not written: %s", error)

    # -- from the disk ------------------------------------------------------------------------------------------------

    def bring_back(self, req: Req) -> None:
        """Caches what the disk has of a request's prompt, before the scheduler gets it."""
        if req.private:
            return
        windows = self._kv.radix.windows(req.array)[: max(self._kv.may_reuse(req), 0)]
        with self._lock, torch.inference_mode():
            found = list(takewhile(self._store.__contains__, block_digests(namespace_of(req.request), windows)))
            while found and not self._begins(found[-1]):
                found.pop()
            before = self._kv.cached(req) if found else 0
            if len(found) * BLOCK < before + BLOCK:
                return
            end = self._kv.bring_back(req, len(found) * BLOCK, lambda start, slots: self._fill(found, start, slots))
            used = found[: end // BLOCK]
            if self._kv.states is not None:
                used = self._bring_back_state(req, used)
            self._store.use(used)
            self.restored += max(len(used) * BLOCK - before, 0)

    def _begins(self, digest: bytes) -> bool:
        """Returns whether a request can begin at the end of a block, if all before is there."""
        return self._kv.states is None or state_digest(digest) in self._store

    def _fill(self, digests: list[bytes], start: int, slots: IntArray) -> int:
        """`KVManager.bring_back`, fill."""
        end, upto = start, start + len(slots)
        while end < upto:
            data = self._store.read(digests[end // BLOCK])
            if data is None or len(data) != (self._slots.each + 1) * BLOCK:
                break
            first, count = end % BLOCK, BLOCK - end % BLOCK
            at = slots[end - start : end - start + count]
            self._slots.write(self._upload(at), data[:-BLOCK], first)
            self._sched.catch_ups.note_seen(at, np.frombuffer(data[-BLOCK:], np.bool_)[first:])
            end += count
        return end

    def _bring_back_state(self, req: Req, digests: list[bytes]) -> list[bytes]:
        """Brings back the last snapshot that is there. Returns the digests of what can be begun with then."""

        def fill(slot: int) -> bool:
            data = self._store.read(state_digest(digests[-1]))
            if data is None or len(data) != self._states.each:
                return False
            self._states.write(self._upload(_one(slot)), data)
            return True

        while digests and not (
            state_digest(digests[-1]) in self._store and self._kv.bring_back_state(req, len(digests) * BLOCK, fill)
        ):
            digests = digests[:-1]
        return [*digests, *([state_digest(digests[-1])] if digests else ())]

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def forget(self, client: str) -> None:
        """Removes what is kept of a client, whichever model it asked. Raises OSError."""
        owner = owner_of(client)
        with self._lock:
            self._texts = deque(text for text in self._texts if text.owner != owner)
            self._waiting = sum(len(text.keys) for text in self._texts)
            self._store.delete(owner)

    def clear(self) -> None:
        """Removes all that is kept for this model. Raises OSError."""
        with self._lock:
            self._texts.clear()
            self._waiting = 0
            self._store.delete()

    def spoilt(self) -> None:
        """Does so, since some of it may be what makes logits not finite."""
        try:
            self.clear()
        except OSError as error:
            self._warn(error)

    def stats(self) -> dict[str, Any]:
        """Counts: bytes on the disk, and tokens of prompts that came from there."""
        return {"prefix_cache_bytes": self._store.size, "prefix_cache_restored_tokens": self.restored}


def _one(slot: int) -> IntArray:
    return np.asarray([slot], np.int64)


def namespace_of(request: GenerationRequest) -> bytes:
    """Returns a digest of what requests must share to share prefixes."""
    return digest_of(json.dumps([request.client, request.cache_salt, request.adapter_digest]).encode())


def identity_of(parts: Parts, provenance: Provenance) -> bytes:
    """Returns a digest of all that bits of the cache depend on besides the text. Reads the model's files where their
    digests are not remembered. Raises GenerationError."""
    executor, options = parts.executor, parts.options
    of_bits = tuple(file for file in provenance.files if file.part in ("weights", "config"))
    pool = executor.attn.pool
    known = [
        __version__, torch.__version__, provenance.device, executor.device.ops.title, provenance.options,
        digests_of(provenance._replace(files=of_bits, template=None)),
        options.context_length or executor.model.config.max_positions,  # some rotary embeddings go by it
        [(str(kept.dtype), list(kept.shape[1:])) for kept in executor.by_slot], list(pool.scales),
        repr(pool.layers), repr(executor.model.config.tower), _projector_digest(parts, of_bits),
        parts.sched.config.lookahead, str(options.speculative_algorithm), _files_of_drafts(options),
    ]  # fmt: skip
    return digest_of(json.dumps(known).encode())


def _projector_digest(parts: Parts, files: tuple[StoredFile, ...]) -> str | None:
    """Returns the digest of the file that reads images beside a GGUF file, which is among `files`. Raises
    GenerationError."""
    if parts.executor.model.tower is None:
        return None
    path = projector_file.find(Path(files[0].path), parts.options.mmproj)
    if path is None:
        return None
    stat = path.stat()
    return file_digest(StoredFile("images", str(path.absolute()), stat.st_size, stat.st_mtime_ns))


def _files_of_drafts(options: Options) -> list[Any]:
    """Of draft models by names, sizes and times: their bits change no text."""
    path, found = draft_path_of(options), list[Any]([options.speculative_second_draft_model_path])
    for file in [] if path is None else [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        stat = file.stat()
        found.append([str(file.absolute()), stat.st_size, stat.st_mtime_ns])
    return found
