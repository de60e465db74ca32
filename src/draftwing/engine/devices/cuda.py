"""An NVIDIA GPU: copies in flight from and to page-locked memory, events as marks, CUDA graphs."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwing.config.devices import Defaults
from draftwing.core import IntArray
from draftwing.engine.devices.base import Device, Download
from draftwing.engine.devices.put_away import PutAway, bytes_to_copy, put_storages_away
from draftwing.engine.stats import StepTimes
from draftwing.ops.table import TorchOps

T = TypeVar("T")

# (bytes of memory at least, most requests, prompt tokens of a step, largest batch with graphs)
SIZES = ((60e9, 256, 8192, 128), (20e9, 128, 4096, 64), (0, 64, 2048, 32))
TIMED_EVERY = 8  # steps, of which the stages of one are timed


class Staging:
    """Pinned host buffers for copies in flight, each used again when its copy has happened. Making one is slow."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._busy: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # in the order of the stream

    def take(self, size: int) -> Tensor:
        """Returns the smallest free buffer of int64, at least [size]; give it back by `give` or `give_after`."""
        while self._busy and self._busy[0][0].query():
            self._free.append(self._busy.popleft()[1])
        fitting = [(buffer.numel(), i) for i, buffer in enumerate(self._free) if buffer.numel() >= size]
        if fitting:
            return self._free.pop(min(fitting)[1])
        return torch.empty(max(1 << size.bit_length(), 4096), dtype=torch.int64, pin_memory=True)

    def give(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    def give_after(self, buffer: Tensor) -> None:
        """Frees the buffer when what was put on the current stream so far has happened."""
        done = torch.cuda.Event()
        done.record()
        self._busy.append((done, buffer))


class _Bytes:
    """Memory of the device at an address."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 2}


class CudaDevice(Device):
    kind = "cuda"
    has_own_memory = True
    collectives = "NCCL"
    read_bytes = 1 << 30

    def __init__(self, rank: int = 0, ops: TorchOps | None = None) -> None:
        if rank:
            torch.cuda.set_device(rank)
        super().__init__(rank, ops)
        self._up, self._down = Staging(), Staging()
        self._stream: torch.cuda.Stream | None = None  # that graphs are captured on
        self._branch: torch.cuda.Stream | None = None  # of what is beside it there
        self._copies_out: torch.cuda.Stream | None = None
        self._copies_in: torch.cuda.Stream | None = None
        # The memory that they share, by name. torch ends a pool with the last graph that uses it.
        self._pools: dict[str, tuple[Any, WeakSet[torch.cuda.CUDAGraph]]] = {}

    def use(self) -> None:
        torch.cuda.set_device(self.device.index or 0)

    @classmethod
    def missing(cls) -> str:
        return "" if torch.cuda.is_available() else "torch finds no CUDA device here"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def defaults(self) -> Defaults:
        return defaults_for(self.total_memory())

    def default_dtype(self, checkpoint: torch.dtype | None) -> torch.dtype:
        """Returns the checkpoint's half type, bfloat16 where it has none."""
        return checkpoint if checkpoint in (torch.bfloat16, torch.float16) else torch.bfloat16

    def upload(self, host: IntArray) -> Tensor:
        out = torch.empty(len(host), dtype=torch.int64, device=self.device)
        self.upload_into(out, host)
        return out

    def upload_array(self, host: npt.NDArray[Any]) -> Tensor:
        whole = np.ascontiguousarray(host)
        buffer = self._up.take(-(-whole.nbytes // 8))
        staged = buffer.view(torch.uint8)[: whole.nbytes]
        staged.numpy()[:] = whole.reshape(-1).view(np.uint8)  # by this thread: torch would wake others up for it
        out = torch.empty(whole.nbytes, dtype=torch.uint8, device=self.device)
        out.copy_(staged, non_blocking=True)
        self._up.give_after(buffer)
        return out.view(torch.from_numpy(np.empty(0, whole.dtype)).dtype).view(host.shape)

    def upload_into(self, out: Tensor, host: IntArray) -> None:
        buffer = self._up.take(len(host))
        buffer.numpy()[: len(host)] = host
        out.copy_(buffer[: len(host)], non_blocking=True)
        self._up.give_after(buffer)

    def download(self, tensor: Tensor) -> Download:
        buffer = self._down.take(tensor.numel())
        pinned = buffer[: tensor.numel()].view(tensor.shape)
        pinned.copy_(tensor, non_blocking=True)
        arrived = self.mark()

        def fetch() -> IntArray:
            arrived.synchronize()
            host = pinned.numpy().copy()
            self._down.give(buffer)
            return host

        return Download(fetch, arrived)

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], bool]:
        if self._copies_out is None:
            self._copies_out = torch.cuda.Stream(self.device)
        self._copies_out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies_out):
            for source, host in pairs:
                host.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return done.query

    def copy_in(self, parts: Sequence[Tensor]) -> tuple[Tensor, Callable[[], bool]]:
        if self._copies_in is None:
            self._copies_in = torch.cuda.Stream(self.device)
        compute = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies_in):  # its memory, too, is this stream's, which waits for no step
            out = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device=self.device)
            for place, part in zip(out.split([len(part) for part in parts]), parts, strict=True):
                place.copy_(part, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        compute.wait_event(done)
        out.record_stream(compute)
        return out, done.query

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end) / 1e3)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def step_times(self) -> StepTimes:
        return StepTimes(TIMED_EVERY, self.mark, self.seconds, lambda event: event.query())

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def trim(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def put_away(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> PutAway:
        done = put_storages_away(self, _here(kept), _here(emptied))

        def back() -> None:
            done.back()
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()  # else torch keeps the slabs

        return PutAway(done.freed, back)

    def bytes_to_copy(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> int:
        return bytes_to_copy(_here(kept), _here(emptied))

    def peak(self, fn: Callable[[], object]) -> int:
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        fn()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def record(self, fn: Callable[[], T], pool: str = "steps") -> tuple[Callable[[], None], T]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        memory, graphs = self._pools.get(pool) or (None, ())
        if not graphs:
            memory, graphs = self._pools[pool] = torch.cuda.graph_pool_handle(), WeakSet()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream):
                fn()
                collects = gc.isenabled()
                gc.disable()  # what a collection lets go of may be something that CUDA cannot free while it captures
                try:
                    # Other threads of the process may use CUDA meanwhile.
                    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
                    graphs.add(graph)
                    try:
                        out = fn()
                    finally:
                        graph.capture_end()
                finally:
                    if collects:
                        gc.enable()
        except torch.AcceleratorError as error:
            if "out of memory" not in str(error):
                raise
            raise torch.OutOfMemoryError(str(error)) from error  # the driver's, for the graph itself
        finally:  # where there is no room either: the first call may run on, in memory that steps use, too
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return graph.replay, out

    def beside(self, first: Callable[[], T], other: Callable[[], T]) -> tuple[T, T]:
        """As two branches of the graph that is captured; elsewhere the host would be what takes time."""
        if not torch.cuda.is_current_stream_capturing():
            return first(), other()
        if self._branch is None:
            self._branch = torch.cuda.Stream(self.device, priority=-1)  # its blocks go before those of `first`
        stream = torch.cuda.current_stream(self.device)
        self._branch.wait_stream(stream)
        with torch.cuda.stream(self._branch):
            there = other()
        here = first()
        stream.wait_stream(self._branch)
        return here, there

    def alias(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        place = torch.as_tensor(_Bytes(tensor.data_ptr(), (last + 1) * tensor.itemsize), device=self.device)
        return place.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    @property
    def count(self) -> int:
        return torch.cuda.device_count()

    def names(self, count: int) -> list[str]:
        return [torch.cuda.get_device_name(i) for i in range(count)] if count > 1 else [self.name]

    def links(self, count: int) -> str:
        return nvlink(count)


def _here(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.is_cuda]


def defaults_for(memory: int) -> Defaults:
    """Returns the defaults of a GPU with so many bytes of memory."""
    rows, chunk, graphs = next(sizes for least, *sizes in SIZES if memory >= least)
    return Defaults(rows, chunk, overlap=True, graph_size=graphs, mixed=True)


def nvlink(size: int) -> str:
    """Returns the links between the ranks' GPUs in the words of nvidia-smi, such as NV18 or PIX; "unknown" without
    it."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "unknown"
    try:
        done = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return links_of(done.stdout, range(size))
    numbers = visible.split(",")[:size]
    return links_of(done.stdout, list(map(int, numbers))) if all(map(str.isdecimal, numbers)) else "unknown"


def links_of(table: str, gpus: Sequence[int]) -> str:
    """Returns the links in a table of `nvidia-smi topo -m`.  gpus: as it counts them."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and "X" in line}  # "X" is what a GPU has with itself
    known = [gpu for gpu in gpus if f"GPU{gpu}" in rows]
    kinds = {rows[f"GPU{one}"][other] for one in known for other in known if one != other}
    return ", ".join(sorted(kinds)) or "unknown"
