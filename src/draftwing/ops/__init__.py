"""Every operation with more than one implementation. `make_ops` makes the table for a device.

A folder for each kind, with its specification in torch; `table` has all of them, `cpu.ops` and `triton.ops` those of a
device.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from draftwing.ops.table import TorchOps


def use_triton(tensor: Tensor) -> bool:
    """Returns whether the GPU's kernels take this tensor: on CUDA from compute capability 8.0 on, where Triton is
    installed, unless DRAFTWING_NATIVE=0. And without data (on the meta device), where `engine.startup.precompile` finds
    out which kernels are launched."""
    return (tensor.is_meta or (tensor.is_cuda and _is_recent(tensor.device))) and have_triton()


@functools.cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def have_triton() -> bool:
    """Returns whether Triton is installed and wanted."""
    return os.environ.get("DRAFTWING_NATIVE") != "0" and importlib.util.find_spec("triton") is not None


def make_ops(device: torch.device) -> TorchOps:
    """Returns the operations of this device, with all that it has."""
    if use_triton(torch.empty(0, device=device)):
        from draftwing.ops.triton.ops import TritonOps

        return TritonOps(device)
    from draftwing.ops.cpu.extension import load_extension

    if device.type == "cpu" and load_extension() is not None:
        from draftwing.ops.cpu.ops import CpuOps

        return CpuOps(device)
    from draftwing.ops.table import TorchOps

    return TorchOps(device)
