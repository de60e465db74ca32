"""The operations of layers, in C."""

from __future__ import annotations

from draftwing.ops.torch.layer_ops import LayerOps


class CpuLayerOps(LayerOps):
    """Overrides those of `LayerOps` that the extension has."""
