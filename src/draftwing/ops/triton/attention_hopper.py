"""Causal attention of prefill chunks on compute capability 9.0 where bits may differ from decode's.

Scores of a unit and the weighted values of the unit before it are two products of warp groups that run at once, and so
do the softmax of the one and the product of the other. Triton's compiler waits for each product before the next
begins, so this kernel is written in Gluon, which leaves the order to it. It has no interpreter: what runs without a GPU
is `attention_prefill`, of which this is the fast form for layers without a window and sinks.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from draftwing.ops.attention import AttentionKind
from draftwing.ops.triton.attention import Workspace
from draftwing.ops.triton.attention_common import Tiling
from draftwing.ops.triton.attention_groups import FETCHING, MULTIPLYING, _hopper_groups_kernel
from draftwing.ops.triton.attention_groups import WARPS as GROUP_WARPS
from draftwing.ops.triton.attention_hopper_parts import merged, of_piece, scores, weights
from draftwing.ops.triton.attention_tiles import PIECES
from draftwing.ops.triton.common import keep_cache, launch_options

WARPS = 8  # two groups, of which each takes half of a tile's rows
ROWS = 128


@gluon.jit
def _slots(table_row, place, end):
    """Slots of these positions, int64; of the last one for those past it, whose scores are masked."""
    return gl.load(table_row + gl.minimum(place, end - 1)).to(gl.int64)


@gluon.jit
def _copy(kv_head, slots, dim, into, PITCH: gl.constexpr):
    """Lets keys, or values, of these slots come into shared memory [UNIT, DIM]."""
    async_copy.async_copy_global_to_shared(into, gl.expand_dims(kv_head + slots * PITCH, 1) + gl.expand_dims(dim, 0))


@gluon.jit
def _step(
    unit, q_smem, k_smem, v_smem, kv_head, table_row, end, last, scale, place, dim, columns,
    k_slots, v_slots, top, den, acc, p,
    MASKED: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr, PITCH: gl.constexpr, DIM: gl.constexpr,
    ROWS: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Does scores of a unit, and values of the one before, of which p are the weights. Lets keys come of the unit that
    is STAGES - 1 further, whose slots are k_slots, and values of the one before that."""
    async_copy.wait_group(STAGES - 2)
    s = scores(q_smem, k_smem.index(unit % STAGES), ROWS, UNIT, S)
    acc = hopper.warpgroup_mma(p, v_smem.index((unit - 1) % STAGES), acc, is_async=True)
    _copy(kv_head, k_slots, dim, k_smem.index((unit + STAGES - 1) % STAGES), PITCH)
    _copy(kv_head + DIM, v_slots, dim, v_smem.index((unit + STAGES - 2) % STAGES), PITCH)
    async_copy.commit_group()
    v_slots = k_slots
    k_slots = _slots(table_row, (unit + STAGES) * UNIT + place, end)
    s = hopper.warpgroup_mma_wait(1, (s,))
    if MASKED:
        s = gl.where(gl.expand_dims(unit * UNIT + columns, 0) <= gl.expand_dims(last, 1), s, float("-inf"))
    weight, fade, top, den = weights(s, scale, top, den)
    p_next = gl.convert_layout(weight.to(p.dtype), gl.DotOperandLayout(0, ACC, 2))
    acc, p = hopper.warpgroup_mma_wait(0, (acc, p))
    acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, ACC)), 1)
    return k_slots, v_slots, top, den, acc, p_next


@gluon.jit
def _store_mean(acc, den, v_scale, at, valid, ACC: gl.constexpr, COPY: gl.constexpr):
    """Stores sums of weighted values, each divided by its row's denominator."""
    mean = acc / gl.expand_dims(gl.convert_layout(den, gl.SliceLayout(1, ACC)), 1) * v_scale
    gl.store(at, gl.convert_layout(mean.to(at.dtype.element_ty), COPY), mask=valid)


@gluon.jit(do_not_specialize_on_alignment=["rows", "tiles"])
def _hopper_prefill_kernel(
    q, kv, table, rows, tiles, out, parts, stats, tickets, scale, v_scale, q_stride, table_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, UNIT: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid: heads of a tile are neighbours. tiles [T, 6] int32: as of `prefill_tiles`. Pieces of a tile leave sums in
    parts [places, KV_HEADS, ROWS, DIM], maxima and denominators in stats [places, KV_HEADS, 2, ROWS]; who comes last,
    by tickets [places, KV_HEADS], merges them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    GROUP: gl.constexpr = HEADS // KV_HEADS
    PITCH: gl.constexpr = KV_HEADS * 2 * DIM
    DTYPE: gl.constexpr = kv.dtype.element_ty
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, UNIT, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, DIM, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [num_warps, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q_smem = gl.allocate_shared_memory(DTYPE, [ROWS, DIM], SHARED)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, UNIT, DIM], SHARED)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, UNIT, DIM], SHARED)

    tiles += gl.program_id(0) // KV_HEADS * 6
    head = gl.program_id(0) % KV_HEADS
    table_row = table + gl.load(rows + gl.load(tiles)) * table_stride
    first, position, length, begin = gl.load(tiles + 1), gl.load(tiles + 2), gl.load(tiles + 3), gl.load(tiles + 4)
    cut = gl.load(tiles + 5)  # place << 10 | piece << 5 | pieces
    if length == 0:  # graphs have more tiles than there are
        return
    pieces, piece = cut % 32, cut // 32 % 32
    kv_head = kv + head * (2 * DIM)
    dim = gl.arange(0, DIM, gl.SliceLayout(0, COPY))
    flat = begin + gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    valid = gl.expand_dims(flat // GROUP < length, 1)
    row = (first + flat // GROUP).to(gl.int64)
    own_head = head * GROUP + flat % GROUP
    at_q = q + gl.expand_dims(row * q_stride + own_head * DIM, 1) + gl.expand_dims(dim, 0)
    end = position + gl.minimum((begin + ROWS - 1) // GROUP, length - 1) + 1
    whole = gl.minimum(position + begin // GROUP + 1, end) // UNIT  # units that each row sees all of
    units = (end + UNIT - 1) // UNIT
    low = units * piece // pieces  # the piece's own are counted from here
    units = units * (piece + 1) // pieces - low
    whole = gl.minimum(whole - low, units)
    last = position + (begin + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // GROUP
    place = low * UNIT + gl.arange(0, UNIT, gl.SliceLayout(1, COPY))
    columns = low * UNIT + gl.arange(0, UNIT, gl.SliceLayout(0, S))

    # What comes in one group of copies: keys of a unit and values of the one before.
    async_copy.async_copy_global_to_shared(q_smem, at_q, valid)
    slots = _slots(table_row, place, end)
    _copy(kv_head, slots, dim, k_smem.index(0), PITCH)
    async_copy.commit_group()
    for ahead in gl.static_range(1, STAGES):
        _copy(kv_head + DIM, slots, dim, v_smem.index(ahead - 1), PITCH)
        slots = _slots(table_row, ahead * UNIT + place, end)
        _copy(kv_head, slots, dim, k_smem.index(ahead), PITCH)
        async_copy.commit_group()
    v_slots, k_slots = slots, _slots(table_row, STAGES * UNIT + place, end)
    async_copy.wait_group(STAGES - 1)
    hopper.fence_async_shared()
    gl.thread_barrier()
    s = hopper.warpgroup_mma_wait(0, (scores(q_smem, k_smem.index(0), ROWS, UNIT, S),))
    s = gl.where(gl.expand_dims(columns, 0) <= gl.expand_dims(last, 1), s, float("-inf"))
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    den = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
    weight, _, top, den = weights(s, scale, top, den)
    p = gl.convert_layout(weight.to(DTYPE), gl.DotOperandLayout(0, ACC, 2))
    acc = gl.zeros([ROWS, DIM], gl.float32, ACC)
    for unit in range(1, whole):
        k_slots, v_slots, top, den, acc, p = _step(
            unit, q_smem, k_smem, v_smem, kv_head, table_row, end, last, scale, place, dim, columns, k_slots, v_slots,
            top, den, acc, p, False, UNIT, STAGES, PITCH, DIM, ROWS, S, ACC,
        )  # fmt: skip
    for unit in range(gl.maximum(whole, 1), units):
        k_slots, v_slots, top, den, acc, p = _step(
            unit, q_smem, k_smem, v_smem, kv_head, table_row, end, last, scale, place, dim, columns, k_slots, v_slots,
            top, den, acc, p, True, UNIT, STAGES, PITCH, DIM, ROWS, S, ACC,
        )  # fmt: skip
    async_copy.wait_group(0)
    hopper.fence_async_shared()
    gl.thread_barrier()
    acc, p = hopper.warpgroup_mma_wait(
        0, (hopper.warpgroup_mma(p, v_smem.index((units - 1) % STAGES), acc, is_async=True), p)
    )
    at_out = out + gl.expand_dims((row * HEADS + own_head) * DIM, 1) + gl.expand_dims(dim, 0)
    if pieces == 1:
        _store_mean(acc, den, v_scale, at_out, valid, ACC, COPY)
    else:
        first_place = (cut // 1024 * KV_HEADS).to(gl.int64) + head
        at_top, at_den, at_acc = of_piece(parts, stats, first_place + piece * KV_HEADS, ROWS, DIM, S, ACC)
        gl.store(at_top, top)
        gl.store(at_den, den)
        gl.store(at_acc, acc)
        gl.thread_barrier()
        if gl.atomic_add(tickets + first_place, 1, sem="acq_rel") == pieces - 1:
            gl.store(tickets + first_place, 0)
            den, acc = merged(first_place, pieces, parts, stats, KV_HEADS, ROWS, DIM, S, ACC)
            _store_mean(acc, den, v_scale, at_out, valid, ACC, COPY)


def takes(q: Tensor, kv: Tensor, kind: AttentionKind) -> bool:
    """Returns whether the kernel does queries of this layer of the pool, on a device of compute capability 9.0."""
    aligned = q.stride(0) % 16 == q.data_ptr() % 16 == kv.data_ptr() % 16 == 0  # copies are of 16 bytes
    return kind.window == 0 and kind.sinks is None and aligned and q.dtype == kv.dtype and reads(kv)


def reads(kv: Tensor) -> bool:
    """Returns whether the kernel does layers of such a pool, on such a device."""
    return kv.shape[2] == 2 and kv.dtype in (torch.bfloat16, torch.float16) and kv.shape[3] in (64, 128)


def hopper_prefill_attention(
    q: Tensor, kv: Tensor, table: Tensor, rows: Tensor, tiles: Tensor, out: Tensor, workspace: Workspace, scale: float,
    v_scale: float, tiling: Tiling,
) -> None:  # fmt: skip
    """As `attention_prefill.prefill_attention`, whose tiles are of `ROWS`. scale: of scores, in powers of 2."""
    kv_heads, dim = kv.shape[1], kv.shape[3]
    parts = workspace.take("prompts' parts", PIECES * ROWS * dim, torch.float32)
    stats = workspace.take("prompts' stats", PIECES * ROWS * 2, torch.float32)
    tickets = workspace.take("prompts' tickets", 2 * PIECES, torch.int32)
    args = (q, kv, table, rows, tiles, out, parts, stats, tickets, scale, v_scale, q.stride(0), table.stride(0))
    sizes = dict(HEADS=out.shape[1] // dim, KV_HEADS=kv_heads, DIM=dim, ROWS=ROWS)
    sizes |= dict(UNIT=tiling.overlap_unit, STAGES=tiling.overlap_stages)
    grid, options = (tiles.shape[0] * kv_heads,), launch_options(q.device)
    if tiling.overlap_groups:
        launched = _hopper_groups_kernel[grid](
            *args, **sizes, LAST=MULTIPLYING, FETCHING=FETCHING, num_warps=GROUP_WARPS, **options
        )
    else:
        launched = _hopper_prefill_kernel[grid](*args, **sizes, num_warps=WARPS, **options)
    keep_cache(launched)
