"""Norms in C, with the roundings of torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.runtime import CpuRuntime, InC
from draftwing.ops.elementwise.cpu import CpuElementwiseOps
from draftwing.ops.norms.spec import NormOps
from draftwing.ops.rows.cpu import CpuRowOps

LANES = 16  # of the kernels' vectors


@functools.cache
def _steps(count: int) -> Tensor:
    return torch.arange(count)


def _counted(rows: int) -> Tensor:
    """0, 1, ..: a view of what is kept, for what is recorded makes no such tensor again."""
    return _steps(1 << rows.bit_length())[:rows]


class CpuNormOps(InC, NormOps):
    """Takes real tensors in float32 or bfloat16, all of one dtype; others go to torch."""

    def __init__(self, runtime: CpuRuntime, rows: CpuRowOps, elementwise: CpuElementwiseOps) -> None:
        super().__init__(runtime)
        self._rows, self._elementwise = rows, elementwise

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Computes what torch does, with the same roundings."""
        if x.dtype not in DTYPES or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        return self._normed(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
        known = x.dtype in DTYPES and weight.dtype in (x.dtype, torch.float32)
        if not known or len(weight) % LANES:
            return super().layer_norm(x, weight, eps, bias)
        return self._normed(x, weight, eps, True, bias)

    def _normed(
        self, x: Tensor, weight: Tensor, eps: float, centred: bool = False, bias: Tensor | None = None
    ) -> Tensor:
        x = x if x.is_contiguous() or x.dim() != 2 else self._rows.concat_columns(x)  # which is no operation of torch's
        x = x.contiguous()
        out = torch.empty_like(x)
        size = weight.shape[0]
        assert x.shape[-1] == size and (bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape))
        self.raw.rms_norm(
            out, x, weight, x.numel() // size, size, x.dtype == torch.bfloat16, self.workers.address,
            weight.dtype != x.dtype, centred, bias, eps,
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        total = self._elementwise.add_scaled(
            x, delta if scale == 1 else self._elementwise.add_scaled(delta, None, scale)
        )
        return total, self.rms_norm(total, weight, eps)

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
        if table.dtype not in DTYPES or table.dtype != feature.dtype:
            return super().fuse_inputs(ids, table, feature, norms, eps, positions, feature_first)
        rows, size = feature.shape
        ids = _counted(rows) if ids is None else ids
        assert ids.shape == (rows,) and table.shape[1] == size and table.is_contiguous() and ids.dtype == torch.int64
        assert norms is None or all(w.dtype == table.dtype and w.shape == (size,) and w.stride() == (1,) for w in norms)
        ids = ids.contiguous()
        feature = feature if feature.stride(1) == 1 else feature.contiguous()  # rows may be apart
        positions = None if positions is None else positions.contiguous()
        out = feature.new_empty(rows, 2 * size)
        self.raw.fuse(
            out, ids, table, feature, feature.stride(0), *(norms or (None, None)), positions, rows, size,
            out.dtype == torch.bfloat16, feature_first, eps,
        )  # fmt: skip
        return out
