"""Weights stored as they are: a matrix in a floating point dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftwing.layers.linear_ops.base import (
    SAFE_KIND,
    SMALLEST,
    LinearBase,
    LinearOp,
    PackedBlocks,
    PackedOp,
    PackMode,
    WeightFormat,
)
from draftwing.ops.gemm import onednn
from draftwing.ops.gemm.contract import Gemm
from draftwing.ops.gemm.gemms import OneDnnGemm
from draftwing.ops.table import LayerOps


@dataclass(frozen=True)
class DenseFormat(WeightFormat):
    """One parameter, `weight` [out, in]."""

    def create(self, layer: LinearBase, dtype: torch.dtype, device: torch.device) -> LinearOp:
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

    def part(self, layer: LinearBase, rows: Sequence[range], columns: range) -> LinearOp | None:
        weight = self.layer.weight.detach()[:, columns.start : columns.stop]
        layer.weight = nn.Parameter(torch.cat([weight[some.start : some.stop] for some in rows]), False)
        return Dense(layer)

    def copy_from(self, other: LinearOp) -> None:
        """Takes the weight of one whose weight is a parameter."""


def as_dense(layer: LinearBase) -> Tensor:
    """Makes the layer's weight a dense one, whose operation is still to be chosen."""
    weight = layer.op.dense_weight()
    if not isinstance(layer.op, Dense):
        for name in [name for name, _ in layer.named_parameters() if name != "bias"]:
            delattr(layer, name)
        layer.weight = nn.Parameter(weight, False)
    return layer.weight


def pack_dense(layer: LinearBase, ops: LayerOps, mode: PackMode) -> LinearOp:
    """Returns the fastest operation that this device has for the layer's weight, which becomes a dense one."""
    weight = as_dense(layer)
    if mode.rows_only:
        return Dense(layer)
    in_blocks = SAFE_KIND in ops.block_kinds and weight.dtype == torch.bfloat16 and weight.shape[1] % SMALLEST == 0
    if mode.draft_8bit and in_blocks:
        del layer.weight
        return PackedBlocks(layer, ops, [ops.quantize(weight, SAFE_KIND)], weight.dtype)
    mode = mode.if_exact(
        ops.keeps_bits(weight),
        f"expected {mode.name}.weight in bfloat16 or float16, with a multiple of 64 columns, contiguous and aligned to "
        f"16 bytes; found {weight.dtype}, {list(weight.shape)}",
    )
    gemms = ops.gemms(weight, layer.bias, mode.deterministic, layer.whole_features)
    return PackedDense(layer, gemms, mode.keep_weight)


class PackedDense(PackedOp):
    """A matrix: the layer's parameter, or where a GEMM has a copy of its own only that copy, unless rows of the matrix
    will be read (a tied embedding)."""

    def __init__(self, layer: LinearBase, gemms: Sequence[Gemm], keep_weight: bool) -> None:
        super().__init__(layer, gemms)
        self._copy = gemms[-1] if isinstance(gemms[-1], OneDnnGemm) else None
        if self._copy is not None and not keep_weight:
            del layer.weight

    @property
    def stored(self) -> Tensor | None:
        weight = getattr(self.layer, "weight", None)
        return None if weight is None else weight.detach()

    def dense_weight(self) -> Tensor:
        weight = getattr(self.layer, "weight", None)
        if weight is None:
            assert self._copy is not None
            weight = self._copy.packed.to_dense()
        return weight

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, PackedDense)
        if self._copy is not None and other._copy is not None:
            onednn.copy(other._copy.packed, self._copy.packed)


DENSE = DenseFormat()


def blocks_or_dense(form: WeightFormat) -> WeightFormat:
    """Returns the format of matrices that are small, or multiplied head by head, where that of others is `form`: blocks
    as these, or dense."""
    return form if form.takes_blocks else DENSE


# `quant_method` of a checkpoint's `quantization_config` -> the format that it describes; raises CheckpointError for
# settings that are not served. A new format is a line here.
FORMATS: dict[str, Callable[[Mapping[str, Any]], WeightFormat]] = {}
