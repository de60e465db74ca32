"""Causal attention of prefill chunks on compute capability 9.0, also with the bits of decode.

A block has three groups of four warps. One fetches keys and values of a tile's units into a ring in shared memory; the
others take half of the tile's rows each. Scores of a unit and the weighted values of the unit before it are two
products that run at once, and so do the softmax of the one and the product of the other. A group waits for nothing but
the ring, so that one multiplies while the other is at its softmax. Triton's compiler waits for each product before the
next begins, so this kernel is written in Gluon, which leaves the order to it. It has no interpreter: what runs without
a GPU is `triton_prefill`, of which this is the fast form for layers without a window and sinks.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from draftwing.ops.attention.batch import AttentionKind
from draftwing.ops.attention.triton_common import ROUNDING, Tiling
from draftwing.ops.attention.triton_decode import Workspace
from draftwing.ops.attention.triton_tiles import PIECES
from draftwing.ops.triton.common import keep_cache, launch_options

ROWS = 128
WARPS = 4  # of a group
# Registers of a thread: of the second group that multiplies, and of that which fetches; the first has what is left.
# With others more is spilled, see docs/dev/gpu_kernels.md.
MULTIPLYING, FETCHING = 232, 56
_EXACT_STAGES = 4  # units in shared memory where bits are decode's
ONES = gl.constexpr(8)  # columns of a product that sums weights


@gluon.jit
def scores(q_smem, k_smem, ROWS: gl.constexpr, UNIT: gl.constexpr, S: gl.constexpr):
    """Begins the product [ROWS, UNIT]."""
    zeros = gl.zeros([ROWS, UNIT], gl.float32, S)
    return hopper.warpgroup_mma(q_smem, k_smem.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def weights(s, scale, top, den):
    """s: scores [ROWS, UNIT], -inf where a key is not the row's -> weights as a factor of values, what is summed so far
    fades by, the new maximum and denominator [ROWS]"""
    new = gl.maximum(top, gl.max(s, 1) * scale)
    fade = gl.exp2(top - new)
    weight = gl.exp2(s * scale - gl.expand_dims(new, 1))
    den = den * fade + gl.sum(weight, 1)
    return weight, fade, new, den


@gluon.jit
def of_piece(parts, stats, place, ROWS: gl.constexpr, DIM: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr):
    """Pointers to a piece's maxima and denominators [ROWS], and its sums [ROWS, DIM]."""
    of_row = stats + place * (2 * ROWS) + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, ACC)), gl.arange(0, DIM, gl.SliceLayout(0, ACC))
    return (
        of_row,
        of_row + ROWS,
        parts + place * (ROWS * DIM) + gl.expand_dims(row * DIM, 1) + gl.expand_dims(column, 0),
    )


@gluon.jit
def merged(
    place, pieces, parts, stats,
    STEP: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Denominators and sums of all pieces of a tile, of which the first is at `place`, in their order."""
    at_top, at_den, at_acc = of_piece(parts, stats, place, ROWS, DIM, S, ACC)
    top, den = gl.load(at_top, cache_modifier=".cg"), gl.load(at_den, cache_modifier=".cg")
    acc = gl.load(at_acc, cache_modifier=".cg")
    for piece in range(1, pieces):
        at_top, at_den, at_acc = of_piece(parts, stats, place + piece * STEP, ROWS, DIM, S, ACC)
        its_top = gl.load(at_top, cache_modifier=".cg")
        new = gl.maximum(top, its_top)
        fade, its_fade = gl.exp2(top - new), gl.exp2(its_top - new)
        top, den = new, den * fade + gl.load(at_den, cache_modifier=".cg") * its_fade
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, ACC)), 1)
        its = gl.load(at_acc, cache_modifier=".cg")
        acc = acc + its * gl.expand_dims(gl.convert_layout(its_fade, gl.SliceLayout(1, ACC)), 1)
    return den, acc


@gluon.jit
def _fetch(
    kv_head, table_row, low, units, end, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
    UNIT: gl.constexpr, STAGES: gl.constexpr, PITCH: gl.constexpr, DIM: gl.constexpr,
):  # fmt: skip
    """Lets keys and values of the units come, each as soon as its place in the ring is free."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dim = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
    place = low * UNIT + gl.arange(0, UNIT, gl.SliceLayout(1, COPY))
    slots = gl.load(table_row + gl.minimum(place, end - 1)).to(gl.int64)
    for unit in range(0, units):
        stage, phase = unit % STAGES, (unit // STAGES & 1) ^ 1
        at = gl.expand_dims(kv_head + slots * PITCH, 1) + gl.expand_dims(dim, 0)
        # Those past the end are the last one's, whose scores are masked.
        slots = gl.load(table_row + gl.minimum(place + (unit + 1) * UNIT, end - 1)).to(gl.int64)
        mbarrier.wait(k_empty.index(stage), phase)
        async_copy.async_copy_global_to_shared(k_smem.index(stage), at)
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
        mbarrier.wait(v_empty.index(stage), phase)
        async_copy.async_copy_global_to_shared(v_smem.index(stage), at + DIM)
        async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def _step(
    unit, q_smem, k_smem, v_smem, k_full, v_full, k_empty, v_empty, last, columns, scale, top, den, acc, p,
    MASKED: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, S: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """Does scores of a unit, and values of the one before, of which p are the weights."""
    stage, before = unit % STAGES, (unit - 1) % STAGES
    mbarrier.wait(k_full.index(stage), unit // STAGES & 1)
    s = scores(q_smem, k_smem.index(stage), ROWS, UNIT, S)
    mbarrier.wait(v_full.index(before), (unit - 1) // STAGES & 1)
    acc = hopper.warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    s = hopper.warpgroup_mma_wait(1, (s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        s = gl.where(gl.expand_dims(unit * UNIT + columns, 0) <= gl.expand_dims(last, 1), s, float("-inf"))
    weight, fade, top, den = weights(s, scale, top, den)
    p_next = gl.convert_layout(weight.to(p.dtype), gl.DotOperandLayout(0, ACC, 2))
    acc, p = hopper.warpgroup_mma_wait(0, (acc, p))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, ACC)), 1)
    return top, den, acc, p_next


@gluon.jit
def _store_mean(acc, den, v_scale, at, valid, ACC: gl.constexpr):
    """Stores sums of weighted values, each divided by its row's denominator."""
    mean = acc / gl.expand_dims(gl.convert_layout(den, gl.SliceLayout(1, ACC)), 1) * v_scale
    gl.store(at, mean.to(at.dtype.element_ty), mask=valid)


@gluon.jit
def _attend(
    q_smem, k_smem, v_smem, k_full, v_full, k_empty, v_empty, out, parts, stats, tickets,
    first, position, length, begin, place, low, whole, units, cut, head, scale, v_scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Does half of the rows of a tile, or of a piece, from `begin` on. place: of its first piece's partial results."""
    ROWS: gl.constexpr = 64
    GROUP: gl.constexpr = HEADS // KV_HEADS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, UNIT, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    last = position + (begin + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    columns = low * UNIT + gl.arange(0, UNIT, gl.SliceLayout(0, S))
    mbarrier.wait(k_full.index(0), 0)
    s = hopper.warpgroup_mma_wait(0, (scores(q_smem, k_smem.index(0), ROWS, UNIT, S),))
    mbarrier.arrive(k_empty.index(0), count=1)
    s = gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(last, 1), s, float("-inf"))
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    den = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    weight, _, top, den = weights(s, scale, top, den)
    p = gl.convert_layout(weight.to(q_smem.dtype), gl.DotOperandLayout(0, ACC, 2))
    acc = gl.zeros([ROWS, DIM], gl.float32, ACC)
    for unit in range(1, whole):
        top, den, acc, p = _step(
            unit, q_smem, k_smem, v_smem, k_full, v_full, k_empty, v_empty, last, columns, scale, top, den, acc, p,
            False, UNIT, STAGES, ROWS, S, ACC,
        )  # fmt: skip
    for unit in range(gl.maximum(whole, 1), units):
        top, den, acc, p = _step(
            unit, q_smem, k_smem, v_smem, k_full, v_full, k_empty, v_empty, last, columns, scale, top, den, acc, p,
            True, UNIT, STAGES, ROWS, S, ACC,
        )  # fmt: skip
    unit = units - 1
    mbarrier.wait(v_full.index(unit % STAGES), unit // STAGES & 1)
    acc, p = hopper.warpgroup_mma_wait(0, (hopper.warpgroup_mma(p, v_smem.index(unit % STAGES), acc, is_async=True), p))
    flat = begin + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    row, own_head = (first + flat // GROUP).to(gl.int64), head * GROUP + flat % GROUP
    valid = gl.expand_dims(flat // GROUP < length, 1)
    at_out = out + gl.expand_dims((row * HEADS + own_head) * DIM, 1)
    at_out = at_out + gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, ACC)), 0)
    pieces = cut % 32
    if pieces == 1:
        _store_mean(acc, den, v_scale, at_out, valid, ACC)
    else:
        its = place + cut // 32 % 32 * (2 * KV_HEADS)
        at_top, at_den, at_acc = of_piece(parts, stats, its, ROWS, DIM, S, ACC)
        gl.store(at_top, top)
        gl.store(at_den, den)
        gl.store(at_acc, acc)
        gl.thread_barrier()
        if gl.atomic_add(tickets + place, 1, sem="acq_rel") == pieces - 1:
            gl.store(tickets + place, 0)
            den, acc = merged(place, pieces, parts, stats, 2 * KV_HEADS, ROWS, DIM, S, ACC)
            _store_mean(acc, den, v_scale, at_out, valid, ACC)


# -- with the bits of decode: see `triton_common` ----------------------------------------------------------------------


@gluon.jit
def _raised(s, scale, top):
    """`triton_common.raised` and weights: of scores s [ROWS, UNIT] -> factors of values, what is summed so far fades
    by, and the new maximum [ROWS]."""
    new = gl.maximum(top, gl.max(s, 1) * scale)
    base = gl.where(new == float("-inf"), 0.0, new)
    # A fused product and sum, as in `triton_common.added`, which wants three tensors of one shape.
    scales, below = gl.full_like(s, 0.0) + scale, gl.broadcast(gl.expand_dims(-base, 1), s)[0]
    return gl.exp2(gl.fma(s, scales, below)), gl.exp2(top - base), new


@gluon.jit
def _merged(all_top, all_den, all_acc, top, den, acc, S: gl.constexpr, ACC: gl.constexpr):
    """`triton_common.merged`: the splits before, and the next one, whose den [ROWS, ONES] has equal columns."""
    new = gl.maximum(all_top, top)
    base = gl.where(new == float("-inf"), 0.0, new)
    a, b = gl.exp2(all_top - base), gl.exp2(top - base)
    den = gl.convert_layout(gl.max(den, 1), gl.SliceLayout(1, S))
    all_den = gl.fma(den, b, all_den * a)
    a_acc = gl.expand_dims(gl.convert_layout(a, gl.SliceLayout(1, ACC)), 1)
    b_acc = gl.broadcast(gl.expand_dims(gl.convert_layout(b, gl.SliceLayout(1, ACC)), 1), acc)[0]
    return new, all_den, gl.fma(acc, b_acc, all_acc * a_acc)


@gluon.jit
def _step_in_splits(
    unit, q_smem, k_smem, v_smem, ones, k_full, v_full, k_empty, v_empty, last, columns, scale, top, den, acc, all_top,
    all_den, all_acc, p,
    MASKED: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr, SHORT: gl.constexpr, TIER: gl.constexpr,
    LONG: gl.constexpr, ROWS: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr, DEN: gl.constexpr,
):  # fmt: skip
    """Does scores of a unit, and values of the one before, of which p are the weights."""
    stage, before = unit % STAGES, (unit - 1) % STAGES
    mbarrier.wait(k_full.index(stage), unit // STAGES & 1)
    s = scores(q_smem, k_smem.index(stage), ROWS, UNIT, S)
    mbarrier.wait(v_full.index(before), (unit - 1) // STAGES & 1)
    acc = hopper.warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    den = hopper.warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, DEN, 2)), ones.permute((1, 0)), den, is_async=True
    )
    s = hopper.warpgroup_mma_wait(2, (s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:
        s = gl.where(gl.expand_dims(unit * UNIT + columns, 0) <= gl.expand_dims(last, 1), s, float("-inf"))
    at = unit * UNIT
    begins = gl.where(at < TIER, at % SHORT, (at - TIER) % LONG) == 0
    old = top
    weight, fade, top = _raised(s, scale, gl.where(begins, float("-inf"), top))
    p_next = gl.convert_layout(weight.to(p.dtype), gl.DotOperandLayout(0, ACC, 2))
    acc, den, p = hopper.warpgroup_mma_wait(0, (acc, den, p))
    mbarrier.arrive(v_empty.index(before), count=1)
    if begins:
        all_top, all_den, all_acc = _merged(all_top, all_den, all_acc, old, den, acc, S, ACC)
        acc, den = gl.zeros_like(acc), gl.zeros_like(den)
    else:
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, ACC)), 1)
        den = den * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, DEN)), 1)
    return top, den, acc, all_top, all_den, all_acc, p_next


@gluon.jit
def _attend_in_splits(
    q_smem, k_smem, v_smem, ones, k_full, v_full, k_empty, v_empty, out, first, position, length, begin, whole, units,
    head, scale, v_scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr,
    SHORT: gl.constexpr, TIER: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """Does half of the rows of a tile, from `begin` on, with the bits that `triton_prefill` gives."""
    ROWS: gl.constexpr = 64
    GROUP: gl.constexpr = HEADS // KV_HEADS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, UNIT, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    DEN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES, 16])
    last = position + (begin + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    columns = gl.arange(0, UNIT, gl.SliceLayout(0, S))
    mbarrier.wait(k_full.index(0), 0)
    s = hopper.warpgroup_mma_wait(0, (scores(q_smem, k_smem.index(0), ROWS, UNIT, S),))
    mbarrier.arrive(k_empty.index(0), count=1)
    s = gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(last, 1), s, float("-inf"))
    all_top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    all_den = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    weight, _, top = _raised(s, scale, all_top)
    p = gl.convert_layout(weight.to(q_smem.dtype), gl.DotOperandLayout(0, ACC, 2))
    acc, den = gl.zeros([ROWS, DIM], gl.float32, ACC), gl.zeros([ROWS, ONES], gl.float32, DEN)
    all_acc = acc
    for unit in range(1, whole):
        top, den, acc, all_top, all_den, all_acc, p = _step_in_splits(
            unit, q_smem, k_smem, v_smem, ones, k_full, v_full, k_empty, v_empty, last, columns, scale, top, den, acc,
            all_top, all_den, all_acc, p, False, UNIT, STAGES, SHORT, TIER, LONG, ROWS, S, ACC, DEN,
        )  # fmt: skip
    for unit in range(gl.maximum(whole, 1), units):
        top, den, acc, all_top, all_den, all_acc, p = _step_in_splits(
            unit, q_smem, k_smem, v_smem, ones, k_full, v_full, k_empty, v_empty, last, columns, scale, top, den, acc,
            all_top, all_den, all_acc, p, True, UNIT, STAGES, SHORT, TIER, LONG, ROWS, S, ACC, DEN,
        )  # fmt: skip
    unit = units - 1
    mbarrier.wait(v_full.index(unit % STAGES), unit // STAGES & 1)
    acc = hopper.warpgroup_mma(p, v_smem.index(unit % STAGES), acc, is_async=True)
    den = hopper.warpgroup_mma(
        gl.convert_layout(p, gl.DotOperandLayout(0, DEN, 2)), ones.permute((1, 0)), den, is_async=True
    )
    acc, den, p = hopper.warpgroup_mma_wait(0, (acc, den, p))
    all_top, all_den, all_acc = _merged(all_top, all_den, all_acc, top, den, acc, S, ACC)
    flat = begin + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    row, own_head = (first + flat // GROUP).to(gl.int64), head * GROUP + flat % GROUP
    at_out = out + gl.expand_dims((row * HEADS + own_head) * DIM, 1)
    at_out = at_out + gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, ACC)), 0)
    valid = gl.expand_dims(flat // GROUP < length, 1)
    _store_mean(all_acc, gl.where(all_den > 0.0, all_den, 1.0), v_scale, at_out, valid, ACC)


@gluon.jit
def _fetch_queries(q, first, begin, length, head, q_stride, into, HEADS: gl.constexpr, KV_HEADS: gl.constexpr):
    """Lets rows of a tile from `begin` on come, as many as there is room for."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    ROWS: gl.constexpr = into.shape[0]
    DIM: gl.constexpr = into.shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    flat = begin + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    at = (first + flat // GROUP).to(gl.int64) * q_stride + (head * GROUP + flat % GROUP) * DIM
    at = q + (gl.expand_dims(at, 1) + gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, COPY)), 0))
    async_copy.async_copy_global_to_shared(into, at, gl.expand_dims(flat // GROUP < length, 1))


@gluon.jit(do_not_specialize_on_alignment=["rows", "tiles"])
def _hopper_prefill_kernel(
    q, kv, table, rows, tiles, out, parts, stats, tickets, scale, v_scale, q_stride, table_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, UNIT: gl.constexpr,
    STAGES: gl.constexpr, SHORT: gl.constexpr, TIER: gl.constexpr, LONG: gl.constexpr, LAST: gl.constexpr,
    FETCHING: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: heads of a tile are neighbours. tiles [T, 6] int32: as of `prefill_tiles`. Pieces of a tile leave sums in
    parts [places, KV_HEADS, ROWS, DIM], and of each half maxima and denominators in stats [places, KV_HEADS, 2, ROWS];
    who comes last, by tickets [places, KV_HEADS, 2], merges them. LAST, FETCHING: registers of the last groups.

    SHORT, TIER, LONG: splits of `triton_common`, where the bits are to be those of decode; tiles are whole then. Else
    SHORT is 0."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: gl.constexpr = HEADS // KV_HEADS
    PITCH: gl.constexpr = KV_HEADS * 2 * DIM
    DTYPE: gl.constexpr = kv.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles += gl.program_id(0) // KV_HEADS * 6
    head = gl.program_id(0) % KV_HEADS
    first, position, length, begin = gl.load(tiles + 1), gl.load(tiles + 2), gl.load(tiles + 3), gl.load(tiles + 4)
    cut = gl.load(tiles + 5)  # place << 10 | piece << 5 | pieces
    table_row = table + gl.load(rows + gl.load(tiles)) * table_stride
    if length == 0:  # graphs have more tiles than there are
        return
    q_first = gl.allocate_shared_memory(DTYPE, [ROWS // 2, DIM], SHARED)
    q_last = gl.allocate_shared_memory(DTYPE, [ROWS // 2, DIM], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, UNIT, DIM], SHARED)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, UNIT, DIM], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)  # threads that fetch
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=2)  # groups that multiply
        mbarrier.init(v_empty.index(stage), count=2)
    _fetch_queries(q, first, begin, length, head, q_stride, q_first, HEADS, KV_HEADS)
    _fetch_queries(q, first, begin + ROWS // 2, length, head, q_stride, q_last, HEADS, KV_HEADS)
    async_copy.commit_group()
    async_copy.wait_group(0)
    hopper.fence_async_shared()
    gl.thread_barrier()
    end = position + gl.minimum((begin + ROWS - 1) // GROUP, length - 1) + 1
    whole = gl.minimum(position + begin // GROUP + 1, end) // UNIT  # units that each row sees all of
    units = (end + UNIT - 1) // UNIT
    pieces, piece = cut % 32, cut // 32 % 32
    low = units * piece // pieces  # the piece's own are counted from here
    units = units * (piece + 1) // pieces - low
    whole = gl.minimum(whole - low, units)
    half = begin + ROWS // 2
    place = ((cut // 1024 * KV_HEADS + head) * 2).to(gl.int64)
    if SHORT > 0:
        ones = gl.allocate_shared_memory(DTYPE, [ONES, UNIT], SHARED)
        ones.store(gl.full([ONES, UNIT], 1.0, DTYPE, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
        hopper.fence_async_shared()
        gl.thread_barrier()
        gl.warp_specialize(
            [
                (_attend_in_splits, (
                    q_first, k_smem, v_smem, ones, k_full, v_full, k_empty, v_empty, out, first, position, length,
                    begin, whole, units, head, scale, v_scale, HEADS, KV_HEADS, DIM, UNIT, STAGES, SHORT, TIER, LONG,
                )),
                (_attend_in_splits, (
                    q_last, k_smem, v_smem, ones, k_full, v_full, k_empty, v_empty, out, first, position, length,
                    half, whole, units, head, scale, v_scale, HEADS, KV_HEADS, DIM, UNIT, STAGES, SHORT, TIER, LONG,
                )),
                (_fetch, (
                    kv + head * (2 * DIM), table_row, low, units, end, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
                    UNIT, STAGES, PITCH, DIM,
                )),
            ],
            [4, 4], [LAST, FETCHING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [  # both with values of the same types alone, so that it is compiled once
                (_attend, (
                    q_first, k_smem, v_smem, k_full, v_full, k_empty, v_empty, out, parts, stats, tickets, first,
                    position, length, begin, place, low, whole, units, cut, head, scale, v_scale, HEADS, KV_HEADS, DIM,
                    UNIT, STAGES,
                )),
                (_attend, (
                    q_last, k_smem, v_smem, k_full, v_full, k_empty, v_empty, out, parts, stats, tickets, first,
                    position, length, half, place + 1, low, whole, units, cut, head, scale, v_scale, HEADS, KV_HEADS,
                    DIM, UNIT, STAGES,
                )),
                (_fetch, (
                    kv + head * (2 * DIM), table_row, low, units, end, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
                    UNIT, STAGES, PITCH, DIM,
                )),
            ],
            [4, 4], [LAST, FETCHING],
        )  # fmt: skip


def takes(q: Tensor, kv: Tensor, kind: AttentionKind) -> bool:
    """Returns whether the kernel does queries of this layer of the pool, on a device of compute capability 9.0."""
    aligned = q.stride(0) % 16 == q.data_ptr() % 16 == kv.data_ptr() % 16 == 0  # copies are of 16 bytes
    return kind.reach == 0 and not kind.cap and kind.sinks is None and aligned and q.dtype == kv.dtype and reads(kv)


def reads(kv: Tensor) -> bool:
    """Returns whether the kernel does layers of such a pool, on such a device."""
    return kv.shape[2] == 2 and kv.dtype in (torch.bfloat16, torch.float16) and kv.shape[3] in (64, 128)


def hopper_prefill_attention(
    q: Tensor, kv: Tensor, table: Tensor, rows: Tensor, tiles: Tensor, out: Tensor, workspace: Workspace, scale: float,
    v_scale: float, tiling: Tiling, exact: bool,
) -> None:  # fmt: skip
    """As `attention_prefill.prefill_attention`, whose tiles are of `ROWS`. scale: of scores, in powers of 2."""
    kv_heads, dim = kv.shape[1], kv.shape[3]
    parts = stats = tickets = out  # which nobody reads or writes
    if not exact:
        parts = workspace.take("prompts' parts", PIECES * ROWS * dim, torch.float32)
        stats = workspace.take("prompts' stats", PIECES * ROWS * 2, torch.float32)
        tickets = workspace.take("prompts' tickets", 2 * PIECES, torch.int32)
    args = (q, kv, table, rows, tiles, out, parts, stats, tickets, scale, v_scale, q.stride(0), table.stride(0))
    sizes = dict(HEADS=out.shape[1] // dim, KV_HEADS=kv_heads, DIM=dim, ROWS=ROWS)
    sizes |= shape_of(tiling, exact) | dict(LAST=MULTIPLYING, FETCHING=FETCHING)
    grid, options = (tiles.shape[0] * kv_heads,), launch_options(q.device) | (ROUNDING if exact else {})
    keep_cache(_hopper_prefill_kernel[grid](*args, **sizes, num_warps=WARPS, **options))


def shape_of(tiling: Tiling, exact: bool) -> dict[str, int]:
    """Returns the constants of a kernel that decide its bits, and the units of its ring."""
    if not exact:
        return dict(UNIT=tiling.overlap_unit, STAGES=tiling.overlap_stages, SHORT=0, TIER=0, LONG=0)
    assert tiling.short % tiling.unit == tiling.tier % tiling.short == tiling.long % tiling.unit == 0, (
        "splits end with units"
    )
    splits = dict(SHORT=tiling.short, TIER=tiling.tier, LONG=tiling.long)
    return dict(UNIT=tiling.unit, STAGES=_EXACT_STAGES) | splits
