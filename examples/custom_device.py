"""A device of one's own: this machine's CPU as if it stood at the end of a slow line.

What goes up is copied, and results arrive late, while the host plans the next step. A real device has its own queue
in the thread's place, and operations of its own.

    draftwing serve --device custom_device:FarCpu
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from draftwing.core import IntArray
from draftwing.engine.devices.base import Defaults, Device, Download
from draftwing.ops.table import TorchOps

LATENCY = 0.001  # seconds that a result is on its way


class FarCpu(Device):
    kind = "cpu"
    defaults = Defaults(max_running_requests=16, chunked_prefill_size=256, overlap=True)

    def __init__(self, rank: int = 0, ops: TorchOps | None = None) -> None:
        super().__init__(rank, ops)
        self._line = ThreadPoolExecutor(1)
        self.uploads = self.downloads = 0

    def upload(self, host: IntArray) -> Tensor:
        self.uploads += 1
        return torch.from_numpy(host.copy())

    def download(self, tensor: Tensor) -> Download:
        self.downloads += 1
        result = tensor.clone()  # the next step may use the tensor's memory
        return Download(self._line.submit(self._arrive, result).result, self.mark())

    def _arrive(self, result: Tensor) -> IntArray:
        time.sleep(LATENCY)
        found: IntArray = result.numpy()
        return found

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def free_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def total_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
