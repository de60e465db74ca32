"""Rotary embedding of q and k, with their norm where a model has one, and the write to the pool, in one launch; and of
queries and keys of latents.

The reference is `rotate`, `rms_norm` and `concat_rope` of `ops.table`, and `KVPool.write`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention.triton_common import fits
from draftwing.ops.gemm import cuda_heads
from draftwing.ops.gemm.contract import HeadProducts
from draftwing.ops.rope.spec import RopeOps
from draftwing.ops.triton.common import launch_options, start


@triton.jit
def _normed(a, b, weight, half, ok, eps, DIM: tl.constexpr):
    """RMS norm of heads whose halves are a, b [HEADS, HALF_PAD]; weight [DIM]"""
    mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM
    by = tl.rsqrt(mean + eps)[:, None]
    low = tl.load(weight + half, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(weight + DIM // 2 + half, mask=ok, other=0.0).to(tl.float32)
    return a * by * low[None, :], b * by * high[None, :]


@triton.jit
def _heads_normed(a, b, is_q, q_norm, k_norm, half, ok, eps, dtype: tl.constexpr, DIM: tl.constexpr):
    """a, b [HEADS, HALF_PAD] float32, is_q [HEADS, 1]: which are of queries -> the same under their norms, as dtype"""
    qa, qb = _normed(a, b, q_norm, half, ok, eps, DIM)
    ka, kb = _normed(a, b, k_norm, half, ok, eps, DIM)
    return tl.where(is_q, qa, ka).to(dtype), tl.where(is_q, qb, kb).to(dtype)


@triton.jit
def _turned(a, b, cos, sin, half, ok, dtype: tl.constexpr, HALF: tl.constexpr):
    """a, b [HEADS, HALF_PAD] float32: halves of heads -> the same, turned; cos, sin: of the row. The first product is
    rounded, as in `rotate`."""
    cos_low, cos_high = tl.load(cos + half, mask=ok, other=0.0), tl.load(cos + HALF + half, mask=ok, other=0.0)
    sin_low, sin_high = tl.load(sin + half, mask=ok, other=0.0), tl.load(sin + HALF + half, mask=ok, other=0.0)
    one = (a * cos_low.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    two = (b * cos_high.to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    one = tl.fma(b, tl.broadcast_to(sin_low.to(tl.float32)[None, :], b.shape), one).to(dtype)
    return one, tl.fma(a, tl.broadcast_to(sin_high.to(tl.float32)[None, :], a.shape), two).to(dtype)


@triton.jit
def _to_e4m3(x):
    """float32 -> the code of the nearest float8_e4m3fn, at most 448; ties to even. Written out, so that it rounds alike
    on devices with and without such an instruction."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which are the last bit of numbers from 2^14 on.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_kernel(
    qkv, kv, slots, cos, sin, q_norm, k_norm, eps, k_by, v_by, row_stride, turn_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, AFTER: tl.constexpr, V_NORM: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M, blocks of BLOCK heads): q is turned in place, k is turned into the pool, v goes to the pool. NORM: both
    are normed, before it or AFTER it. V_NORM: v is normed, too, without weights. FP8: the pool holds codes of
    float8_e4m3fn, of keys times k_by and of values times v_by."""
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

    dtype = low.dtype
    a, b = low.to(tl.float32), high.to(tl.float32)
    if V_NORM:
        by = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        low, high = (a * by).to(dtype), (b * by).to(dtype)
    is_q = (head < HEADS)[:, None]
    if NORM and not AFTER:
        a, b = _heads_normed(a, b, is_q, q_norm, k_norm, half, ok, eps, dtype, DIM)
        a, b = a.to(tl.float32), b.to(tl.float32)
    one, two = _turned(a, b, cos + m * turn_stride, sin + m * turn_stride, half, ok, dtype, HALF)
    if AFTER:
        a, b = one.to(tl.float32), two.to(tl.float32)
        one, two = _heads_normed(a, b, is_q, q_norm, k_norm, half, ok, eps, dtype, DIM)
    is_v = head >= HEADS + KV_HEADS
    one = tl.where(is_v[:, None], low, one)
    two = tl.where(is_v[:, None], high, two)

    to_q = here & (head < HEADS)[:, None]
    tl.store(at, one, mask=to_q)
    tl.store(at + HALF, two, mask=to_q)
    to_kv = here & (head >= HEADS)[:, None]
    key_head = tl.where(is_v, head - HEADS - KV_HEADS, head - HEADS)
    into = kv + slot * (KV_HEADS * 2 * DIM) + (key_head * (2 * DIM) + tl.where(is_v, DIM, 0))[:, None] + half[None, :]
    if FP8:
        by = tl.where(is_v, v_by, k_by)[:, None]
        one, two = _to_e4m3(one.to(tl.float32) * by), _to_e4m3(two.to(tl.float32) * by)
    tl.store(into, one, mask=to_kv)
    tl.store(into + HALF, two, mask=to_kv)


@triton.jit
def _concat_rope_kernel(
    out, plain, turned, cos, sin, factor, plain_row, plain_head, turned_row, turned_head, turn_stride,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, PLAIN_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M, HEADS)."""
    start(PDL)
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim, half = tl.arange(0, PLAIN_PAD), tl.arange(0, HALF_PAD)
    HALF: tl.constexpr = TURNED // 2
    ok = half < HALF
    out += (m * HEADS + head) * (PLAIN + TURNED)
    x = tl.load(plain + m * plain_row + head * plain_head + dim, mask=dim < PLAIN, other=0.0)
    turned += m * turned_row + head * turned_head + half
    a = tl.load(turned, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(turned + HALF, mask=ok, other=0.0).to(tl.float32)
    one, two = _turned(
        a[None, :], b[None, :], cos + m * turn_stride, sin + m * turn_stride, half, ok, x.dtype, HALF
    )  # fmt: skip
    tl.store(out + dim, (x.to(tl.float32) * factor).to(x.dtype), mask=dim < PLAIN)
    at = out + PLAIN + half[None, :]
    tl.store(at, (one.to(tl.float32) * factor).to(x.dtype), mask=ok[None, :])
    tl.store(at + HALF, (two.to(tl.float32) * factor).to(x.dtype), mask=ok[None, :])


def concat_rope(plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float = 1.0) -> Tensor:
    """See `LayerOps.concat_rope`."""
    (count, heads, size), width = plain.shape, turned.shape[2]
    assert plain.stride(2) == turned.stride(2) == cos.stride(-1) == sin.stride(-1) == 1
    assert cos.stride(0) == sin.stride(0) and plain.dtype == turned.dtype == cos.dtype
    out = torch.empty(count, heads, size + width, dtype=plain.dtype, device=plain.device)
    if count:
        _concat_rope_kernel[(count, heads)](
            out, plain, turned, cos, sin, factor, *plain.stride()[:2], *turned.stride()[:2], cos.stride(0),
            HEADS=heads, PLAIN=size, TURNED=width, PLAIN_PAD=triton.next_power_of_2(size),
            HALF_PAD=triton.next_power_of_2(width // 2), num_warps=2, **launch_options(plain.device),
        )  # fmt: skip
    return out


@triton.jit
def _norm_beside(out, x, norm, eps, row_stride, SIZE: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr):
    """The norm of a row."""
    col = tl.arange(0, PAD)
    here = col < SIZE
    weight = tl.load(norm + col, mask=here, other=0.0).to(tl.float32)  # no kernel writes weights
    start(PDL)
    m = tl.program_id(0).to(tl.int64)
    raw = tl.load(x + m * row_stride + col, mask=here, other=0.0)
    value = raw.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * weight
    tl.store(out + m * SIZE + col, value.to(raw.dtype), mask=here)


@triton.jit
def _keep_latent(
    made, kv, slots, norm, cos, sin, eps, by, row_stride, turn_stride,
    LATENT: tl.constexpr, TURNED: tl.constexpr, LATENT_PAD: tl.constexpr, HALF_PAD: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What a token keeps, to the pool."""
    col, half = tl.arange(0, LATENT_PAD), tl.arange(0, HALF_PAD)
    HALF: tl.constexpr = TURNED // 2
    here, ok = col < LATENT, half < HALF
    weight = tl.load(norm + col, mask=here, other=0.0).to(tl.float32)  # no kernel writes weights
    start(PDL)
    m = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + m)
    made += m * row_stride
    raw = tl.load(made + col, mask=here, other=0.0)
    a = tl.load(made + LATENT + half, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(made + LATENT + HALF + half, mask=ok, other=0.0).to(tl.float32)
    dtype = raw.dtype
    at = m * turn_stride
    # Before the sum, which has barriers: angles would be loaded behind them.
    one, two = _turned(a[None, :], b[None, :], cos + at, sin + at, half, ok, dtype, HALF)
    x = raw.to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps) * weight).to(dtype)
    into = kv + slot * (LATENT + TURNED)
    ahead = into + LATENT + half[None, :]
    if FP8:
        x = _to_e4m3(x.to(tl.float32) * by)
        one, two = _to_e4m3(one.to(tl.float32) * by), _to_e4m3(two.to(tl.float32) * by)
    tl.store(into + col, x, mask=here)
    tl.store(ahead, one, mask=ok[None, :])
    tl.store(ahead + HALF, two, mask=ok[None, :])


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _latent_kernel(
    made, kv, slots, norm, cos, sin, eps, by, row_stride, turn_stride, query, query_norm, normed, query_stride,
    LATENT: tl.constexpr, TURNED: tl.constexpr, LATENT_PAD: tl.constexpr, HALF_PAD: tl.constexpr, FP8: tl.constexpr,
    QUERY: tl.constexpr, QUERY_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M,), or (M, 2): the second program norms what a query is made of, of QUERY elements. FP8: the pool holds
    codes of float8_e4m3fn, of what is kept times `by`."""
    if tl.program_id(1) == 0:
        _keep_latent(
            made, kv, slots, norm, cos, sin, eps, by, row_stride, turn_stride,
            LATENT, TURNED, LATENT_PAD, HALF_PAD, FP8, PDL,
        )  # fmt: skip
    elif QUERY > 0:
        _norm_beside(normed, query, query_norm, eps, query_stride, QUERY, QUERY_PAD, PDL)


def write_latents(
    made: Tensor,
    norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    write_slots: Tensor,
    kv: Tensor,
    scale: float,
    query: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Norms and rotates what tokens keep of latent attention, and writes it to the pool. query: x [M, n], rows perhaps
    apart, and weights [n] of its norm -> x normed; else nothing.

    made [M, latent + turned], rows perhaps apart; norm [latent]; cos, sin [M, ..., turned], as in `rope_and_write`;
    write_slots [M] int64; kv [slots, 1, 1, latent + turned], in float8_e4m3fn divided by `scale`.
    """
    (count, width), latent = made.shape, len(norm)
    turned, fp8 = width - latent, kv.itemsize == 1
    assert kv.shape[1:] == (1, 1, width) and kv.is_contiguous() and made.dtype == cos.dtype and fits(made, kv)
    assert made.stride(1) == cos.stride(-1) == sin.stride(-1) == 1 and cos.stride(0) == sin.stride(0)
    x, weight = query or (made[:, :0], norm)
    normed, size = x.new_empty(x.shape), x.shape[1]
    assert x.stride(1) == 1 and x.dtype == made.dtype and (query is None or len(weight) == size)
    if count:
        _latent_kernel[(count, 1 if query is None else 2)](
            made, kv.view(torch.uint8) if fp8 else kv, write_slots, norm, cos, sin, eps, 1 / scale,
            made.stride(0), cos.stride(0), x, weight, normed, x.stride(0),
            LATENT=latent, TURNED=turned, LATENT_PAD=triton.next_power_of_2(latent),
            HALF_PAD=triton.next_power_of_2(turned // 2), FP8=fp8, QUERY=size,
            QUERY_PAD=triton.next_power_of_2(size), num_warps=4, **launch_options(made.device),
        )  # fmt: skip
    return normed


def rope_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    write_slots: Tensor,
    kv: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    v_norm: bool = False,
    after: bool = False,
) -> None:
    """`rotate` and `KVPool.write` at once: q is turned in place, k and v go to the pool.

    qkv [M, heads + 2 * kv_heads, head_dim], contiguous within each of M, heads perhaps 0; cos, sin [M, ..., head_dim]:
    the halves of rows of a `rope_table`. write_slots [M] int64; kv [slots, kv_heads, 2, head_dim], in float8_e4m3fn
    divided by `scales`, those of keys and of values. q_norm, k_norm [head_dim]: weights of an RMS norm of each head
    before it is turned, or after that.  v_norm: whether heads of values have one, too, without weights.
    """
    count, all_heads, dim = qkv.shape
    kv_heads = kv.shape[1]
    assert qkv.stride()[1:] == (dim, 1) and kv.is_contiguous() and qkv.dtype == cos.dtype and fits(qkv, kv)
    assert (
        cos.stride(-1) == 1 == sin.stride(-1)
        and cos.stride(0) == sin.stride(0)
        and (q_norm is None) == (k_norm is None)
    )
    block, fp8 = 16, kv.itemsize == 1
    _rope_kernel[(count, triton.cdiv(all_heads, block))](
        qkv, kv.view(torch.uint8) if fp8 else kv, write_slots, cos, sin, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, eps, 1 / scales[0], 1 / scales[1], qkv.stride(0), cos.stride(0),
        HEADS=all_heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim, HALF_PAD=triton.next_power_of_2(dim // 2),
        BLOCK=block, NORM=q_norm is not None, AFTER=after, V_NORM=v_norm, FP8=fp8, num_warps=4,
        **launch_options(qkv.device),
    )  # fmt: skip


@triton.jit
def _turn_heads_kernel(
    qkv, cos, sin, row_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M,): queries and keys are turned in place."""
    start(PDL)
    m = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, HEADS_PAD), tl.arange(0, HALF_PAD)
    HALF: tl.constexpr = SIZE // 2
    ok = half < HALF
    here = (head < 2 * HEADS)[:, None] & ok[None, :]
    at = qkv + m * row_stride + head[:, None] * SIZE + half[None, :]
    a = tl.load(at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    by_cos = tl.load(cos + m * HALF + half, mask=ok, other=0.0)[None, :]
    by_sin = tl.load(sin + m * HALF + half, mask=ok, other=0.0)[None, :]
    dtype = qkv.dtype.element_ty
    tl.store(at, (a * by_cos - b * by_sin).to(dtype), mask=here)
    tl.store(at + HALF, (b * by_cos + a * by_sin).to(dtype), mask=here)


def turn_heads(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `RopeOps.turn_heads`."""
    (count, width), half = qkv.shape, cos.shape[1]
    assert qkv.stride(1) == 1 and width == 6 * heads * half and cos.is_contiguous() and sin.is_contiguous()
    assert cos.shape == sin.shape == (count, half) and cos.dtype == sin.dtype == torch.float32
    if count:
        _turn_heads_kernel[(count,)](
            qkv, cos, sin, qkv.stride(0), HEADS=heads, SIZE=2 * half, HEADS_PAD=triton.next_power_of_2(2 * heads),
            HALF_PAD=triton.next_power_of_2(half), **launch_options(qkv.device),
        )  # fmt: skip
    q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
    return q, k, v


class TritonRopeOps(RopeOps):
    concat_rope = staticmethod(concat_rope)
    turn_heads = staticmethod(turn_heads)

    def head_queries(
        self, products: HeadProducts, plain: Tensor, turned: Tensor, cos: Tensor, sin: Tensor, factor: float = 1.0
    ) -> Tensor:
        if isinstance(products, cuda_heads.HeadGemm):
            return products.queries(plain, turned, cos, sin, factor)
        return super().head_queries(products, plain, turned, cos, sin, factor)
