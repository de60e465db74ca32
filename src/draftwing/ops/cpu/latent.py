"""Each head's product with a matrix of its own, in one call: ops/cpu/csrc/latent.c."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.cpu.workers import Workers

_PANEL = 64  # outputs that lie together, as in latent.c


class HeadGemm:
    """`HeadProducts` of weights in float32 or bfloat16, which are copied: [heads, panels, inputs, outputs of a panel]."""

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
            out.data_ptr(), x.data_ptr(), self.packed.data_ptr(), rows, heads, inputs, self.outputs, x.stride(0),
            x.stride(1), x.dtype == torch.bfloat16, self.workers.address,
        )  # fmt: skip
        return out
