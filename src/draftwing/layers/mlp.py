"""The MLP part of a decoder layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwing.layers.config import LayerConfig
from draftwing.layers.linear import Linear
from draftwing.layers.norm import ByOps, row_sizes
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps

# What a checkpoint has of each layer's activation, and its size, 0: a number.
XIELU = {"alpha_p": 1, "alpha_n": 1, "beta": 0, "eps": 0}


class SparseGates(ByOps):
    """GELU of what of a row's gates is above their mean and so many of their standard deviations, times ups."""

    def __init__(self, deviations: float) -> None:
        super().__init__()
        self._deviations = deviations

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up [M, 2 * ffn] -> [M, ffn]. A row has the same bits in any batch."""
        gate, up = gate_up.chunk(2, 1)
        wide = gate.float().contiguous()
        first = torch.zeros(len(wide), 1, dtype=torch.int64, device=wide.device)
        mean = self.ops.exact_logits(wide, torch.ones_like(wide[:1]), first) / wide.shape[1]
        apart = wide - mean
        left = F.relu(apart - self._deviations * row_sizes(self.ops, apart)).to(gate_up.dtype)
        return self.ops.gelu_mul(self.ops.concat_columns(left, up))

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


class LimitedGates(ByOps):
    """SiLU of gates, which is at most `limit`, times ups, whose size is at most that."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def forward(self, gate_up: Tensor) -> Tensor:
        """gate_up [M, 2 * ffn] -> [M, ffn]. A row has the same bits in any batch."""
        gate, up = gate_up.chunk(2, 1)
        let_through = self.ops.silu_mul(self.ops.concat_columns(gate, torch.ones_like(up)))
        return let_through.clamp(max=self._limit) * up.clamp(-self._limit, self._limit)

    __call__ = forward  # Module's own call looks for hooks: see RMSNorm


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), or with GELU; gate and up are one GEMM."""

    def __init__(self, config: LayerConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, ffn, bias, form = config.hidden, config.ffn, config.mlp_bias, config.weight_format
        self.gelu = config.activation == "gelu"
        self.gate_up = Linear(hidden, 2 * ffn, bias, dtype, device, form)
        self.down = config.last_matrix("mlp", ffn, bias, dtype, device)
        self.gates: SparseGates | LimitedGates | None = None  # that are not made with the product
        if config.sparsity is not None or config.silu_limit:
            assert self.gelu == (config.sparsity is not None) and not (self.gelu and config.silu_limit)
            self.gates = LimitedGates(config.silu_limit) if config.sparsity is None else SparseGates(config.sparsity)

    def forward(self, x: Tensor | Fp8Rows, residual: Tensor | None = None) -> Tensor:
        """x [M, hidden]; residual [M, hidden] is added, and may be overwritten -> [M, hidden]"""
        inner = self.gate_up.gated(x, self.gelu) if self.gates is None else self.gates(self.gate_up(x))
        return self.down(inner, residual, overwrite=True)

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
