"""`TritonOps`: what the GPU's kernels have."""

from __future__ import annotations

from draftwing.ops.torch.ops import TorchOps
from draftwing.ops.triton.layer_ops import TritonLayerOps


class TritonOps(TritonLayerOps, TorchOps):
    """Made on CUDA from compute capability 8.0 on, and on the meta device (`engine.startup.precompile`)."""

    name = "triton"
