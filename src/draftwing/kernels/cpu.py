"""The C kernels of cpu.c, where the install could build them; DRAFTWING_NATIVE=0 leaves them out.

They take addresses and sizes. Here are the functions that take tensors: real ones (no FakeTensors) on the CPU, float32
or bfloat16, all of one dtype.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float32)


class Kernels:
    """`raw` is the extension module; its functions are described in cpu.c."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @staticmethod
    def take(tensor: Tensor) -> bool:
        """Whether the kernels work on tensors like this."""
        return tensor.device.type == "cpu" and tensor.dtype in DTYPES

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size], weight [size] -> [..., size]; see `layers.norm.RMSNorm`, whose roundings it has."""
        x = x.contiguous()
        out = torch.empty_like(x)
        size = weight.shape[0]
        assert x.dtype == weight.dtype and x.shape[-1] == size
        self.raw.rms_norm(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // size, size,
            x.dtype == torch.bfloat16, torch.get_num_threads(), eps,
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [M, 2 * ffn] -> silu(gate) * up, [M, ffn]"""
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        out = gate_up.new_empty(rows, both // 2)
        self.raw.silu_mul(
            out.data_ptr(), gate_up.data_ptr(), rows, both // 2,
            out.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return out


@functools.cache
def load() -> Kernels | None:
    """None where the extension was not built or is not wanted."""
    if os.environ.get("DRAFTWING_NATIVE") == "0":
        return None
    try:
        return Kernels(importlib.import_module("draftwing.kernels._cpu"))  # after torch: it looks for torch's threads
    except ImportError:
        return None
