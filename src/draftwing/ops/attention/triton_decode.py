"""Attention of decode, chains and trees over the paged pool; `triton_common` says what it promises about bits.

A tree that fills several tiles is read in two launches: what all nodes read whole in large tiles, each node's own keys
in small ones. Where bits may differ, the window's keys are read by all rows under a mask instead, in one launch.

The host never knows lengths: programs find out on the device which splits are theirs.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from draftwing.ops.attention.batch import FULL, AttentionKind, Ragged
from draftwing.ops.attention.triton_common import (
    ROUNDING,
    Tiling,
    fits,
    key_parts,
    padded,
    pick_tiling,
    scale_of,
    warps_of,
)
from draftwing.ops.attention.triton_groups import CHUNK, NODES, TreeGroups, tree_groups
from draftwing.ops.attention.triton_tree import ragged_tiles, tree_kernel
from draftwing.ops.triton.common import keep_cache, launch_options, memory_of

WINDOW_BYTES = 16 << 10  # most of a masked window's keys: they lie in shared memory, and so do their values
WINDOW_DEPTH = 32  # longest path that is looked for in a masked window: the search is unrolled
PARTIAL_BYTES = 256 << 20  # of memory for partial results at least; where they need more, a tile is one program's work
PARTIAL_SHARE = 128  # of a GPU's memory they may take one part in so many, which on large ones is more


def partial_bytes(device: torch.device) -> int:
    """Returns the most bytes of partial results at a time, a power of two. A workspace takes up to twice as many, with
    those that it has outgrown.

    Four trees of 16 nodes of an 8B Llama with 131,072 positions need 281 MB. In one program for each tile and row they
    leave three of four multiprocessors without work."""
    return max(PARTIAL_BYTES, 1 << max(memory_of(device) // PARTIAL_SHARE, 1).bit_length() - 1)


class Workspace:
    """Partial results and tickets of attention, of trees and of prompts: made once, shared by all layers and
    graphs. Launches that share some, by their names, must follow each other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.room = partial_bytes(device)  # of one launch's partial results
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


class Plan(NamedTuple):
    """How a batch of trees is run; all of it is known on the host."""

    exact: bool  # else under a mask, in one launch
    two_launches: bool
    rows: int  # of a tile of the first launch
    lanes: int  # programs that share a tile of the first launch; one merges in registers
    parts: int  # partial results of each row


def plan(
    batch: int, queries: int, depth: int, heads: int, kv: Tensor, positions: int, window: int, exact: bool,
    tiling: Tiling, reach: int = 0, room: int = PARTIAL_BYTES,
) -> Plan:  # fmt: skip
    """queries: of a tree, of ragged ones on average. positions: of a page table. exact: its bits are wanted; what it
    gives is exact also where that is as fast, and where there is no room for a masked window. reach:
    most positions that a query sees, 0: all before it. room: bytes for partial results."""
    _, kv_heads, parts, dim = kv.shape
    row = padded(dim) if parts == 2 else dim // 2  # of keys, as of values, which may be a part of them
    rows_all = queries * heads // kv_heads  # of a key head

    def programs(rows: int) -> int:
        return batch * kv_heads * triton.cdiv(rows_all, rows)

    exact = (
        exact
        or queries == depth == 1
        or depth > WINDOW_DEPTH
        or padded(window) * row * max(kv.itemsize, 2) > WINDOW_BYTES
    )
    two = exact and queries > 1 and rows_all > tiling.rows and tiling.context_rows > tiling.rows
    large = tiling.context_rows if two else tiling.window_rows
    rows = min(large, padded(rows_all))
    if not two and (exact or programs(tiling.rows) <= tiling.programs):
        rows = tiling.rows
    splits = split_count(positions, tiling)
    # Of tiles of 64 rows a multiprocessor holds one.
    limit = tiling.context_programs if two or rows >= 64 else tiling.programs
    touched = min(splits, triton.cdiv(reach + depth, tiling.short) + 1) if reach else splits
    lanes = max(1, min(limit // programs(rows), touched))
    if batch * queries * heads * splits * dim * 4 > room:
        lanes = 1
    return Plan(exact, two, rows, lanes, splits if lanes > 1 else 2 if two else 0)


def merge_slices(programs: int, splits: int, dim: int, more: int, tiling: Tiling) -> int:
    """Returns how many programs share a tile of the second launch, each with a part of the values' elements. programs:
    tiles; splits: of a page table; dim, more: as `key_parts` has them.

    Splits are merged one after the other, and behind a long context that takes longer than all else of the launch."""
    slices = 1
    if not more and splits >= tiling.shared_merge:
        while slices < 4 and padded(dim) > 32 * slices and 2 * slices * programs <= tiling.programs:
            slices *= 2
    return slices


def mergers_of(programs: int, lanes: int, part: int, splits: int, dim: int, more: int, tiling: Tiling) -> int:
    """Returns how many programs of a single launch merge a tile's splits together, as the slices of `merge_slices`.
    lanes: programs of a tile; part: elements of a split's part.

    All but one of a tile may wait for it; of all tiles those are fewer than the multiprocessors."""
    mergers = 1
    if not more and splits >= tiling.shared_merge and part >= tiling.shared_part:
        most = min(4, lanes // 2, padded(dim) // 32)
        while 2 * mergers <= most and (2 * mergers - 1) * programs < tiling.waiting:
            mergers *= 2
    return mergers


def split_count(length: int, tiling: Tiling) -> int:
    """Splits that [0, length) touches."""
    near, far = min(length, tiling.tier), max(length - tiling.tier, 0)
    return -(-near // tiling.short) + -(-far // tiling.long)


@functools.cache
def _own_tiling(queries: int, lanes: int, group: int, rows: int, tiling: Tiling) -> tuple[int, int, int, int]:
    """(FRONT, STEP, AT_ONCE, STEPS): lanes of a group in a unit, subsets that are gathered at a time, groups of each,
    and how often for all subsets. rows: of a tile."""
    tiles = range(-(-queries * group // rows))
    nodes = [(tile * rows // group, min((tile * rows + rows - 1) // group, queries - 1)) for tile in tiles]
    subsets = max(last // NODES - first // NODES + 1 for first, last in nodes)
    front = min(tiling.unit, lanes)
    step = min(triton.next_power_of_2(subsets), max(1, tiling.own // front))
    return front, step, min(NODES, max(1, tiling.own // (front * step))), -(-subsets // step)


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
    ragged: Ragged | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    kind: AttentionKind = FULL,
    inputs_ready: bool = False,
    groups: TreeGroups | None = None,
) -> None:
    """Decode, chains and trees; see `ops.attention.batch.Batch` for what a query reads.

    q [B * Q, heads or more, head_dim], of which the first heads are read, its last two axes dense; kv [slots, kv_heads,
    2, head_dim], or [slots, kv_heads, 1, head_dim] where values are a part of keys; table [rows, L], rows, prefix_len
    [B], path [B, Q, D], path_len [B, Q], all int64; out [B * Q, heads * values]. exact: its bits are wanted, else
    whatever `plan` finds fastest. `window` as in `Batch`; 0: Q. With `ragged` Q is 1, and the trees are those that it
    names. scales: what keys and what values of the pool are to be multiplied with; a pool may be float8_e4m3fn with
    queries of 16 bits. kind: of the layer. inputs_ready: as `AttnBackend.bind` has it. groups: of these trees, where
    they are known already.
    """
    tiling = tiling or pick_tiling(kv)
    batch, queries, depth = path.shape
    total = batch * queries
    window = window or queries
    mean, starts = queries, None
    if ragged is not None:
        assert queries == 1 and ragged.starts.is_contiguous()
        rows, prefix_len, starts, queries, mean = ragged
        batch = rows.shape[0]
    dim, more = key_parts(kv, kind)
    kv_heads, heads = kv.shape[1], out.shape[1] // dim
    group = heads // kv_heads
    assert q.stride(2) == 1 and q.stride(1) == dim + more and kv.is_contiguous() and out.is_contiguous()
    assert table.stride(1) == 1 and path.is_contiguous() and path_len.is_contiguous() and fits(q, kv)
    assert tiling.tier % tiling.short == 0 == tiling.short % tiling.unit and tiling.long % tiling.unit == 0
    how = plan(
        triton.cdiv(total, mean), mean, depth, heads, kv, table.shape[1], window, exact, tiling, abs(kind.reach),
        workspace.room,
    )  # fmt: skip
    single, own_lanes = queries == depth == 1, CHUNK
    if how.exact and not single:
        if groups is None:
            groups = tree_groups(prefix_len, path, path_len, ragged, q.dtype != torch.float32)
        own_lanes = groups.lanes
    own = (None,) * 5 if groups is None else groups
    partials = total * heads * how.parts
    parts = workspace.take("parts", max(1, partials * dim), torch.float32)
    stats = workspace.take("stats", max(1, partials * 2), torch.float32)

    def grid(tile: int) -> tuple[int, int]:
        """Tiles of a batch row, and batch rows; of ragged trees 1, and all tiles."""
        if starts is None:
            return triton.cdiv(queries * group, tile), batch
        return 1, ragged_tiles(total, batch, group, tile)

    tickets = workspace.take("tickets", kv_heads * math.prod(grid(how.rows)), torch.int32)

    def launch(phase: int, lanes: int, tile: int, stages: int) -> None:
        tiles, times = grid(tile)
        front, step, at_once, steps = (padded(window), 1, 1, 1)
        if how.exact:
            front, step, at_once, steps = _own_tiling(queries, own_lanes, group, tile, tiling)
        merge_rows, slices, mergers = min(16, tile, triton.next_power_of_2(queries * group)), 1, 1
        programs, splits = kv_heads * tiles * times, split_count(table.shape[1], tiling)
        if phase == 2:
            slices = merge_slices(programs, splits, dim, more, tiling)
        elif phase == 0:
            mergers = mergers_of(programs, lanes, merge_rows * padded(dim), splits, dim, more, tiling)
        width = padded(dim) // slices
        launched = tree_kernel[(lanes * slices, kv_heads * tiles, times)](
            q, kv, table, rows, prefix_len, path, path_len, *own, starts, batch, kind.sinks, out, parts, stats, tickets,
            scale_of(dim, kind) * scales[0], scales[kv.shape[2] - 1], q.stride(0), table.stride(0), how.parts, window,
            WINDOW=kind.reach, QUERIES=queries, DEPTH=depth, HEADS=heads, KV_HEADS=kv_heads, DIM=dim, MORE=more,
            DIM_PAD=padded(dim), ROWS=tile, TILES=tiles, UNIT=tiling.unit, SHORT=tiling.short, TIER=tiling.tier,
            LONG=tiling.long, LANES=own_lanes, FRONT=front, STEP=step, AT_ONCE=at_once, STEPS=steps, EXACT=how.exact,
            CAP=kind.cap, PHASE=phase,
            ONE_LANE=how.lanes == 1, MERGE_ROWS=merge_rows,
            MERGE=min(16, (128 << 7) // (merge_rows * width)), STAGES=stages, SLICES=slices, MERGERS=mergers,
            TOGETHER=tiling.shared_merge, INPUTS_READY=inputs_ready,
            num_warps=warps_of(tile, tiling), **ROUNDING, **launch_options(q.device),
        )  # fmt: skip
        keep_cache(launched)

    if how.two_launches:
        launch(1, how.lanes, how.rows, tiling.context_stages)
        launch(2, 1, min(tiling.own_rows, how.rows), tiling.stages)
    else:
        launch(0, how.lanes, how.rows, tiling.stages)
