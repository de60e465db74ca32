"""Products of weights and activations in fp8 in plain torch: what kernels for `Fp8Blocks` are to give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.fp8_blocks import WIDE, Fp8Blocks, Fp8Rows, quantised


class TorchFp8Gemm:
    """A row is multiplied by itself, so it has the same bits among any number of them."""

    def linear(
        self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        """x [M, K] @ weight [N, K]^T + bias [N] + residual [M, N] -> [M, N] bfloat16, rounded once."""
        y = self._sums(x, weight, bias)
        return (y if residual is None else y + residual.float()).bfloat16()

    def gated(self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        """silu(x @ gate^T) * (x @ up^T), weight [2 * N, K] the gates and then the ups -> [M, N] bfloat16"""
        gate, up = self._sums(x, weight, bias).chunk(2, 1)
        return (F.silu(gate) * up).bfloat16()

    def _sums(self, x: Tensor | Fp8Rows, weight: Fp8Blocks, bias: Tensor | None) -> Tensor:
        """-> [M, N] float32"""
        codes, scales = x.plain() if isinstance(x, Fp8Rows) else quantised(x)
        values = codes.float() * scales.repeat_interleave(WIDE, 1)
        matrix = weight.dense(torch.float32)
        y = torch.stack([(matrix * row).sum(1) for row in values]) if len(values) else values.new_zeros(0, weight.rows)
        return y if bias is None else y + bias.float()
