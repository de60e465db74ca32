"""Triton kernels for what a layer does besides GEMMs, attention and norms; one row per program, float32 inside.

A row's bits depend on that row only: how a sum is split follows from the row's size, never from the number of rows
(nor from where a row lies, as long as rows begin at multiples of 16 bytes).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.elementwise.spec import ElementwiseOps
from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.fp8.triton import Out, empty_rows, parts_of, store_fp8
from draftwing.ops.triton.common import launch_options, softplus, start

_SHORT = 1024  # elements of a program for rows shorter than that, and of a chunk where a row can be cut


@triton.jit
def gated(gate, up, GELU: tl.constexpr = False):
    """silu(gate) * up of one type, or gelu(gate) by tanh, in float32; what `up` is multiplied with is rounded to it"""
    wide = gate.to(tl.float32)
    power = -wide
    if GELU:  # x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)), y = sqrt(2 / pi) * (x + 0.044715 x^3)
        power = wide * (-1.5957691216 - 0.0713548163 * wide * wide)
    return (wide / (1.0 + tl.exp(power))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)


@triton.jit
def _silu_mul_kernel(
    out,
    x,
    x_stride,
    GELU: tl.constexpr,
    FFN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < FFN
    start(PDL)
    gate = tl.load(x + row * x_stride + col, mask=mask, other=0.0)
    up = tl.load(x + row * x_stride + FFN + col, mask=mask, other=0.0)
    tl.store(out + row * FFN + col, gated(gate, up, GELU).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _relu_squared_kernel(out, x, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start(PDL)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    value = tl.where(value < 0, 0.0, value)
    tl.store(out + at, (value * value).to(out.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=["padded"])
def _gate_kernel(
    out, codes, scales, padded, gate, x, gate_stride, x_stride, SIZE: tl.constexpr, ONE: tl.constexpr,
    SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    start(PDL)
    by = tl.load(gate + row * gate_stride + (col * 0 if ONE else col), mask=mask, other=0.0)
    value = tl.load(x + row * x_stride + col, mask=mask, other=0.0)
    wide = by.to(tl.float32)
    by = (softplus(wide) if SOFTPLUS else 1.0 / (1.0 + tl.exp(-wide))).to(by.dtype).to(tl.float32)
    result = (by * value.to(tl.float32)).to(x.dtype.element_ty)
    if codes is None:
        tl.store(out + row * SIZE + col, result, mask=mask)
    else:
        GROUPS: tl.constexpr = BLOCK // 128
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        groups = tl.reshape(result.to(tl.float32), [GROUPS, 128])
        store_fp8(codes, scales, groups, row + 0 * group, group, group < SIZE // 128, padded)


@triton.jit
def _block_conv_kernel(
    out, x, factors, base, residual, SIDE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, TAPS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    start(PDL)
    if residual is None:
        total = tl.zeros([BLOCK], tl.float32)
    else:
        total = tl.load(residual + row * SIZE + col, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        number = SIDE * TAPS + tap
        factor = tl.load(base + number * SIZE + col, mask=mask, other=0.0).to(tl.float32)
        group = (row * 2 * TAPS + number) * GROUPS + col // (SIZE // GROUPS)
        factor += tl.load(factors + group, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + (row - tap) * SIZE + col, mask=mask & (row % ROWS >= tap), other=0.0).to(tl.float32)
        total += factor * value
    tl.store(out + row * SIZE + col, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _soft_cap_kernel(out, x, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start(PDL)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    # tanh(y) = 1 - 2 / (1 + exp(2y))
    value = cap - 2.0 * cap / (1.0 + tl.exp(value * (2.0 / cap)))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=["part_stride"])
def _sum_parts_kernel(
    out, parts, part_stride, bias, residual, residual_stride,
    SIZE: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    start(PDL)
    source = parts + row * SIZE + col
    total = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(PARTS - 1):
        source += part_stride
        total += tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + row * residual_stride + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + col, total.to(out.dtype.element_ty), mask=mask)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [M, 2 * ffn] -> gelu(gate) * up, [M, ffn], by tanh; gelu(gate) is rounded before it is multiplied"""
    return silu_mul(gate_up, gelu=True)


def silu_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """gate_up [M, 2 * ffn] -> silu(gate) * up, [M, ffn]; silu(gate) is rounded before it is multiplied, as in torch"""
    rows, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(rows, ffn, dtype=gate_up.dtype, device=gate_up.device)
    if rows == 0:
        return out
    _silu_mul_kernel[(rows, triton.cdiv(ffn, _SHORT))](
        out, gate_up, gate_up.stride(0), GELU=gelu, FFN=ffn, BLOCK=_SHORT, num_warps=4, **launch_options(gate_up.device)
    )
    return out


def relu_squared(x: Tensor) -> Tensor:
    """x of any shape -> relu(x)², rounded once"""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        grid = (triton.cdiv(out.numel(), _SHORT),)
        _relu_squared_kernel[grid](out, x, x.numel(), BLOCK=_SHORT, num_warps=4, **launch_options(x.device))
    return out


def gate(gate: Tensor, x: Tensor, softplus: bool = False) -> Tensor:
    """gate [M, n] or [M, 1], x [M, n], rows may be apart -> sigmoid(gate) * x, or softplus(gate) * x; the first factor
    is rounded before, as in torch"""
    return _gate(torch.empty(x.shape, dtype=x.dtype, device=x.device), gate, x, softplus)


def gate_fp8(gate: Tensor, x: Tensor, softplus: bool = False) -> Fp8Rows:
    """gate, x [M, n], n a multiple of 128 -> `gate` of them, for products with activations in fp8"""
    return _gate(empty_rows(x.shape, x.device), gate, x, softplus)


def _gate(out: Out, gate: Tensor, x: Tensor, soft: bool) -> Out:
    rows, size = x.shape
    one = gate.shape != x.shape
    assert gate.shape == (rows, 1 if one else size) and x.stride(1) == 1 and (one or gate.stride(1) == 1)
    if rows == 0:
        return out
    block = min(triton.next_power_of_2(size), _SHORT)
    _gate_kernel[(rows, triton.cdiv(size, block))](
        *parts_of(out), gate, x, gate.stride(0), x.stride(0), SIZE=size, ONE=one, SOFTPLUS=soft, BLOCK=block,
        num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """x of any shape -> cap * tanh(x / cap), in float32 and rounded once"""
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    _soft_cap_kernel[(triton.cdiv(out.numel(), _SHORT),)](
        out, x, x.numel(), cap, BLOCK=_SHORT, num_warps=4, **launch_options(x.device)
    )
    return out


def block_conv(
    x: Tensor, factors: Tensor, base: Tensor, side: int, rows: int, residual: Tensor | None = None
) -> Tensor:
    """See `ElementwiseOps.block_conv`."""
    x, factors, residual = x.contiguous(), factors.contiguous(), None if residual is None else residual.contiguous()
    (_, taps, size), out = base.shape, torch.empty_like(x)
    assert base.is_contiguous() and len(x) % rows == 0 and (residual is None or residual.shape == x.shape)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(size), _SHORT)
    _block_conv_kernel[(len(x), triton.cdiv(size, block))](
        out, x, factors, base, residual, SIDE=side, ROWS=rows, SIZE=size, TAPS=taps,
        GROUPS=factors.shape[1] // (2 * taps), BLOCK=block, num_warps=4, **launch_options(x.device),
    )  # fmt: skip
    return out


def sum_parts(parts: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """parts [P, M, n] + bias [n] + residual [M, n] -> [M, n], in this order in float32, rounded once"""
    count, rows, size = parts.shape
    out = torch.empty(rows, size, dtype=parts.dtype, device=parts.device)
    if out.numel() == 0:
        return out
    assert parts.is_contiguous() and (residual is None or residual.stride(1) == 1)
    block = min(triton.next_power_of_2(size), _SHORT)
    _sum_parts_kernel[(rows, triton.cdiv(size, block))](
        out, parts, parts.stride(0), bias, residual, 0 if residual is None else residual.stride(0), SIZE=size,
        PARTS=count, BIAS=bias is not None, RESIDUAL=residual is not None, BLOCK=block, num_warps=4,
        **launch_options(parts.device),
    )  # fmt: skip
    return out


class TritonElementwiseOps(ElementwiseOps):
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    relu_squared = staticmethod(relu_squared)
    soft_cap = staticmethod(soft_cap)
    gate = staticmethod(gate)
    gate_fp8 = staticmethod(gate_fp8)
    sum_parts = staticmethod(sum_parts)
    block_conv = staticmethod(block_conv)
