"""Norms of rows, and of what a draft head's first GEMM reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.fp8.spec import Fp8Rows, packed_rows, quantised


class NormOps:
    """Norms, of sums too. Here with gradients, for tensors of any dtype."""

    norm_adds_residual = False  # whether `add_rms_norm` is one kernel, which then adds residuals better than a GEMM

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., size], weight [size] -> x / sqrt(mean(x²) + eps) * weight, the mean in float32.

        Beside a weight in float32 nothing of a half-precision x is rounded before the end, but in training."""
        if weight.dtype == torch.float32 and x.itemsize < 4 and not weight.requires_grad:
            return self.rms_norm(x.float(), weight, eps).to(x.dtype)
        if x.device.type != "cpu":
            # In training the weight is in float32 with a half-precision x, which torch's fused kernel does not take.
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
        # On the CPU F.rms_norm is a dozen small operations, layer_norm one. Beside its own negation a row has mean 0
        # and the mean of squares as its variance. The result is rounded before it is weighted, as in transformers.
        both = torch.cat((x, -x), -1)
        return F.layer_norm(both, both.shape[-1:], eps=eps)[..., : x.shape[-1]] * weight

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        """x [..., size], weight, bias [size] -> (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, in float32."""
        return F.layer_norm(x.to(weight.dtype), weight.shape, weight, bias, eps).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """x, delta [M, size], weight [size] -> x + scale * delta [M, size], the product rounded before, and its norm
        [M, size]."""
        total = x + (delta if scale == 1 else delta * scale)
        return total, self.rms_norm(total, weight, eps)

    def rms_norm_fp8(self, x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
        """Returns `rms_norm` of x [M, size], and what products with activations in fp8 read of it."""
        normed = self.rms_norm(x, weight, eps)
        return packed_rows(*quantised(normed))._replace(x=normed)

    def add_rms_norm_fp8(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
        """Returns x + delta [M, size] and `rms_norm_fp8` of it."""
        total = x + delta
        return total, self.rms_norm_fp8(total, weight, eps)

    def fuse_inputs(
        self,
        ids: Tensor | None,
        table: Tensor,
        feature: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
        positions: Tensor | None = None,
        feature_first: bool = False,
    ) -> Tensor:
        """Returns what a draft head's first GEMM reads: the embedding of a token next to a feature, each perhaps
        normed.

        ids [M] int64, table [vocab, size], feature [M, size], norms: weights [size] of the embedding's norm and of the
        feature's -> [M, 2 * size]. positions [M]: where it is 0 the embedding counts as zero. ids None: row i of the
        table is the embedding of row i.
        """
        token = table if ids is None else F.embedding(ids, table)
        if positions is not None:
            token = token.masked_fill((positions == 0).unsqueeze(1), 0.0)
        if norms is not None:
            token, feature = self.rms_norm(token, norms[0], eps), self.rms_norm(feature, norms[1], eps)
        return torch.cat((feature, token) if feature_first else (token, feature), -1)
