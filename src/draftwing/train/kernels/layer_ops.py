"""Norms and gated activations of training in Triton, forwards and backwards; one row per turn, float32 inside.

A norm is y = x r w with r = 1 / sqrt(mean(x^2) + eps); of a gradient g it makes r (g w - x r^2 mean(g w x)), and g x r
for w. Of silu(a) b with s = 1 / (1 + exp(-a)) the gradients are g b s (1 + a (1 - s)) and g a s. The references are
`LayerOps.rms_norm` and `LayerOps.silu_mul`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.torch.layer_ops import LayerOps
from draftwing.ops.triton import layers, norms
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


class TrainingOps(LayerOps):
    """Overrides of `LayerOps` what there are kernels for; differentiable as that is."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1 or not len(x) or weight.dtype not in (x.dtype, torch.float32):
            return super().rms_norm(x, weight, eps)
        out: Tensor = _Norm.apply(x, weight, eps)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.stride(1) != 1:
            return super().silu_mul(gate_up)
        out: Tensor = _SiluMul.apply(gate_up)
        return out
