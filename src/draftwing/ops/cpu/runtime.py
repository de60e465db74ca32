"""The CPU with the C extension: its functions, threads and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftwing.ops.cpu.arena import Arena
from draftwing.ops.cpu.extension import chosen_isa, load_extension
from draftwing.ops.cpu.tape import Calls, is_recording
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.runtime import Runtime


class CpuRuntime(Runtime):
    """Made where the extension was built. Takes tensors with data only."""

    name = "cpu"
    exact_by_design = True
    reads_int8_pool = True
    table_dtype = torch.int64  # C reads these; a CPU's memory is taken as it is written
    raw: Any  # the extension module; its functions are described in the C files

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.raw = load_extension()
        assert self.raw is not None, "the extension was not built, or is not wanted"
        self.spare, self.workers, self.arena = Spare(), Workers(), Arena()

    def replay_calls(self, calls: Calls) -> None:
        """Calls what was noted, in threads that stay for all of it."""
        self.raw.replay(calls, self.workers.address)

    @property
    def active_threads(self) -> float:  # type: ignore[override]
        return self.workers.active / self.workers.most

    def pin_threads(self, processors: Sequence[int]) -> bool:
        if len(processors) > 1 and not self.raw.has_openmp:
            return False
        self.workers.pin(processors)
        return True

    @property
    def title(self) -> str:
        isa = chosen_isa()
        assert isa is not None
        return f"{self.name}, C for {isa.name}"


class InC:
    """A part of a CPU's operations that the C extension does."""

    def __init__(self, runtime: CpuRuntime) -> None:
        self.raw, self.workers = runtime.raw, runtime.workers


class Spare:
    """Memory that calls need until they return, kept from one to the next: beyond 32 MB libc gives it back each time,
    and to get that of 512 rows page by page takes a fifth as long as the GEMMs of a layer's experts."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # a piece for each thread that was here at once

    @contextmanager
    def of(self, size: int) -> Iterator[Tensor]:
        """size bytes, at least. What is recorded has its own."""
        if is_recording():
            yield torch.empty(size, dtype=torch.uint8)
            return
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = torch.empty(0, dtype=torch.uint8)
        if len(memory) < size:
            del memory  # before there is more
            memory = torch.empty(size, dtype=torch.uint8)
        try:
            yield memory
        finally:
            self._kept.append(memory)
