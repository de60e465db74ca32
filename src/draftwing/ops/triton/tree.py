"""Draft trees on the GPU: geometry and the target's inputs in one launch, acceptance and commit in another.

One program per row, one lane per node. The references are `draftwing.ops.torch.tree` and the torch code of
`Executor.verify` and of `draftwing.engine.commit`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.torch.tree import Accepted, Tree
from draftwing.ops.triton.common import launch_options, start

HEAD = 2  # columns of a packed result before the committed tokens: hint, count


class TargetInputs(NamedTuple):
    """What the target reads of a tree step, as in `Batch`."""

    positions: Tensor  # [B * N] int64
    write_slots: Tensor  # [B * N] int64
    prefix_len: Tensor  # [B] int64, kv_len of each row before the step


class Path(NamedTuple):
    """The accepted path of each row as a chain of W tokens: the root, what was committed after it, 0 past that.

    W is depth + 1, or one more for a drafter whose `tail` is 1: with the newest token's own query. Where a row's chain
    is shorter the rest is garbage that may be computed and written, but that nobody reads.
    """

    ids: Tensor  # [B * W] int64
    positions: Tensor  # [B * W] int64
    write_slots: Tensor  # [B * W] int64
    nodes: Tensor  # [B * (D + 1)] int64, which of the step's B * N nodes stands there: picks the taps
    newest: Tensor  # [B] int64, which of the B * W rows gives the root's continuations


class Settled(NamedTuple):
    """What a step commits. The slot table has advanced when the kernel has run."""

    packed: Tensor  # [B, 2 + (D + 1) + N + N] int64: hint, count, committed, order, depth
    committed: Tensor  # [B, D + 1] int64, 0 past count
    count: Tensor  # type: ignore[assignment]  # [B] int64; hides tuple.count
    kv_len: Tensor  # [B] int64, after the step
    path: Path | None


@triton.jit(do_not_specialize=["length"])
def _tree_kernel(
    parent_ptr, alive_ptr, rows_ptr, table_ptr, kv_len_ptr, length,
    depth_ptr, path_ptr, path_len_ptr, positions_ptr, slots_ptr, prefix_ptr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, INPUTS: tl.constexpr, PDL: tl.constexpr,
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

    if INPUTS:
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
    """From the root to a child while it equals the target's token at its parent.

    Returns the number of nodes on the way, the last of them, the target's tokens along it [STEPS] (0 past the end),
    and the place of each node in `order` [LANES].
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
    for d in range(DEPTH + 1):
        going = d < count
        want = tl.load(target_ptr + first + node)
        committed = tl.where((step == d) & going, want, committed)
        place = tl.where((lane == node) & going, d, place)
        before += ((lane > node) & going).to(tl.int32)
        child = draft & (parent == node) & (token == want)
        below = tl.min(tl.where(child, lane, LANES), 0)
        found = going & (below < LANES) & (d < DEPTH)
        node = tl.where(found, below, node)
        count = count + found.to(tl.int32)
    place = tl.where(place >= 0, place, count + lane - before)
    return count, node, committed, place


@triton.jit
def _accept_kernel(
    tokens_ptr, parent_ptr, alive_ptr, target_ptr, count_ptr, order_ptr, committed_ptr, leaf_ptr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    count, leaf, committed, place = _walk(
        b * NODES, tokens_ptr, parent_ptr, alive_ptr, target_ptr, NODES, LANES, DEPTH, STEPS
    )
    lane = tl.arange(0, LANES)
    step = tl.arange(0, STEPS)
    tl.store(count_ptr + b, count.to(tl.int64))
    tl.store(leaf_ptr + b, leaf.to(tl.int64))
    tl.store(order_ptr + b * NODES + place, lane.to(tl.int64), mask=lane < NODES)
    tl.store(committed_ptr + b * (DEPTH + 1) + step, committed, mask=step <= DEPTH)


@triton.jit(do_not_specialize=["length", "dummy", "hint"])
def _settle_kernel(
    tokens_ptr, parent_ptr, alive_ptr, depth_ptr, target_ptr, rows_ptr,
    table_ptr, text_ptr, kv_len_ptr, last_ptr, length, dummy, hint,
    packed_ptr, committed_ptr, count_ptr, after_ptr,
    ids_ptr, positions_ptr, slots_ptr, nodes_ptr, newest_ptr,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr, PATH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    first = b * NODES
    row = tl.load(rows_ptr + b)
    kv_len = tl.load(kv_len_ptr + row)
    count, leaf, committed, place = _walk(
        first, tokens_ptr, parent_ptr, alive_ptr, target_ptr, NODES, LANES, DEPTH, STEPS
    )
    lane = tl.arange(0, LANES)
    step = tl.arange(0, STEPS)
    row_at = row * length + kv_len  # of page-table entries and tokens
    room = length - kv_len
    moves = row != dummy  # several programs may run the dummy row: it stays as it is
    inside = (lane < NODES) & (lane < room) & moves
    newest = tl.load(target_ptr + first + leaf)
    slot = tl.load(table_ptr + row_at + lane, mask=inside, other=0)
    tl.debug_barrier()  # all is read before anything is written in its place
    tl.store(table_ptr + row_at + place, slot, mask=inside)
    tl.store(text_ptr + row_at + 1 + step, committed, mask=(step <= DEPTH) & (step + 1 < room) & moves)
    tl.store(kv_len_ptr + row, kv_len + count, mask=moves)
    tl.store(last_ptr + row, newest, mask=moves)

    packed = packed_ptr + b * (HEAD + DEPTH + 1 + 2 * NODES)
    tl.store(packed, hint)
    tl.store(packed + 1, count.to(tl.int64))
    tl.store(packed + HEAD + step, committed, mask=step <= DEPTH)
    order = packed + HEAD + DEPTH + 1
    tl.store(order + place, lane.to(tl.int64), mask=lane < NODES)
    depth = tl.load(depth_ptr + first + lane, mask=lane < NODES, other=0)
    tl.store(order + NODES + lane, depth, mask=lane < NODES)
    tl.store(committed_ptr + b * (DEPTH + 1) + step, committed, mask=step <= DEPTH)
    tl.store(count_ptr + b, count.to(tl.int64))
    tl.store(after_ptr + b, kv_len + count)

    if PATH:
        tl.debug_barrier()  # from here on: what this program has just written
        at = tl.arange(0, WIDE)
        width: tl.constexpr = DEPTH + 1 + TAIL
        used = at < width
        there = used & (at < room)
        out = b * width + at
        tl.store(ids_ptr + out, tl.load(text_ptr + row_at + at, mask=there, other=0), mask=used)
        tl.store(positions_ptr + out, kv_len + at, mask=used)
        tl.store(slots_ptr + out, tl.load(table_ptr + row_at + at, mask=there, other=0), mask=used)
        node = tl.load(order + step, mask=(step <= DEPTH) & (step < NODES), other=0)
        tl.store(nodes_ptr + b * (DEPTH + 1) + step, first + node, mask=step <= DEPTH)
        tl.store(newest_ptr + b, b * width + count - 1 + TAIL)


def derive(parent: Tensor, alive: Tensor, depth_max: int) -> Tree:
    """`ops.torch.tree.derive` in one launch."""
    tree, _ = _tree(parent, alive, depth_max, None)
    return tree


def target_inputs(
    parent: Tensor, alive: Tensor, rows: Tensor, table: Tensor, kv_len: Tensor, depth_max: int
) -> tuple[Tree, TargetInputs]:
    """`derive` and what `Executor.verify` computes, in one launch.

    parent [B, N] int64, alive [B, N] bool of a `Draft`; rows [B]; table [R + 1, L], kv_len [R + 1] of the slot table.
    In Executor.verify:

        tree, inputs = target_inputs(draft.parent, draft.alive, rows, slots.table, slots.kv_len, shape.depth)
        batch = Batch(rows, draft.tokens.flatten(), *inputs[:2], table, inputs.prefix_len, path=tree.path, ...)
    """
    tree, inputs = _tree(parent, alive, depth_max, (rows, table, kv_len))
    assert inputs is not None
    return tree, inputs


def plain_inputs(rows: Tensor, table: Tensor, kv_len: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain decoding: ids, positions and write slots of the rows' last tokens, [B] int64 each, in one launch. The
    positions are kv_len as well, so `prefix_len`; the geometry of a lone root never changes."""
    batch = rows.shape[0]
    ids, positions, write_slots = (torch.empty_like(rows) for _ in range(3))
    _plain_kernel[(triton.cdiv(batch, 32),)](
        rows, table, kv_len, last, table.shape[1], batch, ids, positions, write_slots,
        LANES=32, num_warps=1, **launch_options(rows.device),
    )  # fmt: skip
    return ids, positions, write_slots


def accept(tokens: Tensor, parent: Tensor, alive: Tensor, target: Tensor, depth_max: int) -> Accepted:
    """`ops.torch.tree.accept` in one launch; it needs no geometry."""
    batch, nodes = tokens.shape
    new = tokens.new_empty
    result = Accepted(new(batch), new(batch, nodes), new(batch, depth_max + 1), new(batch))
    _accept_kernel[(batch,)](
        tokens.contiguous(), parent.contiguous(), _bytes(alive), target.contiguous(),
        result.count, result.order, result.committed, result.leaf,
        NODES=nodes, LANES=_lanes(nodes), DEPTH=depth_max, STEPS=_lanes(depth_max + 1),
        num_warps=1, **launch_options(tokens.device),
    )  # fmt: skip
    return result


def accept_and_advance(
    tokens: Tensor,
    parent: Tensor,
    alive: Tensor,
    depth: Tensor,
    target: Tensor,
    rows: Tensor,
    table: Tensor,
    text: Tensor,
    kv_len: Tensor,
    last: Tensor,
    depth_max: int,
    hint: int = 0,
    tail: int | None = None,
    packed: Tensor | None = None,
) -> Settled:
    """Acceptance, the commit of `engine.commit.advance`, the packed result and the accepted path, in one launch.

    tokens, parent, depth, target [B, N] int64 and alive [B, N] bool; rows [B]; table, text [R + 1, L], kv_len, last
    [R + 1] are the slot table's `table`, `tokens`, `kv_len` and `last`, advanced in place. The last row is the dummy:
    it may come several times and stays as it is. hint: what goes into the packed result's hint column. tail: the
    drafter's, if it observes the accepted path (None: no `path`). packed: where to write,
    [B, 2 + (D + 1) + N + N] int64, contiguous. In engine/commit.py:

        settled = accept_and_advance(draft.tokens, draft.parent, draft.alive, tree.depth, target, rows, slots.table,
                                     slots.tokens, slots.kv_len, slots.last, shape.depth, MAX_HINT, drafter.tail)
        path = settled.path
        feature_rows = taps.index_select(0, path.nodes)  # [B * (D + 1), T]
        batch = Batch(rows, path.ids, path.positions, path.write_slots, table, batch.prefix_len, window=W, ...)

    With lookahead 1 the ids that a head wants are `settled.committed.flatten()`; with lookahead 0 the chain is already
    the one with the newest token (`tail` = 1). Its last row is hidden.index_select(0, path.newest), its root stands at
    `settled.kv_len`.
    """
    batch, nodes = tokens.shape
    commit, new = depth_max + 1, tokens.new_empty
    columns = HEAD + commit + 2 * nodes
    packed = new(batch, columns) if packed is None else packed
    assert packed.shape == (batch, columns) and packed.is_contiguous()
    assert table.shape == text.shape and table.is_contiguous() and text.is_contiguous()
    width = commit + (tail or 0)
    path = None
    if tail is not None:
        path = Path(new(batch * width), new(batch * width), new(batch * width), new(batch * commit), new(batch))
    settled = Settled(packed, new(batch, commit), new(batch), new(batch), path)
    _settle_kernel[(batch,)](
        tokens.contiguous(), parent.contiguous(), _bytes(alive), depth.contiguous(), target.contiguous(), rows,
        table, text, kv_len, last, table.shape[1], kv_len.shape[0] - 1, hint,
        packed, settled.committed, settled.count, settled.kv_len,
        *(path if path is not None else (packed,) * len(Path._fields)),
        NODES=nodes, LANES=_lanes(nodes), DEPTH=depth_max, STEPS=_lanes(commit),
        TAIL=tail or 0, WIDE=_lanes(width), HEAD=HEAD, PATH=path is not None,
        num_warps=1, **launch_options(tokens.device),
    )  # fmt: skip
    return settled


def _tree(
    parent: Tensor, alive: Tensor, depth_max: int, slots: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tree, TargetInputs | None]:
    batch, nodes = parent.shape
    new = parent.new_empty
    tree = Tree(new(batch, nodes), new(batch, nodes, depth_max + 1), new(batch, nodes))
    inputs = None
    if slots is not None:
        inputs = TargetInputs(new(batch * nodes), new(batch * nodes), new(batch))
        assert slots[1].is_contiguous()
    rows, table, kv_len = slots or (parent,) * 3  # stand-ins that are not read
    _tree_kernel[(batch,)](
        parent.contiguous(), _bytes(alive), rows, table, kv_len, table.shape[1],
        tree.depth, tree.path, tree.path_len, *(inputs or (parent,) * 3),
        NODES=nodes, LANES=_lanes(nodes), DEPTH=depth_max, INPUTS=inputs is not None,
        num_warps=1, **launch_options(parent.device),
    )  # fmt: skip
    return tree, inputs


def _bytes(flags: Tensor) -> Tensor:
    return flags.contiguous().view(torch.uint8)


def _lanes(size: int) -> int:
    return max(triton.next_power_of_2(size), 2)
