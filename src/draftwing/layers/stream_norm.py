"""RMS norms of several streams beside each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwing.layers.norm import ByOps
from draftwing.layers.part_configs import NormConfig


class StreamNorm(ByOps):
    """The norm of each of `count` streams by itself, with weights of its own; rounded once."""

    def __init__(self, hidden: int, count: int, norm: NormConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.ones(count * hidden, dtype=wide, device=device))
        self._hidden, self._eps = hidden, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """x [M, count * hidden] -> the same"""
        weight = self.weight
        rows = x.to(weight.dtype).view(-1, self._hidden)
        normed = self.ops.rms_norm(rows, torch.ones_like(weight[: self._hidden]), self._eps)
        return (normed.view(x.shape) * weight).to(x.dtype)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
