"""Copies checkpoint tensors into parameters; to a GPU by several threads through small pinned buffers.

A copy from pageable memory is staged by the driver on one core, which reaches a fraction of what the bus carries.
Here each thread reads a chunk (of a mapped file: the page faults are its own) into a pinned buffer and sends it on a
stream of its own while it reads the next. Host memory stays within the buffers and the tensors that are waiting.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20
THREADS = 8
WAITING_BYTES = 256 << 20  # of chunks that no thread has taken yet
_LARGE = 4 << 20  # bytes from which on threads are worth starting


def uploaded(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device; large ones by several threads where that is a GPU."""
    if torch.device(device).type != "cuda" or tensor.is_cuda or tensor.nbytes < _LARGE:
        return tensor.to(device)
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    with Uploader(device) as uploader:
        uploader.copy(out, tensor)
    return out


class _Chunk(NamedTuple):
    """Elements [start, stop) of both tensors, which are flat."""

    target: Tensor
    source: Tensor
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.source.itemsize


class Uploader:
    """A context in which tensors are copied to one device; on leaving it they have arrived.

    An error of a thread is raised by the next `copy` or on leaving.
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
            threads = min(THREADS, os.cpu_count() or 1) if self._device.type == "cuda" else 0
        self._chunk_bytes = chunk_bytes
        self._chunks: deque[_Chunk | None] = deque()
        self._changed = threading.Condition()
        self._waiting = 0
        self._error: BaseException | None = None
        self._ready: torch.cuda.Event | None = None
        self._threads = [threading.Thread(target=self._run, name=f"upload-{i}") for i in range(threads)]

    def __enter__(self) -> Uploader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            if error is not None:
                self._chunks.clear()
            self._chunks.extend([None] * len(self._threads))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if error is None:
            self._raise()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target, on the device, becomes `source` in its dtype; source, mostly on the CPU, must not change before the
        context is left."""
        assert target.shape == source.shape
        if not self._threads or not target.is_contiguous() or source.device.type != "cpu":
            with torch.no_grad():
                target.copy_(source)
            return
        target, source = target.detach().view(-1), source.detach().contiguous().view(-1)
        if self._device.type == "cuda":
            # The allocator may hand out memory that is still in use by what was queued before.
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._ready = event
        step = self._chunk_bytes // source.itemsize
        for start in range(0, source.numel(), step):
            self._put(_Chunk(target, source, start, min(start + step, source.numel())))

    def _put(self, chunk: _Chunk) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._waiting < WAITING_BYTES)
            self._raise()
            self._chunks.append(chunk)
            self._waiting += chunk.nbytes
            self._changed.notify_all()

    def _take(self) -> _Chunk | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._chunks))
            chunk = self._chunks.popleft()
            if chunk is not None:
                self._waiting -= chunk.nbytes
                self._changed.notify_all()
            return chunk

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    @torch.no_grad()
    def _run(self) -> None:
        try:
            send = _Sender(self._device, self._chunk_bytes)
            while (chunk := self._take()) is not None:
                send(chunk, self._ready)
            send.wait()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()


class _Sender:
    """One thread's stream and its two buffers: one is read into while the other is sent."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._sent: list[Callable[[], None] | None] = [None, None]
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._turn = 0

    def __call__(self, chunk: _Chunk, ready: torch.cuda.Event | None) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        before = self._sent[turn]
        if before is not None:
            before()
        part = chunk.source[chunk.start : chunk.stop]
        staged = self._buffers[turn][: chunk.nbytes]
        ctypes.memmove(staged.data_ptr(), part.data_ptr(), chunk.nbytes)  # lets other Python threads run
        values, target = staged.view(part.dtype), chunk.target[chunk.start : chunk.stop]
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
