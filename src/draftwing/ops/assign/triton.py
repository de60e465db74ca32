"""What is worth verifying, in Triton: the survival of nodes in one launch, the choice among a batch's in another.

One program per row, one lane per node. Each program of the second launch looks at the survival of all nodes, to find
the least that is good enough, and writes its own row: that costs less than to wait for one program that does it for
all. Nothing depends on which is first.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.core import MARK_ONE, MARK_SOURCE, MARK_SURVIVAL, MARK_VERIFIED
from draftwing.ops.assign.spec import DEPTHS, LEVELS, MIDDLE, SLOPE, SURE, AssignOps, spare_trees
from draftwing.ops.attention.batch import Ragged
from draftwing.ops.triton.common import int_fields, lanes, launch_options, start
from draftwing.ops.types import Assigned, Calibration, Draft, Queries, Ranked, RowTensors, TargetInputs, Tree

_ONE, _SOURCE, _SURVIVAL, _VERIFIED = (tl.constexpr(x) for x in (MARK_ONE, MARK_SOURCE, MARK_SURVIVAL, MARK_VERIFIED))
_DEPTHS, _LEVELS, _SURE, _SLOPE, _MIDDLE = (tl.constexpr(x) for x in (DEPTHS, LEVELS, SURE, SLOPE, MIDDLE))
_BITS_OF_ONE = tl.constexpr(0x3F800000)  # of 1.0; bits of floats from 0 on are in the floats' order
_ROUNDS = tl.constexpr(30)  # that halve what lies below
_MIN_BLOCK = 1024  # nodes that every program looks at: few sizes are compiled


@triton.jit
def level_of(logp):
    """`ops.assign.spec.level_of`"""
    p = tl.exp(logp)
    p = tl.minimum(tl.where(p > 1e-6, p, 1e-6), 1 - 1e-6)
    level = tl.floor(_SLOPE * tl.log(p / (1 - p)) + (_MIDDLE + 0.5))
    return tl.minimum(tl.maximum(level, 0.0), _LEVELS - 1.0).to(tl.int64)


@triton.jit(do_not_specialize=["dummy"])
def _rank_kernel(
    survival_ptr, mark_ptr, grade_ptr, parent_ptr, alive_ptr, depth_ptr, rows_ptr, seen_ptr, accepted_ptr, dummy,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    first = b * NODES
    lane = tl.arange(0, LANES)
    real = lane < NODES
    alive = tl.load(alive_ptr + first + lane, mask=real, other=0) != 0
    depth = tl.load(depth_ptr + first + lane, mask=real, other=0)
    grade = depth * 0
    if grade_ptr is not None:
        grade = tl.load(grade_ptr + first + lane, mask=real, other=0)
    cell = grade * _DEPTHS + tl.minimum(depth, _DEPTHS - 1)
    share = tl.load(accepted_ptr + cell, mask=real, other=0.0) / tl.load(seen_ptr + cell, mask=real, other=1.0)
    estimate = tl.where(lane == 0, 1.0, tl.minimum(share, _SURE))

    survival = estimate
    up = lane
    for _ in range(DEPTH - 1):  # past the root nothing changes any more
        up = tl.load(parent_ptr + first + up, mask=real, other=0).to(tl.int32)
        survival *= tl.gather(estimate, up, 0)
    worth = alive & ((lane == 0) | (tl.load(rows_ptr + b) != dummy))
    survival = tl.where(worth, survival, 0.0)
    mark = depth + (grade // _LEVELS << _SOURCE) + ((survival * _ONE).to(tl.int64) << _SURVIVAL)
    tl.store(survival_ptr + first + lane, survival, mask=real)
    tl.store(mark_ptr + first + lane, tl.where(alive, mark | _VERIFIED, mark), mask=real)


@triton.jit
def _least(bits, total):
    """The largest number from 1 on that at least `total` of bits [BLOCK] reach; 1 where fewer do."""
    low = 1
    high = _BITS_OF_ONE + 1
    for _ in range(_ROUNDS):
        middle = (low + high) // 2
        enough = tl.sum((bits >= middle).to(tl.int32), 0) >= total
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit(do_not_specialize=["total", "spare", "dummy"])
def _assign_kernel(
    survival_ptr, mark_ptr, tokens_ptr, path_ptr, path_len_ptr, positions_ptr, slots_ptr, prefix_ptr, rows_ptr,
    alive_ptr, new_mark_ptr, place_ptr, ints_ptr, new_path_ptr, trees_ptr, starts_ptr, total, spare, dummy,
    NODES: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ints: ids, positions, write_slots, rows, prefix_len, path_len [total] each, with the pitch of `int_fields`;
    trees: rows and prefix_len [B + spare] of `Ragged`, with such a pitch, too."""
    start(PDL)
    b, batch = tl.program_id(0), tl.num_programs(0)
    every = tl.arange(0, BLOCK)
    bits = tl.load(survival_ptr + every, mask=every < batch * NODES, other=0.0).to(tl.int32, bitcast=True)
    least = _least(bits, total)
    better, equal = bits > least, bits == least
    left = total - tl.sum(better.to(tl.int32), 0)  # for nodes that just reach it, the first ones
    known = total - left + tl.minimum(tl.sum(equal.to(tl.int32), 0), left)  # queries
    before = every < b * NODES
    equal_before = tl.sum((equal & before).to(tl.int32), 0)
    begin = tl.sum((better & before).to(tl.int32), 0) + tl.minimum(equal_before, left)

    lane = tl.arange(0, LANES)
    real = lane < NODES
    at = b.to(tl.int64) * NODES + lane
    mine = tl.load(survival_ptr + at, mask=real, other=0.0).to(tl.int32, bitcast=True)
    just = (mine == least).to(tl.int32)
    chosen = (mine > least) | ((mine == least) & (equal_before + tl.cumsum(just, 0) <= left))
    number = begin + tl.cumsum(chosen.to(tl.int32), 0) - 1
    mark = tl.load(mark_ptr + at, mask=real, other=0)
    tl.store(alive_ptr + at, chosen, mask=real)
    tl.store(new_mark_ptr + at, tl.where(chosen, mark, mark & ~_VERIFIED), mask=real)
    tl.store(place_ptr + at, tl.where(chosen, number, 0).to(tl.int64), mask=real)

    row, prefix = tl.load(rows_ptr + b), tl.load(prefix_ptr + b)
    pitch = total + total % 2
    _store_query(
        ints_ptr + number, pitch, tl.load(tokens_ptr + at, mask=chosen, other=0),
        tl.load(positions_ptr + at, mask=chosen, other=0), tl.load(slots_ptr + at, mask=chosen, other=0), row, prefix,
        tl.load(path_len_ptr + at, mask=chosen, other=0), chosen,
    )  # fmt: skip
    step = tl.arange(0, STEPS)[None, :]
    inside = chosen[:, None] & (step < WIDTH)
    path = tl.load(path_ptr + at[:, None] * WIDTH + step, mask=inside, other=0)
    tl.store(new_path_ptr + number[:, None].to(tl.int64) * WIDTH + step, path, mask=inside)
    for first in range(known + b * LANES, total, batch * LANES):  # of the dummy row
        filler = first + lane
        fills = filler < total
        nothing = tl.zeros([LANES], tl.int64)
        _store_query(ints_ptr + filler, pitch, nothing, nothing, nothing, nothing + dummy, nothing, nothing + 1, fills)
        query = filler[:, None].to(tl.int64) * WIDTH + step
        tl.store(new_path_ptr + query, query * 0, mask=fills[:, None] & (step < WIDTH))

    trees = batch + spare
    prefixes = trees_ptr + trees + trees % 2
    tl.store(trees_ptr + b, row)
    tl.store(prefixes + b, prefix)
    tl.store(starts_ptr + b, tl.cast(begin, tl.int64))
    if b == 0:
        for first in range(0, spare + 1, LANES):
            tree = first + lane
            tl.store(trees_ptr + batch + tree, tl.cast(tree * 0, tl.int64) + dummy, mask=tree < spare)
            tl.store(prefixes + batch + tree, tl.cast(tree * 0, tl.int64), mask=tree < spare)
            begun = tl.minimum(known + tree * NODES, total)
            tl.store(starts_ptr + batch + tree, tl.cast(begun, tl.int64), mask=tree <= spare)


@triton.jit
def _store_query(at, pitch, ids, positions, slots, row, prefix, path_len, mask):
    zero = ids * 0
    tl.store(at, ids, mask=mask)
    tl.store(at + pitch, positions, mask=mask)
    tl.store(at + 2 * pitch, slots, mask=mask)
    tl.store(at + 3 * pitch, zero + row, mask=mask)
    tl.store(at + 4 * pitch, zero + prefix, mask=mask)
    tl.store(at + 5 * pitch, path_len, mask=mask)


class TritonAssignOps(AssignOps):
    """Overrides what every step with drafts does, each in one launch."""

    def rank(self, draft: Draft, tree: Tree, rows: Tensor, dummy: int, calibration: Calibration) -> Ranked:
        batch, nodes = draft.parent.shape
        survival = torch.empty(batch, nodes, dtype=torch.float32, device=rows.device)
        ranked = Ranked(survival, torch.empty(batch, nodes, dtype=torch.int64, device=rows.device))
        _rank_kernel[(batch,)](
            *ranked, None if draft.grade is None else draft.grade.contiguous(), draft.parent.contiguous(),
            draft.alive.contiguous().view(torch.uint8), tree.depth, rows, *calibration, dummy, NODES=nodes,
            LANES=lanes(nodes), DEPTH=tree.path.shape[2] - 1, num_warps=1, **launch_options(rows.device),
        )  # fmt: skip
        return ranked

    def assign(
        self, table: RowTensors, rows: Tensor, draft: Draft, tree: Tree, inputs: TargetInputs, ranked: Ranked,
        total: int,
    ) -> Assigned:  # fmt: skip
        batch, nodes, width = tree.path.shape
        assert batch <= total <= batch * nodes
        spare, new = spare_trees(batch, nodes, total), rows.new_empty
        ints, (ids, positions, slots, owners, prefix, path_len) = int_fields(6, rows, total)
        trees, (tree_rows, tree_prefix) = int_fields(2, rows, batch + spare)
        alive = torch.empty(batch, nodes, dtype=torch.bool, device=rows.device)
        mark, place, path, starts = new(batch, nodes), new(batch, nodes), new(total, 1, width), new(batch + spare + 1)
        block = max(_MIN_BLOCK, triton.next_power_of_2(batch * nodes))
        _assign_kernel[(batch,)](
            *ranked, draft.tokens.contiguous(), tree.path, tree.path_len, inputs.positions, inputs.write_slots,
            inputs.prefix_len, rows, alive, mark, place, ints, path, trees, starts, total, spare, table.rows,
            NODES=nodes, LANES=lanes(nodes), WIDTH=width, STEPS=lanes(width), BLOCK=block,
            num_warps=min(16, block // 256), **launch_options(rows.device),
        )  # fmt: skip
        queries = Queries(ids, positions, slots, owners, prefix, path, path_len.unsqueeze(1))
        return Assigned(alive, mark, place, Ragged(tree_rows, tree_prefix, starts, nodes, -(-total // batch)), queries)
