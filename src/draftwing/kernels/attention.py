"""Attention over the paged pool in Triton; what it promises about bits, and how.

A query's result depends on its own path alone: it has the same bits as a plain decode, a node of any tree, or a row of
a prefill chunk, alone or in a batch. Like `attn.torch_ref` it sums in position order:

- Positions are cut at fixed places into splits, splits into units. A unit's keys share one running maximum; each
  split starts a softmax of its own, and splits are merged one after the other, by the same code wherever they meet.
- Inside a unit keys are summed in chunks of 16, the depth of one tensor core instruction, in order. A key or a chunk
  of weight 0 adds an exact zero. So a tile, whose rows belong to several nodes, reads the chunks below the committed
  length once for all rows, and each node's own chunks (the end of the committed positions, then its path) side by
  side, with weight 0 where node and row differ. What is not a key of any row is never loaded.
- The softmax's denominator is summed by the same instruction, as a product with ones.
- One kind of instruction everywhere: tiles of 16 or 32 rows stay below the 64 of Hopper's warp group products, which
  prefill uses where the promise is not wanted.

The host never knows lengths: programs find out on the device which splits are theirs.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.kernels.triton_common import launch_options, start


class Tiling(NamedTuple):
    """Sizes of the kernels. Results are the same bits for the same (unit, short, tier, long) only."""

    rows: int = 16  # rows (nodes x group) of a tile
    unit: int = 64  # positions that share one maximum
    short: int = 128  # positions of a split below `tier`
    tier: int = 2048
    long: int = 512  # positions of a split from `tier` on
    warps: int = 4
    stages: int = 3
    mixed_stages: int = 3  # of the units where committed positions end
    own: int = 128  # most keys that a tile gathers at a time for its nodes alone
    programs: int = 528  # splits are spread over lanes until there are about as many
    merge_last: bool = True  # the last program of a tile merges its splits; else a second kernel does
    prefill_rows: int = 32  # 64 would take other instructions
    prefill_warps: int = 4
    prefill_stages: int = 3
    fast_rows: int = 128  # prefill where bits may differ from decode's
    fast_warps: int = 8


TILING = Tiling()
# Products in float32 run without tensor cores, on operands in registers.
TILING_FLOAT32 = Tiling(unit=16, own=32, warps=8, prefill_rows=16, fast_rows=16, fast_warps=4)
TILING_WIDE = Tiling(unit=32, own=64, warps=8, prefill_rows=16, fast_rows=64)  # heads of more than 128
WINDOW_BYTES = 64 << 10  # most of a masked window's keys: they lie in shared memory, and so do their values
WINDOW_DEPTH = 32  # longest path that is looked for in a masked window: the search is unrolled
PARTIAL_BYTES = 256 << 20  # most memory for partial results; where they need more, a tile is one program's work


def pick_tiling(kv: Tensor) -> Tiling:
    """For a layer of the pool."""
    if kv.dtype == torch.float32:
        return TILING_FLOAT32
    return TILING_WIDE if kv.shape[3] > 128 else TILING


@triton.jit
def _splits_of(length, SHORT: tl.constexpr, TIER: tl.constexpr, LONG: tl.constexpr):
    """How many splits [0, length) touches."""
    near, far = tl.minimum(length, TIER), tl.maximum(length - TIER, 0)
    return (near + SHORT - 1) // SHORT + (far + LONG - 1) // LONG


@triton.jit
def _split_start(split, SHORT: tl.constexpr, TIER: tl.constexpr, LONG: tl.constexpr):
    near = TIER // SHORT
    return tl.where(split < near, split * SHORT, TIER + (split - near) * LONG)


@triton.jit
def _load_kv(kv, slot, head, ok, dim, KV_HEADS: tl.constexpr, DIM: tl.constexpr):
    """slot [K] int64, dim [DIM_PAD] -> keys, values [K, DIM_PAD], 0 where not ok"""
    at = kv + (slot * (KV_HEADS * 2 * DIM) + head * (2 * DIM))[:, None] + dim[None, :]
    mask = ok[:, None] & (dim < DIM)[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + DIM, mask=mask, other=0.0)


@triton.jit
def _scores(q, k):
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def _raise(top, best, scale):
    """The running maximum after scores up to best: (new maximum, what to subtract, factor of what was summed)."""
    new = tl.maximum(top, best * scale)
    base = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet: keeps -inf - -inf out
    return new, base, tl.exp2(top - base)


@triton.jit
def _add(s, scale, base, v, den, acc):
    """Adds the weighted values of one block of keys: s [ROWS, K], -inf where a key is not the row's; v [K, DIM_PAD]."""
    p = tl.exp2(tl.fma(s, scale, -base[:, None])).to(v.dtype)  # an explicit fma: the same rounding in every kernel
    ones = tl.full([s.shape[1], 16], 1.0, tl.float32).to(v.dtype)
    den = tl.dot(p, ones, den, input_precision="ieee")
    acc = tl.dot(p, v, acc, input_precision="ieee")
    return den, acc


@triton.jit
def _merge(top_a, den_a, acc_a, top_b, den_b, acc_b):
    """Splits a (all before) and b (the next); den [ROWS], acc [ROWS, DIM_PAD]."""
    new = tl.maximum(top_a, top_b)
    base = tl.where(new == float("-inf"), 0.0, new)
    a, b = tl.exp2(top_a - base), tl.exp2(top_b - base)
    den = tl.fma(den_b, b, den_a * a)
    acc = tl.fma(acc_b, tl.broadcast_to(b[:, None], acc_b.shape), acc_a * a[:, None])
    return new, den, acc


@triton.jit
def _column(den):
    """[ROWS, 16] of equal columns -> [ROWS]"""
    return tl.max(den, 1)


@triton.jit
def _own_slots(
    table_row, path, path_len, prefix, first, start_at, stop,
    QUERIES: tl.constexpr, DEPTH: tl.constexpr, FRONT: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Keys of STEP nodes from node `first` on at positions [start_at, start_at + FRONT) below `stop`, each node's on
    its own path: (slots, nodes, which exist), all [STEP * FRONT]. path, path_len: those of the batch row."""
    column = tl.arange(0, STEP * FRONT)
    node = first + column // FRONT
    at = start_at + column % FRONT
    ok = node < QUERIES
    length = prefix + tl.load(path_len + node, mask=ok, other=0).to(tl.int32)
    ok = ok & (at < tl.minimum(length, stop))
    step = at - prefix
    entry = tl.load(path + node * DEPTH + step, mask=ok & (step >= 0), other=0).to(tl.int32)
    slot = tl.load(table_row + tl.where(step >= 0, prefix + entry, at), mask=ok, other=0)
    return slot, node, ok


@triton.jit
def _on_path(path, path_len, node, valid, entry, DEPTH: tl.constexpr):
    """Whether window entry [W] is on the path of the node of each row: [ROWS, W]"""
    length = tl.load(path_len + node, mask=valid, other=0).to(tl.int32)
    on = (node[:, None] < 0) & (entry[None, :] < 0)
    for i in tl.static_range(DEPTH):
        here = valid & (i < length)
        named = tl.load(path + node * DEPTH + i, mask=here, other=-1).to(tl.int32)
        on = on | (here[:, None] & (named[:, None] == entry[None, :]))
    return on


@triton.jit
def _merge_parts(
    parts, stats, first_part, part_stride, splits, flat, valid, dim,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Merges what the programs of a tile stored, in split order -> (den [ROWS], acc [ROWS, DIM_PAD])"""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for first in range(0, splits, MERGE):
        for i in tl.static_range(MERGE):  # unrolled, so that their loads are under way together
            ok = valid & (first + i < splits)
            at = first_part + (first + i) * part_stride + flat
            top_b = tl.load(stats + at * 2, mask=ok, other=float("-inf"), cache_modifier=".cg")
            den_b = tl.load(stats + at * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
            mask = ok[:, None] & (dim < DIM)[None, :]
            acc_b = tl.load(parts + at[:, None] * DIM + dim[None, :], mask=mask, other=0.0, cache_modifier=".cg")
            top, den, acc = _merge(top, den, acc, top_b, den_b, acc_b)
    return den, acc


@triton.jit
def _store_mean(out, row, den, acc, valid, dim, DIM: tl.constexpr):
    """row [ROWS] int64: rows of out [M * heads, head_dim]"""
    den = tl.where(den > 0.0, den, 1.0)  # padding rows of the tile
    mask = valid[:, None] & (dim < DIM)[None, :]
    tl.store(out + row[:, None] * DIM + dim[None, :], (acc / den[:, None]).to(out.dtype.element_ty), mask=mask)


_ANY_ALIGNMENT = ["rows", "prefix_len", "path", "path_len"]  # they may be parts of larger tensors


@triton.jit(do_not_specialize=["splits_max", "window"], do_not_specialize_on_alignment=_ANY_ALIGNMENT)
def _tree_kernel(
    q, kv, table, rows, prefix_len, path, path_len, out, parts, stats, tickets, scale, q_stride, table_stride,
    splits_max, window,
    QUERIES: tl.constexpr, DEPTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, UNIT: tl.constexpr, SHORT: tl.constexpr,
    TIER: tl.constexpr, LONG: tl.constexpr, FRONT: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
    EXACT: tl.constexpr, ONE_LANE: tl.constexpr, MERGE_LAST: tl.constexpr, MERGE: tl.constexpr,
    STAGES: tl.constexpr, MIXED_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (lanes, KV_HEADS * TILES, B). Program (l, h, b): splits l, l + lanes, ... of a tile of one key head.

    EXACT: FRONT, STEP, STEPS say how a node's own chunks are gathered. Else FRONT is the window, padded, whose keys
    all rows read under a mask, as part of the unit that the committed positions end in.
    """
    start(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    lane, lanes = tl.program_id(0), tl.num_programs(0)
    head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    b = tl.program_id(2).to(tl.int64)
    prefix = tl.load(prefix_len + b).to(tl.int32)
    table_row = table + tl.load(rows + b) * table_stride
    path += b * (QUERIES * DEPTH)
    path_len += b * QUERIES

    flat = tile * ROWS + tl.arange(0, ROWS)  # (node, head of the group)
    node = flat // GROUP
    valid = node < QUERIES
    dim = tl.arange(0, DIM_PAD)
    query = (b * QUERIES + node) * q_stride + (head * GROUP + flat % GROUP) * DIM
    q_tile = tl.load(q + query[:, None] + dim[None, :], mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    out_row = (b * QUERIES + node) * HEADS + head * GROUP + flat % GROUP

    if EXACT:
        length = prefix + tl.load(path_len + node, mask=valid, other=0).to(tl.int32)
        end = tl.max(tl.where(valid, length, 0), 0)
        shared = prefix // 16 * 16  # whole chunks that every row reads
    else:
        end = prefix + 1
        shared = prefix
    splits = _splits_of(end, SHORT, TIER, LONG)
    first_part = (b * KV_HEADS + head) * splits_max * (QUERIES * GROUP)

    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_den = tl.zeros([ROWS], tl.float32)
    all_acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for split in range(lane, splits, lanes):
        low = _split_start(split, SHORT, TIER, LONG)
        high = tl.minimum(_split_start(split + 1, SHORT, TIER, LONG), end)
        whole = tl.minimum(shared // UNIT * UNIT, high)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        den = tl.zeros([ROWS, 16], tl.float32)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)

        for at in tl.range(low, whole, UNIT, num_stages=STAGES):  # units that every row reads whole
            slot = tl.load(table_row + at + tl.arange(0, UNIT))
            k, v = _load_kv(kv, slot, head, tl.arange(0, UNIT) >= 0, dim, KV_HEADS, DIM)
            s = _scores(q_tile, k)
            top, base, fade = _raise(top, tl.max(s, 1), scale)
            den, acc = _add(s, scale, base, v, den * fade[:, None], acc * fade[:, None])

        for at in tl.range(tl.maximum(low, whole), high, UNIT, num_stages=MIXED_STAGES):
            place = at + tl.arange(0, UNIT)
            common = place < shared
            slot = tl.load(table_row + place, mask=common, other=0)
            k, v = _load_kv(kv, slot, head, common, dim, KV_HEADS, DIM)
            front = tl.maximum(at, shared)
            if EXACT:
                if STEPS == 1:
                    own, own_node, ok = _own_slots(
                        table_row, path, path_len, prefix, tile * ROWS // GROUP, front, at + UNIT, QUERIES, DEPTH,
                        FRONT, STEP,
                    )  # fmt: skip
                    own_k, own_v = _load_kv(kv, own, head, ok, dim, KV_HEADS, DIM)
                    s = tl.where(common[None, :], _scores(q_tile, k), float("-inf"))
                    mine = (node[:, None] == own_node[None, :]) & ok[None, :]
                    own_s = tl.where(mine, _scores(q_tile, own_k), float("-inf"))
                    best = tl.maximum(tl.max(s, 1), tl.max(own_s, 1))
                    top, base, fade = _raise(top, best, scale)
                    den, acc = _add(s, scale, base, v, den * fade[:, None], acc * fade[:, None])
                    den, acc = _add(own_s, scale, base, own_v, den, acc)
                else:
                    s = tl.where(common[None, :], _scores(q_tile, k), float("-inf"))
                    best = tl.max(s, 1)
                    for step in range(STEPS):
                        own, own_node, ok = _own_slots(
                            table_row, path, path_len, prefix, tile * ROWS // GROUP + step * STEP, front, at + UNIT,
                            QUERIES, DEPTH, FRONT, STEP,
                        )  # fmt: skip
                        own_k, _ = _load_kv(kv, own, head, ok, dim, KV_HEADS, DIM)
                        mine = (node[:, None] == own_node[None, :]) & ok[None, :]
                        best = tl.maximum(best, tl.max(tl.where(mine, _scores(q_tile, own_k), float("-inf")), 1))
                    top, base, fade = _raise(top, best, scale)
                    den, acc = _add(s, scale, base, v, den * fade[:, None], acc * fade[:, None])
                    for step in range(STEPS):
                        own, own_node, ok = _own_slots(
                            table_row, path, path_len, prefix, tile * ROWS // GROUP + step * STEP, front, at + UNIT,
                            QUERIES, DEPTH, FRONT, STEP,
                        )  # fmt: skip
                        own_k, own_v = _load_kv(kv, own, head, ok, dim, KV_HEADS, DIM)
                        mine = (node[:, None] == own_node[None, :]) & ok[None, :]
                        own_s = tl.where(mine, _scores(q_tile, own_k), float("-inf"))
                        den, acc = _add(own_s, scale, base, own_v, den, acc)
            else:
                entry = tl.arange(0, FRONT)
                on = _on_path(path, path_len, node, valid, entry, DEPTH) & (entry < window)[None, :]
                ok = tl.max(on.to(tl.int32), 0) > 0
                own = tl.load(table_row + prefix + entry, mask=ok, other=0)
                own_k, own_v = _load_kv(kv, own, head, ok, dim, KV_HEADS, DIM)
                s = tl.where(common[None, :], _scores(q_tile, k), float("-inf"))
                own_s = tl.where(on, _scores(q_tile, own_k), float("-inf"))
                best = tl.maximum(tl.max(s, 1), tl.max(own_s, 1))
                top, base, fade = _raise(top, best, scale)
                den, acc = _add(s, scale, base, v, den * fade[:, None], acc * fade[:, None])
                den, acc = _add(own_s, scale, base, own_v, den, acc)

        if ONE_LANE:
            all_top, all_den, all_acc = _merge(all_top, all_den, all_acc, top, _column(den), acc)
        elif splits == 1:
            _store_mean(out, out_row, _column(den), acc, valid, dim, DIM)
        else:
            part = first_part + split * (QUERIES * GROUP) + flat
            tl.store(stats + part * 2, top, mask=valid)
            tl.store(stats + part * 2 + 1, _column(den), mask=valid)
            tl.store(parts + part[:, None] * DIM + dim[None, :], acc, mask=valid[:, None] & (dim < DIM)[None, :])

    if ONE_LANE:
        _store_mean(out, out_row, all_den, all_acc, valid, dim, DIM)
    elif MERGE_LAST:
        busy = tl.minimum(lanes, splits)
        if (splits > 1) & (lane < busy):
            tl.debug_barrier()  # all threads have stored before one of them takes the ticket
            ticket = tickets + b * (KV_HEADS * TILES) + tl.program_id(1)
            if tl.atomic_add(ticket, 1, sem="acq_rel") == busy - 1:
                all_den, all_acc = _merge_parts(
                    parts, stats, first_part, QUERIES * GROUP, splits, flat, valid, dim, DIM, DIM_PAD, ROWS, MERGE
                )
                _store_mean(out, out_row, all_den, all_acc, valid, dim, DIM)
                tl.store(ticket, 0)


@triton.jit(do_not_specialize=["splits_max"], do_not_specialize_on_alignment=["prefix_len", "path_len"])
def _merge_kernel(
    prefix_len, path_len, out, parts, stats, splits_max,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, SHORT: tl.constexpr, TIER: tl.constexpr, LONG: tl.constexpr,
    EXACT: tl.constexpr, MERGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS * TILES, B), after `_tree_kernel` without MERGE_LAST."""
    start(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    b = tl.program_id(1).to(tl.int64)
    flat = tile * ROWS + tl.arange(0, ROWS)
    node = flat // GROUP
    valid = node < QUERIES
    dim = tl.arange(0, DIM_PAD)
    prefix = tl.load(prefix_len + b).to(tl.int32)
    if EXACT:
        length = prefix + tl.load(path_len + b * QUERIES + node, mask=valid, other=0).to(tl.int32)
        end = tl.max(tl.where(valid, length, 0), 0)
    else:
        end = prefix + 1
    splits = _splits_of(end, SHORT, TIER, LONG)
    if splits > 1:
        first_part = (b * KV_HEADS + head) * splits_max * (QUERIES * GROUP)
        den, acc = _merge_parts(
            parts, stats, first_part, QUERIES * GROUP, splits, flat, valid, dim, DIM, DIM_PAD, ROWS, MERGE
        )
        out_row = (b * QUERIES + node) * HEADS + head * GROUP + flat % GROUP
        _store_mean(out, out_row, den, acc, valid, dim, DIM)


@triton.jit(do_not_specialize_on_alignment=["rows", "tiles"])
def _prefill_kernel(
    q, kv, table, rows, tiles, out, scale, q_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr, SHORT: tl.constexpr, TIER: tl.constexpr, LONG: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV_HEADS). tiles [T, 5] int32: batch row, first query of the chunk in q, its position, the chunk's
    length, first row of the tile; rows are (query of the chunk, head of the group)."""
    start(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tiles += tl.program_id(0) * 5
    head = tl.program_id(1)
    table_row = table + tl.load(rows + tl.load(tiles)) * table_stride
    first, position, length = tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 3)
    flat = tl.load(tiles + 4) + tl.arange(0, ROWS)
    query = flat // GROUP
    valid = query < length
    dim = tl.arange(0, DIM_PAD)
    row = (first + query).to(tl.int64)
    at = row * q_stride + (head * GROUP + flat % GROUP) * DIM
    q_tile = tl.load(q + at[:, None] + dim[None, :], mask=valid[:, None] & (dim < DIM)[None, :], other=0.0)
    last = position + query
    end = tl.max(tl.where(valid, last, 0), 0) + 1

    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_den = tl.zeros([ROWS], tl.float32)
    all_acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    den = tl.zeros([ROWS, 16], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for unit in tl.range(0, end, UNIT, num_stages=STAGES):
        if EXACT:  # noqa: SIM102 (known when compiled; the other is not)
            if (unit > 0) & (tl.where(unit < TIER, unit % SHORT, (unit - TIER) % LONG) == 0):  # a split begins
                all_top, all_den, all_acc = _merge(all_top, all_den, all_acc, top, _column(den), acc)
                top = tl.full([ROWS], float("-inf"), tl.float32)
                den = tl.zeros([ROWS, 16], tl.float32)
                acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        place = unit + tl.arange(0, UNIT)
        ok = place < end
        k, v = _load_kv(kv, tl.load(table_row + place, mask=ok, other=0), head, ok, dim, KV_HEADS, DIM)
        s = tl.where(place[None, :] <= last[:, None], _scores(q_tile, k), float("-inf"))
        top, base, fade = _raise(top, tl.max(s, 1), scale)
        den, acc = _add(s, scale, base, v, den * fade[:, None], acc * fade[:, None])
    all_top, all_den, all_acc = _merge(all_top, all_den, all_acc, top, _column(den), acc)
    _store_mean(out, row * HEADS + head * GROUP + flat % GROUP, all_den, all_acc, valid, dim, DIM)


class Workspace:
    """Partial results and tickets of `tree_attention`: made once, shared by all layers and graphs. Launches that share
    one must follow each other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[str, Tensor] = {}
        self._outgrown: list[Tensor] = []  # captured graphs still name their addresses

    def take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """[size or more], zeros at first. Tickets are zero between launches, everything else is what was left."""
        kept = self._kept.get(name)
        if kept is None or kept.shape[0] < size:
            if kept is not None:
                self._outgrown.append(kept)
            kept = self._kept[name] = torch.zeros(triton.next_power_of_2(size), dtype=dtype, device=self.device)
        return kept


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def split_count(length: int, tiling: Tiling) -> int:
    """Splits that [0, length) touches."""
    near, far = min(length, tiling.tier), max(length - tiling.tier, 0)
    return -(-near // tiling.short) + -(-far // tiling.long)


def _own_tiling(queries: int, depth: int, group: int, tiling: Tiling) -> tuple[int, int, int]:
    """(FRONT, STEP, STEPS): positions of a node's own chunks, nodes gathered at a time, how often."""
    front = min(tiling.unit, _padded(-(-(15 + depth) // 16) * 16))
    if tiling.rows % group == 0:
        nodes = tiling.rows // group
    elif group % tiling.rows == 0:
        nodes = 1
    else:  # a tile may begin and end inside a node's group
        nodes = (tiling.rows - 2) // group + 2
    nodes = min(nodes, queries)
    step = min(triton.next_power_of_2(nodes), max(1, tiling.own // front))
    return front, step, -(-nodes // step)


def tree_attention(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    rows: Tensor,
    prefix_len: Tensor,
    path: Tensor,
    path_len: Tensor,
    out: Tensor,
    workspace: Workspace,
    exact: bool = True,
    window: int = 0,
    tiling: Tiling | None = None,
) -> None:
    """Decode, chains and trees; see `attn.base.Batch` for what a query reads.

    q [B * Q, heads or more, head_dim], of which the first heads are read, its last two axes dense; kv [slots, kv_heads,
    2, head_dim]; table [rows, L], rows, prefix_len [B], path [B, Q, D], path_len [B, Q], all int64; out [B * Q, heads *
    head_dim]. `window`, where `exact` is not set, as in `Batch`; 0: Q. What has no room for a masked window is exact.
    """
    tiling = tiling or pick_tiling(kv)
    batch, queries, depth = path.shape
    _, kv_heads, _, dim = kv.shape
    heads = out.shape[1] // dim
    group = heads // kv_heads
    assert q.stride(2) == 1 and q.stride(1) == dim and kv.is_contiguous() and out.is_contiguous()
    assert table.stride(1) == 1 and path.is_contiguous() and path_len.is_contiguous() and q.dtype == kv.dtype
    assert tiling.tier % tiling.short == 0 == tiling.short % tiling.unit and tiling.long % tiling.unit == 0
    tiles = triton.cdiv(queries * group, tiling.rows)
    window = window or queries
    exact = exact or depth > WINDOW_DEPTH or _padded(window) * _padded(dim) * kv.itemsize > WINDOW_BYTES
    front, step, steps = _own_tiling(queries, depth, group, tiling) if exact else (_padded(window), 1, 1)

    splits = split_count(table.shape[1], tiling)
    partials = batch * queries * heads * splits
    programs = batch * kv_heads * tiles
    lanes = max(1, min(-(-tiling.programs // programs), splits))
    if partials * dim * 4 > PARTIAL_BYTES:
        lanes = 1
    parts = workspace.take("parts", partials * dim if lanes > 1 else 1, torch.float32)
    stats = workspace.take("stats", partials * 2 if lanes > 1 else 1, torch.float32)
    tickets = workspace.take("tickets", programs, torch.int32)
    sizes: dict[str, Any] = dict(
        QUERIES=queries, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=_padded(dim), ROWS=tiling.rows, TILES=tiles,
        SHORT=tiling.short, TIER=tiling.tier, LONG=tiling.long, EXACT=exact, MERGE=4 if dim > 128 else 8,
        num_warps=tiling.warps, **launch_options(q.device),
    )  # fmt: skip
    _tree_kernel[(lanes, kv_heads * tiles, batch)](
        q, kv, table, rows, prefix_len, path, path_len, out, parts, stats, tickets, _scale(dim), q.stride(0),
        table.stride(0), splits, window,
        DEPTH=depth, UNIT=tiling.unit, FRONT=front, STEP=step, STEPS=steps, ONE_LANE=lanes == 1,
        MERGE_LAST=tiling.merge_last, STAGES=tiling.stages, MIXED_STAGES=tiling.mixed_stages, **sizes,
    )  # fmt: skip
    if lanes > 1 and not tiling.merge_last:
        _merge_kernel[(kv_heads * tiles, batch)](prefix_len, path_len, out, parts, stats, splits, **sizes)


def prefill_tiles(spans: list[tuple[int, int, int, int]], group: int, rows: int) -> Tensor:
    """spans: (batch row, first query, start, length) of each chunk -> the tiles of `prefill_attention`, [T, 5] int32
    on the CPU, those with most keys first: they take longest."""
    tiles = [
        (row, offset, at, length, first)
        for row, offset, at, length in spans
        for first in range(0, length * group, rows)
    ]
    tiles.sort(key=lambda tile: tile[2] + tile[4] // group, reverse=True)
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 5)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    rows: Tensor,
    tiles: Tensor,
    out: Tensor,
    exact: bool = True,
    tiling: Tiling | None = None,
) -> None:
    """Causal attention of chunks. q [M, heads or more, head_dim] and out [M, heads * head_dim] as for `tree_attention`;
    rows [B] int64; tiles [T, 5] int32 from `prefill_tiles`, on the device, made for `prefill_rows`."""
    tiling = tiling or pick_tiling(kv)
    _, kv_heads, _, dim = kv.shape
    heads = out.shape[1] // dim
    assert q.stride(2) == 1 and q.stride(1) == dim and kv.is_contiguous() and out.is_contiguous()
    assert table.stride(1) == 1 and tiles.is_contiguous() and q.dtype == kv.dtype
    _prefill_kernel[(tiles.shape[0], kv_heads)](
        q, kv, table, rows, tiles, out, _scale(dim), q.stride(0), table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIM_PAD=_padded(dim), ROWS=prefill_rows(kv, exact, tiling),
        UNIT=tiling.unit, SHORT=tiling.short, TIER=tiling.tier, LONG=tiling.long, EXACT=exact,
        STAGES=tiling.prefill_stages, num_warps=tiling.prefill_warps if exact else tiling.fast_warps,
        **launch_options(q.device),
    )  # fmt: skip


def prefill_rows(kv: Tensor, exact: bool, tiling: Tiling | None = None) -> int:
    """Rows of a tile of `prefill_attention` over this layer of the pool."""
    tiling = tiling or pick_tiling(kv)
    return tiling.prefill_rows if exact else tiling.fast_rows


def _scale(dim: int) -> float:
    return dim**-0.5 * math.log2(math.e)  # of scores in powers of 2
