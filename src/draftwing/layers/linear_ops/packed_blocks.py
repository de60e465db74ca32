"""Weights in blocks as they are multiplied: what a format of blocks packs, and dense weights of draft heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwing.layers.linear_ops.base import LinearOp, PackedOp
from draftwing.ops.contracts import BlockGemm
from draftwing.ops.torch.layer_ops import LayerOps
from draftwing.ops.types import BlockRows

if TYPE_CHECKING:
    from draftwing.layers.linear import Linear

SAFE_KIND = "Q8_0"  # for rows that a kind of larger blocks does not take, types without a kernel, and draft heads
SMALLEST = 32  # values of the smallest block


class PackedBlocks(PackedOp):
    """The device's GEMM, which has its own copy of the blocks."""

    def __init__(self, layer: Linear, ops: LayerOps, parts: list[BlockRows], dtype: torch.dtype) -> None:
        self._gemm = ops.block_gemm(parts, dtype)
        super().__init__(layer, [self._gemm])
        self._sizes = sizes_of(parts)
        self._last: dict[int, BlockGemm] = {}  # of the outputs that were asked for alone

    @property
    def sizes(self) -> Counter[str]:
        return self._sizes

    def last(self, x: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        part = self._last.get(outputs)
        if part is None:
            part = self._last[outputs] = self._gemm.last(outputs)
        y = part.linear(x, None if bias is None else bias[-part.outputs :])
        assert y is not None
        return y[:, -outputs:]

    def copy_from(self, other: LinearOp) -> None:
        assert isinstance(other, PackedBlocks)
        self._gemm.copy_from(other._gemm)

    def dense_weight(self) -> Tensor:
        return self._gemm.dense()

    def rows(self, ids: Tensor) -> Tensor:
        return self._gemm.rows(ids)

    def exact_logits(self, hidden: Tensor, ids: Tensor, ops: LayerOps) -> Tensor:
        return (self.rows(ids).float() * hidden.unsqueeze(-2).float()).sum(-1)


def sizes_of(parts: Iterable[BlockRows]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for rows in parts:
        sizes[rows.kind] += rows.data.nbytes
    return sizes
