"""`CpuOps`: what the C extension has."""

from __future__ import annotations

from draftwing.ops.cpu.layer_ops import CpuLayerOps
from draftwing.ops.torch.ops import TorchOps


class CpuOps(CpuLayerOps, TorchOps):
    """Made where the extension was built and the device is a CPU."""

    name = "cpu"
