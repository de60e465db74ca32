"""Triton kernels for the attention of blocks in training, and its gradients: queries that see the beginning of a text,
each as much of it as it says, and their own block.

The online softmax over tiles of keys (Milakov and Gimelshein 2018, arXiv 1805.02867), and a backward pass that makes
the probabilities again from the log-sum-exps (Dao et al. 2022, arXiv 2205.14135). Queries come in the order of what
they see, so a tile of them has its keys in common but for the last few. The keys of their blocks are next to the
queries' own, a few for each tile. The reference is the mask of `train.block_attention`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention import FULL
from draftwing.ops.triton.common import launch_options, start

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
        out, lse, *x, far.limits, queries, keys, FULL.scale(dim), *_strides(out, *x), **_sizes(x, far)
    )
    return out, lse


def block_gradients(grad: Tensor, out: Tensor, lse: Tensor, x: Inputs, far: Reach, to: Inputs) -> None:
    """Writes the gradients to `to`. grad: of the output, like q; out, lse: as `block_attention` gave them."""
    (batch, heads, queries, dim), keys = x.q.shape, x.text_k.shape[2]
    assert lse.is_contiguous()
    inner, sizes, scale = torch.empty_like(lse), _sizes(x, far), FULL.scale(dim)
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


def _sizes(x: Inputs, far: Reach) -> dict[str, int]:
    (_, heads, _, dim), kv_heads = x.q.shape, x.k.shape[1]
    assert heads % kv_heads == 0 and x.text_k.shape[3] == dim
    padded = max(16, triton.next_power_of_2(dim))
    sizes = {"ROWS": far.rows, "HEADS": heads, "GROUP": heads // kv_heads, "DIM": dim, "DIM_PAD": padded}
    return {**sizes, "QUERIES": _QUERIES, "KEYS": _KEYS, "num_warps": 4, **launch_options(x.q.device)}
