"""Rotary embedding of q and k in training, forwards and backwards; the reference is `layers.rope.rotate`.

With x = (a, b) in halves, y = (a c + b s, b c' + a s'), c, c' and s, s' being halves of the tables' rows. So the
gradient is the same with s and s' exchanged: (ga c + gb s', gb c' + ga s).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.triton.common import launch_options, start


@triton.jit
def _turn_kernel(
    out, x, cos, sin, x_stride, turn_stride,
    HEADS: tl.constexpr, TURNED: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    BACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Runs one program a row; the heads after the first TURNED are copied."""
    start(PDL)
    m = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    half = tl.arange(0, HALF_PAD)[None, :]
    HALF: tl.constexpr = DIM // 2
    ok = half < HALF
    here = (head < HEADS) & ok
    at = head * DIM + half
    low = tl.load(x + m * x_stride + at, mask=here, other=0.0)
    high = tl.load(x + m * x_stride + at + HALF, mask=here, other=0.0)
    turn = m * turn_stride + half
    c_low = tl.load(cos + turn, mask=ok, other=0.0).to(tl.float32)
    c_high = tl.load(cos + turn + HALF, mask=ok, other=0.0).to(tl.float32)
    s_low = tl.load(sin + turn + (HALF if BACK else 0), mask=ok, other=0.0).to(tl.float32)
    s_high = tl.load(sin + turn + (0 if BACK else HALF), mask=ok, other=0.0).to(tl.float32)
    a, b = low.to(tl.float32), high.to(tl.float32)
    turned = head < TURNED
    one = tl.where(turned, (a * c_low + b * s_low).to(low.dtype), low)
    two = tl.where(turned, (b * c_high + a * s_high).to(low.dtype), high)
    tl.store(out + m * (HEADS * DIM) + at, one, mask=here)
    tl.store(out + m * (HEADS * DIM) + at + HALF, two, mask=here)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, turned: int, back: bool) -> Tensor:
    rows, heads, dim = x.shape
    assert x.stride(2) == cos.stride(2) == sin.stride(2) == 1 and x.stride(1) == dim and cos.stride(0) == sin.stride(0)
    assert cos.shape == sin.shape == (rows, 1, dim) and dim % 2 == 0
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _turn_kernel[(rows,)](
        out, x, cos, sin, x.stride(0), cos.stride(0), HEADS=heads, TURNED=turned,
        HEADS_PAD=triton.next_power_of_2(heads), DIM=dim, HALF_PAD=triton.next_power_of_2(dim // 2), BACK=back,
        num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turned = turned
        return _launch(x, cos, sin, turned, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _launch(grads[0].contiguous(), cos, sin, ctx.turned, back=True), None, None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    """x [M, heads, head_dim] in float32 or half precision, cos, sin [M, 1, head_dim] of a `rope_table`
    -> the same in x's dtype, contiguous, its first `turned` heads turned. Differentiable by x."""
    out: Tensor = _Turn.apply(x, cos, sin, turned)
    return out
