"""Rotary embedding of q and k, with their norm where a model has one, and the write to the pool, in one launch.

The reference is `layers.rope.rotate` and `KVPool.write`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.triton.common import launch_options, start


@triton.jit
def _normed(a, b, weight, half, ok, eps, DIM: tl.constexpr):
    """RMS norm of heads whose halves are a, b [HEADS, HALF_PAD]; weight [DIM]"""
    mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM
    by = tl.rsqrt(mean + eps)[:, None]
    low = tl.load(weight + half, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(weight + DIM // 2 + half, mask=ok, other=0.0).to(tl.float32)
    return a * by * low[None, :], b * by * high[None, :]


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _rope_kernel(
    qkv, kv, slots, positions, cos, sin, q_norm, k_norm, eps, row_stride, turn_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK: tl.constexpr,
    BY_POSITION: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M, blocks of BLOCK heads): q is turned in place, k is turned into the pool, v goes to the pool."""
    start(PDL)
    m = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, HALF_PAD)
    HALF: tl.constexpr = DIM // 2
    ok = half < HALF
    here = (head < HEADS + 2 * KV_HEADS)[:, None] & ok[None, :]
    slot = tl.load(slots + m)
    at = qkv + m * row_stride + head[:, None] * DIM + half[None, :]
    low = tl.load(at, mask=here, other=0.0)
    high = tl.load(at + HALF, mask=here, other=0.0)

    turn = (tl.load(positions + m) if BY_POSITION else m) * turn_stride
    cos += turn + half
    sin += turn + half
    cos_low, cos_high = tl.load(cos, mask=ok, other=0.0), tl.load(cos + HALF, mask=ok, other=0.0)
    sin_low, sin_high = tl.load(sin, mask=ok, other=0.0), tl.load(sin + HALF, mask=ok, other=0.0)
    dtype = low.dtype
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        qa, qb = _normed(a, b, q_norm, half, ok, eps, DIM)
        ka, kb = _normed(a, b, k_norm, half, ok, eps, DIM)
        is_q = (head < HEADS)[:, None]
        a = tl.where(is_q, qa, ka).to(dtype).to(tl.float32)
        b = tl.where(is_q, qb, kb).to(dtype).to(tl.float32)
    # The first product is rounded, as in `layers.rope.rotate`.
    one = (a * cos_low.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    two = (b * cos_high.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    one = tl.fma(b, tl.broadcast_to(sin_low.to(tl.float32)[None, :], b.shape), one).to(dtype)
    two = tl.fma(a, tl.broadcast_to(sin_high.to(tl.float32)[None, :], a.shape), two).to(dtype)
    is_v = head >= HEADS + KV_HEADS
    one = tl.where(is_v[:, None], low, one)
    two = tl.where(is_v[:, None], high, two)

    to_q = here & (head < HEADS)[:, None]
    tl.store(at, one, mask=to_q)
    tl.store(at + HALF, two, mask=to_q)
    to_kv = here & (head >= HEADS)[:, None]
    key_head = tl.where(is_v, head - HEADS - KV_HEADS, head - HEADS)
    into = kv + slot * (KV_HEADS * 2 * DIM) + (key_head * (2 * DIM) + tl.where(is_v, DIM, 0))[:, None] + half[None, :]
    tl.store(into, one, mask=to_kv)
    tl.store(into + HALF, two, mask=to_kv)


def rope_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_slots: Tensor,
    kv: Tensor,
    positions: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """`layers.rope.rotate` and `KVPool.write` at once: q is turned in place, k and v go to the pool.

    qkv [M, heads + 2 * kv_heads, head_dim], contiguous; cos, sin: the halves of a `rope_table`, [positions, ...,
    head_dim], whose rows `positions` [M] int64 names; None: row m is query m's. write_slots [M] int64; kv [slots,
    kv_heads, 2, head_dim]. q_norm, k_norm [head_dim]: weights of an RMS norm of each head before it is turned.
    """
    count, all_heads, dim = qkv.shape
    kv_heads = kv.shape[1]
    assert qkv.is_contiguous() and kv.is_contiguous() and qkv.dtype == kv.dtype == cos.dtype
    assert (
        cos.stride(-1) == 1 == sin.stride(-1)
        and cos.stride(0) == sin.stride(0)
        and (q_norm is None) == (k_norm is None)
    )
    block = 16
    _rope_kernel[(count, triton.cdiv(all_heads, block))](
        qkv, kv, write_slots, write_slots if positions is None else positions, cos, sin,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, eps, qkv.stride(0), cos.stride(0),
        HEADS=all_heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim, HALF_PAD=triton.next_power_of_2(dim // 2),
        BLOCK=block, BY_POSITION=positions is not None, NORM=q_norm is not None, num_warps=4,
        **launch_options(qkv.device),
    )  # fmt: skip
