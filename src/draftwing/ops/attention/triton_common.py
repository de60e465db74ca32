"""What the attention kernels share, and what it promises about bits.

A query's result depends on its own path alone: it has the same bits as a plain decode, a node of any tree, or a row of
a prefill chunk, alone or in a batch. Like `ops.attention.spec` it sums in position order:

- Positions are cut at fixed places into splits, splits into units. A unit's keys share one running maximum; each
  split starts a softmax of its own, and splits are merged one after the other, by the same code wherever they meet.
- Inside a unit keys are summed in chunks of 16, the depth of one tensor core instruction, in order. A key or a chunk
  of weight 0 adds an exact zero.
- The softmax's denominator is summed by the same instruction, as a product with ones.
- A sliding window leaves units out that no row of a tile reaches, and masks the rest. What is left out would have added
  zeros. A sink is merged last, as a split of one key without a value.
- Products and sums are rounded where the source says: fused are those only that it writes so. Float32 products are
  made of single multiplications and additions, and what the compiler would fuse differs from loop to loop.
- Tiles below 64 rows are one kind of instruction (mma.sync) everywhere. On compute capability 9.0, and there only,
  larger ones become warp group products (wgmma). These gave the same bits on an H200 (2026-11-20): every element of
  sums of 64 and 128 products, in bfloat16 and float16, of factors of one size and spread over 2^24 (float16: 2^16),
  added to nothing and to numbers up to 4096 times as large; and the order of products inside a chunk made no
  difference. Other devices were not measured and keep to small tiles where bits are promised.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention.batch import FULL, AttentionKind
from draftwing.ops.triton.common import IS_INTERPRETED, is_hopper

LOG2E = tl.constexpr(math.log2(math.e))


class Tiling(NamedTuple):
    """Sizes of the kernels. Results are the same bits for the same (unit, short, tier, long) only."""

    unit: int = 64  # positions that share one maximum
    short: int = 128  # positions of a split below `tier`
    tier: int = 2048
    long: int = 512  # positions of a split from `tier` on
    rows: int = 16  # rows (nodes x group) of a tile of decode and chains
    own_rows: int = 16  # of the second launch of trees
    warps: int = 4  # of tiles up to 64 rows
    stages: int = 3  # units under way, of decode, chains and masked trees
    own: int = 64  # most keys that a tile gathers at a time for its nodes alone
    programs: int = 264  # splits are spread over lanes until there are about as many
    context_rows: int = 32  # of the first launch of trees, which reads what all nodes share; 0: one launch
    context_stages: int = 2
    context_programs: int = 132
    shared_merge: int = 64  # splits of a page table from which on programs share the merge of a tile, by elements
    shared_part: int = 2048  # elements of a split's part from which on those of a single launch do so, too
    waiting: int = 0  # of which fewer than so many wait for others: multiprocessors
    window_rows: int = 32  # where many trees read a masked window; few take tiles of `rows`
    prefill_rows: int = 32
    prefill_stages: int = 3
    fast_rows: int = 128  # prefill where bits may differ from decode's
    overlap_unit: int = 0  # positions of a unit of `triton_hopper`, which is this where it can be; 0: it is not
    overlap_stages: int = 0  # its units in shared memory


TILING = Tiling()
TILING_HOPPER = TILING._replace(  # compute capability 9.0, measured on an H200
    stages=5,
    context_rows=128,
    context_stages=5,
    waiting=78,  # of the smallest (H20)
    window_rows=64,
    prefill_rows=128,
    prefill_stages=5,
    overlap_unit=128,
    overlap_stages=2,
)
# Products in float32 run without tensor cores, on operands in registers.
TILING_FLOAT32 = Tiling(unit=16, own=32, warps=8, context_rows=0, window_rows=16, prefill_rows=16, fast_rows=16)
TILING_WIDEST_FLOAT32 = TILING_FLOAT32._replace(own=16)  # of heads of more than 256: keys of 32 take 228 KB
TILING_WIDE = Tiling(  # heads of more than 128
    unit=32, own=32, warps=8, context_rows=0, window_rows=16, prefill_rows=32, fast_rows=64
)
TILING_WIDE_HOPPER = TILING_WIDE._replace(context_rows=64, context_stages=3, prefill_rows=64)
# Of heads of more than 256: keys and values of two units and of 16 own ones, and 16 queries, take 112 KB of 16 bits.
TILING_WIDEST = TILING_WIDE._replace(unit=16, stages=2, own=16, prefill_stages=2, fast_rows=32)
# Of latents on compute capability 9.0; on an H200 a unit of 64 took half of the time of one of 16.
TILING_LATENT_HOPPER = TILING_WIDEST._replace(unit=64, own=32)
ROUNDING = {"enable_fp_fusion": False}  # else `den * fade` is rounded before a zero is added, not before a weight
ANY_ALIGNMENT = ["rows", "prefix_len", "path", "path_len"]  # they may be parts of larger tensors


def pick_tiling(kv: Tensor) -> Tiling:
    """Picks the tiling for a layer of the pool."""
    if kv.dtype == torch.float32:
        return TILING_WIDEST_FLOAT32 if kv.shape[3] > 256 else TILING_FLOAT32
    hopper = kv.device.type != "cpu" and is_hopper()
    if kv.shape[3] > 256:
        tiling = TILING_LATENT_HOPPER if hopper and kv.shape[2] == 1 else TILING_WIDEST
        return tiling if kv.itemsize > 1 else tiling._replace(prefill_rows=16)  # registers do not hold what is widened
    if kv.shape[3] > 128:
        return TILING_WIDE_HOPPER if hopper else TILING_WIDE
    return TILING_HOPPER if hopper else TILING


def warps_of(rows: int, tiling: Tiling) -> int:
    """A warp takes 16 rows, and small tiles are shared by several."""
    return max(tiling.warps, rows // 16)


@triton.constexpr_function
def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def key_parts(kv: Tensor, kind: AttentionKind) -> tuple[int, int]:
    """Returns DIM and MORE of the kernels: elements of a value, and those that keys have behind the first so many where
    these are the values, 0: values are apart."""
    dim = kv.shape[3]
    assert (kv.shape[2] == 1) == (0 < kind.values < dim), "a layer's values are apart, or a part of its keys"
    return (kind.values, dim - kind.values) if kind.values else (dim, 0)


def fits(q: Tensor, kv: Tensor) -> bool:
    """Returns whether these queries can read this layer of the pool."""
    return q.dtype == kv.dtype or (kv.dtype == torch.float8_e4m3fn and q.itemsize == 2)


def scale_of(dim: int, kind: AttentionKind = FULL) -> float:
    return kind.scale(dim) * math.log2(math.e)  # of scores in powers of 2


# -- splits -----------------------------------------------------------------------------------------------------------


@triton.jit
def splits_of(length, SHORT: tl.constexpr, TIER: tl.constexpr, LONG: tl.constexpr):
    """How many splits [0, length) touches."""
    near, far = tl.minimum(length, TIER), tl.maximum(length - TIER, 0)
    return (near + SHORT - 1) // SHORT + (far + LONG - 1) // LONG


@triton.jit
def split_start(split, SHORT: tl.constexpr, TIER: tl.constexpr, LONG: tl.constexpr):
    near = TIER // SHORT
    return tl.where(split < near, split * SHORT, TIER + (split - near) * LONG)


@triton.jit
def begins_split(at, SHORT: tl.constexpr, TIER: tl.constexpr, LONG: tl.constexpr):
    return tl.where(at < TIER, at % SHORT, (at - TIER) % LONG) == 0


# -- sums: a state is (top [ROWS], the maximum so far; den [ROWS, 16], equal columns; acc [ROWS, DIM_PAD]) ------------


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """Returns the first position that queries at these positions see; WINDOW: `AttentionKind.reach`, not 0."""
    if WINDOW > 0:  # noqa: SIM108 (known when it is compiled)
        first = tl.maximum(position + 1 - WINDOW, 0)
    else:
        first = position // -WINDOW * -WINDOW
    return first


@triton.jit
def load_kv(
    kv, slot, head, ok, dim, vdim, KV_HEADS: tl.constexpr, DIM: tl.constexpr, MORE: tl.constexpr, DTYPE: tl.constexpr
):
    """slot [K] int32 or int64, dim [DIM_PAD] -> keys, in two parts as queries are, and values [K, W] as DTYPE, 0 where
    not ok; a pool in 8 bits is widened, which is exact. vdim [W]: which elements of values, all where they are a part
    of keys. MORE: as `key_parts` has it."""
    ROW: tl.constexpr = DIM + (MORE if MORE > 0 else DIM)
    at = kv + (slot.to(tl.int64) * (KV_HEADS * ROW) + head * ROW)[:, None]
    mask = ok[:, None] & (dim < DIM)[None, :]
    first = _widened(tl.load(at + dim[None, :], mask=mask, other=0.0), DTYPE)
    if MORE > 0:
        behind = tl.arange(0, padded(MORE))
        more = tl.load(at + DIM + behind[None, :], mask=ok[:, None] & (behind < MORE)[None, :], other=0.0)
        k, v = (first, _widened(more, DTYPE)), first
    else:
        mask = ok[:, None] & (vdim < DIM)[None, :]
        k, v = (first,), _widened(tl.load(at + DIM + vdim[None, :], mask=mask, other=0.0), DTYPE)  # type: ignore[assignment]
    return k, v


@triton.jit
def load_q(q, at, valid, dim, DIM: tl.constexpr, MORE: tl.constexpr):
    """at [ROWS]: where each query begins -> its parts: the first DIM elements [ROWS, DIM_PAD], and MORE behind them"""
    at = q + at[:, None]
    first = tl.load(at + dim[None, :], mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    if MORE > 0:
        behind = tl.arange(0, padded(MORE))
        more = tl.load(at + DIM + behind[None, :], mask=valid[:, None] & (behind < MORE)[None, :], other=0.0)
        parts = first, more
    else:
        parts = (first,)  # type: ignore[assignment]
    return parts


@triton.jit
def ask_for_kv(
    kv, table_row, head, first, stop, KV_HEADS: tl.constexpr, ROW: tl.constexpr, COUNT: tl.constexpr, ON: tl.constexpr
):
    """Lets keys and values of positions [first, stop), of the first COUNT of them, come into the L2 cache; of the dummy
    slot for those past `stop`. ROW: elements of both."""
    if ON:
        place = first + tl.arange(0, COUNT)
        slot = tl.load(table_row + place, mask=place < stop, other=0, cache_modifier=".cg")
        values: tl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth  # of a line of 128 bytes
        line = tl.minimum(tl.arange(0, triton.next_power_of_2(triton.cdiv(ROW, values))) * values, ROW - 1)
        at = kv + (slot.to(tl.int64) * (KV_HEADS * ROW) + head * ROW)[:, None] + line[None, :]
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [at.to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def _widened(x, DTYPE: tl.constexpr):
    """Where the compiler sees that a factor of a product was loaded in 8 bits, it gives a lane four neighbours and so
    spreads 32 keys over two instructions: a chunk of 16 would not be summed alone any more. It sees as far as this."""
    HIDDEN: tl.constexpr = x.dtype.primitive_bitwidth == 8 and not IS_INTERPRETED
    x = x.to(DTYPE)
    tl.static_assert(not HIDDEN or x.dtype.primitive_bitwidth == 16)
    if HIDDEN:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def scores(q, k, scale, CAP: tl.constexpr):
    """q, k: parts of queries [ROWS, ..] and keys [K, ..] -> [ROWS, K], without the scale. CAP: as `AttentionKind` has
    it, of scores with the scale."""
    s = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    if len(k) > 1:
        s = tl.dot(q[1], tl.trans(k[1]), s, input_precision="ieee")
    if CAP > 0:  # cap * tanh(x) = cap - 2 * cap / (1 + exp2(2 * log2(e) * x)), divided by the scale, in powers of 2
        cap = CAP * LOG2E / scale
        s = cap - 2.0 * cap / (1.0 + tl.exp2(s * (2.0 * LOG2E / cap)))
    return s


@triton.jit
def nothing(ROWS: tl.constexpr, DIM_PAD: tl.constexpr):
    """The state before the first key of a split"""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, DIM_PAD], tl.float32)


@triton.jit
def raised(top, best, scale):
    """The running maximum after scores up to best: (new maximum, what to subtract, factor of what was summed)."""
    new = tl.maximum(top, best * scale)
    base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: keeps -inf - -inf out
    return new, base, tl.exp2(top - base)


@triton.jit
def added(s, scale, base, v, den, acc):
    """Adds the weighted values of one block of keys: s [ROWS, K], -inf where a key is not the row's; v [K, DIM_PAD]."""
    p = tl.exp2(tl.fma(s, scale, -base[:, None])).to(v.dtype)  # an explicit fma: the same rounding in every kernel
    ones = tl.full([s.shape[1], 16], 1.0, tl.float32).to(v.dtype)
    den = tl.dot(p, ones, den, input_precision="ieee")
    acc = tl.dot(p, v, acc, input_precision="ieee")
    return den, acc


@triton.jit
def with_unit(s, scale, v, top, den, acc):
    """The state after a unit that is one block of keys."""
    top, base, fade = raised(top, tl.max(s, 1), scale)
    den, acc = added(s, scale, base, v, den * fade[:, None], acc * fade[:, None])
    return top, den, acc


@triton.jit
def merged(top_a, den_a, acc_a, top_b, den_b, acc_b):
    """Splits a (all before) and b (the next); den [ROWS], acc [ROWS, DIM_PAD]."""
    new = tl.maximum(top_a, top_b)
    base = tl.where(new == float("-inf"), 0.0, new)
    a, b = tl.exp2(top_a - base), tl.exp2(top_b - base)
    den = tl.fma(den_b, b, den_a * a)
    acc = tl.fma(acc_b, tl.broadcast_to(b[:, None], acc_b.shape), acc_a * a[:, None])
    return new, den, acc


@triton.jit
def column(den):
    """[ROWS, 16] of equal columns -> [ROWS]"""
    return tl.max(den, 1)


@triton.jit
def store_mean(out, row, top, den, acc, sinks, head, v_scale, valid, dim, DIM: tl.constexpr):
    """row [ROWS] int64: rows of out [M * heads, head_dim]; head [ROWS]: which sink is theirs, where there are sinks"""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        _, den, acc = merged(top, den, acc, sink, tl.full(den.shape, 1.0, tl.float32), tl.zeros_like(acc))
    den = tl.where(den > 0.0, den, 1.0)  # padding rows of the tile
    mask = valid[:, None] & (dim < DIM)[None, :]
    tl.store(
        out + row[:, None] * DIM + dim[None, :], (acc / den[:, None] * v_scale).to(out.dtype.element_ty), mask=mask
    )
