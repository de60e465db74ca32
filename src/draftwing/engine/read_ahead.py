"""Files of cached blocks, read by several threads before they are wanted, into memory that a device copies from.

To read a file and to make its checksum takes a thread longer than the copy to a GPU, and the host's other threads have
nothing to do meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from draftwing.kv.host_prefixes import HostCopies
from draftwing.kv.prefix_store import PrefixStore

THREADS = 16  # at most: as many make checksums about as fast as a GPU is copied to
AHEAD = 3  # files for each of them: one is read, one has been, and one is copied
GROUPS = 4  # that all these files make, of which one goes to the device at once


class ReadAhead:
    """One thread at a time may call it."""

    def __init__(self, store: PrefixStore, copies: HostCopies, size: int, most: int) -> None:
        """size: bytes of a block's file.  most: bytes that go to the device at once, or one file; `GROUPS` times as
        many may be there until they are placed."""
        self._store, self._copies, self._size, self._most = store, copies, size, GROUPS * most
        self._landing = deque[tuple[int, Callable[[], bool]]]()  # bytes, and whether the device has placed them
        self._count = AHEAD * min(os.cpu_count() or 1, THREADS)
        self._group = max(min(self._count // GROUPS, most // size), 1)
        self._threads: ThreadPoolExecutor | None = None  # and buffers, from the first file on
        self._free = list[Tensor]()
        self._begun: dict[bytes, tuple[Tensor, Future[bool]]] = {}
        self._left = deque[tuple[Tensor, Callable[[], bool]]]()  # buffers, and whether nobody has them any more
        self._single: tuple[bytes, Tensor, Future[bool]] | None = None

    def read(self, digests: Sequence[bytes], tail: int, stop: Callable[[], bool]) -> tuple[Tensor, Tensor] | None:
        """Waits for some blocks' files, and has those behind them read meanwhile: what the device is told of one block
        takes longer than its copy. digests: of the first block, and of those that are wanted next.  tail: bytes.  stop:
        whether to wait for no more than are there. Returns bytes of n blocks on the device [n, bytes], to where they
        are being copied, but for the last `tail` of each, and these on the host; None where the first is not what it
        should be."""
        self._begin(digests[: self._count])
        found = self._begun.pop(digests[0], None)
        if found is None:
            return None
        buffer, loaded = found
        if not loaded.result():
            self._free.append(buffer)
            return None
        buffers = [buffer, *self._further(digests[1 : self._group], stop)]
        ends = torch.stack([buffer[-tail:] for buffer in buffers])
        try:
            there, done = self._copies.copy_in([buffer[:-tail] for buffer in buffers])
        except BaseException:  # such as for want of the device's memory: nothing is copied
            self._free += buffers
            raise
        self._left += [(buffer, done) for buffer in buffers]
        return there.view(len(buffers), len(buffer) - tail), ends

    def _further(self, digests: Sequence[bytes], stop: Callable[[], bool]) -> Iterator[Tensor]:
        """Yields the buffers of the blocks behind the first one, as far as they are what they should be."""
        for digest in digests:
            found = self._begun.get(digest)
            if found is None or (not found[1].done() and stop()) or not found[1].result():
                return
            del self._begun[digest]
            yield found[0]

    def placed(self, size: int) -> None:
        """Notes that the device was told to put so many of the bytes that `read` gave where they belong: their memory
        is free when it has come to that."""
        self._landing.append((size, self._copies.copy_out([])))

    @property
    def full(self) -> bool:
        """Returns whether enough is on the device that is not where it belongs yet, such as behind a long prefill."""
        while self._landing and self._landing[0][1]():
            self._landing.popleft()
        return sum(size for size, _ in self._landing) >= max(self._most, self._size)

    def begin_single(self, digest: bytes, size: int) -> None:
        """Has a file read that is no block's. size: bytes. There is one of them; the one before is forgotten."""
        stored = self._store.find(digest, size)
        if stored is None or (self._single is not None and self._single[0] == digest):
            return
        buffer, threads = torch.empty(size, dtype=torch.uint8), self._open()
        self._single = digest, buffer, threads.submit(self._store.load, stored, buffer.numpy().data)

    def take_single(self, digest: bytes) -> memoryview | None:
        """Waits for it. Returns its bytes; None where it was not begun, or is not what it should be."""
        single, self._single = self._single, None
        if single is None or single[0] != digest or not single[2].result():
            return None
        return single[1].numpy().data

    def forget_single(self) -> None:
        """Lets go of it, where it was begun."""
        self._single = None

    def forget(self) -> None:
        """Lets go of all that was begun: files are removed, and others may get their names."""
        self._single = None
        self._keep(())

    def _open(self) -> ThreadPoolExecutor:
        """Returns the threads; the first call makes them and the buffers."""
        if self._threads is None:
            try:
                memory = self._copies.host_memory(self._count * self._size)
            except RuntimeError:  # the system locks no more pages: copies from others take longer
                memory = torch.empty(self._count * self._size, dtype=torch.uint8)
            self._free += memory.split(self._size)
            self._threads = ThreadPoolExecutor(self._count // AHEAD, "draftwing-prefixes")
        return self._threads

    def _keep(self, wanted: Sequence[bytes]) -> None:
        """Lets go of what else was begun, such as for a request that ended."""
        for digest in self._begun.keys() - wanted:
            buffer, loaded = self._begun.pop(digest)
            loaded.cancel()
            self._left.append((buffer, loaded.done))

    def _begin(self, wanted: Sequence[bytes]) -> None:
        threads = self._open()
        self._keep(wanted)
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
                self._begun[digest] = buffer, threads.submit(self._store.load, stored, buffer.numpy().data)
