"""Files of cached blocks, read by several threads before they are wanted, into memory that a device copies from.

To read a file and to make its checksum takes a thread longer than the copy to a GPU, and the host's other threads have
nothing to do meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from draftwing.kv.host_prefixes import HostCopies
from draftwing.kv.prefix_store import PrefixStore

THREADS = 16  # at most: as many make checksums about as fast as a GPU is copied to
AHEAD = 2  # files for each of them


class ReadAhead:
    """One thread at a time may call it."""

    def __init__(self, store: PrefixStore, copies: HostCopies, size: int) -> None:
        """size: bytes of a block's file."""
        self._store, self._copies, self._size = store, copies, size
        self._count = AHEAD * min(os.cpu_count() or 1, THREADS)
        self._threads: ThreadPoolExecutor | None = None  # and buffers, from the first file on
        self._free = list[Tensor]()
        self._begun: dict[bytes, tuple[Tensor, Future[bool]]] = {}
        self._left = deque[tuple[Tensor, Callable[[], bool]]]()  # buffers, and whether nobody has them any more

    def read(self, digests: Sequence[bytes], tail: int) -> tuple[Tensor, Tensor] | None:
        """Waits for a block's file, and has those behind it read meanwhile. digests: of the block, and of those that
        are wanted next.  tail: bytes. Returns its bytes on the device, to where they are being copied, but for the last
        `tail`, and these on the host; None where it is not what it should be."""
        self._begin(digests[: self._count])
        found = self._begun.pop(digests[0], None)
        if found is None:
            return None
        buffer, loaded = found
        if not loaded.result():
            self._free.append(buffer)
            return None
        end = buffer[-tail:].clone()
        there, done = self._copies.copy_in([buffer[:-tail]])
        self._left.append((buffer, done))
        return there, end

    def _begin(self, wanted: Sequence[bytes]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count // AHEAD, "draftwing-prefixes")
            self._free += self._copies.host_memory(self._count * self._size).split(self._size)
        for digest in self._begun.keys() - wanted:  # of a request that ended
            buffer, loaded = self._begun.pop(digest)
            loaded.cancel()
            self._left.append((buffer, loaded.done))
        for _ in range(len(self._left)):
            buffer, done = self._left.popleft()
            if done():
                self._free.append(buffer)
            else:
                self._left.append((buffer, done))
        for digest in wanted:
            if digest in self._begun or not self._free:
                continue
            stored = self._store.find(digest, self._size)
            if stored is not None:
                buffer = self._free.pop()
                self._begun[digest] = buffer, self._threads.submit(self._store.load, stored, buffer.numpy().data)
