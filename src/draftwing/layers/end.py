"""What some layers do to the residual stream behind their MLP: an embedding of the token that they alone read, and a
factor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig
from draftwing.layers.linear import Linear
from draftwing.layers.norm import RMSNorm
from draftwing.ops.torch.layer_ops import PLAIN, LayerOps


class LayerEnd(nn.Module):
    """(x + norm(out(gelu(gate(x)) * embedding))) * scalar, either part where the layer has it. On all ranks alike."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, size, form = config.hidden, config.per_layer, config.weight_format
        self.gate = Linear(hidden, size, False, dtype, device, form) if size else None
        self.out = Linear(size, hidden, False, dtype, device, form) if size else None
        self.norm = RMSNorm(hidden, config.norm.eps, config.norm.dtype(dtype), device) if size else None
        self.scalar = nn.Parameter(torch.ones(1, dtype=dtype, device=device)) if config.scaled else None
        self._ops: LayerOps = PLAIN

    def use(self, ops: LayerOps) -> None:
        """Lets the device do what lies between its matrices as it does it best."""
        self._ops = ops

    def forward(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """x [M, hidden]; embedding [M, per_layer], whose rows may be apart -> [M, hidden]"""
        scale = 1.0 if self.scalar is None else self.scalar
        if self.gate is None or self.out is None or self.norm is None:
            return self._ops.add_scaled(x, None, scale)
        assert embedding is not None
        gated = self._ops.gelu_mul(self._ops.concat_columns(self.gate(x), embedding))
        return self._ops.add_scaled(x, self.norm(self.out(gated)), scale)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
