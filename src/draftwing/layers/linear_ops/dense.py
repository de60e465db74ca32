"""Weights stored as they are: a matrix in a floating point dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from draftwing.errors import ConfigError
from draftwing.layers.linear_ops.base import LinearOp, PackMode, WeightFormat
from draftwing.layers.linear_ops.packed_blocks import SAFE_KIND, SMALLEST, PackedBlocks
from draftwing.ops.contracts import FEW_ROWS, MediumMGemm, SmallMGemm
from draftwing.ops.torch import onednn
from draftwing.ops.torch.layer_ops import LayerOps

if TYPE_CHECKING:
    from draftwing.layers.linear import Linear

# Up to this many rows our own kernel for few beats cuBLAS (docs/dev/gpu_kernels.md); it takes any number. Of a
# vocabulary's GEMM, which is long enough for its start and end not to matter, up to fewer, and of outputs of a router,
# or of a delta net's b and a, up to more: a GEMM that is over when it begins.
_SMALL_M, _ANY_M = 16, 1 << 30
_LONG, _LONG_M = 1 << 16, 8
_TINY, _TINY_M = 512, 64
# From so many values of a weight on our kernel for more rows is the fastest above so many rows, and up to so many. From
# so many values on, but not with a vocabulary's, it is so up to all rows that it names. Smaller ones were not timed.
_MEDIUM_FROM, _MEDIUM_ABOVE, _MEDIUM_M, _LARGE_FROM = 1 << 24, 8, 64, 1 << 25


@dataclass(frozen=True)
class DenseFormat(WeightFormat):
    """One parameter, `weight` [out, in]."""

    def create(self, layer: Linear, dtype: torch.dtype, device: torch.device) -> LinearOp:
        shape = layer.out_features, layer.in_features
        layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), False)
        return Dense(layer)


class Dense(LinearOp):
    """A product in plain torch, with gradients."""

    @property
    def stored(self) -> Tensor | None:
        return self.layer.weight.detach()

    def dense_weight(self) -> Tensor:
        return self.layer.weight

    def can_append(self, other: LinearOp) -> bool:
        return type(other) is type(self) and self.layer.weight.dtype == other.layer.weight.dtype

    def append(self, other: LinearOp) -> None:
        self.layer.weight = nn.Parameter(torch.cat((self.layer.weight, other.dense_weight())), False)

    def part(self, layer: Linear, rows: Sequence[range], columns: range) -> LinearOp | None:
        weight = self.layer.weight.detach()[:, columns.start : columns.stop]
        layer.weight = nn.Parameter(torch.cat([weight[some.start : some.stop] for some in rows]), False)
        return Dense(layer)

    def copy_from(self, other: LinearOp) -> None:
        """Takes the weight of one whose weight is a parameter."""


def as_dense(layer: Linear) -> Tensor:
    """Makes the layer's weight a dense one, whose operation is still to be chosen."""
    weight = layer.op.dense_weight()
    if not isinstance(layer.op, Dense):
        for name in [name for name, _ in layer.named_parameters() if name != "bias"]:
            delattr(layer, name)
        layer.weight = nn.Parameter(weight, False)
    return layer.weight


def pack_dense(layer: Linear, ops: LayerOps, mode: PackMode) -> LinearOp:
    """Returns the fastest operation that this device has for the layer's weight, which becomes a dense one."""
    weight = as_dense(layer)
    if mode.rows_only:
        return InferenceDense(layer)
    in_blocks = SAFE_KIND in ops.block_kinds and weight.dtype == torch.bfloat16 and weight.shape[1] % SMALLEST == 0
    if mode.draft_8bit and in_blocks:
        del layer.weight
        return PackedBlocks(layer, ops, [ops.quantize(weight, SAFE_KIND)], weight.dtype)
    gemm = ops.small_m_gemm(weight)
    if gemm is None and mode.deterministic and not ops.gemm_keeps_bits(weight):
        raise ConfigError(
            f"--enable-deterministic-inference: expected {mode.name}.weight in bfloat16 or float16, with a multiple "
            f"of 64 columns, contiguous and aligned to 16 bytes; found {weight.dtype}, {list(weight.shape)}. "
            "Set --dtype, or leave the option out"
        )
    if ops.packs_with_onednn(weight):
        return OneDnn(layer, ops, mode)
    return InferenceDense(layer) if gemm is None else OwnGemms(layer, gemm, ops.medium_m_gemm(weight), mode)


class InferenceDense(Dense):
    """A product in plain torch, without gradients."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        if overwrite and residual is not None and bias is None:
            return residual.addmm_(x, self.layer.weight.t())  # saves a pass
        return super().__call__(x, bias, residual)


class OwnGemms(InferenceDense):
    """On a GPU: our own GEMMs for few rows and for some more, torch's for many. Where a row must have the same bits in
    any batch, one of ours takes any number."""

    def __init__(self, layer: Linear, small: SmallMGemm, medium: MediumMGemm | None, mode: PackMode) -> None:
        super().__init__(layer)
        outputs, values = layer.out_features, layer.weight.numel()
        medium = medium if values >= _MEDIUM_FROM else None
        few = _LONG_M if outputs >= _LONG else _TINY_M if outputs <= _TINY else _SMALL_M
        self._gemms: list[tuple[int, SmallMGemm]]  # up to so many rows
        if mode.deterministic:
            self._gemms = [(_ANY_M, small if medium is None else medium)]
        elif medium is None:
            self._gemms = [(few, small)]
        else:
            large = values >= _LARGE_FROM and outputs < _LONG
            self._gemms = [(_MEDIUM_ABOVE, small), (medium.fast if large else _MEDIUM_M, medium)]

    def _gemm(self, x: Tensor) -> SmallMGemm | None:
        return next((gemm for most, gemm in self._gemms if x.shape[0] <= most), None)

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        gemm = self._gemm(x)
        if gemm is not None:
            return gemm.linear(x, self.layer.weight, bias, residual)
        return super().__call__(x, bias, residual, overwrite)

    def gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        gemm = self._gemm(x)
        return None if gemm is None else gemm.gated(x, self.layer.weight, bias)


class OneDnn(LinearOp):
    """On a CPU: the weight packed once for oneDNN, and perhaps a GEMM of our own for few rows.

    The layer's own weight is gone afterwards, unless its rows will be read (a tied embedding).
    """

    def __init__(self, layer: Linear, ops: LayerOps, mode: PackMode) -> None:
        super().__init__(layer)
        weight = layer.weight
        outputs, inputs = weight.shape
        self._alike = onednn.rows_summed_alike(
            inputs, min(outputs, onednn.MAX_TRIED), weight.dtype, torch.get_num_threads()
        )
        self._packed = onednn.pack(weight)
        self.few_rows = ops.few_rows_gemm(self._packed, layer.bias, self._alike)
        self._keeps_weight = mode.keep_weight
        if not mode.keep_weight:
            del layer.weight

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        if self.few_rows is not None and x.shape[0] <= FEW_ROWS:
            return self.few_rows(x, bias, residual)
        return onednn.gemm_alike(x, self._packed, bias, residual, self._alike)

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, OneDnn)
        onednn.copy(other._packed, self._packed)

    @property
    def stored(self) -> Tensor | None:
        return self.layer.weight.detach() if self._keeps_weight else None

    def dense_weight(self) -> Tensor:
        return self.layer.weight if self._keeps_weight else self._packed.to_dense()
