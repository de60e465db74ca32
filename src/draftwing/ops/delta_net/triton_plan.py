"""What the kernels of gated delta nets have to do for a batch: found once a forward, the same for all layers.

Tokens are the batch's M queries and, for trees, those that are run again from their records (`kv.pool`): token
M + t * nodes + i is the i-th of tree t. Of each token the plan knows where the convolution's inputs lie. *Walks* are
runs of tokens that follow each other, from a state on. A chunk is one. Of a tree each leaf is one: it runs the root and
all nodes down to the leaf, each of them with the bits that every other walk has for it, so it matters to nobody which
walk leaves its result. A walk has *segments*, and a state is written at the end of some.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.kv.pool import RowStates
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.ops.triton.common import lanes, launch_options, start

QUERY, RECORD, WINDOW = (tl.constexpr(kind) for kind in range(3))  # where an input lies
_BLOCK = 256  # tokens of a chunk at a time
_OF_SPAN = 5  # numbers


class Walks(NamedTuple):
    """All int32.

    sources [tokens, conv_width]: inputs of the convolution, the token's own last: 4 * index + kind: of a query its
    number, of a record its number in [rows + 1, 2, nodes], of a window its number in [slots + 2, conv_width - 1].
    tokens [tokens, 4]: whether it is there (a tree's dead nodes are not); two state slots where its window goes, or
    -1; and a record's number: of a query where it leaves one, or -1, else which one it is.
    walks [W, 4]: first of its `steps`, state slot, first segment, end of its segments.
    segments [S, 2]: steps at its end, counted from the walk's first, and the state slot that is written then, or -1.
    of_chunks: whether a walk may be long.
    """

    queries: int
    of_chunks: bool
    sources: Tensor
    tokens: Tensor
    steps: Tensor
    walks: Tensor
    segments: Tensor


@triton.jit
def _picked(values, index, at):
    """values [N], index [N] of them, at [P] -> [P], 0 where there is no such index"""
    return tl.sum(tl.where(index[None, :] == at[:, None], values[None, :], 0), 1)


@triton.jit
def tree_of(starts, trees, query, each, RAGGED: tl.constexpr):
    """Returns the tree that has the query, its queries [first, end), and its row in the batch's tensors. starts
    [trees + 1]: of ragged trees; others have `each` queries."""
    if RAGGED:
        found = tl.full((), 0, tl.int32)
        for at in range(0, trees + 1, 64):
            lane = at + tl.arange(0, 64)
            found += tl.sum(tl.where(tl.load(starts + lane, mask=lane <= trees, other=query + 1) <= query, 1, 0), 0)
        tree = found - 1
        first, end = tl.load(starts + tree).to(tl.int32), tl.load(starts + tree + 1).to(tl.int32)
        batch_row = query
    else:
        tree = query // each
        first, end = tree * each, (tree + 1) * each
        batch_row = tree
    return tree, first, end, batch_row


@triton.jit
def _source(position, read, records, index, WIDTH: tl.constexpr):
    """Returns where inputs of replayed tokens lie, and those of the window in front of them, at positions below 0."""
    window = (read * (WIDTH - 1) + WIDTH - 1 + position) * 4 + WINDOW
    return tl.where(position < 0, window, _picked(records, index, position) * 4 + RECORD)


@triton.jit(
    do_not_specialize=["count", "trees", "each", "depth", "cap"],
    do_not_specialize_on_alignment=["rows", "prefix_len", "path", "path_len", "starts", "slots", "sources", "tokens",
                                    "steps", "walks", "segments"],
)  # fmt: skip
def _plan_trees_kernel(
    sources, tokens, steps, walks, segments, rows, prefix_len, path, path_len, starts, table, slots,
    reads, writes, pages, lengths, fresh, node_slots, table_stride, count, trees, each, depth, cap,
    LAZY: tl.constexpr, RAGGED: tl.constexpr, NODES: tl.constexpr, NODES_PAD: tl.constexpr, CAP_PAD: tl.constexpr,
    DEPTH_PAD: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (M). count: M. each: queries of a tree that is not ragged. cap: steps of a walk. LAZY: rows whose state
    is fresh keep it."""
    start(PDL)
    query = tl.program_id(0)
    tree, first, end, batch_row = tree_of(starts, trees, query, each, RAGGED)
    row, prefix = tl.load(rows + batch_row), tl.load(prefix_len + batch_row)
    page = tl.load(pages + row)
    length, read, write = tl.load(lengths + row), tl.load(reads + row).to(tl.int32), tl.load(writes + row).to(tl.int32)
    if LAZY:
        write = tl.where(tl.load(fresh + row) > 0, -1, write)

    # The tree's queries: their nodes, the parents of these, and whether they are dead.
    other = first + tl.arange(0, CAP_PAD)
    there = other < end
    size = tl.load(path_len + other, mask=there, other=1).to(tl.int32)
    its = path + other.to(tl.int64) * depth
    alive = there & (tl.load(its, mask=there, other=1) == 0)
    node = tl.load(its + size - 1, mask=there, other=-1).to(tl.int32)
    parent = tl.load(its + size - 2, mask=alive & (size > 1), other=-1).to(tl.int32)

    own_path = path + query.to(tl.int64) * depth
    own_size = tl.load(path_len + query).to(tl.int32)
    own_node = tl.load(own_path + own_size - 1).to(tl.int32)
    live = tl.load(own_path) == 0
    is_leaf = live & (tl.max(tl.where(parent == own_node, 1, 0), 0) == 0)
    # The last one that is alive has no children. Its walk writes the state after the root.
    is_last = live & (tl.max(tl.where(alive & (other > query), 1, 0), 0) == 0)

    # Tokens that were accepted since the state was written, by their records.
    again = tl.minimum(tl.maximum(prefix - length, 0), NODES).to(tl.int32)
    index = tl.arange(0, NODES_PAD)
    page_row = (row * 2 + 1 - page) * NODES
    name = tl.load(node_slots + page_row + index, mask=index < NODES, other=-1)
    slot = tl.load(table + row * table_stride + length + index, mask=index < again, other=-2)
    record = tl.min(tl.where(slot[:, None] == name[None, :], index[None, :], NODES), 1)
    record = tl.where(record < NODES, record, 0) + page_row.to(tl.int32)
    tap = tl.arange(0, WIDTH_PAD)
    if query == first:
        for back in tl.static_range(WIDTH):
            token = count + tree * NODES + index
            source = _source(index - back, read, record, index, WIDTH)
            tl.store(sources + token * WIDTH + WIDTH - 1 - back, source, mask=index < again)
            if back == 0:
                tl.store(tokens + token * 4, tl.where(index < again, 1, 0), mask=index < NODES)
                for keep in tl.static_range(1, 3):
                    tl.store(tokens + token * 4 + keep, index * 0 - 1, mask=index < again)
                tl.store(tokens + token * 4 + 3, record, mask=index < again)

    level = tl.arange(0, DEPTH_PAD)
    on_path = tl.load(own_path + level, mask=level < own_size, other=-2).to(tl.int32)
    of_level = tl.max(tl.where(there[None, :] & (node[None, :] == on_path[:, None]), other[None, :], 0), 1)
    tl.store(steps + query * cap + index, count + tree * NODES + index, mask=index < again)
    tl.store(steps + query * cap + again + level, of_level, mask=level < own_size)

    position = again + own_size - WIDTH + tap
    in_path = position >= again
    source = tl.where(
        in_path, _picked(of_level, level, position - again) * 4 + QUERY,
        _source(position, read, record, index, WIDTH),
    )  # fmt: skip
    tl.store(sources + query * WIDTH + tap, source, mask=tap < WIDTH)

    leaves = (row * 2 + page) * NODES + own_node
    tl.store(node_slots + leaves, tl.load(slots + query), mask=live)
    own = tokens + query * 4
    tl.store(own, tl.where(live, 1, 0))
    tl.store(own + 1, tl.where(live & (own_node == 0), write, -1))
    tl.store(own + 2, -1)
    tl.store(own + 3, leaves.to(tl.int32))

    tl.store(segments + query * 4, again + 1)
    tl.store(segments + query * 4 + 1, write)
    tl.store(segments + query * 4 + 2, again + own_size)
    tl.store(segments + query * 4 + 3, -1)
    begin = query * 2 + tl.where(is_last, 0, 1)
    tl.store(walks + query * 4, query * cap)
    tl.store(walks + query * 4 + 1, read)
    tl.store(walks + query * 4 + 2, begin)
    # The segment after the root's is there where others follow it.
    tl.store(walks + query * 4 + 3, tl.where(is_leaf, query * 2 + tl.where(own_size > 1, 2, 1), begin))


@triton.jit(do_not_specialize_on_alignment=["rows", "spans", "segments", "sources", "tokens", "steps", "walks"])
def _plan_chunks_kernel(
    sources, tokens, steps, walks, segments, spans, rows, reads, writes,
    OF_SPAN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (spans, blocks of the longest). spans, segments: as `chunk_walks` gives them."""
    start(PDL)
    span = tl.program_id(0)
    spans += span * OF_SPAN
    row, offset, length = tl.load(rows + tl.load(spans)), tl.load(spans + 1), tl.load(spans + 2)
    first, end = tl.load(spans + 3), tl.load(spans + 4)
    read, write = tl.load(reads + row).to(tl.int32), tl.load(writes + row).to(tl.int32)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, is_chunk = at < length, first < end  # else nobody's
    for back in tl.static_range(WIDTH):
        window = (read * (WIDTH - 1) + WIDTH - 1 + at - back) * 4 + WINDOW
        source = tl.where(at < back, window, (offset + at - back) * 4 + QUERY)
        tl.store(sources + (offset + at) * WIDTH + WIDTH - 1 - back, source, mask=here)
    save = at * 0 - 1
    for segment in range(first, end - 1):
        save = tl.where(at + 1 == tl.load(segments + segment * 2), tl.load(segments + segment * 2 + 1), save)
    own = tokens + (offset + at) * 4
    tl.store(own, tl.where(is_chunk, at * 0 + 1, 0), mask=here)
    tl.store(own + 1, tl.where(is_chunk & (at == length - 1), write, -1), mask=here)
    tl.store(own + 2, save, mask=here)
    tl.store(own + 3, at * 0 - 1, mask=here)
    tl.store(steps + offset + at, offset + at, mask=here)
    if tl.program_id(1) == 0:
        tl.store(segments + end * 2 - 1, write, mask=is_chunk)
        tl.store(walks + span * 4, offset)
        tl.store(walks + span * 4 + 1, read)
        tl.store(walks + span * 4 + 2, first)
        tl.store(walks + span * 4 + 3, end)


def chunk_walks(spans: Sequence[ChunkSpan], queries: int) -> tuple[Tensor, Tensor]:
    """Computes what `TiledAttention.chunk_walks` returns."""
    ends = [(*span.saves, (span.length, -1)) for span in spans]
    found, count, end = [], 0, 0
    for span, theirs in zip(spans, ends, strict=True):
        end = span.offset + span.length
        found.append((span.row, span.offset, span.length, count, count + len(theirs)))
        count += len(theirs)
    if end < queries:
        found.append((0, end, queries - end, 0, 0))
    made = (torch.tensor(part, dtype=torch.int32) for part in (found, [*chain(*ends)]))
    return next(made), next(made).view(-1, 2)


def plan_chunks(states: RowStates, batch: Batch, width: int) -> Walks:
    """width: of the convolution."""
    device, count = batch.rows.device, batch.write_slots.shape[0]
    spans, segments = batch.walks or chunk_walks(batch.chunks, count)
    if batch.walks is None:
        host = torch.cat((segments.view(-1), spans.view(-1)))
        sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
        segments, spans = sent[: segments.numel()].view(-1, 2), sent[segments.numel() :].view(-1, _OF_SPAN)
    sizes = count * width, count * 4, count, len(spans) * 4
    sources, tokens, steps, walks = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    blocks = triton.cdiv(max((chunk.length for chunk in batch.chunks), default=count), _BLOCK)
    _plan_chunks_kernel[(len(spans), blocks)](
        sources, tokens, steps, walks, segments, spans, batch.rows, states.read, states.write, OF_SPAN=_OF_SPAN,
        WIDTH=width, BLOCK=_BLOCK, num_warps=4, **launch_options(device),
    )  # fmt: skip
    return Walks(count, True, sources.view(count, width), tokens.view(count, 4), steps, walks.view(-1, 4), segments)


def plan_trees(states: RowStates, batch: Batch, width: int) -> Walks:
    """Leaves the records' KV slots, too. width: of the convolution."""
    path, path_len, ragged, nodes = batch.path, batch.path_len, batch.ragged, states.nodes
    assert path is not None and path_len is not None and batch.window <= nodes
    trees, each, depth = path.shape
    starts, cap = batch.rows, each
    if ragged is not None:
        assert each == 1
        trees, starts, cap = ragged.rows.shape[0], ragged.starts, ragged.cap
    path, path_len, steps = path.contiguous(), path_len.contiguous(), nodes + depth
    count, device = batch.write_slots.shape[0], path.device
    tokens = count + trees * nodes
    known = torch.zeros(tokens, 4, dtype=torch.int32, device=device)  # trees may have no queries
    sizes = tokens * width, count * steps, count * 4, count * 4
    sources, walk_steps, walks, segments = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    _plan_trees_kernel[(count,)](
        sources, known, walk_steps, walks, segments, batch.rows, batch.prefix_len, path, path_len, starts, batch.table,
        batch.write_slots, states.read, states.write, states.page, states.length, states.fresh, states.node_slots,
        batch.table.stride(0), count, trees, each, depth, steps, LAZY=states.lazy and batch.window == 1,
        RAGGED=ragged is not None, NODES=nodes, NODES_PAD=lanes(nodes), CAP_PAD=lanes(cap), DEPTH_PAD=lanes(depth),
        WIDTH=width, WIDTH_PAD=lanes(width), num_warps=4, **launch_options(device),
    )  # fmt: skip
    return Walks(
        count, False, sources.view(tokens, width), known, walk_steps, walks.view(count, 4), segments.view(2 * count, 2)
    )
