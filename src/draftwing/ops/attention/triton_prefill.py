"""Causal attention of prefill chunks over the paged pool; `triton_common` says what it promises about bits."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention.batch import FULL, AttentionKind
from draftwing.ops.attention.triton_common import (
    ROUNDING,
    Tiling,
    begins_split,
    column,
    first_seen,
    fits,
    key_parts,
    load_kv,
    load_q,
    merged,
    nothing,
    padded,
    pick_tiling,
    scale_of,
    scores,
    store_mean,
    warps_of,
    with_unit,
)
from draftwing.ops.attention.triton_decode import Workspace
from draftwing.ops.attention.triton_hopper import ROWS, hopper_prefill_attention, reads, takes
from draftwing.ops.attention.triton_tiles import WHOLE, Room
from draftwing.ops.triton.common import keep_cache, launch_options, start


@triton.jit(do_not_specialize_on_alignment=["rows", "tiles"])
def _prefill_kernel(
    q, kv, table, rows, tiles, counts, sinks, out, scale, v_scale, q_stride, table_stride,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, MORE: tl.constexpr,
    DIM_PAD: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, SHORT: tl.constexpr, TIER: tl.constexpr,
    LONG: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV_HEADS). tiles [T, 6] int32: as of `prefill_tiles`; rows are (query of the chunk, head of the
    group). The first piece of a tile does all of it. counts: as of `prefill_attention`. WINDOW: `AttentionKind.reach`;
    CAP, sinks: as `AttentionKind` has them. EXACT: in splits, as decode."""
    start(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tiles += tl.program_id(0) * 6
    head = tl.program_id(1)
    table_row = table + tl.load(rows + tl.load(tiles)) * table_stride
    first, position, length = tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 3)
    length = tl.where(tl.load(tiles + 5) // 32 % 32 == 0, length, 0)
    flat = tl.load(tiles + 4) + tl.arange(0, ROWS)
    query = flat // GROUP
    valid = query < length
    dim = tl.arange(0, DIM_PAD)
    row = (first + query).to(tl.int64)
    q_tile = load_q(q, row * q_stride + (head * GROUP + flat % GROUP) * (DIM + MORE), valid, dim, DIM, MORE)
    last = position + query
    seen_last = last
    if counts is not None:
        seen_last = tl.load(counts + row, mask=valid, other=0) - 1
    end = tl.max(tl.where(valid, seen_last, 0), 0) + 1
    begin = 0
    if WINDOW != 0:  # the first unit that the tile's first row reaches
        begin = first_seen(position + tl.load(tiles + 4) // GROUP, WINDOW) // UNIT * UNIT

    top, den, acc = nothing(ROWS, DIM_PAD)
    all_top, all_den, all_acc = top, tl.zeros([ROWS], tl.float32), acc  # of the splits before
    for unit in tl.range(begin, end, UNIT, num_stages=STAGES):
        if EXACT:  # noqa: SIM102 (known when compiled; the other is not)
            if (unit > begin) & begins_split(unit, SHORT, TIER, LONG):
                all_top, all_den, all_acc = merged(all_top, all_den, all_acc, top, column(den), acc)
                top, den, acc = nothing(ROWS, DIM_PAD)
        place = unit + tl.arange(0, UNIT)
        ok = place < end
        slot = tl.load(table_row + place, mask=ok, other=0)
        k, v = load_kv(kv, slot, head, ok, dim, dim, KV_HEADS, DIM, MORE, q_tile[0].dtype)
        seen = place[None, :] <= seen_last[:, None]
        if WINDOW != 0:
            seen = seen & (place[None, :] >= first_seen(last, WINDOW)[:, None])
        s = tl.where(seen, scores(q_tile, k, scale, CAP), float("-inf"))
        top, den, acc = with_unit(s, scale, v, top, den, acc)
    all_top, all_den, all_acc = merged(all_top, all_den, all_acc, top, column(den), acc)
    own_head = head * GROUP + flat % GROUP
    store_mean(out, row * HEADS + own_head, all_top, all_den, all_acc, sinks, own_head, v_scale, valid, dim, DIM)


def prefill_rows(kv: Tensor, exact: bool, tiling: Tiling | None = None) -> int:
    """Returns rows of a tile of `prefill_attention` over this layer of the pool."""
    tiling = tiling or pick_tiling(kv)
    return tiling.prefill_rows if exact else tiling.fast_rows


def prefill_room(kv: Tensor, exact: bool, tiling: Tiling | None = None) -> Room:
    """Returns what there is for the tiles of this layer of the pool."""
    tiling = tiling or pick_tiling(kv)
    if exact or not tiling.overlap_unit or tiling.fast_rows != ROWS or not reads(kv) or kv.device.type != "cuda":
        return WHOLE
    processors = torch.cuda.get_device_properties(kv.device).multi_processor_count
    return Room.of(tiling.overlap_unit, processors, kv.shape[1])


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    rows: Tensor,
    tiles: Tensor,
    out: Tensor,
    workspace: Workspace,
    exact: bool = True,
    tiling: Tiling | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    kind: AttentionKind = FULL,
    counts: Tensor | None = None,
) -> None:
    """Causal attention of chunks. q [M, heads or more, head_dim] and out [M, heads * values] as for
    `attention.tree_attention`, as `workspace`, `scales` and `kind` are; rows [B] int64; tiles [T, 6] int32 from
    `prefill_tiles`, on the device, made for `prefill_rows`; counts [M] int32: how many of its row's positions each
    query sees, where that is not up to its own (`ChunkSpan.counts`)."""
    tiling = tiling or pick_tiling(kv)
    dim, more = key_parts(kv, kind)
    kv_heads, heads = kv.shape[1], out.shape[1] // dim
    tile = prefill_rows(kv, exact, tiling)
    assert q.stride(2) == 1 and q.stride(1) == dim + more and kv.is_contiguous() and out.is_contiguous()
    assert table.stride(1) == 1 and tiles.is_contiguous() and fits(q, kv)
    scale, v_scale = scale_of(dim, kind) * scales[0], scales[kv.shape[2] - 1]
    if counts is None and tiling.overlap_unit and tile == ROWS and takes(q, kv, kind):
        hopper_prefill_attention(q, kv, table, rows, tiles, out, workspace, scale, v_scale, tiling, exact)
        return
    launched = _prefill_kernel[(tiles.shape[0], kv_heads)](
        q, kv, table, rows, tiles, counts, kind.sinks, out, scale, v_scale,
        q.stride(0), table.stride(0), WINDOW=kind.reach, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, MORE=more,
        DIM_PAD=padded(dim), ROWS=tile, UNIT=tiling.unit, SHORT=tiling.short, TIER=tiling.tier, LONG=tiling.long,
        EXACT=exact, CAP=kind.cap, STAGES=tiling.prefill_stages, num_warps=warps_of(tile, tiling), **ROUNDING,
        **launch_options(q.device),
    )  # fmt: skip
    keep_cache(launched)
