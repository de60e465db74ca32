"""Rotary embedding in C."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwing.ops.cpu.extension import DTYPES
from draftwing.ops.cpu.runtime import InC
from draftwing.ops.rope.spec import RopeOps


class CpuRopeOps(InC, RopeOps):
    """Takes real tensors in float32 or bfloat16, all of one dtype; others go to torch."""

    def concat_rope(self, plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float = 1.0) -> Tensor:
        if plain.dtype not in DTYPES or type(plain) is not Tensor:
            return super().concat_rope(plain, turned, cos, sin, factor)
        (rows, heads, same), dim = plain.shape, turned.shape[2]
        assert turned.shape[:2] == (rows, heads) and all(part.dtype == plain.dtype for part in (turned, cos, sin))
        assert all(part.stride(2) == 1 for part in (plain, turned, cos, sin)) and cos.stride(0) == sin.stride(0)
        out = plain.new_empty(rows, heads, same + dim)
        self.raw.concat_rope(
            out, plain, turned, cos, sin, rows, heads, same, dim, *plain.stride()[:2], *turned.stride()[:2],
            cos.stride(0), plain.dtype == torch.bfloat16, self.workers.address, factor,
        )  # fmt: skip
        return out
