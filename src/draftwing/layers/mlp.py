"""The MLP part of a decoder layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig
from draftwing.layers.linear import Linear
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps

# What a checkpoint has of each layer's activation, and its size, 0: a number.
XIELU = {"alpha_p": 1, "alpha_n": 1, "beta": 0, "eps": 0}


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with GELU; gate and up are one GEMM."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, ffn, bias, form = config.hidden, config.ffn, config.mlp_bias, config.weight_format
        self.gelu = config.activation == "gelu"
        self.gate_up = Linear(hidden, 2 * ffn, bias, dtype, device, form)
        self.down = config.last_matrix("mlp", ffn, bias, dtype, device)

    def forward(self, x: Tensor | Fp8Rows, residual: Tensor | None = None) -> Tensor:
        """x [M, hidden]; residual [M, hidden] is added, and may be overwritten -> [M, hidden]"""
        return self.down(self.gate_up.gated(x, self.gelu), residual, overwrite=True)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]


class UngatedMLP(nn.Module):
    """down(relu(up(x))²), or with GELU, or xIELU (Huang and Schlag 2024, arXiv 2411.13010)."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, ffn, bias, form = config.hidden, config.ffn, config.mlp_bias, config.weight_format
        self.up = Linear(hidden, ffn, bias, dtype, device, form)
        self.down = config.last_matrix("mlp", ffn, bias, dtype, device)
        learned, self._activation = config.activation == "xielu", config.activation
        self.xielu = nn.Parameter(torch.zeros(len(XIELU), dtype=torch.float32, device=device)) if learned else None
        self._ops = PLAIN
        self._how: Tensor | None = None  # as `LayerOps.xielu` has it, once packed

    def pack(self, ops: LayerOps) -> None:
        """Lets the device do the activation as it does it best; the activation is not trainable afterwards."""
        self._ops = ops
        self._how = None if self.xielu is None else self._made_how(self.xielu).detach()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As `GatedMLP`."""
        made = self.up(x)
        if self.xielu is not None:
            made = self._ops.xielu(made, self._made_how(self.xielu) if self._how is None else self._how)
        elif self._activation == "relu2":
            made = self._ops.relu_squared(made)
        else:
            made = self._ops.gelu(made, self._activation == "ungated_exact_gelu")
        return self.down(made, residual, overwrite=True)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm

    @staticmethod
    def _made_how(stored: Tensor) -> Tensor:
        alpha_p, alpha_n, beta, eps = stored.float().unbind()
        return torch.stack((F.softplus(alpha_p), beta + F.softplus(alpha_n), beta, eps))

    def linears(self) -> list[Linear]:
        return [self.up, self.down]
