"""Copies checkpoint tensors into parameters; to a GPU by several threads through small pinned buffers.

A copy from pageable memory is staged by the driver on one core, which reaches a fraction of what the bus carries.
Here each thread reads a chunk (of a mapped file: the page faults are its own) into a pinned buffer and sends it on a
stream of its own while it reads the next. Host memory stays within the buffers and the tensors that are waiting.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from draftwing.machine import processors

CHUNK_BYTES = 16 << 20  # of a tensor, that a thread copies at a time
THREADS = 8  # at most, that copy for a GPU
WAITING_BYTES = 256 << 20  # of chunks that are not sent yet
_LARGE = 4 << 20  # bytes from which on threads are worth starting


def uploaded(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Returns the tensor on the device; large ones by several threads where that is a GPU."""
    if torch.device(device).type != "cuda" or tensor.is_cuda or tensor.nbytes < _LARGE:
        return tensor.to(device)
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    with Uploader(device) as uploader:
        uploader.copy(out, tensor)
    return out


class Uploader:
    """A context in which tensors are copied to one device; on leaving it they have arrived.

    An error of a thread is raised by a later `copy` or on leaving.
    """

    def __init__(self, device: torch.device | str, threads: int | None = None, chunk_bytes: int | None = None) -> None:
        """threads: 0 copies at once, in the calling thread, which is best where no bus is crossed (the default on a
        CPU: torch's own copy has threads)."""
        chunk_bytes = chunk_bytes or CHUNK_BYTES
        assert chunk_bytes % 16 == 0
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:  # a thread has a current device of its own
            self._device = torch.device("cuda", torch.cuda.current_device())
        if threads is None:
            threads = min(THREADS, processors().threads) if self._device.type == "cuda" else 0
        self._chunk_bytes = chunk_bytes
        self._pool = ThreadPoolExecutor(threads, "upload") if threads else None
        self._own = threading.local()  # each thread's sender
        self._senders: list[_Sender] = []
        self._queue: deque[tuple[Future[None], int]] = deque()  # chunks that are not known to be sent, and their bytes
        self._waiting = 0  # bytes of all of these

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            self._drain(0)
            for sender in self._senders:
                sender.wait()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Makes target, on the device, `source` in its dtype; source, mostly on the CPU, must not change before the
        context is left."""
        assert target.shape == source.shape
        if self._pool is None or not target.is_contiguous() or source.device.type != "cpu":
            with torch.no_grad():
                target.copy_(source)
            return
        target, source, ready = target.detach().view(-1), source.detach().contiguous().view(-1), None
        if self._device.type == "cuda":
            # The allocator may hand out memory that is still in use by what was queued before.
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        step = self._chunk_bytes // source.itemsize
        for part, values in zip(target.split(step), source.split(step), strict=True):
            self._drain(WAITING_BYTES - values.nbytes)
            self._queue.append((self._pool.submit(self._send, part, values, ready), values.nbytes))
            self._waiting += values.nbytes

    def _drain(self, limit: int) -> None:
        """Waits until fewer bytes are left to be sent, or none."""
        while self._queue and self._waiting >= limit:
            sent, size = self._queue.popleft()
            self._waiting -= size
            sent.result()

    def _send(self, target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> None:
        if not hasattr(self._own, "sender"):
            self._own.sender = _Sender(self._device, self._chunk_bytes)
            self._senders.append(self._own.sender)
        self._own.sender(target, source, ready)


class _Sender:
    """One thread's stream and its two buffers: one is read into while the other is sent."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._sent: list[Callable[[], None] | None] = [None, None]
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._turn = 0

    @torch.no_grad()
    def __call__(self, target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        before = self._sent[turn]
        if before is not None:
            before()
        staged = self._buffers[turn][: source.nbytes]
        ctypes.memmove(staged.data_ptr(), source.data_ptr(), source.nbytes)  # lets other Python threads run
        values = staged.view(source.dtype)
        if self._stream is None:
            target.copy_(values)
            return
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            if values.dtype != target.dtype:  # converted there: fewer passes here
                values = values.to(self._device, non_blocking=True)
            target.copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._sent[turn] = event.synchronize

    def wait(self) -> None:
        for sent in self._sent:
            if sent is not None:
                sent()


SIZES: Final = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096),
)
STEP: Final = 1024  # between those beyond: a product of so many takes long whatever it is rounded up to


def even(count: int) -> int:
    """Returns the first of these numbers that is not below `count`."""
    return SIZES[bisect_left(SIZES, count)] if count <= SIZES[-1] else -(-count // STEP) * STEP


def evens(largest: int) -> list[int]:
    """Returns all up to `largest`, ascending."""
    return [*(size for size in SIZES if size <= largest), *range(SIZES[-1] + STEP, largest + 1, STEP)]
