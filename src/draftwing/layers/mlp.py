"""The MLP part of a decoder layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig
from draftwing.layers.linear import Linear, row_parallel
from draftwing.ops.fp8.spec import Fp8Rows


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with GELU; gate and up are one GEMM."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, ffn, bias, form = config.hidden, config.ffn, config.mlp_bias, config.weight_format
        self.gelu = config.activation == "gelu"
        self.gate_up = Linear(hidden, 2 * ffn, bias, dtype, device, form)
        self.down = row_parallel(Linear(ffn, hidden, bias, dtype, device, form), config.ranks)

    def forward(self, x: Tensor | Fp8Rows, residual: Tensor | None = None) -> Tensor:
        """x [M, hidden]; residual [M, hidden] is added, and may be overwritten -> [M, hidden]"""
        return self.down(self.gate_up.gated(x, self.gelu), residual, overwrite=True)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm
