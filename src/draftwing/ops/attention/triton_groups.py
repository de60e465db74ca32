"""Which nodes of a tree read keys of their own together, found once for all layers of a forward.

A chunk of 16 positions is summed by one instruction, so a row's keys of a chunk have to lie together, and those of
other rows may lie beside them with weight 0 as long as there is room for all. A group of nodes has as many lanes as
positions from the chunk on in which committed positions end: the committed ones first, then each key of the nodes'
paths once. Of nodes that are neighbours four are a group where their keys fit, else two and two, else each is one.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.attention.batch import Ragged
from draftwing.ops.triton.common import is_hopper, keep_cache, launch_options, start

CHUNK = 16  # positions, the depth of an instruction
NODES = 4  # neighbours that may be one group
_MOST_DEPTH = 16  # of paths that are compared with each other: of deeper trees each node is a group
_CHUNK, _NODES = tl.constexpr(CHUNK), tl.constexpr(NODES)


class TreeGroups(NamedTuple):
    """By queries of the batch, N; `lanes` of a group, a power of two. A group's keys lie by its subset's first node and
    which of the subset's groups it is."""

    columns: Tensor  # [N, lanes] int32: of the row of the page table, of each key; -1: none
    places: Tensor  # [N, lanes] int32: their positions
    seen: Tensor  # [N, lanes / 16] int32: which keys of its group a node sees, a bit for each lane of a chunk
    group_of: Tensor  # [N] int32: which of its subset's groups a node belongs to
    groups: Tensor  # [N] int32: how many groups its subset has

    @property
    def lanes(self) -> int:
        return self.columns.shape[1]


@triton.jit
def ragged_place(starts, trees, number, TIMES: tl.constexpr, SIZE: tl.constexpr):
    """Tile `number` of all, of SIZE rows, where a query has TIMES rows -> its place in its tree, the tree, and the
    tree's first query and number of queries.

    A tree's tiles begin at number starts[b] * TIMES // SIZE + b. That is room enough: for numbers x and d,
    floor(x + d) - floor(x) + 1 >= ceil(d). Some numbers are nobody's: their place is past the tree's last query."""
    begun = 0
    for first in range(0, trees, 128):
        tree = first + tl.arange(0, 128)
        known = tree < trees
        at = tl.load(starts + tree, mask=known, other=0, cache_modifier=".cg") * TIMES // SIZE + tree
        begun += tl.sum((known & (at <= number)).to(tl.int32), 0)
    b = tl.cast(begun - 1, tl.int64)
    first_query = tl.load(starts + b, cache_modifier=".cg")
    queries = (tl.load(starts + b + 1, cache_modifier=".cg") - first_query).to(tl.int32)
    return (number - first_query * TIMES // SIZE - b).to(tl.int32), b, first_query, queries


@triton.jit
def _lanes(there, entry, step, group_of, committed, ANY_LANE: tl.constexpr):
    """Keys of paths [K], of which `there` are real, with the group of their node -> whether a key is the first of its
    kind in its group [K], its lane in its chunk [K], and whether all keys have one."""
    at = tl.arange(0, there.shape[0])
    together = (group_of[:, None] == group_of[None, :]) & there[:, None] & there[None, :]
    same = together & (entry[:, None] == entry[None, :])
    earlier = at[None, :] < at[:, None]
    first = there & (tl.max((same & earlier).to(tl.int32), 1) == 0)
    beside = together & first[:, None] & first[None, :]
    crowded = tl.max((beside & (step[:, None] == step[None, :]) & (at[:, None] != at[None, :])).to(tl.int32), 1)
    crowded = tl.max((together & (crowded[None, :] > 0)).to(tl.int32), 1) > 0  # some key of its group
    position = committed + step  # from the first chunk on
    chunk = position // _CHUNK
    rank = tl.sum((beside & earlier & (chunk[:, None] == chunk[None, :])).to(tl.int32), 1)
    ranked = rank + tl.where(chunk == 0, committed, 0)
    lane = tl.where(crowded, ranked, position % _CHUNK) if ANY_LANE else position % _CHUNK
    fits = ((crowded == 0) | (ranked < _CHUNK)) if ANY_LANE else crowded == 0
    lane = tl.sum(tl.where(same & first[None, :], lane[None, :], 0), 1)  # that of the first of its kind
    return first, lane, tl.min((fits | (first == 0)).to(tl.int32), 0) == 1


@triton.jit(do_not_specialize=["trees"], do_not_specialize_on_alignment=["prefix_len", "path", "path_len", "starts"])
def _group_kernel(
    columns, places, seen, group_of_out, groups_out, prefix_len, path, path_len, starts, trees,
    QUERIES: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr, SHARED: tl.constexpr,
    ANY_LANE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (subsets of a tree, trees), of ragged trees (1, all subsets). STEPS: DEPTH, padded. SHARED: whether nodes
    may share a group."""
    start(PDL)
    if starts is None:
        subset, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        first_query = b * QUERIES
        queries = QUERIES
    else:
        subset, b, first_query, queries = ragged_place(starts, trees, tl.program_id(1), 1, _NODES)
        if subset * _NODES >= queries:
            return
    prefix = tl.load(prefix_len + b).to(tl.int32)
    shared = prefix // _CHUNK * _CHUNK
    committed = prefix - shared
    key = tl.arange(0, _NODES * STEPS)
    node, step = subset * _NODES + key // STEPS, key % STEPS
    length = tl.load(path_len + first_query + node, mask=node < queries, other=0).to(tl.int32)
    there = step < length
    entry = tl.load(path + (first_query + node) * DEPTH + step, mask=there & (step < DEPTH), other=-1).to(tl.int32)
    within = key // STEPS
    group_of, position = within, committed + step
    first, lane = there, position % _CHUNK
    if SHARED:
        one, lane_1, fits_1 = _lanes(there, entry, step, within * 0, committed, ANY_LANE)
        two, lane_2, fits_2 = _lanes(there, entry, step, within // 2, committed, ANY_LANE)
        group_of = tl.where(fits_1, within * 0, tl.where(fits_2, within // 2, group_of))
        first = (fits_1 & one) | ((fits_1 == 0) & ((fits_2 & two) | ((fits_2 == 0) & there)))
        lane = tl.where(fits_1, lane_1, tl.where(fits_2, lane_2, lane))
    leader = first_query + subset * _NODES

    # What is committed, and nothing; then keys of paths.
    slot = tl.arange(0, _NODES * LANES)
    own = subset * _NODES + slot // LANES < queries
    last = tl.max(tl.where(node < queries, group_of, 0), 0)
    known = (slot % LANES < committed) & (slot // LANES <= last)
    at = leader * LANES + slot
    tl.store(columns + at, tl.where(known, shared + slot % LANES, -1), mask=own)
    tl.store(places + at, shared + slot % LANES, mask=own)
    tl.debug_barrier()
    to = (leader + group_of) * LANES + position // _CHUNK * _CHUNK + lane
    tl.store(columns + to, prefix + entry, mask=first)
    tl.store(places + to, prefix + step, mask=first)

    CHUNKS: tl.constexpr = LANES // _CHUNK
    which = subset * _NODES + tl.arange(0, _NODES)
    bits = tl.where(there, 1 << lane, 0)
    for chunk in tl.static_range(CHUNKS):
        mine = tl.sum(tl.reshape(tl.where(position // _CHUNK == chunk, bits, 0), [_NODES, STEPS]), 1)
        mine = mine | ((1 << committed) - 1 if chunk == 0 else 0)
        tl.store(seen + (first_query + which) * CHUNKS + chunk, mine, mask=which < queries)
    its_group = tl.max(tl.reshape(group_of, [_NODES, STEPS]), 1)
    tl.store(group_of_out + first_query + which, its_group, mask=which < queries)
    real = tl.where(which < queries, its_group, 0)
    tl.store(groups_out + first_query + which, tl.zeros_like(real) + tl.max(real, 0) + 1, mask=which < queries)


def lanes_of(depth: int) -> int:
    """Returns the lanes of a group: chunks that committed positions and a path of this depth touch, a power of two."""
    return triton.next_power_of_2(-(-(CHUNK - 1 + depth) // CHUNK)) * CHUNK


def tree_groups(
    prefix_len: Tensor, path: Tensor, path_len: Tensor, ragged: Ragged | None = None, half: bool = True
) -> TreeGroups:
    """prefix_len [B], path [B, Q, D], path_len [B, Q], as `tree_attention` takes them -> the groups of their nodes.
    half: whether queries have 16 bits. On compute capability 9.0 a key may then have any lane of its chunk
    (`triton_common`), else only that of its position."""
    (batch, queries, depth), device = path.shape, path.device
    total, starts = batch * queries, None
    if ragged is not None:
        prefix_len, starts, queries = ragged.prefix_len, ragged.starts, ragged.cap
        batch = prefix_len.shape[0]
    lanes = lanes_of(depth)
    columns, places = (torch.empty(total, lanes, dtype=torch.int32, device=device) for _ in range(2))
    seen = torch.empty(total, lanes // CHUNK, dtype=torch.int32, device=device)
    group_of, groups = (torch.empty(total, dtype=torch.int32, device=device) for _ in range(2))
    grid = (-(-queries // NODES), batch) if starts is None else (1, total // NODES + batch)
    launched = _group_kernel[grid](
        columns, places, seen, group_of, groups, prefix_len, path, path_len, starts, batch, QUERIES=queries,
        DEPTH=depth, STEPS=triton.next_power_of_2(depth), LANES=lanes, SHARED=depth <= _MOST_DEPTH,
        ANY_LANE=half and is_hopper(), num_warps=4, **launch_options(device),
    )  # fmt: skip
    keep_cache(launched)
    return TreeGroups(columns, places, seen, group_of, groups)
