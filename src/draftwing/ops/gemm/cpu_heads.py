"""Each head's product with a matrix of its own, in one call: ops/cpu/csrc/latent.c."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.runtime import Spare
from draftwing.ops.cpu.workers import Workers
from draftwing.ops.gemm.cpu_blocks import BlockedGemm

_PANEL = 64  # outputs that lie together, as in latent.c
_UNIT = 16  # outputs of blocks that lie together
_SLICE = 512  # rows at a time that are rounded to 8 bits for each head


class HeadGemm:
    """`HeadProducts` of weights in float32 or bfloat16, copied to [heads, panels, inputs, outputs of a panel]."""

    def __init__(self, weight: Tensor, heads: int, workers: Workers) -> None:
        """weight [heads * outputs, inputs]"""
        self.raw: Any = load_extension()
        self.heads, self.workers = heads, workers
        by_head = weight.detach().unflatten(0, (heads, -1))
        _, self.outputs, self.inputs = by_head.shape
        padded = F.pad(by_head, (0, 0, 0, -self.outputs % _PANEL))
        self.packed = padded.unflatten(1, (-1, _PANEL)).transpose(2, 3).contiguous()

    @property
    def weight(self) -> Tensor:
        rows = self.packed.transpose(2, 3).flatten(1, 2)[:, : self.outputs]  # [heads, outputs, inputs]
        return rows.flatten(0, 1)

    def __call__(self, x: Tensor) -> Tensor:
        rows, heads, inputs = x.shape
        assert (heads, inputs) == (self.heads, self.inputs) and x.dtype == self.packed.dtype and x.stride(2) == 1
        out = x.new_empty(rows, heads, self.outputs)
        self.raw.head_products(
            out, x, self.packed, rows, heads, inputs, self.outputs, x.stride(0), x.stride(1), x.dtype == torch.bfloat16,
            self.workers.address,
        )  # fmt: skip
        return out


class HeadBlocks:
    """`HeadProducts` of weights in blocks: a GEMM whose outputs are those of all heads. Rows are rounded as there."""

    def __init__(self, gemm: BlockedGemm, heads: int, spare: Spare) -> None:
        """gemm: that `takes` them. spare: of all layers."""
        assert self.takes(gemm.outputs, heads) and gemm.shared
        self._gemm, self._heads, self._spare, self._outputs = gemm, heads, spare, gemm.outputs // heads

    @staticmethod
    def takes(outputs: int, heads: int) -> bool:
        """outputs: of all heads."""
        return outputs % (heads * _UNIT) == 0

    @property
    def weight(self) -> Tensor:
        return self._gemm.dense()

    def __call__(self, x: Tensor) -> Tensor:
        (rows, heads, inputs), gemm = x.shape, self._gemm
        assert (heads, inputs) == (self._heads, gemm.inputs) and x.dtype == gemm.dtype and x.stride(2) == 1
        out = x.new_empty(rows, heads, self._outputs)
        with self._spare.of(heads * min(rows, _SLICE) * gemm.rounded) as spare:
            for to, some in zip(out.split(_SLICE), x.split(_SLICE), strict=True):
                gemm.raw.head_blocks(
                    to, some, gemm.parts, len(some), heads, inputs, self._outputs, x.stride(0), x.stride(1),
                    x.dtype == torch.bfloat16, spare, gemm.workers.address,
                )  # fmt: skip
        return out
