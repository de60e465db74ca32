"""The host's own processor: what it is given is done before the call returns, and its memory is the host's."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from draftwing import machine
from draftwing.config.devices import Defaults
from draftwing.core import IntArray
from draftwing.engine.devices.base import Device, Download
from draftwing.engine.devices.put_away import PutAway
from draftwing.errors import ConfigError
from draftwing.ops.table import TorchOps

log = logging.getLogger("draftwing")

_VIEW = "array_of_download"  # of a tensor: its memory, as numpy has it
UNKNOWN_MEMORY = 8 << 30  # bytes taken for free on systems without /proc; --max-total-tokens overrules what follows


class CpuDevice(Device):
    kind = "cpu"
    out_of_memory = RuntimeError  # torch has no type of its own for it

    def __init__(self, rank: int = 0, ops: TorchOps | None = None) -> None:
        super().__init__(0, ops)  # all ranks are on the one that there is

    @property
    def name(self) -> str:
        try:
            with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
                for line in lines:
                    if line.startswith("model name"):
                        return line.partition(":")[2].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine()

    @property
    def defaults(self) -> Defaults:
        return Defaults(max_running_requests=64, chunked_prefill_size=512)

    def default_dtype(self, checkpoint: torch.dtype | None) -> torch.dtype:
        return torch.bfloat16 if has_native_bfloat16() else torch.float32

    def upload(self, host: IntArray) -> Tensor:
        """Returns [n] int64 that shares the array's memory."""
        return torch.from_numpy(host)

    def download(self, tensor: Tensor) -> Download:
        # Recorded steps leave their results in the same tensors. To ask torch for an array is slow behind a forward,
        # which has emptied the caches.
        view = getattr(tensor, _VIEW, None)
        if view is None:
            setattr(tensor, _VIEW, view := tensor.numpy())
        host = view.copy()  # the next step may use the tensor's memory
        return Download(lambda: host, self.mark())

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def free_memory(self) -> int:
        found = machine.free_memory()
        return UNKNOWN_MEMORY if found is None else found

    def memory_limit(self) -> int:
        limit = machine.memory_limit()
        return self.total_memory() if limit is None else min(limit, self.total_memory())

    def total_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def put_away(self, kept: Sequence[Tensor], emptied: Sequence[Tensor]) -> PutAway:
        """Gives pages of `emptied` back, which come again as they are written: all addresses stay."""
        before = machine.resident_memory()
        for tensor in emptied:
            machine.drop_pages(tensor.data_ptr(), tensor.nbytes)
        return PutAway(max(before - machine.resident_memory(), 0), lambda: None)

    @property
    def count(self) -> int:
        """Returns any number of ranks."""
        return 1 << 30

    def links(self, count: int) -> str:
        return "this machine's memory, by its loopback interface"

    @property
    def active_threads(self) -> float:
        return self.ops.active_threads

    @contextmanager
    def torch_in_active_threads(self) -> Iterator[None]:
        """Has torch's own operations run in as many threads as kernels do now. Each of them, too, waits for all of its
        threads, and a step that makes log probabilities has dozens of them. Not for models and drafters: kernels that
        are noted within (`ops.cpu.tape`) would never have more threads, and oneDNN's sums were tried out in all."""
        most = torch.get_num_threads()
        active = round(self.active_threads * most)
        if active < most:
            torch.set_num_threads(active)
        try:
            yield
        finally:
            if active < most:
                torch.set_num_threads(most)

    def set_threads(self, count: int | None, pinned: Sequence[int] = ()) -> None:
        """Sets how many threads compute. count None, none pinned: as many as can compute at the same time, or as torch
        has, where these are fewer."""
        found = machine.processors()
        torch.set_num_threads(count or len(pinned) or min(found.threads, torch.get_num_threads()))
        if pinned:
            self._pin(pinned)
        where = ", ".join(map(str, pinned))
        on = f", on processors {where}" if pinned else ""
        log.info("threads: %d%s; this process may use %s", torch.get_num_threads(), on, found)

    def _pin(self, processors: Sequence[int]) -> None:
        allowed, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
        if not set(processors) <= set(allowed):
            raise ConfigError(f"--cpu-affinity: expected some of the processors {allowed}, found {list(processors)}")
        if len(processors) != threads:
            raise ConfigError(f"--cpu-affinity: expected a processor for each of {threads} threads, found {processors}")
        if not self.ops.pin_threads(processors):
            raise ConfigError("--cpu-affinity: expected the C extension and GNU's OpenMP: leave it out and use taskset")
        os.sched_setaffinity(0, processors)  # the caller and threads that it makes from now on, until the process ends


def has_native_bfloat16() -> bool:
    """Returns whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX or Arm BF16)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(getattr(torch.cpu, probe)() for probe in probes if hasattr(torch.cpu, probe))
