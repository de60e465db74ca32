"""The kernel of decode, chains and trees: what `attention` launches.

A tile's rows belong to several nodes. It reads the chunks below the committed length once for all rows, and each node's
own chunks (the end of the committed positions, then its path) side by side, with weight 0 where a key is not a row's.
Nodes whose chunks fit into the same ones read them together (`triton_groups`). What is not a key of any row is never
loaded.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from draftwing.ops.attention.triton_common import (
    ANY_ALIGNMENT,
    added,
    ask_for_kv,
    begins_split,
    column,
    first_seen,
    load_kv,
    load_q,
    merged,
    nothing,
    raised,
    scores,
    split_start,
    splits_of,
    store_mean,
    with_unit,
)
from draftwing.ops.attention.triton_groups import NODES, ragged_place
from draftwing.ops.triton.common import let_next_come, wait

_NODES = tl.constexpr(NODES)

# -- partial results: a state with den [ROWS]; at [ROWS]: rows of parts and stats -------------------------------------


@triton.jit
def _store_part(parts, stats, at, top, den, acc, valid, dim, DIM: tl.constexpr):
    tl.store(stats + at * 2, top, mask=valid)
    tl.store(stats + at * 2 + 1, den, mask=valid)
    tl.store(parts + at[:, None] * DIM + dim[None, :], acc, mask=valid[:, None] & (dim < DIM)[None, :])


@triton.jit
def _load_part(parts, stats, at, valid, dim, DIM: tl.constexpr):
    top = tl.load(stats + at * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
    den = tl.load(stats + at * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
    mask = valid[:, None] & (dim < DIM)[None, :]
    acc = tl.load(parts + at[:, None] * DIM + dim[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    return top, den, acc


@triton.jit
def _merge_parts(
    parts, stats, at, stride, splits, valid, dim,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The first `splits` parts, in order; at [ROWS]: of split 0"""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    den = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for first in range(0, splits, MERGE):
        for i in tl.static_range(MERGE):  # unrolled, so that their loads are under way together
            ok = valid & (first + i < splits)
            top_b, den_b, acc_b = _load_part(parts, stats, at + (first + i) * stride, ok, dim, DIM)
            top, den, acc = merged(top, den, acc, top_b, den_b, acc_b)
    return top, den, acc


@triton.jit
def _merge_rows(
    out, parts, stats, sinks, first_part, first_split, splits, first_query, queries, head, tile, dim, v_scale,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Merges a tile's splits [first_split, splits) and stores its result, MERGE_ROWS rows at a time: those of a tile
    that can be real. first_query, queries: of the batch row's; dim [W]: which elements"""
    for first in tl.static_range(0, ROWS, MERGE_ROWS):
        flat = tile * ROWS + first + tl.arange(0, MERGE_ROWS)
        node = flat // GROUP
        valid = node < queries
        if first < QUERIES * GROUP:
            stride = queries * GROUP
            top, den, acc = _merge_parts(
                parts, stats, first_part + flat + first_split * stride, stride, splits - first_split, valid, dim, DIM,
                W, MERGE_ROWS, MERGE,
            )  # fmt: skip
            own_head = head * GROUP + flat % GROUP
            row = (first_query + node) * HEADS + own_head
            store_mean(out, row, top, den, acc, sinks, own_head, v_scale, valid, dim, DIM)


@triton.jit
def _merging_turn(ticket, lanes, MERGERS: tl.constexpr):
    """Returns which of the MERGERS that merge a tile's splits together a program is, below 0: none of them.

    They are the last of `lanes` programs to come, all of which have splits, and wait until all have stored. One program
    alone takes 60 us for 268 splits of 16 rows of 128 elements (H200), for it has a 132th of the device to read with.
    No program waits for one that finds no place on the device: the host sees to it (`mergers_of`).
    """
    tl.debug_barrier()  # all threads have stored before one of them takes the ticket
    turn = tl.atomic_add(ticket, 1, sem="acq_rel") - (lanes - MERGERS)
    if turn >= 0:
        while tl.atomic_add(ticket, 0, sem="acquire") < lanes:
            pass
    return turn


@triton.jit
def _end_split(
    parts, stats, at, valid, dim, top, den, acc, all_top, all_den, all_acc, DIM: tl.constexpr, KEEP: tl.constexpr
):
    """KEEP: into the state of all splits so far, which is returned; else to memory."""
    if KEEP:
        all_top, all_den, all_acc = merged(all_top, all_den, all_acc, top, column(den), acc)
    else:
        _store_part(parts, stats, at, top, column(den), acc, valid, dim, DIM)
    return all_top, all_den, all_acc


@triton.jit
def _store_context(
    parts, stats, at, split, stride, left, valid, dim, top, den, acc, all_top, all_den, all_acc,
    DIM: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """What a lane of the first launch ends in. KEEP: part 0 is all finished splits, part 1 one that is not, if there
    is one (left), and the only part where nothing is finished; else parts are splits."""
    if not KEEP:
        _store_part(parts, stats, at + split * stride, top, column(den), acc, valid, dim, DIM)
    elif left:
        if split > 0:
            _store_part(parts, stats, at, all_top, all_den, all_acc, valid, dim, DIM)
        at += tl.minimum(split, 1) * stride
        _store_part(parts, stats, at, top, column(den), acc, valid, dim, DIM)
    else:
        all_top, all_den, all_acc = merged(all_top, all_den, all_acc, top, column(den), acc)
        _store_part(parts, stats, at, all_top, all_den, all_acc, valid, dim, DIM)


# -- a node's own keys ------------------------------------------------------------------------------------------------


@triton.jit
def _load_own(
    kv, slot, head, ok, dim, vdim, KV_HEADS: tl.constexpr, DIM: tl.constexpr, MORE: tl.constexpr, DTYPE: tl.constexpr
):
    """As load_kv. A weight of 0 times NaN would spoil the tile's other nodes, so NaN among values becomes 0. Whoever
    sees the node has NaN from its keys, which are NaN where its values are."""
    k, v = load_kv(kv, slot, head, ok, dim, vdim, KV_HEADS, DIM, MORE, DTYPE)
    return k, tl.where(v == v, v, 0.0)


@triton.jit
def _group_keys(
    kv, table_row, columns, places, seen, head, own_group, first_subset, first_group, low, dim, vdim, start_at, offset,
    stop, queries, node,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, MORE: tl.constexpr, LANES: tl.constexpr,
    FRONT: tl.constexpr, STEP: tl.constexpr, AT_ONCE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Of STEP subsets from `first_subset` on, AT_ONCE groups of each from `first_group` on (`TreeGroups`, of LANES
    lanes): their FRONT keys from lane `offset` on, which is position start_at, below `stop` -> keys, values [KEYS, ..],
    KEYS = STEP * AT_ONCE * FRONT, as load_kv has them, whose they are [ROWS, KEYS]. columns, places, seen: of the batch
    row. own_group [ROWS]: which of its subset's groups a row belongs to. low [ROWS]: the first position that a row
    sees"""
    lane = tl.arange(0, STEP * AT_ONCE * FRONT)
    subset, group_of = first_subset + lane // (AT_ONCE * FRONT), first_group + lane // FRONT % AT_ONCE
    within, leader = offset + lane % FRONT, subset * _NODES + group_of
    ok = (group_of < _NODES) & (leader < queries) & (within < LANES) & (start_at + lane % FRONT // 16 * 16 < stop)
    column = tl.load(columns + leader * LANES + within, mask=ok, other=-1)
    ok = column >= 0
    slot = tl.load(table_row + column, mask=ok, other=0)
    k, v = _load_own(kv, slot, head, ok, dim, vdim, KV_HEADS, DIM, MORE, DTYPE)
    mine = ((node // _NODES)[:, None] == subset[None, :]) & (own_group[:, None] == group_of[None, :]) & ok[None, :]
    bits = tl.load(seen + node[:, None] * (LANES // 16) + (within // 16)[None, :], mask=mine, other=0)
    mine = mine & ((bits >> (within % 16)[None, :]) & 1 != 0)
    if WINDOW != 0:
        place = tl.load(places + leader * LANES + within, mask=ok, other=0)
        mine = mine & (place[None, :] >= low[:, None])
    return k, v, mine


@triton.jit
def _window_keys(
    kv, table_row, path, path_len, prefix, head, node, low, valid, dim, vdim, window,
    WINDOW: tl.constexpr, DEPTH: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, MORE: tl.constexpr,
    FRONT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """-> keys, values [FRONT, ..] of the window, which are on the path of a row's node [ROWS, FRONT]"""
    entry = tl.arange(0, FRONT)
    length = tl.load(path_len + node, mask=valid, other=0).to(tl.int32)
    on = (node[:, None] < 0) & (entry[None, :] < 0)
    for i in tl.static_range(DEPTH):
        here = valid & (i < length)
        if WINDOW != 0:
            here = here & (prefix + i >= low)
        named = tl.load(path + node * DEPTH + i, mask=here, other=-1).to(tl.int32)
        on = on | (here[:, None] & (named[:, None] == entry[None, :]))
    on = on & (entry < window)[None, :]
    ok = tl.max(on.to(tl.int32), 0) > 0
    slot = tl.load(table_row + prefix + entry, mask=ok, other=0)
    k, v = _load_own(kv, slot, head, ok, dim, vdim, KV_HEADS, DIM, MORE, DTYPE)
    return k, v, on


@triton.jit
def _with_both(q_tile, s, v, own_k, own_v, mine, scale, top, den, acc, CAP: tl.constexpr):
    """The state after scores of common keys and their values, and after own keys."""
    own_s = tl.where(mine, scores(q_tile, own_k, scale, CAP), float("-inf"))
    top, base, fade = raised(top, tl.maximum(tl.max(s, 1), tl.max(own_s, 1)), scale)
    den, acc = added(s, scale, base, v, den * fade[:, None], acc * fade[:, None])
    den, acc = added(own_s, scale, base, own_v, den, acc)
    return top, den, acc


@triton.jit
def _with_mixed_unit(
    q_tile, kv, table_row, path, path_len, columns, places, seen, group_of, groups, prefix, shared, at, head, tile,
    node, low, valid, dim, vdim, scale, window, queries, top, den, acc,
    WINDOW: tl.constexpr, DEPTH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    MORE: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr, FRONT: tl.constexpr,
    STEP: tl.constexpr, AT_ONCE: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The state after the unit at `at`, of whose keys all rows share those below `shared`."""
    place = at + tl.arange(0, UNIT)
    common = place < shared
    visible = common[None, :]
    if WINDOW != 0:
        visible = visible & (place[None, :] >= low[:, None])
    slot = tl.load(table_row + place, mask=common, other=0)
    k, v = load_kv(kv, slot, head, common, dim, vdim, KV_HEADS, DIM, MORE, q_tile[0].dtype)
    s = tl.where(visible, scores(q_tile, k, scale, CAP), float("-inf"))
    if not EXACT:
        own_k, own_v, mine = _window_keys(
            kv, table_row, path, path_len, prefix, head, node, low, valid, dim, vdim, window, WINDOW, DEPTH, KV_HEADS,
            DIM, MORE, FRONT, q_tile[0].dtype,
        )  # fmt: skip
        top, den, acc = _with_both(q_tile, s, v, own_k, own_v, mine, scale, top, den, acc, CAP)
    else:
        front, stop = tl.maximum(at, shared), at + UNIT
        first = tile * ROWS // GROUP // _NODES
        own_group = tl.load(group_of + node, mask=valid, other=-1)
        rounds = (tl.max(tl.load(groups + node, mask=valid, other=1), 0) + AT_ONCE - 1) // AT_ONCE * STEPS
        if rounds == 1:
            own_k, own_v, mine = _group_keys(
                kv, table_row, columns, places, seen, head, own_group, first, 0, low, dim, vdim, front, front - shared,
                stop, queries, node, WINDOW, KV_HEADS, DIM, MORE, LANES, FRONT, STEP, AT_ONCE, q_tile[0].dtype,
            )  # fmt: skip
            top, den, acc = _with_both(q_tile, s, v, own_k, own_v, mine, scale, top, den, acc, CAP)
        else:
            best = tl.max(s, 1)
            for i in range(rounds):
                own_k, _, mine = _group_keys(
                    kv, table_row, columns, places, seen, head, own_group, first + i % STEPS * STEP,
                    i // STEPS * AT_ONCE, low, dim, vdim, front, front - shared, stop, queries, node, WINDOW, KV_HEADS,
                    DIM, MORE, LANES, FRONT, STEP, AT_ONCE, q_tile[0].dtype,
                )  # fmt: skip
                best = tl.maximum(best, tl.max(tl.where(mine, scores(q_tile, own_k, scale, CAP), float("-inf")), 1))
            top, base, fade = raised(top, best, scale)
            den, acc = added(s, scale, base, v, den * fade[:, None], acc * fade[:, None])
            for i in range(rounds):
                own_k, own_v, mine = _group_keys(
                    kv, table_row, columns, places, seen, head, own_group, first + i % STEPS * STEP,
                    i // STEPS * AT_ONCE, low, dim, vdim, front, front - shared, stop, queries, node, WINDOW, KV_HEADS,
                    DIM, MORE, LANES, FRONT, STEP, AT_ONCE, q_tile[0].dtype,
                )  # fmt: skip
                own_s = tl.where(mine, scores(q_tile, own_k, scale, CAP), float("-inf"))
                den, acc = added(own_s, scale, base, own_v, den, acc)
    return top, den, acc


# -- trees of different sizes -----------------------------------------------------------------------------------------


def ragged_tiles(queries: int, trees: int, group: int, rows: int) -> int:
    """Tiles of `rows` rows that so many queries of so many trees may take, which `ragged_place` numbers."""
    return queries * group // rows + trees


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["trees", "splits_max", "window"], do_not_specialize_on_alignment=[*ANY_ALIGNMENT, "starts"]
)
def tree_kernel(
    q, kv, table, rows, prefix_len, path, path_len, columns, places, seen, group_of, groups, starts, trees, sinks, out,
    parts, stats, tickets, scale, v_scale,
    q_stride, table_stride, splits_max, window,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, DEPTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, MORE: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    UNIT: tl.constexpr, SHORT: tl.constexpr, TIER: tl.constexpr, LONG: tl.constexpr, LANES: tl.constexpr,
    FRONT: tl.constexpr, STEP: tl.constexpr, AT_ONCE: tl.constexpr, STEPS: tl.constexpr, EXACT: tl.constexpr,
    CAP: tl.constexpr, PHASE: tl.constexpr,
    ONE_LANE: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE: tl.constexpr, STAGES: tl.constexpr,
    SLICES: tl.constexpr, MERGERS: tl.constexpr, TOGETHER: tl.constexpr, INPUTS_READY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (lanes, KV_HEADS * TILES, B). Program (l, h, b): a run of the splits of a tile of one key head; of a tile's
    programs the last to finish merges what all stored, or the last MERGERS where there are TOGETHER splits or more.
    ONE_LANE: a tile's only program merges in registers.

    INPUTS_READY: as `AttnBackend.bind` has it. A program then finds its splits, and asks for the first one's keys,
    while the kernel before still runs. Most lanes of a short context have none, and end: the next kernel, whose blocks
    come up when all of these have, need not wait for their turns on the multiprocessors.

    starts: None where every batch row has QUERIES queries. Else there are `trees` rows, row b has the queries from
    starts[b] up to starts[b + 1], QUERIES at most, and the grid is (lanes, KV_HEADS, `ragged_tiles`).

    PHASE 0 does everything. PHASE 1 the units that all nodes read whole, and stores the states it ends in: of each
    split, or with ONE_LANE of all finished splits together, and of the last. PHASE 2 goes on from there, in one lane:
    one program, or SLICES, of which each has a part of the values' elements.

    WINDOW: `AttentionKind.reach`; CAP, sinks: as `AttentionKind` has them; `window`: of the batch.

    EXACT: nodes read their own chunks in groups, columns, places, seen, group_of and groups (`TreeGroups`, of LANES
    lanes): FRONT lanes of AT_ONCE groups of STEP subsets at a time, STEPS times for all subsets of a tile. Else
    FRONT is the window, padded, whose keys all rows read under a mask, as part of the unit that the committed positions
    end in.
    """
    let_next_come(PDL)
    if not INPUTS_READY:
        wait(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SINGLE: tl.constexpr = QUERIES == 1 and DEPTH == 1  # no unit has keys that rows do not share
    KEEP: tl.constexpr = ONE_LANE or PHASE == 2
    tl.static_assert(SLICES == 1 or (PHASE == 2 and MORE == 0))
    W: tl.constexpr = DIM_PAD // SLICES  # elements of values
    if SLICES > 1:
        lane, lanes = 0, 1
    else:
        lane, lanes = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1) // TILES
    if starts is None:
        tile = tl.program_id(1) % TILES
        b = tl.program_id(2).to(tl.int64)
        first_query = b * QUERIES
        queries = QUERIES
    else:
        tile, b, first_query, queries = ragged_place(starts, trees, tl.program_id(2), GROUP, ROWS)
        if tile * ROWS >= queries * GROUP:  # before it has touched anything
            return
    prefix = tl.load(prefix_len + b, cache_modifier=".cg").to(tl.int32)
    table_row = table + tl.load(rows + b, cache_modifier=".cg") * table_stride
    path += first_query * DEPTH
    path_len += first_query
    if EXACT and not SINGLE:
        columns += first_query * LANES
        places += first_query * LANES
        seen += first_query * (LANES // 16)
        group_of += first_query
        groups += first_query

    flat = tile * ROWS + tl.arange(0, ROWS)  # (node, head of the group)
    node = flat // GROUP
    valid = node < queries
    dim = tl.arange(0, DIM_PAD)
    vdim = dim if SLICES == 1 else tl.program_id(0) * W + tl.arange(0, W)
    own_head = head * GROUP + flat % GROUP
    out_row = (first_query + node) * HEADS + own_head
    stride = queries * GROUP  # parts of a split
    first_part = (first_query * KV_HEADS + head * queries) * splits_max * GROUP
    part = first_part + flat

    if PHASE == 1:
        shared = prefix // UNIT * UNIT
        end = shared
    elif EXACT:
        length = prefix + tl.load(path_len + node, mask=valid, other=0, cache_modifier=".cg").to(tl.int32)
        end = tl.max(tl.where(valid, length, 0), 0)
        shared = prefix // 16 * 16  # whole chunks that every row reads
    else:
        end = prefix + 1
        shared = prefix
    low, begin = node * 0, prefix * 0  # the first position that each row sees, and the first unit that some row does
    if WINDOW != 0:
        own_length = prefix + tl.load(path_len + node, mask=valid, other=0, cache_modifier=".cg").to(tl.int32)
        low = first_seen(own_length - 1, WINDOW)
        begin = tl.minimum(tl.min(tl.where(valid, low, shared), 0), shared) // UNIT * UNIT
    first_split = splits_of(begin + 1, SHORT, TIER, LONG) - 1
    origin = split_start(first_split, SHORT, TIER, LONG)
    splits = splits_of(end, SHORT, TIER, LONG)
    top, den, acc = nothing(ROWS, W)
    all_top, all_den, all_acc = top, tl.zeros([ROWS], tl.float32), acc  # of the splits before, where KEEP

    # A lane has the splits that begin in its part of the positions.
    span = (end - origin).to(tl.int64)
    split = splits_of(origin + (span * lane // lanes).to(tl.int32), SHORT, TIER, LONG)
    next_lane = splits_of(origin + (span * (lane + 1) // lanes).to(tl.int32), SHORT, TIER, LONG)
    own_splits = next_lane - split
    if not KEEP:  # noqa: SIM102 (known when this is compiled)
        if own_splits == 0:
            if INPUTS_READY and PHASE == 1:  # perhaps no program of this launch has a split, and then nobody waits
                wait(PDL)
            return
    start_at = tl.maximum(split_start(split, SHORT, TIER, LONG), begin)
    high = tl.minimum(split_start(next_lane, SHORT, TIER, LONG), end)
    own_entry = tl.load(path, cache_modifier=".cg") if SINGLE else 0
    own_slot = tl.load(table_row + prefix + own_entry, cache_modifier=".cg") if SINGLE else 0
    if INPUTS_READY:
        if not KEEP:
            ROW: tl.constexpr = DIM + (MORE if MORE > 0 else DIM)
            ask_for_kv(kv, table_row, head, start_at, tl.minimum(high, prefix), KV_HEADS, ROW, SHORT, PDL)
        wait(PDL)
    q_tile = load_q(q, (first_query + node) * q_stride + own_head * (DIM + MORE), valid, dim, DIM, MORE)
    whole = high if SINGLE else tl.minimum(shared // UNIT * UNIT, high)

    if PHASE == 2:
        start_at = whole
        split = splits_of(whole + 1, SHORT, TIER, LONG) - 1
        begun = (whole > split_start(split, SHORT, TIER, LONG)) & (begin < whole)
        finished = tl.minimum(split, 1) if ONE_LANE else split
        merge_from = 0 if ONE_LANE else first_split * stride
        count = finished if ONE_LANE else split - first_split
        all_top, all_den, all_acc = _merge_parts(
            parts, stats, part + merge_from, stride, tl.where(begin < whole, count, 0), valid, vdim, DIM, W, ROWS,
            MERGE,
        )  # fmt: skip
        top, old_den, acc = _load_part(parts, stats, part + finished * stride, valid & begun, vdim, DIM)
        den += old_den[:, None]
    else:
        for at in tl.range(start_at, whole, UNIT, num_stages=STAGES):  # units that every row reads whole
            if (at > start_at) & begins_split(at, SHORT, TIER, LONG):
                all_top, all_den, all_acc = _end_split(
                    parts, stats, part + split * stride, valid, vdim, top, den, acc, all_top, all_den, all_acc, DIM,
                    KEEP,
                )  # fmt: skip
                split += 1
                top, den, acc = nothing(ROWS, W)
            place = at + tl.arange(0, UNIT)
            if SINGLE:
                slot = tl.load(table_row + place, mask=place < prefix, other=0)
                slot = tl.where(place < prefix, slot, own_slot)
                k, v = load_kv(kv, slot, head, place < end, dim, vdim, KV_HEADS, DIM, MORE, q_tile[0].dtype)
                s = tl.where((place < end)[None, :], scores(q_tile, k, scale, CAP), float("-inf"))
            else:
                slot = tl.load(table_row + place)
                k, v = load_kv(kv, slot, head, place >= 0, dim, vdim, KV_HEADS, DIM, MORE, q_tile[0].dtype)
                s = scores(q_tile, k, scale, CAP)
            if WINDOW != 0:
                s = tl.where(place[None, :] >= low[:, None], s, float("-inf"))
            top, den, acc = with_unit(s, scale, v, top, den, acc)

    if PHASE != 1 and not SINGLE:
        for at in tl.range(tl.maximum(start_at, whole), high, UNIT, num_stages=1):
            if (at > start_at) & begins_split(at, SHORT, TIER, LONG):
                all_top, all_den, all_acc = _end_split(
                    parts, stats, part + split * stride, valid, vdim, top, den, acc, all_top, all_den, all_acc, DIM,
                    KEEP,
                )  # fmt: skip
                split += 1
                top, den, acc = nothing(ROWS, W)
            top, den, acc = _with_mixed_unit(
                q_tile, kv, table_row, path, path_len, columns, places, seen, group_of, groups, prefix, shared, at,
                head, tile, node, low, valid, dim, vdim, scale, window, queries, top, den, acc, WINDOW, DEPTH, KV_HEADS,
                GROUP, DIM, MORE, ROWS, UNIT, LANES, FRONT, STEP, AT_ONCE, STEPS, EXACT, CAP,
            )  # fmt: skip

    if PHASE == 1:
        if start_at < whole:
            left = not begins_split(whole, SHORT, TIER, LONG)
            _store_context(
                parts, stats, part, split, stride, left, valid, dim, top, den, acc, all_top, all_den, all_acc, DIM, KEEP
            )
    elif KEEP:
        all_top, all_den, all_acc = merged(all_top, all_den, all_acc, top, column(den), acc)
        store_mean(out, out_row, all_top, all_den, all_acc, sinks, own_head, v_scale, valid, vdim, DIM)
    else:
        if splits == first_split + 1:
            store_mean(out, out_row, top, column(den), acc, sinks, own_head, v_scale, valid, dim, DIM)
        else:
            _store_part(parts, stats, part + split * stride, top, column(den), acc, valid, dim, DIM)
            ticket = tickets + tl.program_id(2) * (KV_HEADS * TILES) + tl.program_id(1)
            together = MERGERS > 1 and splits - first_split >= TOGETHER and span >= lanes * LONG  # no lane is empty
            if together:
                W0: tl.constexpr = DIM_PAD // MERGERS
                turn = _merging_turn(ticket, lanes, MERGERS)
                if turn >= 0:
                    _merge_rows(
                        out, parts, stats, sinks, first_part, first_split, splits, first_query, queries, head, tile,
                        turn * W0 + tl.arange(0, W0), v_scale, QUERIES, HEADS, GROUP, DIM, W0, ROWS, MERGE_ROWS,
                        MERGE * MERGERS,
                    )  # fmt: skip
                    if tl.atomic_add(ticket, 1, sem="acq_rel") == lanes + MERGERS - 1:  # nobody looks at it any more
                        tl.store(ticket, 0)
            else:
                tl.debug_barrier()  # all threads have stored before one of them takes the ticket
                if tl.atomic_add(ticket, own_splits, sem="acq_rel") + own_splits == splits - first_split:
                    _merge_rows(
                        out, parts, stats, sinks, first_part, first_split, splits, first_query, queries, head, tile,
                        dim, v_scale, QUERIES, HEADS, GROUP, DIM, DIM_PAD, ROWS, MERGE_ROWS, MERGE,
                    )  # fmt: skip
                    tl.store(ticket, 0)
