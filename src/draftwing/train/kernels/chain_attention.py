"""Triton kernels for the rows of its own chain that a draft sees in training, besides the causal attention.

A query q, whose causal part is (out, lse), sees one row (k_s, v_s) of each step s = 1 .. S. The joint output and
log-sum-exp are those of the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), started from the causal
part. With the probability p_s = exp(q k_s scale - lse) and the slope g_s = p_s (grad v_s - grad out) scale, the
gradients are q: sum_s g_s k_s, k_s: g_s q, v_s: p_s grad, the latter two summed over the heads that share a key. The
reference is in `train.chain_attention`.

B * heads is on the first axis of the grids, which alone takes more than 65,535 blocks: short texts make large batches.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention import FULL
from draftwing.ops.triton.common import launch_options, start

_ELEMENTS = 2048  # of a program's tile: what six of them leave in registers


@triton.jit(do_not_specialize=["length"])
def _join_kernel(
    out, joint, part, lse, q, keys, values, length, step_stride, scale,
    part_b, part_h, part_t, q_b, q_h, q_t,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, STEPS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * HEADS, blocks of ROWS queries); out lies as `part` does, lse and joint are contiguous."""
    start(PDL)
    t = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    h = tl.program_id(0) % HEADS
    d = tl.arange(0, DIM_PAD)
    row = t < length
    here = row[:, None] & (d < DIM)[None, :]
    query = tl.load(q + b * q_b + h * q_h + t[:, None] * q_t + d[None, :], mask=here, other=0.0).to(tl.float32)
    at = b * part_b + h * part_h + t[:, None] * part_t + d[None, :]
    total = tl.load(part + at, mask=here, other=0.0).to(tl.float32)
    sums = (b * HEADS + h) * length + t
    row_max = tl.load(lse + sums, mask=row, other=0.0)
    norm = tl.full([ROWS], 1.0, tl.float32)
    own = ((b * KV_HEADS + h // (HEADS // KV_HEADS)) * length + t[:, None]) * DIM + d[None, :]
    for _ in range(0, STEPS):
        k = tl.load(keys + own, mask=here, other=0.0).to(tl.float32)
        v = tl.load(values + own, mask=here, other=0.0).to(tl.float32)
        score = tl.sum(query * k, 1) * scale
        more = tl.maximum(row_max, score)
        before, prob = tl.exp(row_max - more), tl.exp(score - more)
        total = total * before[:, None] + prob[:, None] * v
        norm = norm * before + prob
        row_max = more
        own += step_stride
    tl.store(out + at, (total / norm[:, None]).to(out.dtype.element_ty), mask=here)
    tl.store(joint + sums, row_max + tl.log(norm), mask=row)


@triton.jit(do_not_specialize=["length", "heads_stride"])
def _slope_kernel(
    to_q, probs, slopes, grad, out, joint, q, keys, values, length, step_stride, heads_stride, scale,
    to_q_b, to_q_h, to_q_t, grad_b, grad_h, grad_t, out_b, out_h, out_t, q_b, q_h, q_t,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, STEPS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * HEADS, blocks of ROWS queries); probs, slopes [STEPS, B, HEADS, length]; to_q is added to."""
    start(PDL)
    t = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    h = tl.program_id(0) % HEADS
    d = tl.arange(0, DIM_PAD)
    row = t < length
    here = row[:, None] & (d < DIM)[None, :]
    query = tl.load(q + b * q_b + h * q_h + t[:, None] * q_t + d[None, :], mask=here, other=0.0).to(tl.float32)
    g = tl.load(grad + b * grad_b + h * grad_h + t[:, None] * grad_t + d[None, :], mask=here, other=0.0).to(tl.float32)
    o = tl.load(out + b * out_b + h * out_h + t[:, None] * out_t + d[None, :], mask=here, other=0.0).to(tl.float32)
    inner = tl.sum(g * o, 1)
    at = to_q + b * to_q_b + h * to_q_h + t[:, None] * to_q_t + d[None, :]
    total = tl.load(at, mask=here, other=0.0).to(tl.float32)
    sums = (b * HEADS + h) * length + t
    lse = tl.load(joint + sums, mask=row, other=0.0)
    own = ((b * KV_HEADS + h // (HEADS // KV_HEADS)) * length + t[:, None]) * DIM + d[None, :]
    for _ in range(0, STEPS):
        k = tl.load(keys + own, mask=here, other=0.0).to(tl.float32)
        v = tl.load(values + own, mask=here, other=0.0).to(tl.float32)
        prob = tl.exp(tl.sum(query * k, 1) * scale - lse)
        slope = prob * (tl.sum(g * v, 1) - inner) * scale
        total += slope[:, None] * k
        tl.store(probs + sums, prob, mask=row)
        tl.store(slopes + sums, slope, mask=row)
        own += step_stride
        sums += heads_stride
    tl.store(at, total.to(to_q.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["length"])
def _own_kernel(
    to_keys, to_values, probs, slopes, grad, q, length, grad_b, grad_h, grad_t, q_b, q_h, q_t,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * KV_HEADS, blocks of ROWS rows, STEPS)"""
    start(PDL)
    t = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    step = tl.program_id(2).to(tl.int64)
    batch = tl.num_programs(0) // KV_HEADS
    d = tl.arange(0, DIM_PAD)
    row = t < length
    here = row[:, None] & (d < DIM)[None, :]
    to_k = tl.zeros([ROWS, DIM_PAD], tl.float32)
    to_v = tl.zeros([ROWS, DIM_PAD], tl.float32)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    for i in range(0, GROUP):
        h = kv_head * GROUP + i
        query = tl.load(q + b * q_b + h * q_h + t[:, None] * q_t + d[None, :], mask=here, other=0.0).to(tl.float32)
        at = b * grad_b + h * grad_h + t[:, None] * grad_t + d[None, :]
        g = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        sums = ((step * batch + b) * HEADS + h) * length + t
        to_k += tl.load(slopes + sums, mask=row, other=0.0)[:, None] * query
        to_v += tl.load(probs + sums, mask=row, other=0.0)[:, None] * g
    own = (((step * batch + b) * KV_HEADS + kv_head) * length + t[:, None]) * DIM + d[None, :]
    tl.store(to_keys + own, to_k.to(to_keys.dtype.element_ty), mask=here)
    tl.store(to_values + own, to_v.to(to_values.dtype.element_ty), mask=here)


def join_own(part: Tensor, lse: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """part [B, heads, T, head_dim], lse [B, heads, T] float32: the causal part of q [B, heads, T, head_dim]; keys,
    values [steps, B, kv_heads, T, head_dim] contiguous -> the joint output like `part`, the joint lse [B, heads, T]."""
    batch, heads, length, _ = q.shape
    out, lse = torch.empty_like(part), lse.contiguous()
    assert out.stride() == part.stride() and q.shape == part.shape and lse.dtype == torch.float32
    joint = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    sizes = _sizes(q, keys, values)
    _join_kernel[(batch * heads, triton.cdiv(length, sizes["ROWS"]))](
        out, joint, part, lse, q, keys, values, length, keys.stride(0), FULL.scale(q.shape[-1]),
        *_strides(part), *_strides(q), STEPS=keys.shape[0], **sizes, **launch_options(q.device),
    )  # fmt: skip
    return out, joint


def own_gradients(
    to_q: Tensor, grad: Tensor, out: Tensor, joint: Tensor, q: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of keys and values, in their shapes, from what `join_own` gave, (out, joint), and the
    output's gradient.

    to_q [B, heads, T, head_dim]: the gradient of q through the causal part; what the own rows add to it is added.
    """
    batch, heads, length, _ = q.shape
    steps, kv_heads = keys.shape[0], keys.shape[2]
    assert joint.is_contiguous() and grad.shape == out.shape == to_q.shape == q.shape
    probs = torch.empty(steps, *joint.shape, dtype=torch.float32, device=q.device)
    slopes = torch.empty(steps, *joint.shape, dtype=torch.float32, device=q.device)
    to_keys = torch.empty(keys.shape, dtype=keys.dtype, device=q.device)
    to_values = torch.empty(keys.shape, dtype=keys.dtype, device=q.device)
    sizes, options = _sizes(q, keys, values), launch_options(q.device)
    blocks = triton.cdiv(length, sizes["ROWS"])
    _slope_kernel[(batch * heads, blocks)](
        to_q, probs, slopes, grad, out, joint, q, keys, values, length, keys.stride(0), joint.numel(),
        FULL.scale(q.shape[-1]), *_strides(to_q), *_strides(grad), *_strides(out), *_strides(q),
        STEPS=steps, **sizes, **options,
    )  # fmt: skip
    _own_kernel[(batch * kv_heads, blocks, steps)](
        to_keys, to_values, probs, slopes, grad, q, length, *_strides(grad), *_strides(q), **sizes, **options
    )
    return to_keys, to_values


def _strides(x: Tensor) -> tuple[int, ...]:
    """Returns the strides of all axes but the last."""
    assert x.stride(-1) == 1
    return x.stride()[:-1]


def _sizes(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, int]:
    (batch, heads, length, dim), kv_heads = q.shape, keys.shape[2]
    assert keys.shape == values.shape == (keys.shape[0], batch, kv_heads, length, dim) and heads % kv_heads == 0
    assert keys.is_contiguous() and values.is_contiguous()
    padded = triton.next_power_of_2(dim)
    rows = max(1, _ELEMENTS // padded)
    return {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PAD": padded, "ROWS": rows, "num_warps": 4}
