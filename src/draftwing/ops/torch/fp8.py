"""Products of weights and activations in fp8 in plain torch: what kernels for `Fp8Blocks` are to give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.fp8_blocks import WIDE, Fp8Blocks, quantised


class TorchFp8Gemm:
    """A row is multiplied by itself, so it has the same bits among any number of them."""

    def linear(self, x: Tensor, weight: Fp8Blocks, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N] in the type of x, rounded once."""
        y = self._sums(x, weight, bias)
        return (y if residual is None else y + residual.float()).to(x.dtype)

    def gated(self, x: Tensor, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N]"""
        gate, up = self._sums(x, weight, bias).chunk(2, 1)
        return (F.silu(gate) * up).to(x.dtype)

    def _sums(self, x: Tensor, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        """-> [M, N] float32"""
        codes, scales = quantised(x)
        values = codes.float() * scales.repeat_interleave(WIDE, 1)
        matrix = weight.dense(torch.float32)
        y = torch.stack([(matrix * row).sum(1) for row in values]) if len(x) else x.new_zeros(0, weight.rows).float()
        return y if bias is None else y + bias.float()
