"""Weights of experts that stay quantised, without data: their form decides which kernels an engine launches."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.layers.experts import ExpertLinear
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp
from draftwing.models.decoder import DecoderModel
from draftwing.models.quantised.config import Quantization, Scheme
from draftwing.ops.cuda.gemm_groups import Width
from draftwing.ops.groups import WHOLE, PackedGroups, groups_of_row, shift_of
from draftwing.ops.types import MX_BLOCK, MXRows

_ANY_EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
MADE = {"fp8": Width(8, False, WHOLE, True), "w4a16": Width(4, False, 1)}  # by `--quantization`


def width_of(scheme: Scheme) -> Width:
    zeros = not scheme.symmetric and not scheme.real
    return Width(8 if scheme.real or scheme.bits > 4 else 4, zeros, shift_of(scheme.wide), scheme.real)


def hold_experts(model: DecoderModel, dtype: torch.dtype, asked: str, stored: Quantization | None) -> None:
    """Of a model on the meta device that is to be packed. asked: `--quantization`."""
    if asked == "none":
        return
    for part in model.modules():
        if isinstance(part, ExpertLinear):
            weight = _held(part.out_features, part.in_features, dtype, asked, stored)
            if weight is not None:
                part.op = _Held(part, weight)


class _Held(LinearOp):
    def __init__(self, layer: Linear, weight: PackedGroups | MXRows) -> None:
        super().__init__(layer)
        self._weight = weight

    def groups(self) -> PackedGroups | MXRows | None:
        return self._weight


def _held(
    rows: int, columns: int, dtype: torch.dtype, asked: str, stored: Quantization | None
) -> PackedGroups | MXRows | None:
    if stored is not None and stored.method == "mxfp4":
        return MXRows(_bytes(rows, columns // 2), _bytes(rows, columns // MX_BLOCK))
    scheme = None if stored is None else stored.scheme_of(_ANY_EXPERT)
    width = MADE.get(asked) if scheme is None else width_of(scheme)
    if width is None or rows % 16 or columns % 64:
        return None
    scales = torch.empty(rows // 16, groups_of_row(columns, width.shift), 8, 2, dtype=dtype, device="meta")
    zeros = torch.empty_like(scales) if width.zeros else None
    codes = _bytes(rows // 16, columns * 2 * width.bits)
    return PackedGroups(codes, scales, zeros, width.bits, width.shift, None, width.fp8)


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")
