"""Norms in Triton: of rows, of sums, and of the two halves of what a draft head's first GEMM reads.

As in layers.py, float32 inside, and a row's bits depend on that row only.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.fp8.spec import Fp8Rows
from draftwing.ops.fp8.triton import Out, empty_rows, parts_of, store_rows_fp8
from draftwing.ops.norms.spec import NormOps
from draftwing.ops.triton.common import launch_options, rounded_product, start

_SHORT = 1024  # elements of a program for rows shorter than that


@triton.jit
def normed(x, weight, SIZE: tl.constexpr, EPS: tl.constexpr):
    """x, weight [ROWS, BLOCK] float32, zero past SIZE -> the same, normed; rounded once when it is stored, as
    torch's own kernel does."""
    mean = tl.sum(x * x, 1) / SIZE
    return x * tl.rsqrt(mean + EPS)[:, None] * weight


@triton.jit(do_not_specialize=["rows", "padded"])
def _rms_norm_kernel(
    out,
    codes,
    scales,
    padded,
    x,
    weight,
    rows,
    x_outer,
    x_inner,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < SIZE)[None, :]
    w = tl.load(weight + col, mask=col < SIZE, other=0.0).to(tl.float32)  # no kernel writes weights
    start(PDL)
    row64 = row.to(tl.int64)
    source = (row64 // INNER) * x_outer + (row64 % INNER) * x_inner
    value = tl.load(x + source[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    result = normed(value, w[None, :], SIZE, EPS).to(out.dtype.element_ty)
    tl.store(out + row64[:, None] * SIZE + col[None, :], result, mask=mask)
    if codes is not None:
        store_rows_fp8(codes, scales, result.to(tl.float32), tl.program_id(0) * ROWS, rows, padded, SIZE, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows", "padded"])
def _add_rms_norm_kernel(
    total,
    out,
    codes,
    scales,
    padded,
    x,
    delta,
    weight,
    rows,
    x_stride,
    delta_stride,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < SIZE)[None, :]
    w = tl.load(weight + col, mask=col < SIZE, other=0.0).to(tl.float32)
    start(PDL)
    row64 = row.to(tl.int64)[:, None]
    a = tl.load(x + row64 * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(delta + row64 * delta_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if SCALE != 1:
        b = rounded_product(b, SCALE).to(delta.dtype.element_ty).to(tl.float32)
    stream = (a + b).to(total.dtype.element_ty)
    tl.store(total + row64 * SIZE + col[None, :], stream, mask=mask)
    result = normed(stream.to(tl.float32), w[None, :], SIZE, EPS).to(out.dtype.element_ty)
    tl.store(out + row64 * SIZE + col[None, :], result, mask=mask)
    if codes is not None:
        store_rows_fp8(codes, scales, result.to(tl.float32), tl.program_id(0) * ROWS, rows, padded, SIZE, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _fuse_kernel(
    out,
    ids,
    table,
    feature,
    feature_stride,
    token_weight,
    feature_weight,
    positions,
    rows,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLANK_FIRST: tl.constexpr,
    TOKEN_AT: tl.constexpr,
    FEATURE_AT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tiles are those of `_rms_norm_kernel`: how threads share a tile decides the order of a row's sum. Of rows that
    begin at no multiples of 16 bytes they may share it otherwise."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    there = row < rows
    mask = there[:, None] & (col < SIZE)[None, :]
    row64 = row.to(tl.int64)
    target = out + row64[:, None] * (2 * SIZE) + col[None, :]
    dtype = out.dtype.element_ty
    if tl.program_id(1) == 0:
        if NORM:
            w = tl.load(token_weight + col, mask=col < SIZE, other=0.0).to(tl.float32)
        start(PDL)
        token = tl.load(ids + row64, mask=there, other=0).to(tl.int64)
        x = tl.load(table + token[:, None] * SIZE + col[None, :], mask=mask, other=0.0).to(tl.float32)
        if BLANK_FIRST:
            first = tl.load(positions + row64, mask=there, other=0) == 0
            x = tl.where(first[:, None], 0.0, x)
        if NORM:
            x = normed(x, w[None, :], SIZE, EPS)
        tl.store(target + TOKEN_AT, x.to(dtype), mask=mask)
    else:
        if NORM:
            w = tl.load(feature_weight + col, mask=col < SIZE, other=0.0).to(tl.float32)
        start(PDL)
        x = tl.load(feature + row64[:, None] * feature_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            x = normed(x, w[None, :], SIZE, EPS)
        tl.store(target + FEATURE_AT, x.to(dtype), mask=mask)


def row_blocks(size: int) -> tuple[int, int, int]:
    """(rows per program, padded size of a row, warps), by the size of a row alone."""
    block = triton.next_power_of_2(size)
    rows = max(1, _SHORT // block)
    return rows, block, min(16, max(4, rows * block // 512))


def warps_of_row(size: int, itemsize: int) -> int:
    """Returns warps of a program of one row whose norm is to have `rms_norm`'s bits: as many as a row has there, whose
    threads take 16 bytes at a time. Shorter rows than a warp takes may have others."""
    rows, block, warps = row_blocks(size)
    return warps if rows == 1 else min(max(block * itemsize // 512, 1), warps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] of any strides but for the last, at most three axes; weight [size] -> [..., size]

    As F.rms_norm does it on CUDA, which rounds once, after the weight."""
    return _rms_norm(_like(x), x, weight, eps)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """x [M, size], size a multiple of 128 -> its norm, and what products with activations in fp8 read of it."""
    return _rms_norm(empty_rows(x.shape, x.device, _like(x)), x, weight, eps)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _rms_norm(out: Out, x: Tensor, weight: Tensor, eps: float) -> Out:
    size = weight.shape[0]
    assert x.dim() in (2, 3) and x.shape[-1] == size and x.stride(-1) == 1
    assert weight.dtype in (x.dtype, torch.float32)
    inner, x_inner = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    rows = x.shape[0] * inner
    if rows == 0:
        return out
    per_program, block, warps = row_blocks(size)
    _rms_norm_kernel[(triton.cdiv(rows, per_program),)](
        *parts_of(out), x, weight, rows, x.stride(0), x_inner, INNER=inner, SIZE=size, EPS=eps, ROWS=per_program,
        BLOCK=block, num_warps=warps, **launch_options(x.device),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """x, delta [M, size], weight [size] -> x + scale * delta [M, size], rounded to their dtype, as the product is, and
    its norm [M, size]."""
    return _add_rms_norm(_like(x), x, delta, weight, eps, scale)


def add_rms_norm_fp8(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
    """Returns x + delta, and its norm as `rms_norm_fp8` does."""
    return _add_rms_norm(empty_rows(x.shape, x.device, _like(x)), x, delta, weight, eps)


def _add_rms_norm(
    out: Out, x: Tensor, delta: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Out]:
    # Sizes of weights are constants to torch.compile, those of x are not, and a kernel's tiles must be.
    rows, size = x.shape[0], weight.shape[0]
    assert delta.shape == x.shape and x.shape[1] == size and x.dtype == delta.dtype
    assert x.stride(1) == delta.stride(1) == 1 and weight.dtype in (x.dtype, torch.float32)
    total = _like(x)
    if rows == 0:
        return total, out
    per_program, block, warps = row_blocks(size)
    _add_rms_norm_kernel[(triton.cdiv(rows, per_program),)](
        total, *parts_of(out), x, delta, weight, rows, x.stride(0), delta.stride(0),
        SIZE=size, EPS=eps, SCALE=scale, ROWS=per_program, BLOCK=block, num_warps=warps, **launch_options(x.device),
    )  # fmt: skip
    return total, out


def fuse_inputs(
    ids: Tensor | None,
    table: Tensor,
    feature: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    positions: Tensor | None = None,
    feature_first: bool = False,
) -> Tensor:
    """Returns what a draft head's first GEMM reads: the embedding of a token next to a feature, each perhaps normed.

    ids [M] int64, table [vocab, size], feature [M, size], norms: weights [size] of the embedding's norm and of the
    feature's -> [M, 2 * size]. positions [M]: where it is 0 the embedding counts as zero. ids None: row i of the table
    is the embedding of row i.
    """
    rows, size = feature.shape[0], table.shape[1] if norms is None else norms[0].shape[0]
    if ids is None:
        ids = torch.arange(rows, device=table.device)
    assert ids.shape == (rows,) and feature.shape == (rows, size) and feature.stride(1) == 1 and table.is_contiguous()
    assert table.dtype == feature.dtype
    out = torch.empty(rows, 2 * size, dtype=feature.dtype, device=feature.device)
    if rows == 0:
        return out
    # No tensor twice, which torch's compiler does not take.
    token_weight, feature_weight = norms or (None, None)
    per_program, block, warps = row_blocks(size)
    _fuse_kernel[(triton.cdiv(rows, per_program), 2)](
        out, ids, table, feature, feature.stride(0), token_weight, feature_weight, positions, rows,
        SIZE=size, EPS=eps, NORM=norms is not None, BLANK_FIRST=positions is not None,
        TOKEN_AT=size if feature_first else 0, FEATURE_AT=0 if feature_first else size,
        ROWS=per_program, BLOCK=block, num_warps=warps, **launch_options(feature.device),
    )  # fmt: skip
    return out


class TritonNormOps(NormOps):
    norm_adds_residual = True
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rms_norm_fp8 = staticmethod(rms_norm_fp8)
    add_rms_norm_fp8 = staticmethod(add_rms_norm_fp8)
    fuse_inputs = staticmethod(fuse_inputs)
