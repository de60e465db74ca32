"""Norms, gated activations and rotary embeddings of training in Triton, forwards and backwards; one row per turn,
float32 inside.

A norm is y = x r w with r = 1 / sqrt(mean(x^2) + eps); of a gradient g it makes r (g w - x r^2 mean(g w x)), and g x r
for w. Of silu(a) b with s = 1 / (1 + exp(-a)) the gradients are g b s (1 + a (1 - s)) and g a s. The references are
`NormOps.rms_norm` and `ElementwiseOps.silu_mul`.

Of a rotary embedding, with x = (a, b) in halves, y = (a c + b s, b c' + a s'), c, c' and s, s' being halves of the
tables' rows. So the gradient is the same with s and s' exchanged: (ga c + gb s', gb c' + ga s). It is taken with the
norms of queries' and keys' heads where they have any. The reference is `ops.rope.spec.rotate` behind
`NormOps.rms_norm`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention.batch import HeadNorms
from draftwing.ops.elementwise import triton as layers
from draftwing.ops.elementwise.spec import ElementwiseOps
from draftwing.ops.experts.spec import ExpertOps
from draftwing.ops.norms import triton as norms
from draftwing.ops.norms.spec import NormOps
from draftwing.ops.table import TorchOps
from draftwing.ops.triton.common import launch_options, start

_PROGRAMS = 1024  # at most, where each leaves a sum over its rows
_BLOCK = 1024  # columns of a program


@triton.jit(do_not_specialize=["rows"])
def _norm_back_kernel(
    out, sums, grad, x, weight, rows, grad_stride, x_stride,
    SIZE: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program takes every so many-th row; sums [programs, SIZE]: the gradient of the weight."""
    col = tl.arange(0, BLOCK)
    here = col < SIZE
    w = tl.load(weight + col, mask=here, other=0.0).to(tl.float32)
    start(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    nought = tl.program_id(0).to(tl.int64) * 0  # makes the rows' numbers as wide as their offsets
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = nought + number
        a = tl.load(x + row * x_stride + col, mask=here, other=0.0).to(tl.float32)
        g = tl.load(grad + row * grad_stride + col, mask=here, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(a * a, 0) / SIZE + EPS)
        total += g * a * r
        g = g * w
        inner = tl.sum(g * a, 0) / SIZE * r * r
        tl.store(out + row * SIZE + col, (r * (g - a * inner)).to(out.dtype.element_ty), mask=here)
    tl.store(sums + tl.program_id(0) * SIZE + col, total, mask=here)


@triton.jit
def _silu_back_kernel(out, grad, x, x_stride, grad_stride, FFN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, blocks of columns)"""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = col < FFN
    start(PDL)
    a = tl.load(x + row * x_stride + col, mask=here, other=0.0).to(tl.float32)
    b = tl.load(x + row * x_stride + FFN + col, mask=here, other=0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + col, mask=here, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-a))
    dtype = out.dtype.element_ty
    tl.store(out + row * (2 * FFN) + col, (g * b * s * (1.0 + a * (1.0 - s))).to(dtype), mask=here)
    tl.store(out + row * (2 * FFN) + FFN + col, (g * a * s).to(dtype), mask=here)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return norms.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (rows, size), grad = x.shape, grads[0]
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        programs = max(1, min(_PROGRAMS, rows))
        sums = torch.empty(programs, size, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(size)
        _norm_back_kernel[(programs,)](
            out, sums, grad, x, weight, rows, grad.stride(0), x.stride(0), SIZE=size, EPS=ctx.eps, BLOCK=block,
            num_warps=min(16, max(4, block // 512)), **launch_options(x.device),
        )  # fmt: skip
        return out, sums.sum(0).to(weight.dtype), None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return layers.silu_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,), grad = ctx.saved_tensors, grads[0]
        rows, ffn = grad.shape
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        if rows:
            _silu_back_kernel[(rows, triton.cdiv(ffn, _BLOCK))](
                out, grad, gate_up, gate_up.stride(0), grad.stride(0), FFN=ffn, BLOCK=_BLOCK, num_warps=4,
                **launch_options(grad.device),
            )  # fmt: skip
        return out


class TrainingNormOps(NormOps):
    """Overrides what there is a kernel for; differentiable as that is."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1 or not len(x) or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        out: Tensor = _Norm.apply(x, weight, eps)
        return out


class TrainingElementwiseOps(ElementwiseOps):
    """Overrides what there is a kernel for; differentiable as that is."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.stride(1) != 1:
            return super().silu_mul(gate_up)
        out: Tensor = _SiluMul.apply(gate_up)
        return out


def training_ops() -> TorchOps:
    """Returns operations that are differentiable, by kernels where there are some."""
    norms = TrainingNormOps()
    return TorchOps(norms=norms, elementwise=TrainingElementwiseOps(), experts=ExpertOps(norms))


_TURN_PROGRAMS = 2048  # at most, where each leaves sums over its rows


@triton.jit
def _weights(q_norm, k_norm, is_q, half, ok):
    """[heads, half]"""
    w_q = tl.load(q_norm + half, mask=ok, other=0.0).to(tl.float32)
    w_k = tl.load(k_norm + half, mask=ok, other=0.0).to(tl.float32)
    return tl.where(is_q, w_q, w_k)


@triton.jit
def _turns(cos, sin, at, HALF: tl.constexpr, ok):
    """Returns both halves of a row of each table, [1, half]."""
    c_low = tl.load(cos + at, mask=ok, other=0.0).to(tl.float32)
    c_high = tl.load(cos + at + HALF, mask=ok, other=0.0).to(tl.float32)
    s_low = tl.load(sin + at, mask=ok, other=0.0).to(tl.float32)
    s_high = tl.load(sin + at + HALF, mask=ok, other=0.0).to(tl.float32)
    return c_low, c_high, s_low, s_high


@triton.jit
def _turn_kernel(
    out, x, cos, sin, q_norm, k_norm, x_stride, turn_stride, eps,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, TURNED: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr,
    HALF_PAD: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Runs one program a row; the heads after the first TURNED are copied, those after QUERIES are keys."""
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
    c_low, c_high, s_low, s_high = _turns(cos, sin, turn, HALF, ok)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        r = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        a = a * r * _weights(q_norm, k_norm, head < QUERIES, half, ok)
        b = b * r * _weights(q_norm + HALF, k_norm + HALF, head < QUERIES, half, ok)
    turned = head < TURNED
    one = tl.where(turned, (a * c_low + b * s_low).to(low.dtype), low)
    two = tl.where(turned, (b * c_high + a * s_high).to(low.dtype), high)
    tl.store(out + m * (HEADS * DIM) + at, one, mask=here)
    tl.store(out + m * (HEADS * DIM) + at + HALF, two, mask=here)


@triton.jit(do_not_specialize=["rows"])
def _back_kernel(
    out, sums, grad, x, cos, sin, q_norm, k_norm, rows, x_stride, turn_stride, eps,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, TURNED: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr,
    HALF_PAD: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program takes every so many-th row; sums [programs, 2, DIM]: the gradients of both norms' weights."""
    start(PDL)
    head = tl.arange(0, HEADS_PAD)[:, None]
    half = tl.arange(0, HALF_PAD)[None, :]
    HALF: tl.constexpr = DIM // 2
    ok = half < HALF
    here = (head < HEADS) & ok
    at = head * DIM + half
    turned, is_q = head < TURNED, head < QUERIES
    if NORM:
        w_low = _weights(q_norm, k_norm, is_q, half, ok)
        w_high = _weights(q_norm + HALF, k_norm + HALF, is_q, half, ok)
        by_low = tl.zeros([HEADS_PAD, HALF_PAD], tl.float32)
        by_high = tl.zeros([HEADS_PAD, HALF_PAD], tl.float32)
    nought = tl.program_id(0).to(tl.int64) * 0  # makes the rows' numbers as wide as their offsets
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        m = nought + number
        g_low = tl.load(grad + m * (HEADS * DIM) + at, mask=here, other=0.0)
        g_high = tl.load(grad + m * (HEADS * DIM) + at + HALF, mask=here, other=0.0)
        turn = m * turn_stride + half
        c_low, c_high, s_low, s_high = _turns(cos, sin, turn, HALF, ok)
        ga, gb = g_low.to(tl.float32), g_high.to(tl.float32)
        one, two = ga * c_low + gb * s_high, gb * c_high + ga * s_low
        if NORM:
            a = tl.load(x + m * x_stride + at, mask=here, other=0.0).to(tl.float32)
            b = tl.load(x + m * x_stride + at + HALF, mask=here, other=0.0).to(tl.float32)
            r = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            by_low += tl.where(turned, one * a * r, 0.0)
            by_high += tl.where(turned, two * b * r, 0.0)
            one, two = one * w_low, two * w_high
            inner = ((tl.sum(one * a, 1) + tl.sum(two * b, 1)) / DIM)[:, None] * r * r
            one, two = r * (one - a * inner), r * (two - b * inner)
        one = tl.where(turned, one.to(g_low.dtype), g_low)
        two = tl.where(turned, two.to(g_low.dtype), g_high)
        tl.store(out + m * (HEADS * DIM) + at, one, mask=here)
        tl.store(out + m * (HEADS * DIM) + at + HALF, two, mask=here)
    if NORM:
        place = sums + tl.program_id(0) * (2 * DIM) + tl.arange(0, HALF_PAD)
        fits = tl.arange(0, HALF_PAD) < HALF
        tl.store(place, tl.sum(tl.where(is_q, by_low, 0.0), 0), mask=fits)
        tl.store(place + HALF, tl.sum(tl.where(is_q, by_high, 0.0), 0), mask=fits)
        tl.store(place + DIM, tl.sum(tl.where(is_q, 0.0, by_low), 0), mask=fits)
        tl.store(place + DIM + HALF, tl.sum(tl.where(is_q, 0.0, by_high), 0), mask=fits)


def _sizes(x: Tensor, queries: int, turned: int, norm: bool) -> dict[str, Any]:
    _, heads, dim = x.shape
    padded = {"HEADS_PAD": triton.next_power_of_2(heads), "HALF_PAD": triton.next_power_of_2(dim // 2)}
    sizes = {"QUERIES": queries, "HEADS": heads, "TURNED": turned, "DIM": dim, **padded}
    return {**sizes, "NORM": norm, "num_warps": 4, **launch_options(x.device)}


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, sizes: dict[str, Any], eps: float, *norms: Tensor
    ) -> Tensor:
        rows, dim = len(x), x.shape[2]
        assert x.stride(2) == cos.stride(2) == sin.stride(2) == 1 and x.stride(1) == dim
        assert cos.shape == sin.shape == (rows, 1, dim) and dim % 2 == 0 and cos.stride(0) == sin.stride(0)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        weights = norms or (x, x)  # not looked at
        _turn_kernel[(rows,)](out, x, cos, sin, *weights, x.stride(0), cos.stride(0), eps, **sizes)
        ctx.save_for_backward(cos, sin, *((x, *norms) if norms else ()))
        ctx.sizes, ctx.eps = sizes, eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *saved = ctx.saved_tensors
        grad = grads[0].contiguous()
        rows, _, dim = grad.shape
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        x, *weights = saved or (grad, grad, grad)  # not looked at
        programs = max(1, min(_TURN_PROGRAMS, rows))
        sums = torch.empty(programs if saved else 0, 2, dim, dtype=torch.float32, device=grad.device)
        _back_kernel[(programs,)](
            out, sums, grad, x, cos, sin, *weights, rows, x.stride(0), cos.stride(0), ctx.eps, **ctx.sizes
        )
        if not saved:
            return out, None, None, None, None
        to_q, to_k = (total.to(weight.dtype) for total, weight in zip(sums.sum(0), weights, strict=True))
        return out, None, None, None, None, to_q, to_k


def turn(x: Tensor, cos: Tensor, sin: Tensor, turned: int, queries: int = 0, norms: HeadNorms | None = None) -> Tensor:
    """x [M, heads, head_dim] in float32 or half precision, cos, sin [M, 1, head_dim] of a `rope_table`
    -> the same in x's dtype, contiguous, its first `turned` heads turned. Differentiable by x and the norms' weights.

    norms: of those heads before that, of which the first `queries` are queries and the others keys.
    """
    assert norms is None or not norms.after
    sizes = _sizes(x, queries, turned, norms is not None)
    out: Tensor = _Turn.apply(x, cos, sin, sizes, *((0.0,) if norms is None else (norms.eps, norms.q, norms.k)))
    return out
