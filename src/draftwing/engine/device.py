"""The device a step runs on: one compute stream, one packed upload and one packed download per step.

With `attn/` this is the only place that knows the CPU from CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from draftwing.core import IntArray
from draftwing.errors import ConfigError


class Download:
    """A tensor on its way to the host. `wait` blocks until it is there; `ready_at` is the monotonic time it was."""

    def __init__(self, fetch: Callable[[], Tensor], ready_at: float | None) -> None:
        self._fetch = fetch
        self.ready_at = ready_at

    def wait(self) -> IntArray:
        host = self._fetch().numpy()
        if self.ready_at is None:
            self.ready_at = time.monotonic()
        return host


class Device:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"

    def upload(self, host: IntArray) -> Tensor:
        """Copies without waiting for it; on the CPU the tensor shares the array's memory."""
        tensor = torch.from_numpy(host)
        if self.is_cuda:
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def download(self, tensor: Tensor) -> Download:
        """Starts the copy to the host, in order with the compute stream."""
        if not self.is_cuda:
            return Download(lambda: tensor, time.monotonic())
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def fetch() -> Tensor:
            arrived.synchronize()
            return pinned

        return Download(fetch, None)

    def free_memory(self) -> int:
        """Bytes that could be allocated now."""
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.device)[0]
        return _free_host_memory()

    def total_memory(self) -> int:
        if self.is_cuda:
            return torch.cuda.mem_get_info(self.device)[1]
        return _free_host_memory()


def pick_device(name: str) -> Device:
    """name: auto | cpu | cuda. Raises ConfigError where there is no CUDA device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
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


def _free_host_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30  # a guess for systems without /proc; --max-total-tokens overrides what follows from it
