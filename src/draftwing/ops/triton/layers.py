"""Triton kernels for what a layer does besides GEMMs and attention; one row per program, float32 inside.

A row's bits depend on that row only: how a sum is split follows from the row's size, never from the number of rows
(nor from where a row lies, as long as rows begin at multiples of 16 bytes).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.fp8_blocks import Fp8Rows
from draftwing.ops.triton.common import launch_options, let_next_come, start, wait
from draftwing.ops.triton.fp8 import empty_rows, parts_of, store_fp8, store_rows_fp8

_SHORT = 1024  # elements of a program for rows shorter than that, and of a chunk where a row can be cut


@triton.jit
def _normed(x, weight, SIZE: tl.constexpr, EPS: tl.constexpr):
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
    result = _normed(value, w[None, :], SIZE, EPS).to(out.dtype.element_ty)
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
    stream = (a + b).to(total.dtype.element_ty)
    tl.store(total + row64 * SIZE + col[None, :], stream, mask=mask)
    result = _normed(stream.to(tl.float32), w[None, :], SIZE, EPS).to(out.dtype.element_ty)
    tl.store(out + row64 * SIZE + col[None, :], result, mask=mask)
    if codes is not None:
        store_rows_fp8(codes, scales, result.to(tl.float32), tl.program_id(0) * ROWS, rows, padded, SIZE, ROWS, BLOCK)


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
    gate = tl.load(x + row * x_stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + FFN + col, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    power = -gate
    if GELU:  # x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)), y = sqrt(2 / pi) * (x + 0.044715 x^3)
        power = gate * (-1.5957691216 - 0.0713548163 * gate * gate)
    gate = (gate / (1.0 + tl.exp(power))).to(dtype).to(tl.float32)
    tl.store(out + row * FFN + col, (gate * up).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["padded"])
def _gate_kernel(
    out, codes, scales, padded, gate, x, gate_stride, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    start(PDL)
    by = tl.load(gate + row * gate_stride + col, mask=mask, other=0.0)
    value = tl.load(x + row * x_stride + col, mask=mask, other=0.0)
    by = (1.0 / (1.0 + tl.exp(-by.to(tl.float32)))).to(by.dtype).to(tl.float32)
    result = (by * value.to(tl.float32)).to(x.dtype.element_ty)
    if codes is None:
        tl.store(out + row * SIZE + col, result, mask=mask)
    else:
        GROUPS: tl.constexpr = BLOCK // 128
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        groups = tl.reshape(result.to(tl.float32), [GROUPS, 128])
        store_fp8(codes, scales, groups, row + 0 * group, group, group < SIZE // 128, padded)


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
    """Tiles are those of `_rms_norm_kernel`: how threads share a tile decides the order of a row's sum."""
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
            x = _normed(x, w[None, :], SIZE, EPS)
        tl.store(target + TOKEN_AT, x.to(dtype), mask=mask)
    else:
        if NORM:
            w = tl.load(feature_weight + col, mask=col < SIZE, other=0.0).to(tl.float32)
        start(PDL)
        x = tl.load(feature + row64[:, None] * feature_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            x = _normed(x, w[None, :], SIZE, EPS)
        tl.store(target + FEATURE_AT, x.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["count", "begin", "known"], do_not_specialize_on_alignment=["ids"])
def _chosen_logits_kernel(
    out,
    hidden,
    hidden_stride,
    weight,
    ids,
    count,
    begin,
    known,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (M, count), which is no constant because clients choose it. A sum per column of STEP, then over the columns:
    in an order that follows from SIZE alone. SHARE: the weight has the rows [begin, begin + known) of ids alone. ids:
    None are all rows of the weight."""
    let_next_come(PDL)
    if ids is not None:
        wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = row * count + tl.program_id(1)
    own = tl.program_id(1).to(tl.int64) if ids is None else tl.load(ids + place).to(tl.int64)
    there = True
    if SHARE:
        own -= begin
        there = (own >= 0) & (own < known)
        own = tl.where(there, own, 0)
    source = weight + own * SIZE
    weights = ()
    for first in tl.static_range(0, SIZE, STEP):  # no kernel writes them
        col = first + tl.arange(0, STEP)
        weights = weights + (tl.load(source + col, mask=col < SIZE, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    if ids is None:
        wait(PDL)
    total = tl.zeros([STEP], tl.float32)
    for part in tl.static_range(0, len(weights)):
        col = part * STEP + tl.arange(0, STEP)
        x = tl.load(hidden + row * hidden_stride + col, mask=col < SIZE, other=0.0).to(tl.float32)
        total = tl.fma(weights[part].to(tl.float32), x, total)
    result = tl.sum(total, 0)
    if SHARE:
        result = tl.where(there, result, 0.0)
    tl.store(out + place, result)


@triton.jit(do_not_specialize=["begin", "count"])
def _share_rows_kernel(
    out, source, source_stride, index, begin, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Grid (M, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < SIZE
    start(PDL)
    own = tl.load(index + row).to(tl.int64) - begin
    there = (own >= 0) & (own < count)
    value = tl.load(source + tl.where(there, own, 0) * source_stride + col, mask=mask & there, other=0.0)
    tl.store(out + row * SIZE + col, value, mask=mask)


def _row_blocks(size: int) -> tuple[int, int, int]:
    """(rows per program, padded size of a row, warps), by the size of a row alone."""
    block = triton.next_power_of_2(size)
    rows = max(1, _SHORT // block)
    return rows, block, min(16, max(4, rows * block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size] of any strides but for the last, at most three axes; weight [size] -> [..., size]

    As F.rms_norm does it on CUDA, which rounds once, after the weight."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run_rms_norm(out, None, x, weight, eps)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> Fp8Rows:
    """x [M, size], size a multiple of 128 -> its norm, and what products with activations in fp8 read of it."""
    rows = _room_for(x)
    _run_rms_norm(rows.x, rows, x, weight, eps)
    return rows


def _room_for(x: Tensor) -> Fp8Rows:
    return empty_rows(x.shape[0], x.shape[1], x.device, torch.empty(x.shape, dtype=x.dtype, device=x.device))


def _run_rms_norm(out: Tensor | None, into: Fp8Rows | None, x: Tensor, weight: Tensor, eps: float) -> None:
    size = weight.shape[0]
    assert x.dim() in (2, 3) and x.shape[-1] == size and x.stride(-1) == 1
    assert weight.dtype in (x.dtype, torch.float32)
    inner, x_inner = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    rows = x.shape[0] * inner
    if rows == 0:
        return
    per_program, block, warps = _row_blocks(size)
    _rms_norm_kernel[(triton.cdiv(rows, per_program),)](
        out, *parts_of(into), x, weight, rows, x.stride(0), x_inner, INNER=inner, SIZE=size, EPS=eps, ROWS=per_program,
        BLOCK=block, num_warps=warps, **launch_options(x.device),
    )  # fmt: skip


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [M, size], weight [size] -> x + delta [M, size], rounded to their dtype, and its norm [M, size]."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _run_add_rms_norm(total, out, None, x, delta, weight, eps)
    return total, out


def add_rms_norm_fp8(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
    """Returns x + delta, and its norm as `rms_norm_fp8` does."""
    total, rows = torch.empty(x.shape, dtype=x.dtype, device=x.device), _room_for(x)
    _run_add_rms_norm(total, rows.x, rows, x, delta, weight, eps)
    return total, rows


def _run_add_rms_norm(
    total: Tensor, out: Tensor | None, into: Fp8Rows | None, x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> None:
    # Sizes of weights are constants to torch.compile, those of x are not, and a kernel's tiles must be.
    rows, size = x.shape[0], weight.shape[0]
    assert delta.shape == x.shape and x.shape[1] == size and x.dtype == delta.dtype
    assert x.stride(1) == delta.stride(1) == 1 and weight.dtype in (x.dtype, torch.float32)
    if rows == 0:
        return
    per_program, block, warps = _row_blocks(size)
    _add_rms_norm_kernel[(triton.cdiv(rows, per_program),)](
        total, out, *parts_of(into), x, delta, weight, rows, x.stride(0), delta.stride(0),
        SIZE=size, EPS=eps, ROWS=per_program, BLOCK=block, num_warps=warps, **launch_options(x.device),
    )  # fmt: skip


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


def gate(gate: Tensor, x: Tensor) -> Tensor:
    """gate, x [M, n], rows may be apart -> sigmoid(gate) * x; the sigmoid is rounded before, as in torch"""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run_gate(out, None, gate, x)
    return out


def gate_fp8(gate: Tensor, x: Tensor) -> Fp8Rows:
    """gate, x [M, n], n a multiple of 128 -> `gate` of them, for products with activations in fp8"""
    rows = empty_rows(x.shape[0], x.shape[1], x.device)
    _run_gate(None, rows, gate, x)
    return rows


def _run_gate(out: Tensor | None, into: Fp8Rows | None, gate: Tensor, x: Tensor) -> None:
    rows, size = x.shape
    assert gate.shape == x.shape and gate.stride(1) == x.stride(1) == 1
    if rows == 0:
        return
    block = min(triton.next_power_of_2(size), _SHORT)
    _gate_kernel[(rows, triton.cdiv(size, block))](
        out, *parts_of(into), gate, x, gate.stride(0), x.stride(0), SIZE=size, BLOCK=block, num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip


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
    per_program, block, warps = _row_blocks(size)
    _fuse_kernel[(triton.cdiv(rows, per_program), 2)](
        out, ids, table, feature, feature.stride(0), token_weight, feature_weight, positions, rows,
        SIZE=size, EPS=eps, NORM=norms is not None, BLANK_FIRST=positions is not None,
        TOKEN_AT=size if feature_first else 0, FEATURE_AT=0 if feature_first else size,
        ROWS=per_program, BLOCK=block, num_warps=warps, **launch_options(feature.device),
    )  # fmt: skip
    return out


def share_rows(source: Tensor, index: Tensor, begin: int) -> Tensor:
    """source [R, size], the rows [begin, begin + R) of a whole, index [M] int64 into the whole -> [M, size], 0 where
    the row is not in `source`."""
    (count, size), rows = source.shape, len(index)
    assert index.dim() == 1 and source.stride(1) == 1
    out = torch.empty(rows, size, dtype=source.dtype, device=source.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(size), _SHORT)
    _share_rows_kernel[(rows, triton.cdiv(size, block))](
        out, source, source.stride(0), index.contiguous(), begin, count, SIZE=size, BLOCK=block, num_warps=4,
        **launch_options(source.device),
    )  # fmt: skip
    return out


def chosen_logits(hidden: Tensor, weight: Tensor, ids: Tensor | None, begin: int | None = None) -> Tensor:
    """hidden [M, size], weight [vocab, size], ids [M, K] int64 -> hidden @ weight[ids], [M, K] float32. None: all rows.

    A logit's bits depend on its row of `hidden` and its id alone, and no row of the weight is copied. The weight begins
    at a multiple of 16 bytes, as an allocation does: Triton sums in another order where it does not.

    begin: the weight has the rows from there on of those that ids name; 0 for others. None: all."""
    rows, size = hidden.shape
    count = len(weight) if ids is None else ids.shape[1]
    assert hidden.stride(1) == 1 and weight.is_contiguous() and weight.shape[1] == size
    assert weight.data_ptr() % 16 == 0 and (ids is None or ids.shape[0] == rows)
    out = torch.empty(rows, count, dtype=torch.float32, device=hidden.device)
    if out.numel() == 0:
        return out
    ids = None if ids is None else ids.contiguous()
    _chosen_logits_kernel[(rows, count)](
        out, hidden, hidden.stride(0), weight, ids, count, begin or 0, len(weight), SIZE=size,
        STEP=min(triton.next_power_of_2(size), _SHORT), SHARE=begin is not None, num_warps=4,
        **launch_options(hidden.device),
    )  # fmt: skip
    return out
