"""The operations of layers, in Triton, with the GEMM of `ops.cuda`."""

from __future__ import annotations

from torch import Tensor

from draftwing.ops.cuda import gemm
from draftwing.ops.torch.layer_ops import LayerOps, SmallMGemm
from draftwing.ops.triton import layers


class TritonLayerOps(LayerOps):
    """Overrides those of `LayerOps` that GPUs have kernels for."""

    norm_adds_residual = True

    rms_norm = staticmethod(layers.rms_norm)
    add_rms_norm = staticmethod(layers.add_rms_norm)
    silu_mul = staticmethod(layers.silu_mul)
    fuse_inputs = staticmethod(layers.fuse_inputs)

    def exact_logits(self, hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        """Torch's sum on a GPU takes another order when there are more rows."""
        return layers.chosen_logits(hidden.flatten(0, -2), weight, ids.flatten(0, -2)).view(ids.shape)

    def packs_with_onednn(self, weight: Tensor) -> bool:
        return False

    def small_m_gemm(self, weight: Tensor) -> SmallMGemm | None:
        return gemm.small_m_gemm(weight.device, weight.dtype) if gemm.takes(weight) else None
