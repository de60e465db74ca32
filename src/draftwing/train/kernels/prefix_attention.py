"""Triton kernels for queries that see the beginning of a text, each as much of it as it says, and their gradients.

The online softmax over tiles of keys (Milakov and Gimelshein 2018, arXiv 1805.02867), and a backward pass that makes
the probabilities again from the log-sum-exps (Dao et al. 2022, arXiv 2205.14135). Queries come in the order of what
they see, so a tile of them has its keys in common but for the last few. The reference is the mask of
`train.block_attention`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention import default_scale
from draftwing.ops.triton.common import launch_options, start

NOTHING = -1e30  # log-sum-exp of a query that sees nothing: finite, so that no difference of infinities arises
_QUERIES, _KEYS = 64, 64  # of a tile
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(base, at, row_stride, rows, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """[.., DIM_PAD] of the rows `at` below `rows`"""
    d = tl.arange(0, DIM_PAD)
    here = (at < rows)[:, None] & (d < DIM)[None, :]
    return tl.load(base + at[:, None].to(tl.int64) * row_stride + d[None, :], mask=here, other=0.0)


@triton.jit(do_not_specialize=["queries", "keys"])
def _forward_kernel(
    out, lse, q, k, v, limits, queries, keys, scale,
    out_b, out_h, out_r, q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * HEADS, tiles of queries)"""
    start(PDL)
    b, h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    row = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    limit = tl.load(limits + b * queries + row, mask=row < queries, other=0)
    query = _tile(q + b * q_b + h * q_h, row, q_r, queries, DIM, DIM_PAD)
    most = tl.full([QUERIES], -1e30, tl.float32)
    norm = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for first in range(0, tl.max(limit, 0), KEYS):
        col = first + tl.arange(0, KEYS)
        key = _tile(k + b * k_b + (h // GROUP) * k_h, col, k_r, keys, DIM, DIM_PAD)
        value = _tile(v + b * v_b + (h // GROUP) * v_h, col, v_r, keys, DIM, DIM_PAD)
        seen = col[None, :] < limit[:, None]
        score = tl.where(seen, tl.dot(query, tl.trans(key)) * (scale * _LOG2E), -1e30)
        more = tl.maximum(most, tl.max(score, 1))
        before = tl.exp2(most - more)
        prob = tl.where(seen, tl.exp2(score - more[:, None]), 0.0)
        norm = norm * before + tl.sum(prob, 1)
        total = tl.dot(prob.to(value.dtype), value, total * before[:, None])
        most = more
    sees = norm > 0
    total = total / tl.where(sees, norm, 1.0)[:, None]
    d = tl.arange(0, DIM_PAD)
    here = (row < queries)[:, None] & (d < DIM)[None, :]
    at = out + b * out_b + h * out_h + row[:, None].to(tl.int64) * out_r + d[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=here)
    found = tl.where(sees, (most + tl.log2(tl.where(sees, norm, 1.0))) / _LOG2E, -1e30)
    tl.store(lse + tl.program_id(0).to(tl.int64) * queries + row, found, mask=row < queries)


@triton.jit(do_not_specialize=["queries", "keys"])
def _query_kernel(
    to_q, grad, q, k, v, lse, inner, limits, queries, keys, scale,
    to_b, to_h, to_r, grad_b, grad_h, grad_r, q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * HEADS, tiles of queries); inner, lse [B, HEADS, queries]"""
    start(PDL)
    b, h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    row = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    real = row < queries
    limit = tl.load(limits + b * queries + row, mask=real, other=0)
    sums = tl.program_id(0).to(tl.int64) * queries + row
    log_sum = tl.load(lse + sums, mask=real, other=0.0) * _LOG2E
    mean = tl.load(inner + sums, mask=real, other=0.0)
    query = _tile(q + b * q_b + h * q_h, row, q_r, queries, DIM, DIM_PAD)
    slope = _tile(grad + b * grad_b + h * grad_h, row, grad_r, queries, DIM, DIM_PAD)
    total = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for first in range(0, tl.max(limit, 0), KEYS):
        col = first + tl.arange(0, KEYS)
        key = _tile(k + b * k_b + (h // GROUP) * k_h, col, k_r, keys, DIM, DIM_PAD)
        value = _tile(v + b * v_b + (h // GROUP) * v_h, col, v_r, keys, DIM, DIM_PAD)
        seen = col[None, :] < limit[:, None]
        score = tl.dot(query, tl.trans(key)) * (scale * _LOG2E)
        prob = tl.where(seen, tl.exp2(score - log_sum[:, None]), 0.0)
        by = prob * (tl.dot(slope, tl.trans(value)) - mean[:, None])
        total = tl.dot(by.to(key.dtype), key, total)
    d = tl.arange(0, DIM_PAD)
    here = real[:, None] & (d < DIM)[None, :]
    at = to_q + b * to_b + h * to_h + row[:, None].to(tl.int64) * to_r + d[None, :]
    tl.store(at, (total * scale).to(to_q.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["queries", "keys"])
def _key_kernel(
    to_k, to_v, grad, q, k, v, lse, inner, limits, begins, queries, keys, scale,
    to_b, to_h, to_r, grad_b, grad_h, grad_r, q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (B * kv_heads, tiles of keys); begins [B, tiles of keys]: the first query that sees any of a tile"""
    start(PDL)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    b, kv_head = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS
    col = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    key = _tile(k + b * k_b + kv_head * k_h, col, k_r, keys, DIM, DIM_PAD)
    value = _tile(v + b * v_b + kv_head * v_h, col, v_r, keys, DIM, DIM_PAD)
    begin = tl.load(begins + b * tl.num_programs(1) + tl.program_id(1)) // QUERIES * QUERIES
    add_k = tl.zeros([KEYS, DIM_PAD], tl.float32)
    add_v = tl.zeros([KEYS, DIM_PAD], tl.float32)
    for i in range(0, GROUP):
        h = kv_head * GROUP + i
        for first in range(begin, queries, QUERIES):
            row = first + tl.arange(0, QUERIES)
            real = row < queries
            limit = tl.load(limits + b * queries + row, mask=real, other=0)
            sums = (b * HEADS + h) * queries + row
            log_sum = tl.load(lse + sums, mask=real, other=0.0) * _LOG2E
            mean = tl.load(inner + sums, mask=real, other=0.0)
            query = _tile(q + b * q_b + h * q_h, row, q_r, queries, DIM, DIM_PAD)
            slope = _tile(grad + b * grad_b + h * grad_h, row, grad_r, queries, DIM, DIM_PAD)
            seen = col[:, None] < limit[None, :]
            score = tl.dot(key, tl.trans(query)) * (scale * _LOG2E)  # [KEYS, QUERIES]
            prob = tl.where(seen, tl.exp2(score - log_sum[None, :]), 0.0)
            add_v = tl.dot(prob.to(slope.dtype), slope, add_v)
            by = prob * (tl.dot(value, tl.trans(slope)) - mean[None, :])
            add_k = tl.dot(by.to(query.dtype), query, add_k)
    d = tl.arange(0, DIM_PAD)
    here = (col < keys)[:, None] & (d < DIM)[None, :]
    at = b * to_b + kv_head * to_h + col[:, None].to(tl.int64) * to_r + d[None, :]
    tl.store(to_k + at, (add_k * scale).to(to_k.dtype.element_ty), mask=here)
    tl.store(to_v + at, add_v.to(to_v.dtype.element_ty), mask=here)


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, heads, R, head_dim] of R queries, k, v [B, kv_heads, T, head_dim], limits [B, R] int32 ascending: how many
    of the T keys each query sees -> the output like q, and the log-sum-exps [B, heads, R] float32. A query that sees
    nothing gets 0 and NOTHING."""
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    assert limits.shape == (batch, queries) and limits.dtype == torch.int32 and limits.is_contiguous()
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    _forward_kernel[(batch * heads, triton.cdiv(queries, _QUERIES))](
        out, lse, q, k, v, limits, queries, keys, default_scale(dim),
        *_strides(out), *_strides(q), *_strides(k), *_strides(v), **_sizes(q, k), **launch_options(q.device),
    )  # fmt: skip
    return out, lse


def prefix_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, inner: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v through the prefix, where it may be a part of what queries see.

    grad [B, heads, R, head_dim]: of the joint output; lse, inner [B, heads, R] float32: the joint log-sum-exps, and the
    sums of the output times its gradient; the rest as of `prefix_attention`.
    """
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    assert lse.is_contiguous() and inner.is_contiguous() and lse.shape == inner.shape == q.shape[:3]
    to_q, to_k, to_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    sizes, options, scale = _sizes(q, k), launch_options(q.device), default_scale(dim)
    tail = (*_strides(grad), *_strides(q), *_strides(k), *_strides(v))
    _query_kernel[(batch * heads, triton.cdiv(queries, _QUERIES))](
        to_q, grad, q, k, v, lse, inner, limits, queries, keys, scale, *_strides(to_q), *tail, **sizes, **options
    )
    tiles = torch.arange(0, keys, _KEYS, dtype=torch.int32, device=q.device)
    begins = torch.searchsorted(limits, tiles.expand(batch, -1).contiguous(), right=True, out_int32=True)
    _key_kernel[(batch * k.shape[1], tiles.shape[0])](
        to_k, to_v, grad, q, k, v, lse, inner, limits, begins, queries, keys, scale,
        *_strides(to_k), *tail, **sizes, **options,
    )  # fmt: skip
    return to_q, to_k, to_v


def _strides(x: Tensor) -> tuple[int, ...]:
    """Returns the strides of all axes but the last."""
    assert x.stride(-1) == 1
    return x.stride()[:-1]


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    (_, heads, _, dim), kv_heads = q.shape, k.shape[1]
    assert heads % kv_heads == 0 and k.shape[3] == dim
    padded = max(16, triton.next_power_of_2(dim))
    sizes = {"HEADS": heads, "GROUP": heads // kv_heads, "DIM": dim, "DIM_PAD": padded}
    return {**sizes, "QUERIES": _QUERIES, "KEYS": _KEYS, "num_warps": 4}
