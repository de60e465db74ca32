"""Columns in the order in which instructions take them, for products whose weights come from registers."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.triton.common import launch_options, start

_BLOCK = 128  # times `spread` columns of a program


@triton.jit(do_not_specialize=["count"])
def _order_kernel(out, x, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [count, 4, PARTS] int32 -> [count, PARTS, 4]"""
    start(PDL)
    SIZE: tl.constexpr = 4 * PARTS
    row, word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
    at, there = row.to(tl.int64)[:, None] * SIZE + word[None, :], (row < count)[:, None]
    parts = tl.reshape(tl.load(x + at, mask=there, other=0), [BLOCK, 4, PARTS])
    tl.store(out + at, tl.reshape(tl.permute(parts, (0, 2, 1)), [BLOCK, SIZE]), mask=there)


def in_order(x: Tensor, spread: int) -> Tensor:
    """x [R, K] in 16 bits, K a multiple of `spread`, a multiple of 16 -> the same: of `spread` columns, words of two of
    which each of four lanes has as many side by side, word i of lane t is word 4 i + t."""
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = x.numel() // spread
    if count:
        _order_kernel[(triton.cdiv(count, _BLOCK),)](
            out.view(torch.int32), x.view(torch.int32), count, PARTS=spread // 8, BLOCK=_BLOCK, num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
    return out
