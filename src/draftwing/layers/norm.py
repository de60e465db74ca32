"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467), and LayerNorm."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from draftwing.layers.part_configs import NormConfig
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.table import PLAIN, LayerOps
from draftwing.parallel.ranks import NextNorm


def row_squares(ops: LayerOps, x: Tensor) -> Tensor:
    """x [M, n] -> sums of the squares of its rows, [M, 1] float32: products of rows with themselves, which have the
    same bits in any batch."""
    return ops.exact_logits(x, x, torch.arange(len(x), device=x.device).unsqueeze(1))


def row_sizes(ops: LayerOps, x: Tensor, least: float = 0.0) -> Tensor:
    """x [M, n] -> roots of the means of the squares of its rows, which are `least` at least, [M, 1] float32"""
    return (row_squares(ops, x) / x.shape[1]).clamp(min=least).sqrt()


class ByOps(nn.Module):
    """A module that computes with `ops` besides its matrices and norms."""

    ops: LayerOps = PLAIN

    def pack(self, ops: LayerOps) -> None:
        """Lets the device do that from now on."""
        self.ops = ops


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last axis, the mean in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.eps = eps
        self._ops = PLAIN

    def pack(self, ops: LayerOps) -> None:
        """Lets a kernel of `ops` do it from now on, with gradients where that has them."""
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]"""
        return self._ops.rms_norm(x, self.weight, self.eps)

    # Module's own call looks for hooks; over a forward's small layers that adds up to a few percent of a decode step.
    __call__ = forward

    def quantised(self, x: Tensor) -> Fp8Rows:
        """x [M, size] -> [M, size], for products with activations in fp8"""
        return self._ops.rms_norm_fp8(x, self.weight, self.eps)

    def quantised_sum(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Fp8Rows]:
        """x, delta [M, size] -> x + delta, and its norm as `quantised` has it."""
        return self._ops.add_rms_norm_fp8(x, delta, self.weight, self.eps)

    def of_next_sum(self, quantises: bool) -> NextNorm:
        """Returns itself for sums over ranks that it reads next."""
        return NextNorm(self.weight, self.eps, quantises)

    def of_sum(self, x: Tensor, delta: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """x, delta [M, size] -> x + scale * delta, and its norm."""
        return self._ops.add_rms_norm(x, delta, self.weight, self.eps, scale)


class BareNorm(RMSNorm):
    """One without weights: they are ones, and no checkpoint has them."""

    unsaid: Mapping[str, float] = MappingProxyType({"weight": 1.0})


class LayerNorm(RMSNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight, perhaps + bias, over the last axis, in float32."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str, bias: bool = False
    ) -> None:
        super().__init__(size, eps, dtype, device)
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.layer_norm(x, self.weight, self.eps, self.bias)

    __call__ = forward

    def of_sum(self, x: Tensor, delta: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        total = self._ops.add_scaled(x, delta if scale == 1 else self._ops.add_scaled(delta, None, scale))
        return total, self(total)


class BareLayerNorm(LayerNorm):
    """One without weights, as `BareNorm`."""

    unsaid = BareNorm.unsaid


def norm_of(config: NormConfig, size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    """Returns the norm of a stream of this size in a model in `dtype`, its weight not filled."""
    if config.centred:
        kind = BareLayerNorm if config.bare else LayerNorm
        return kind(size, config.eps, config.dtype(dtype), device, config.bias)
    return (BareNorm if config.bare else RMSNorm)(size, config.eps, config.dtype(dtype), device)
