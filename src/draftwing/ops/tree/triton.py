"""Draft trees in Triton: geometry and the target's inputs in one launch, acceptance and commit in another.

One program per row, one lane per node.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.core import MARK_DEPTH, TOKEN
from draftwing.ops.assign.spec import DEPTHS
from draftwing.ops.noise.triton import position_words
from draftwing.ops.tree.spec import FRACTION_BITS, TreeOps
from draftwing.ops.triton.common import lanes, launch_options, start
from draftwing.ops.types import (
    HEAD,
    AcceptedPath,
    Calibration,
    Committed,
    Draft,
    RowTensors,
    TargetInputs,
    Tree,
    packed_width,
)

_TOKEN = tl.constexpr(TOKEN)
_DEPTH_BITS, _DEPTHS = tl.constexpr(MARK_DEPTH), tl.constexpr(DEPTHS)


@triton.jit(do_not_specialize=["length"])
def _tree_kernel(
    parent_ptr, alive_ptr, rows_ptr, table_ptr, kv_len_ptr, length,
    depth_ptr, path_ptr, path_len_ptr, positions_ptr, slots_ptr, prefix_ptr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    real = lane < NODES
    first = b * NODES
    alive = tl.load(alive_ptr + first + lane, mask=real, other=0) != 0

    # Parents stay in the first-level cache, so each round of this walk to the root costs a few dozen cycles.
    depth = tl.zeros([LANES], tl.int32)
    up = tl.where(alive, lane, 0)  # a dead node has depth 0
    for _ in range(DEPTH):
        depth += (up != 0).to(tl.int32)
        up = tl.load(parent_ptr + first + up, mask=real, other=0).to(tl.int32)
    tl.store(depth_ptr + first + lane, depth.to(tl.int64), mask=real)
    tl.store(path_len_ptr + first + lane, (depth + 1).to(tl.int64), mask=real)

    up = lane + 0
    path = path_ptr + (first + lane) * (DEPTH + 1)
    for j in range(DEPTH + 1):  # `up` is the ancestor j levels above
        tl.store(path + depth - j, up.to(tl.int64), mask=real & (depth >= j))
        tl.store(path + j, lane.to(tl.int64), mask=real & (depth < j))
        up = tl.load(parent_ptr + first + up, mask=real, other=0).to(tl.int32)

    row = tl.load(rows_ptr + b)
    kv_len = tl.load(kv_len_ptr + row)
    entry = kv_len + lane
    slot = tl.load(table_ptr + row * length + entry, mask=real & (entry < length), other=0)
    tl.store(positions_ptr + first + lane, kv_len + depth, mask=real)
    tl.store(slots_ptr + first + lane, slot, mask=real)
    tl.store(prefix_ptr + b, kv_len)


@triton.jit(do_not_specialize=["length", "batch"])
def _plain_kernel(
    rows_ptr, table_ptr, kv_len_ptr, last_ptr, length, batch, ids_ptr, positions_ptr, slots_ptr,
    LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0) * LANES + tl.arange(0, LANES)
    real = b < batch
    row = tl.load(rows_ptr + b, mask=real, other=0)
    kv_len = tl.load(kv_len_ptr + row, mask=real, other=0)
    tl.store(ids_ptr + b, tl.load(last_ptr + row, mask=real, other=0), mask=real)
    tl.store(positions_ptr + b, kv_len, mask=real)
    tl.store(slots_ptr + b, tl.load(table_ptr + row * length + kv_len, mask=real, other=0), mask=real)


@triton.jit
def _walk(
    first, tokens_ptr, parent_ptr, alive_ptr, target_ptr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Walks from the root to a child while it equals the target's token at its parent.

    Returns the number of nodes on the way, the last of them, the target's tokens along it [STEPS] (0 past the end), the
    place of each node in `order` [LANES], and which drafts have their parent on the way [LANES].
    """
    lane = tl.arange(0, LANES)
    step = tl.arange(0, STEPS)
    real = lane < NODES
    token = tl.load(tokens_ptr + first + lane, mask=real, other=0)
    parent = tl.load(parent_ptr + first + lane, mask=real, other=0).to(tl.int32)
    alive = tl.load(alive_ptr + first + lane, mask=real, other=0) != 0
    draft = alive & (lane > 0)

    node = 0
    count = 1
    committed = tl.zeros([STEPS], tl.int64)
    place = tl.full([LANES], -1, tl.int32)  # of the nodes on the way: their depth
    before = tl.zeros([LANES], tl.int32)  # nodes on the way with a lower number
    tried = lane < 0
    for d in range(DEPTH + 1):
        going = d < count
        want = tl.load(target_ptr + first + node)
        committed = tl.where((step == d) & going, want, committed)
        place = tl.where((lane == node) & going, d, place)
        before += ((lane > node) & going).to(tl.int32)
        tried = tried | (going & draft & (parent == node))
        child = draft & (parent == node) & (token == want)
        below = tl.min(tl.where(child, lane, LANES), 0)
        found = going & (below < LANES) & (d < DEPTH)
        node = tl.where(found, below, node)
        count = count + found.to(tl.int32)
    place = tl.where(place >= 0, place, count + lane - before)
    return count, node, committed, place, tried


@triton.jit(do_not_specialize=["length", "dummy", "confidence"])
def _commit_kernel(
    tokens_ptr, parent_ptr, alive_ptr, mark_ptr, target_ptr, rows_ptr,
    table_ptr, text_ptr, kv_len_ptr, last_ptr, length, dummy, confidence,
    packed_ptr, committed_ptr, count_ptr, ids_ptr, positions_ptr, slots_ptr, nodes_ptr,
    grade_ptr, seen_ptr, accepted_ptr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    HEAD: tl.constexpr, PATH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    first = b * NODES
    row = tl.load(rows_ptr + b)
    kv_len = tl.load(kv_len_ptr + row)
    count, leaf, committed, place, tried = _walk(
        first, tokens_ptr, parent_ptr, alive_ptr, target_ptr, NODES, LANES, DEPTH, STEPS
    )
    lane = tl.arange(0, LANES)
    step = tl.arange(0, STEPS)
    row_at = row * length + kv_len  # of page-table entries and tokens
    room = length - kv_len
    moves = row != dummy  # several programs may run the dummy row: it stays as it is
    inside = (lane < NODES) & (lane < room) & moves
    newest = tl.load(target_ptr + first + leaf) & _TOKEN
    drawn = committed
    committed = committed & _TOKEN
    slot = tl.load(table_ptr + row_at + lane, mask=inside, other=0)
    tl.debug_barrier()  # all is read before anything is written in its place
    tl.store(table_ptr + row_at + place, slot, mask=inside)
    tl.store(text_ptr + row_at + 1 + step, committed, mask=(step <= DEPTH) & (step + 1 < room) & moves)
    tl.store(kv_len_ptr + row, kv_len + count, mask=moves)
    tl.store(last_ptr + row, newest, mask=moves)

    packed = packed_ptr + b * (HEAD + DEPTH + 1 + 2 * NODES)
    tl.store(packed, confidence)
    tl.store(packed + 1, count.to(tl.int64))
    tl.store(packed + HEAD + step, drawn, mask=step <= DEPTH)
    order = packed + HEAD + DEPTH + 1
    tl.store(order + place, lane.to(tl.int64), mask=lane < NODES)
    mark = tl.load(mark_ptr + first + lane, mask=lane < NODES, other=0)
    tl.store(order + NODES + lane, mark, mask=lane < NODES)
    tl.store(committed_ptr + b * (DEPTH + 1) + step, committed, mask=step <= DEPTH)
    tl.store(count_ptr + b, count.to(tl.int64))

    if seen_ptr is not None:  # learn; all add the same number, so that their order is of no account
        cell = tl.minimum(mark & _DEPTH_BITS, _DEPTHS - 1)
        if grade_ptr is not None:
            cell += tl.load(grade_ptr + first + lane, mask=lane < NODES, other=0) * _DEPTHS
        one = tl.full([LANES], 1.0, tl.float32)
        tried = tried & moves
        tl.atomic_add(seen_ptr + cell, one, mask=tried, sem="relaxed")
        tl.atomic_add(accepted_ptr + cell, one, mask=tried & (place < count), sem="relaxed")

    if PATH:
        tl.debug_barrier()  # from here on: what this program has just written
        used = step <= DEPTH
        there = used & (step < room)
        out = b * (DEPTH + 1) + step
        tl.store(ids_ptr + out, tl.load(text_ptr + row_at + step, mask=there, other=0), mask=used)
        tl.store(positions_ptr + out, kv_len + step, mask=used)
        tl.store(slots_ptr + out, tl.load(table_ptr + row_at + step, mask=there, other=0), mask=used)
        node = tl.load(order + step, mask=used & (step < NODES), other=0)
        tl.store(nodes_ptr + out, first + node, mask=used)


@triton.jit
def _simulate_kernel(
    out_ptr, tokens_ptr, parent_ptr, alive_ptr, depth_ptr, target_ptr, rows_ptr, kv_len_ptr,
    CHANCE: tl.constexpr, BITS: tl.constexpr, VOCAB: tl.constexpr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    first = b * NODES
    lane = tl.arange(0, LANES)
    real = lane < NODES
    token = tl.load(tokens_ptr + first + lane, mask=real, other=0)
    parent = tl.load(parent_ptr + first + lane, mask=real, other=0).to(tl.int32)
    alive = tl.load(alive_ptr + first + lane, mask=real, other=0) != 0
    depth = tl.load(depth_ptr + first + lane, mask=real, other=0).to(tl.int32)
    result = tl.load(target_ptr + first + lane, mask=real, other=0)

    word, _ = position_words(tl.load(rows_ptr + b), tl.load(kv_len_ptr + b))
    bits = (word & ((1 << BITS) - 1)).to(tl.int64)
    power = tl.full([], CHANCE, tl.int64)
    wanted = tl.zeros([], tl.int32)
    for _ in range(DEPTH):
        wanted += (bits < power).to(tl.int32)
        power = (power * CHANCE) >> BITS
    best = tl.max(tl.where(alive & (depth <= wanted), depth * NODES + (NODES - 1 - lane), -1), 0)
    leaf = NODES - 1 - best % NODES

    child = alive & (parent == leaf) & (lane > 0)
    last = tl.sum(tl.where(lane == leaf, result, 0), 0)
    hit = tl.max((child & (token == last)).to(tl.int32), 0)
    above = tl.max(tl.where(child, token, -1), 0) + 1
    below = tl.min(tl.where(child, token, VOCAB), 0) - 1
    neighbour = tl.where(above < VOCAB, above, tl.where(below >= 0, below, last))
    result = tl.where((lane == leaf) & (hit != 0), neighbour, result)

    node = leaf
    for _ in range(DEPTH):  # up to the root, where nothing matches any more
        here = (lane == node) & (node > 0)
        up = tl.sum(tl.where(here, parent, 0), 0)
        draft = tl.sum(tl.where(here, token, 0), 0)
        result = tl.where((lane == up) & (node > 0), draft, result)
        node = up
    tl.store(out_ptr + first + lane, result, mask=real)


class TritonTreeOps(TreeOps):
    """Overrides what every step does, each in one launch."""

    def plain_inputs(self, table: RowTensors, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch = rows.shape[0]
        ids, positions, write_slots = (torch.empty_like(rows) for _ in range(3))
        _plain_kernel[(triton.cdiv(batch, 32),)](
            rows, table.page_table, table.kv_len, table.last, table.length, batch, ids, positions, write_slots,
            LANES=32, num_warps=1, **launch_options(rows.device),
        )  # fmt: skip
        return ids, positions, write_slots

    def tree_inputs(self, table: RowTensors, rows: Tensor, draft: Draft, depth_max: int) -> tuple[Tree, TargetInputs]:
        batch, nodes = draft.parent.shape
        new = draft.parent.new_empty
        tree = Tree(new(batch, nodes), new(batch, nodes, depth_max + 1), new(batch, nodes))
        inputs = TargetInputs(new(batch * nodes), new(batch * nodes), new(batch))
        assert table.page_table.is_contiguous()
        _tree_kernel[(batch,)](
            draft.parent.contiguous(), _bytes(draft.alive), rows, table.page_table, table.kv_len, table.length,
            *tree, *inputs, NODES=nodes, LANES=lanes(nodes), DEPTH=depth_max,
            num_warps=1, **launch_options(rows.device),
        )  # fmt: skip
        return tree, inputs

    def commit(
        self, table: RowTensors, rows: Tensor, draft: Draft, tree: Tree, target: Tensor, prefix_len: Tensor,
        confidence: int, with_path: bool, mark: Tensor | None = None, calibration: Calibration | None = None,
    ) -> Committed:  # fmt: skip
        (batch, nodes), width, new = draft.tokens.shape, tree.path.shape[2], draft.tokens.new_empty
        mark = tree.depth if mark is None else mark
        assert table.page_table.is_contiguous() and table.tokens.is_contiguous()
        path = AcceptedPath(*(new(batch * width) for _ in range(4))) if with_path else None
        done = Committed(new(batch, packed_width(width - 1, nodes)), new(batch, width), new(batch), path)
        _commit_kernel[(batch,)](
            draft.tokens.contiguous(), draft.parent.contiguous(), _bytes(draft.alive), mark.contiguous(),
            target.contiguous(), rows, table.page_table, table.tokens, table.kv_len, table.last, table.length,
            table.rows, confidence, *done[:3], *(path if path is not None else (done.packed,) * 4),
            None if draft.grade is None or calibration is None else draft.grade.contiguous(),
            *(calibration or (None, None)),
            NODES=nodes, LANES=lanes(nodes), DEPTH=width - 1, STEPS=lanes(width), HEAD=HEAD, PATH=with_path,
            num_warps=1, **launch_options(rows.device),
        )  # fmt: skip
        return done

    def simulate(
        self, draft: Draft, tree: Tree, target: Tensor, rows: Tensor, kv_len: Tensor, chance: int, vocab: int
    ) -> Tensor:
        batch, nodes = target.shape
        tokens, parent, alive, target = (part.contiguous() for part in (*draft[:3], target))
        out = torch.empty(batch, nodes, dtype=torch.int64, device=target.device)
        wide = triton.next_power_of_2(nodes)
        _simulate_kernel[(batch,)](
            out, tokens, parent, alive, tree.depth, target, rows, kv_len,
            CHANCE=chance, BITS=FRACTION_BITS, VOCAB=vocab, NODES=nodes, LANES=wide,
            DEPTH=tree.path.shape[2] - 1, num_warps=max(1, min(4, wide // 32)), **launch_options(target.device),
        )  # fmt: skip
        return out


def _bytes(flags: Tensor) -> Tensor:
    return flags.contiguous().view(torch.uint8)
