"""Weights in fp8 that a GPU multiplies with activations in fp8, quantised as they come."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwing.layers.linear_ops.base import LinearOp, PackedOp
from draftwing.ops.fp8_blocks import TALL, Fp8Blocks, Fp8Rows
from draftwing.ops.torch.layer_ops import LayerOps

if TYPE_CHECKING:
    from draftwing.layers.linear import Linear


class Fp8Linear(PackedOp):
    """Activations are quantised whatever the number of rows, each row by itself, and a row's sums have one order: it
    has the same bits in plain steps, trees and prompts, with or without deterministic mode."""

    takes_fp8 = True

    def __init__(self, layer: Linear, ops: LayerOps, weight: Fp8Blocks) -> None:
        super().__init__(layer, ops.gemms(weight))
        self._weight = weight

    def gated(self, x: Tensor | Fp8Rows, bias: Tensor | None) -> Tensor | None:
        return None if self._weight.rows % (2 * TALL) else super().gated(x, bias)

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, Fp8Linear)
        for mine, part in zip(self._weight, other._weight, strict=True):
            mine.copy_(part)

    @property
    def sizes(self) -> Counter[str]:
        return Counter({"fp8": self._weight.nbytes})

    def dense_weight(self) -> Tensor:
        return self._weight.dense(torch.bfloat16)
