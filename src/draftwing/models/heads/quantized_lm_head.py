"""The lm_head of drafts in fewer bits, on a GPU: a copy beside the one that it is made of.

Each level of a draft reads the lm_head once, and a product of few rows takes as long as its bytes do. Errors cost
acceptance, never text: the target computes its logits with the lm_head as it is.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.base import LinearOp, ParamSlice
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.ops.torch.layer_ops import LayerOps

# Most rows that are multiplied with the copy, as far as it was measured: with 64 int8 takes 0.60 to 0.66 of bfloat16's
# time on an H100, 4 bits 0.54 to 0.60 (docs/dev/quantised_kernels.md).
MOST_ROWS = 64
# Logits of a row that are computed again with the lm_head as it is, where 4 bits have found them: those with 8 bits are
# right as they are. Acceptance with so many: docs/dev/quantised_kernels.md; other numbers were not tried.
RESCORED = {"w4a16": 16}
_LARGE = 1 << 26  # values of an lm_head of which there is a copy by default: in 16 bits they are read in 30 to 50 us
_STEP = 1 << 14  # rows that are quantised and packed at a time: what lies between takes some times their bytes


def is_large(rows: int, columns: int) -> bool:
    """Returns whether an lm_head of this shape takes so long to read that a copy is worth its memory."""
    return rows * columns >= _LARGE


def for_rows(rows: int, lm_head: Linear, quantized: Linear | None) -> Linear:
    """Returns which of the two so many rows are multiplied with."""
    return lm_head if quantized is None or rows > MOST_ROWS else quantized


class Rescored(LinearOp):
    """A packed lm_head in fewer bits, whose largest logits are those of the lm_head as it is."""

    def __init__(self, few: Linear, whole: Linear, count: int, ops: LayerOps) -> None:
        """few: the copy; whole: the lm_head, without a bias; count: of logits."""
        super().__init__(few)
        self._few, self._whole, self._count, self._ops = few.op, whole, count, ops

    @property
    def sizes(self) -> Counter[str]:
        return self._few.sizes

    def dense_weight(self) -> Tensor:
        return self._few.dense_weight()

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, Rescored)
        self._few.copy_from(other._few)

    @property
    def can_copy(self) -> bool:
        return self._few.can_copy

    def __call__(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None = None, overwrite: bool = False
    ) -> Tensor:
        logits = self._few(x, bias, residual, overwrite)  # [M, vocab]
        ids = self._ops.largest(logits, self._count)  # [M, count]
        return logits.scatter_(1, ids, self._whole.exact_logits(x, ids).to(logits.dtype))


@torch.no_grad()
def quantized_copy(lm_head: Linear, scheme: str, ops: LayerOps) -> Linear | None:
    """Returns a packed layer with the outputs of another, which stays as it is, in one of the schemes of `ops.groups`;
    over ranks as that one is. Where the scheme is in `RESCORED`, the largest are those of the other. None where the
    kernels do not take its weight, or it is in fewer bits already."""
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
    if scheme in RESCORED and lm_head.bias is None:
        made.op = Rescored(made, lm_head, min(RESCORED[scheme], len(weight)), ops)
    return made
