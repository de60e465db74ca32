"""The device a step runs on: one compute stream, one packed upload and one packed download per step, and its memory.

What is computed there is asked of `Device.ops`. Both know the device; whoever has a `Device` need not.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from draftwing.core import IntArray
from draftwing.engine.stats import StepTimes
from draftwing.errors import ConfigError
from draftwing.ops import make_ops
from draftwing.ops.torch.ops import TorchOps

T = TypeVar("T")


class Download(NamedTuple):
    """A tensor on its way to the host. wait: blocks until it is there; once. done: when that is, see `Device.mark`."""

    wait: Callable[[], IntArray]
    done: Any


READ_GPU, READ_CPU = 1 << 30, 256 << 20  # bytes that tell how fast memory is read: more than most caches hold


class Staging:
    """Pinned host buffers for copies in flight, each used again when its copy has happened. Making one is slow."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._busy: deque[tuple[torch.cuda.Event, Tensor]] = deque()  # in the order of the stream

    def take(self, size: int) -> Tensor:
        """int64, at least [size], the smallest that is free; give it back by `give` or `give_after`."""
        while self._busy and self._busy[0][0].query():
            self._free.append(self._busy.popleft()[1])
        fitting = [(buffer.numel(), i) for i, buffer in enumerate(self._free) if buffer.numel() >= size]
        if fitting:
            return self._free.pop(min(fitting)[1])
        return torch.empty(max(1 << size.bit_length(), 4096), dtype=torch.int64, pin_memory=True)

    def give(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    def give_after(self, buffer: Tensor) -> None:
        """Free when what was put on the current stream so far has happened."""
        done = torch.cuda.Event()
        done.record()
        self._busy.append((done, buffer))


class Device:
    """A CPU or a GPU, with its operations."""

    def __init__(self, device: torch.device, ops: TorchOps | None = None) -> None:
        """ops: other operations than the device's own, for tests."""
        self.device = device
        self.ops = ops if ops is not None else make_ops(device)
        self.is_cuda = device.type == "cuda"
        self.has_own_memory = self.is_cuda  # which this process may fill, and of which torch counts what it takes
        self._up, self._down = Staging(), Staging()
        self._stream: torch.cuda.Stream | None = None  # that graphs are captured on
        self._pool: Any = None  # that they share

    @property
    def name(self) -> str:
        """What its maker calls it."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else _cpu_name()

    def upload(self, host: IntArray) -> Tensor:
        """Copies [n] int64 without waiting for it; on the CPU the tensor shares the array's memory."""
        if not self.is_cuda:
            return torch.from_numpy(host)
        out = torch.empty(len(host), dtype=torch.int64, device=self.device)
        self.upload_into(out, host)
        return out

    def upload_into(self, out: Tensor, host: IntArray) -> None:
        """The same into a tensor [n] that there is."""
        if not self.is_cuda:
            out.copy_(torch.from_numpy(host))
            return
        buffer = self._up.take(len(host))
        buffer.numpy()[: len(host)] = host
        out.copy_(buffer[: len(host)], non_blocking=True)
        self._up.give_after(buffer)

    def download(self, tensor: Tensor) -> Download:
        """Starts the copy of a [B, W] int64 to the host, in order with the compute stream."""
        if not self.is_cuda:
            host = tensor.numpy().copy()  # the next step may use the tensor's memory
            return Download(lambda: host, self.mark())
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

    def mark(self) -> Any:
        """A point of time in what the device does, which `seconds` knows when it is past."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks, both past."""
        return float(begin.elapsed_time(end) / 1e3 if self.is_cuda else end - begin)

    def record(self, fn: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Captures what `fn` puts on the device: how to run it, and its tensors, empty as long as it has not run.

        `fn` is called before, too, which makes what is made once: compiled kernels, workspaces, constants. All graphs
        share one memory pool: a tensor that is no longer referenced may be overwritten by graphs captured later.
        """
        assert self.is_cuda, "graphs are CUDA's"
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            fn()
            collects = gc.isenabled()
            gc.disable()  # what a collection lets go of may be something that CUDA cannot free while it captures
            try:
                # Other threads of the process may use CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    out = fn()
                finally:
                    graph.capture_end()
            finally:
                if collects:
                    gc.enable()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return graph.replay, out

    def names(self, count: int) -> list[str]:
        """What makers call the devices of so many ranks."""
        if self.is_cuda and count > 1:
            return [torch.cuda.get_device_name(i) for i in range(count)]
        return [self.name] * count

    def links(self, count: int) -> str | None:
        """What is between the devices of so many ranks; None: ask the driver's own program."""
        return None if self.is_cuda else "this machine's memory, by its loopback interface"

    @property
    def count(self) -> int:
        """How many there are for ranks: any number on a CPU."""
        return torch.cuda.device_count() if self.is_cuda else 1 << 30

    @property
    def threads(self) -> int:
        """How many compute, where the host does."""
        return torch.get_num_threads()

    def set_threads(self, count: int) -> None:
        """Sets how many threads compute, where the host does."""
        if not self.is_cuda:
            torch.set_num_threads(count)

    def step_times(self) -> StepTimes:
        """Returns what times the stages of steps; of some steps only where that takes marks on the device."""
        if not self.is_cuda:
            return StepTimes()
        return StepTimes(8, self.mark, self.seconds, lambda event: event.query())

    def timed(self, fn: Callable[[], object], times: int) -> list[float]:
        """Seconds that the device takes for each of so many calls, one right after the other."""
        marks = [self.mark()]
        for _ in range(times):
            fn()
            marks.append(self.mark())
        self.synchronize()
        return [self.seconds(begin, end) for begin, end in pairwise(marks)]

    def read_rate(self) -> float:
        """Measures how many bytes a second the device reads of its memory: the fastest of a few sums. 0 where there is
        no room for what they read."""
        try:
            data = torch.ones((READ_GPU if self.is_cuda else READ_CPU) // 4, device=self.device)
        except RuntimeError as error:
            if self.is_cuda and not isinstance(error, torch.OutOfMemoryError):  # a CPU has no type of its own for it
                raise
            return 0.0
        rate = data.nbytes / min(self.timed(data.sum, 8))
        del data
        self.trim()
        return rate

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def trim(self) -> None:
        """Gives memory that torch keeps for later back to the device."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def peak(self, fn: Callable[[], object]) -> int:
        """Bytes that are allocated at most while `fn` runs, beyond those that were before. CUDA only."""
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        fn()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.device)[0]
        return _free_host_memory()

    def total_memory(self) -> int:
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.device)[1]
        return _free_host_memory()

    def installed_memory(self) -> int:
        """Bytes that the device has, whoever uses them now."""
        return self.total_memory() if self.is_cuda else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pick_device(name: str, rank: int = 0) -> Device:
    """name: auto | cpu | cuda; rank: which GPU, where there are several ranks. Raises ConfigError where there is no
    CUDA device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if rank and name == "cuda":
        torch.cuda.set_device(rank)
        return Device(torch.device(name, rank))  # for other threads, too
    return Device(torch.device(name))


def pick_dtype(name: str, device: Device, checkpoint: torch.dtype | None) -> torch.dtype:
    """`auto`: the checkpoint's half type on CUDA; on the CPU bfloat16 where it is native, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.is_cuda:
        return checkpoint if checkpoint in (torch.bfloat16, torch.float16) else torch.bfloat16
    return torch.bfloat16 if has_native_bfloat16() else torch.float32


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX or Arm BF16)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(getattr(torch.cpu, probe)() for probe in probes if hasattr(torch.cpu, probe))


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _free_host_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30  # a guess for systems without /proc; --max-total-tokens overrides what follows from it
