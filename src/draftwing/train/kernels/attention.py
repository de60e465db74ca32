"""Triton kernels for attention in training: the rows of its own chain that a draft sees besides the causal attention,
and the texts and blocks of heads that draft a block. The references are in `train.ttt` and `train.blocks`.

Chains. A query q, whose causal part is (out, lse), sees one row (k_s, v_s) of each step s = 1 .. S. The joint output
and log-sum-exp are those of the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), started from the causal
part. With the probability p_s = exp(q k_s scale - lse) and the slope g_s = p_s (grad v_s - grad out) scale, the
gradients are q: sum_s g_s k_s, k_s: g_s q, v_s: p_s grad, the latter two summed over the heads that share a key.
B * heads is on the first axis of the grids, which alone takes more than 65,535 blocks: short texts make large batches.

Blocks. Queries see the beginning of a text, each as much of it as it says, and their own block: the online softmax over
tiles of keys, and a backward pass that makes the probabilities again from the log-sum-exps (Dao et al. 2022, arXiv
2205.14135). Queries come in the order of what they see, so a tile of them has its keys in common but for the last few.
The keys of their blocks are next to the queries' own, a few for each tile.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention.batch import FULL
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
    sizes = _chain_sizes(q, keys, values)
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
    sizes, options = _chain_sizes(q, keys, values), launch_options(q.device)
    blocks = triton.cdiv(length, sizes["ROWS"])
    _slope_kernel[(batch * heads, blocks)](
        to_q, probs, slopes, grad, out, joint, q, keys, values, length, keys.stride(0), joint.numel(),
        FULL.scale(q.shape[-1]), *_strides(to_q, grad, out, q),
        STEPS=steps, **sizes, **options,
    )  # fmt: skip
    _own_kernel[(batch * kv_heads, blocks, steps)](
        to_keys, to_values, probs, slopes, grad, q, length, *_strides(grad, q), **sizes, **options
    )
    return to_keys, to_values


def _chain_sizes(q: Tensor, keys: Tensor, values: Tensor) -> dict[str, int]:
    (batch, heads, length, dim), kv_heads = q.shape, keys.shape[2]
    assert keys.shape == values.shape == (keys.shape[0], batch, kv_heads, length, dim) and heads % kv_heads == 0
    assert keys.is_contiguous() and values.is_contiguous()
    padded = triton.next_power_of_2(dim)
    rows = max(1, _ELEMENTS // padded)
    return {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PAD": padded, "ROWS": rows, "num_warps": 4}


_QUERIES, _KEYS = 64, 64  # of a tile
_LOG2E = tl.constexpr(1.4426950408889634)


class Reach(NamedTuple):
    """What R queries of each of B texts see of it, besides their own blocks."""

    limits: Tensor  # [B, R] int32, ascending: how many of the text's keys
    begins: Tensor  # [B, tiles of keys] int32: the first query that sees any of a tile
    rows: int  # of a block; R is a multiple


def reach(limits: Tensor, keys: int, rows: int) -> Reach:
    """limits: as in `Reach`, keys: of a text."""
    assert limits.dtype == torch.int32 and limits.is_contiguous() and limits.shape[1] % rows == 0
    tiles = torch.arange(0, keys, _KEYS, dtype=torch.int32, device=limits.device)
    begins = torch.searchsorted(limits, tiles.expand(len(limits), -1).contiguous(), right=True, out_int32=True)
    return Reach(limits, begins, rows)


@triton.jit
def _tile(base, at, row_stride, rows, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """[.., DIM_PAD] of the rows `at` below `rows`"""
    d = tl.arange(0, DIM_PAD)
    here = (at < rows)[:, None] & (d < DIM)[None, :]
    return tl.load(base + at[:, None].to(tl.int64) * row_stride + d[None, :], mask=here, other=0.0)


@triton.jit
def _put(base, at, row_stride, rows, value, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    d = tl.arange(0, DIM_PAD)
    here = (at < rows)[:, None] & (d < DIM)[None, :]
    where = base + at[:, None].to(tl.int64) * row_stride + d[None, :]
    tl.store(where, value.to(base.dtype.element_ty), mask=here)


@triton.jit
def _absorb(query, key, value, seen, scale, row_max, norm, total):
    """The running maximum, sum and weighted values after a tile of keys."""
    score = tl.where(seen, tl.dot(query, tl.trans(key)) * (scale * _LOG2E), -1e30)
    more = tl.maximum(row_max, tl.max(score, 1))
    before = tl.exp2(row_max - more)
    prob = tl.where(seen, tl.exp2(score - more[:, None]), 0.0)
    return more, norm * before + tl.sum(prob, 1), tl.dot(prob.to(value.dtype), value, total * before[:, None])


@triton.jit(do_not_specialize=["queries", "keys"])
def _forward_kernel(
    out, lse, q, text_k, text_v, k, v, limits, queries, keys, scale,
    out_b, out_h, out_r, q_b, q_h, q_r, text_k_b, text_k_h, text_k_r, text_v_b, text_v_h, text_v_r,
    k_b, k_h, k_r, v_b, v_h, v_r,
    ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * HEADS, tiles of queries)"""
    start(PDL)
    b, h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    row = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    limit = tl.load(limits + b * queries + row, mask=row < queries, other=0)
    query = _tile(q + b * q_b + h * q_h, row, q_r, queries, DIM, DIM_PAD)
    text_k += b * text_k_b + (h // GROUP) * text_k_h
    text_v += b * text_v_b + (h // GROUP) * text_v_h
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    row_max = tl.full([QUERIES], -1e30, tl.float32)
    norm = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for first in range(0, tl.max(limit, 0), KEYS):
        col = first + tl.arange(0, KEYS)
        key = _tile(text_k, col, text_k_r, keys, DIM, DIM_PAD)
        value = _tile(text_v, col, text_v_r, keys, DIM, DIM_PAD)
        seen = col[None, :] < limit[:, None]
        row_max, norm, total = _absorb(query, key, value, seen, scale, row_max, norm, total)
    begin = tl.program_id(1) * QUERIES // ROWS * ROWS
    end = tl.minimum(tl.program_id(1) * QUERIES + QUERIES + ROWS - 1, queries)
    for first in range(begin, end, KEYS):
        col = first + tl.arange(0, KEYS)
        key = _tile(k, col, k_r, queries, DIM, DIM_PAD)
        value = _tile(v, col, v_r, queries, DIM, DIM_PAD)
        seen = (col // ROWS)[None, :] == (row // ROWS)[:, None]
        row_max, norm, total = _absorb(query, key, value, seen, scale, row_max, norm, total)
    real = row < queries  # each of which sees itself
    norm = tl.where(real, norm, 1.0)
    _put(out + b * out_b + h * out_h, row, out_r, queries, total / norm[:, None], DIM, DIM_PAD)
    tl.store(lse + tl.program_id(0).to(tl.int64) * queries + row, (row_max + tl.log2(norm)) / _LOG2E, mask=real)


@triton.jit
def _to_query(query, slope, key, value, seen, log_sum, mean, scale, total):
    """The gradient of queries after a tile of keys, without the scale."""
    score = tl.dot(query, tl.trans(key)) * (scale * _LOG2E)
    prob = tl.where(seen, tl.exp2(score - log_sum[:, None]), 0.0)
    by = prob * (tl.dot(slope, tl.trans(value)) - mean[:, None])
    return tl.dot(by.to(key.dtype), key, total)


@triton.jit(do_not_specialize=["queries", "keys"])
def _query_kernel(
    to_q, inner, grad, out, q, text_k, text_v, k, v, lse, limits, queries, keys, scale,
    to_b, to_h, to_r, grad_b, grad_h, grad_r, out_b, out_h, out_r, q_b, q_h, q_r,
    text_k_b, text_k_h, text_k_r, text_v_b, text_v_h, text_v_r, k_b, k_h, k_r, v_b, v_h, v_r,
    ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * HEADS, tiles of queries); lse, inner [B, HEADS, queries], of which inner is left for `_key_kernel`: the
    sums of the output times its gradient."""
    start(PDL)
    b, h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    row = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    real = row < queries
    limit = tl.load(limits + b * queries + row, mask=real, other=0)
    sums = tl.program_id(0).to(tl.int64) * queries + row
    log_sum = tl.load(lse + sums, mask=real, other=0.0) * _LOG2E
    query = _tile(q + b * q_b + h * q_h, row, q_r, queries, DIM, DIM_PAD)
    slope = _tile(grad + b * grad_b + h * grad_h, row, grad_r, queries, DIM, DIM_PAD)
    given = _tile(out + b * out_b + h * out_h, row, out_r, queries, DIM, DIM_PAD)
    mean = tl.sum(slope.to(tl.float32) * given.to(tl.float32), 1)
    tl.store(inner + sums, mean, mask=real)
    text_k += b * text_k_b + (h // GROUP) * text_k_h
    text_v += b * text_v_b + (h // GROUP) * text_v_h
    k += b * k_b + (h // GROUP) * k_h
    v += b * v_b + (h // GROUP) * v_h
    total = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for first in range(0, tl.max(limit, 0), KEYS):
        col = first + tl.arange(0, KEYS)
        key = _tile(text_k, col, text_k_r, keys, DIM, DIM_PAD)
        value = _tile(text_v, col, text_v_r, keys, DIM, DIM_PAD)
        seen = col[None, :] < limit[:, None]
        total = _to_query(query, slope, key, value, seen, log_sum, mean, scale, total)
    begin = tl.program_id(1) * QUERIES // ROWS * ROWS
    end = tl.minimum(tl.program_id(1) * QUERIES + QUERIES + ROWS - 1, queries)
    for first in range(begin, end, KEYS):
        col = first + tl.arange(0, KEYS)
        key = _tile(k, col, k_r, queries, DIM, DIM_PAD)
        value = _tile(v, col, v_r, queries, DIM, DIM_PAD)
        seen = (col // ROWS)[None, :] == (row // ROWS)[:, None]
        total = _to_query(query, slope, key, value, seen, log_sum, mean, scale, total)
    _put(to_q + b * to_b + h * to_h, row, to_r, queries, total * scale, DIM, DIM_PAD)


@triton.jit(do_not_specialize=["queries", "keys"])
def _key_kernel(
    to_k, to_v, grad, q, k, v, lse, inner, limits, begins, queries, keys, scale,
    to_k_b, to_k_h, to_k_r, to_v_b, to_v_h, to_v_r, grad_b, grad_h, grad_r, q_b, q_h, q_r, k_b, k_h, k_r,
    v_b, v_h, v_r,
    OWN: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * kv_heads, tiles of keys); begins [B, tiles of keys]: the first query that sees any of a tile. OWN: the
    keys are those of the blocks."""
    start(PDL)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    b, kv_head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    col = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    key = _tile(k + b * k_b + kv_head * k_h, col, k_r, keys, DIM, DIM_PAD)
    value = _tile(v + b * v_b + kv_head * v_h, col, v_r, keys, DIM, DIM_PAD)
    if OWN:
        begin = tl.program_id(1) * KEYS // ROWS * ROWS
        end = tl.minimum(tl.program_id(1) * KEYS + KEYS + ROWS - 1, queries)
    else:
        begin = tl.load(begins + b * tl.num_programs(1) + tl.program_id(1)) // QUERIES * QUERIES
        end = queries
    add_k = tl.zeros([KEYS, DIM_PAD], tl.float32)
    add_v = tl.zeros([KEYS, DIM_PAD], tl.float32)
    for i in range(0, GROUP):
        h = kv_head * GROUP + i
        for first in range(begin, end, QUERIES):
            row = first + tl.arange(0, QUERIES)
            real = row < queries
            sums = (b * HEADS + h) * queries + row
            log_sum = tl.load(lse + sums, mask=real, other=0.0) * _LOG2E
            mean = tl.load(inner + sums, mask=real, other=0.0)
            query = _tile(q + b * q_b + h * q_h, row, q_r, queries, DIM, DIM_PAD)
            slope = _tile(grad + b * grad_b + h * grad_h, row, grad_r, queries, DIM, DIM_PAD)
            if OWN:
                seen = (col // ROWS)[:, None] == (row // ROWS)[None, :]
            else:
                limit = tl.load(limits + b * queries + row, mask=real, other=0)
                seen = col[:, None] < limit[None, :]
            score = tl.dot(key, tl.trans(query)) * (scale * _LOG2E)  # [KEYS, QUERIES]
            prob = tl.where(seen, tl.exp2(score - log_sum[None, :]), 0.0)
            add_v = tl.dot(prob.to(slope.dtype), slope, add_v)
            by = prob * (tl.dot(value, tl.trans(slope)) - mean[None, :])
            add_k = tl.dot(by.to(query.dtype), query, add_k)
    _put(to_k + b * to_k_b + kv_head * to_k_h, col, to_k_r, keys, add_k * scale, DIM, DIM_PAD)
    _put(to_v + b * to_v_b + kv_head * to_v_h, col, to_v_r, keys, add_v, DIM, DIM_PAD)


class Inputs(NamedTuple):
    """Views of any strides but for the last."""

    q: Tensor  # [B, heads, R, head_dim]
    text_k: Tensor  # [B, kv_heads, T, head_dim]
    text_v: Tensor
    k: Tensor  # [B, kv_heads, R, head_dim]: of the queries' own blocks
    v: Tensor


def block_attention(x: Inputs, far: Reach) -> tuple[Tensor, Tensor]:
    """Returns the output like q, and the log-sum-exps [B, heads, R] float32."""
    (batch, heads, queries, dim), keys = x.q.shape, x.text_k.shape[2]
    assert far.limits.shape == (batch, queries)
    out = torch.empty(batch, queries, heads, dim, dtype=x.q.dtype, device=x.q.device).transpose(1, 2)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=x.q.device)
    _forward_kernel[(batch * heads, triton.cdiv(queries, _QUERIES))](
        out, lse, *x, far.limits, queries, keys, FULL.scale(dim), *_strides(out, *x), **_block_sizes(x, far)
    )
    return out, lse


def block_gradients(grad: Tensor, out: Tensor, lse: Tensor, x: Inputs, far: Reach, to: Inputs) -> None:
    """Writes the gradients to `to`. grad: of the output, like q; out, lse: as `block_attention` gave them."""
    (batch, heads, queries, dim), keys = x.q.shape, x.text_k.shape[2]
    assert lse.is_contiguous()
    inner, sizes, scale = torch.empty_like(lse), _block_sizes(x, far), FULL.scale(dim)
    _query_kernel[(batch * heads, triton.cdiv(queries, _QUERIES))](
        to.q, inner, grad, out, *x, lse, far.limits, queries, keys, scale, *_strides(to.q, grad, out, *x), **sizes
    )
    texts = to.text_k, to.text_v, x.text_k, x.text_v, keys, False
    blocks = to.k, to.v, x.k, x.v, queries, True
    for to_k, to_v, k, v, count, own in (texts, blocks):
        _key_kernel[(batch * k.shape[1], triton.cdiv(count, _KEYS))](
            to_k, to_v, grad, x.q, k, v, lse, inner, far.limits, far.begins, queries, count, scale,
            *_strides(to_k, to_v, grad, x.q, k, v), OWN=own, **sizes,
        )  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    """Returns the strides of all axes but the last, of each."""
    assert all(x.stride(-1) == 1 for x in tensors)
    return [stride for x in tensors for stride in x.stride()[:-1]]


def _block_sizes(x: Inputs, far: Reach) -> dict[str, int]:
    (_, heads, _, dim), kv_heads = x.q.shape, x.k.shape[1]
    assert heads % kv_heads == 0 and x.text_k.shape[3] == dim
    padded = max(16, triton.next_power_of_2(dim))
    sizes = {"ROWS": far.rows, "HEADS": heads, "GROUP": heads // kv_heads, "DIM": dim, "DIM_PAD": padded}
    return {**sizes, "QUERIES": _QUERIES, "KEYS": _KEYS, "num_warps": 4, **launch_options(x.q.device)}
