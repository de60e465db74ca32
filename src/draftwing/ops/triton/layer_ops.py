"""The operations of layers, in Triton, with the GEMM of `ops.cuda`."""

from __future__ import annotations

from draftwing.ops.torch.layer_ops import LayerOps


class TritonLayerOps(LayerOps):
    """Overrides those of `LayerOps` that GPUs have kernels for."""
