"""Weights of experts that stay quantised, without data: their form decides which kernels an engine launches."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.layers.experts import ExpertLinear
from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp
from draftwing.models.decoder import DecoderModel
from draftwing.models.quantised.config import Quantization
from draftwing.ops.groups import WHOLE, PackedGroups, groups_of_row, shift_of
from draftwing.ops.types import MX_BLOCK, MXRows

_ANY_EXPERT = "model.layers.0.mlp.experts.0.gate_proj"


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
    if scheme is not None:
        fp8, bits, zeros = scheme.real, 8 if scheme.real or scheme.bits > 4 else 4, not scheme.symmetric
        shift = shift_of(scheme.wide)
    elif asked in ("fp8", "w4a16"):
        fp8, bits, zeros, shift = asked == "fp8", 8 if asked == "fp8" else 4, False, WHOLE if asked == "fp8" else 1
    else:
        return None
    if rows % 16 or columns % 64:
        return None
    scales = torch.empty(rows // 16, groups_of_row(columns, shift), 8, 2, dtype=dtype, device="meta")
    own_zeros = torch.empty_like(scales) if zeros and not fp8 else None
    return PackedGroups(_bytes(rows // 16, columns * 2 * bits), scales, own_zeros, bits, shift, None, fp8)


def _bytes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")
