"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.ops.pick import LayerKernels, layer_kernels


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last axis, the mean in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.eps = eps
        self._packed: tuple[LayerKernels, Tensor] | None = None

    def pack(self) -> None:
        """Lets a kernel of the loaded weight's device do it from now on, where there is one; without gradients."""
        kernels = layer_kernels(self.weight)
        if kernels is not None:
            self._packed = kernels, self.weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        if self._packed is not None:
            kernels, weight = self._packed
            return kernels.rms_norm(x, weight, self.eps)
        if x.device.type != "cpu":
            # In training the weight is in float32 beside a half-precision x, which torch's fused kernel does not take.
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        # On the CPU F.rms_norm is a dozen small operations, layer_norm one. Beside its own negation a row has mean 0
        # and the mean of squares as its variance. The result is rounded before it is weighted, as in transformers.
        both = torch.cat((x, -x), -1)
        return F.layer_norm(both, both.shape[-1:], eps=self.eps)[..., : x.shape[-1]] * self.weight

    # Module's own call looks for hooks; over a forward's small layers that adds up to a few percent of a decode step.
    __call__ = forward
