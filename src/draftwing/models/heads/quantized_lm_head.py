"""The lm_head of drafts in fewer bits, on a GPU: a copy beside the one that it is made of.

Each level of a draft reads the lm_head once, and a product of few rows takes as long as its bytes do. Errors cost
acceptance, never text: the target computes its logits with the lm_head as it is.
"""

from __future__ import annotations

import torch

from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import ParamSlice
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.ops.torch.layer_ops import LayerOps

# Most rows that are multiplied with the copy, as far as it was measured: with 64 int8 takes 0.60 to 0.66 of bfloat16's
# time on an H100 (docs/dev/quantised_kernels.md).
MOST_ROWS = 64
_LARGE = 1 << 26  # values of an lm_head of which there is a copy by default: in 16 bits they are read in 30 to 50 us
_STEP = 1 << 14  # rows that are quantised and packed at a time: what lies between takes some times their bytes


def is_large(rows: int, columns: int) -> bool:
    """Returns whether an lm_head of this shape takes so long to read that a copy is worth its memory."""
    return rows * columns >= _LARGE


def for_rows(rows: int, lm_head: Linear, quantized: Linear | None) -> Linear:
    """Returns which of the two so many rows are multiplied with."""
    return lm_head if quantized is None or rows > MOST_ROWS else quantized


@torch.no_grad()
def quantized_copy(lm_head: Linear, scheme: str, ops: LayerOps) -> Linear | None:
    """Returns a packed layer with the outputs of another, which stays as it is, in one of the schemes of `ops.groups`;
    over ranks as that one is. None where the kernels do not take its weight, or it is in fewer bits already."""
    if lm_head.op.sizes:
        return None
    weight, form = lm_head.dense_weight().detach(), GroupFormat(scheme, ops)
    made = Linear(lm_head.in_features, lm_head.out_features, False, weight.dtype, torch.device("meta"), form)
    for start in range(0, len(weight), _STEP):
        part = weight[start : start + _STEP]
        if not made.op.keep(ParamSlice("weight", start, len(part)), part):
            return None
    made.bias, made.joined = lm_head.bias, lm_head.joined
    made.pack(ops)
    return made
