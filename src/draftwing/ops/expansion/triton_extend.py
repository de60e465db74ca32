"""A drafter's work around its head in Triton: what it reads of committed text and keeps of the newest row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.config.trees import TreeShape
from draftwing.ops.assign.spec import LEVELS, MIDDLE, SLOPE
from draftwing.ops.expansion.spec import ExpansionOps
from draftwing.ops.expansion.triton import TritonTreeExpansion
from draftwing.ops.expansion.triton_candidates import candidates
from draftwing.ops.expansion.triton_continuations import continuations, merge_chunks, pair_continuations
from draftwing.ops.triton.common import FEATURE_COLUMNS, field_pitch, int_fields, lanes, launch_options, start
from draftwing.ops.types import BlockInputs, Chain, Continuations, Draft, Expansion, First, RowTensors, Unseen

# mypy: allow-untyped-defs


@triton.jit
def _newest_kernel(
    newest,
    seed_feature,
    hidden,
    hidden_stride,
    rows,
    count,
    QUERIES: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    b = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    source = b * QUERIES + tl.load(count + b) - LOOKAHEAD
    value = tl.load(hidden + source.to(tl.int64) * hidden_stride + column, mask=inside, other=0.0)
    tl.store(newest + b.to(tl.int64) * SIZE + column, value, mask=inside)
    if seed_feature is not None:
        tl.store(seed_feature + tl.load(rows + b).to(tl.int64) * SIZE + column, value, mask=inside)


@triton.jit
def _keep_unseen_kernel(
    behind, kept, rows, prefix_len, count, hidden, hidden_stride, nodes,
    STEPS: tl.constexpr, PLACES: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    b, step = tl.program_id(0) // STEPS, tl.program_id(0) % STEPS
    row = tl.load(rows + b)
    if (step == 0) & (tl.program_id(1) == 0):
        tl.store(behind + row, tl.load(behind + row) + tl.load(count + b))
    if hidden is not None:
        node = b.to(tl.int64)
        if nodes is not None:
            node = tl.load(nodes + tl.program_id(0))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < SIZE
        place = row * PLACES + (tl.load(prefix_len + b) + step) % PLACES
        value = tl.load(hidden + node * hidden_stride + column, mask=inside, other=0.0)
        tl.store(kept + place * SIZE + column, value, mask=inside)


@triton.jit
def _keep_first_kernel(
    first_ids,
    first_logp,
    first_stride,
    keys,
    sums,
    target_ids,
    rows,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    TOPK: tl.constexpr,
    KP: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    b = tl.program_id(0)
    ids, logp = merge_chunks(keys, sums, target_ids, b, 1, 1, CHUNKS, CP, TOPK, KP)
    lane = tl.arange(0, KP)[None, :]
    at = tl.load(rows + b) * first_stride + lane
    tl.store(first_ids + at, ids, mask=lane < TOPK)
    tl.store(first_logp + at, logp, mask=lane < TOPK)


@triton.jit
def _chain_kernel(
    ints,
    path,
    tokens,
    tokens_stride,
    table,
    table_stride,
    rows,
    prefix,
    WIDTH: tl.constexpr,
    WP: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    b = tl.program_id(0)
    row, begin = tl.load(rows + b), tl.load(prefix + b)
    step = tl.arange(0, WP)
    inside = step < WIDTH
    position = begin + step
    field = field_pitch(tl.num_programs(0) * WIDTH)
    at = ints + b * WIDTH + step
    tl.store(at, tl.load(tokens + row * tokens_stride + position, mask=inside, other=0), mask=inside)
    tl.store(at + field, position, mask=inside)
    tl.store(at + 2 * field, tl.load(table + row * table_stride + position, mask=inside, other=0), mask=inside)
    tl.store(at + 3 * field, step.to(tl.int64) + 1, mask=inside)
    square = path + (b * WIDTH + step[:, None]) * WIDTH + step[None, :]
    entry = tl.zeros([WP, WP], tl.int64) + step[None, :]
    tl.store(square, entry, mask=inside[:, None] & inside[None, :])


# mypy: allow-untyped-defs


_LEVELS, _SLOPE, _MIDDLE = (tl.constexpr(x) for x in (LEVELS, SLOPE, MIDDLE))
_TILE = 16  # nodes that a node is compared with at a time
_ELEMENTS = 4096  # of hidden states at a time, those of all levels


@triton.jit(do_not_specialize=["table_stride", "mask"])
def _inputs_kernel(
    ints, prefix_len, path, rows, kv_len, last, table, table_stride, mask,
    WIDTH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row. ints: the fields ids, positions, slots and path lengths, [B, WIDTH] each"""
    start(PDL)
    b = tl.program_id(0)
    row = tl.load(rows + b)
    begin = tl.load(kv_len + row)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    field = field_pitch(tl.num_programs(0) * WIDTH)
    at = ints + b * WIDTH + lane
    token = tl.where(lane == 0, tl.load(last + row), mask)
    tl.store(at, token, mask=inside)
    tl.store(at + field, begin + lane, mask=inside)
    tl.store(at + 2 * field, tl.load(table + row * table_stride + begin + lane, mask=inside, other=0), mask=inside)
    tl.store(at + 3 * field, lane * 0 + WIDTH, mask=inside)
    tl.store(prefix_len + b, begin)
    entry = path + (b * WIDTH + lane[:, None]) * WIDTH + lane[None, :]
    tl.store(entry, (lane[:, None] * 0 + lane[None, :]).to(tl.int64), mask=inside[:, None] & inside[None, :])


@triton.jit
def _confident_kernel(
    out, grade, parent, tokens, hidden, hidden_stride, weight, token_odds,
    NODES: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, DEPTHS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row, one lane a node; hidden: row b of level d is that of d * B + b"""
    start(PDL)
    b = tl.program_id(0).to(tl.int64)
    level = tl.arange(0, DEPTHS)
    source = hidden + (level * tl.num_programs(0) + b)[:, None] * hidden_stride
    odds = tl.zeros([DEPTHS], tl.float32)
    for first in range(0, SIZE, BLOCK):
        col = first + tl.arange(0, BLOCK)
        here = (level < DEPTH)[:, None] & (col < SIZE)[None, :]
        x = tl.load(source + col[None, :], mask=here, other=0.0).to(tl.float32)
        odds += tl.sum(x * tl.load(weight + col, mask=col < SIZE, other=0.0)[None, :], 1)

    nodes = b * NODES
    node = tl.arange(0, LANES)
    inside = node < NODES
    child = inside & (node > 0)
    above = tl.load(parent + nodes + node, mask=inside, other=0).to(tl.int32)
    known = tl.load(grade + nodes + node, mask=inside, other=0).to(tl.int32)
    depth = node * 0
    for _ in range(DEPTH):
        depth = tl.where(child, tl.gather(depth, above, 0) + 1, 0)
    sure = tl.gather(odds, tl.maximum(depth - 1, 0), 0)
    sure += tl.load(token_odds + tl.load(tokens + nodes + above, mask=inside, other=0), mask=inside, other=0.0)
    own = known % _LEVELS
    best = node * 0
    for first in range(0, NODES, TILE):
        j = first + tl.arange(0, TILE)
        real = (j > 0) & (j < NODES)
        other = tl.load(grade + nodes + j, mask=real, other=0).to(tl.int32) % _LEVELS
        whose = tl.load(parent + nodes + j, mask=real, other=-1).to(tl.int32)
        best = tl.maximum(best, tl.max(tl.where(whose[None, :] == above[:, None], other[None, :], 0), 1))
    says = tl.minimum(tl.maximum(tl.floor(_SLOPE * sure + (_MIDDLE + 0.5)), 0.0), _LEVELS - 1.0).to(tl.int32)
    # A third of the difference, rounded; what is divided is kept above 0.
    moved = own + (2 * (says - best) + 3 + 6 * _LEVELS) // 6 - _LEVELS
    moved = tl.minimum(tl.maximum(moved, 0), _LEVELS - 1)
    tl.store(out + nodes + node, tl.where(child, known - own + moved, 0).to(tl.int64), mask=inside)


class TritonExpansionOps(ExpansionOps):
    """Overrides all that every step does."""

    reads_root_late = False  # they cost little here, and the stages of a step stay what they are

    def chain(self, table: RowTensors, rows: Tensor, prefix: Tensor, width: int) -> Chain:
        size = rows.shape[0]
        ints, (ids, positions, write_slots, path_len) = int_fields(4, rows, size, width)
        path = torch.empty(size, width, width, dtype=torch.int64, device=rows.device)
        _chain_kernel[(size,)](
            ints, path, table.tokens, table.tokens.stride(0), table.page_table, table.page_table.stride(0), rows,
            prefix, WIDTH=width, WP=lanes(width), num_warps=1, **launch_options(rows.device),
        )  # fmt: skip
        return Chain(ids.flatten(), positions.flatten(), write_slots.flatten(), path, path_len)

    def keep_unseen(
        self, unseen: Unseen, rows: Tensor, prefix_len: Tensor, count: Tensor, hidden: Tensor | None,
        nodes: Tensor | None,
    ) -> None:  # fmt: skip
        batch, (places, size) = rows.shape[0], unseen.hidden.shape[1:]
        assert hidden is None or (hidden.stride(1) == 1 and hidden.shape[1] == size)
        steps = 1 if nodes is None else nodes.shape[0] // batch
        blocks = 1 if hidden is None else triton.cdiv(size, FEATURE_COLUMNS)
        _keep_unseen_kernel[(batch * steps, blocks)](
            unseen.behind, unseen.hidden, rows, prefix_len, count, hidden,
            0 if hidden is None else hidden.stride(0), nodes, STEPS=steps, PLACES=places, SIZE=size,
            COLUMNS=FEATURE_COLUMNS, num_warps=4, **launch_options(rows.device),
        )  # fmt: skip

    def newest_rows(self, hidden: Tensor, count: Tensor, lookahead: int, rows: Tensor, kept: Tensor | None) -> Tensor:
        size, width = rows.shape[0], hidden.shape[1]
        newest = hidden.new_empty(size, width)
        assert hidden.shape[0] % size == 0 and hidden.stride(1) == 1
        assert kept is None or (kept.shape[1] == width and kept.is_contiguous())
        _newest_kernel[(size, triton.cdiv(width, FEATURE_COLUMNS))](
            newest, kept, hidden, hidden.stride(0), rows, count, QUERIES=hidden.shape[0] // size,
            LOOKAHEAD=lookahead, SIZE=width, COLUMNS=FEATURE_COLUMNS, num_warps=4, **launch_options(hidden.device),
        )  # fmt: skip
        return newest

    def continuations(
        self, logits: Tensor, table: RowTensors, rows: Tensor, ahead: int, topk: int, target_ids: Tensor | None,
        noisy: Tensor,
    ) -> Continuations:  # fmt: skip
        return continuations(logits, table, rows, ahead, topk, target_ids)

    def level_candidates(
        self, logits: Tensor, table: RowTensors, rows: Tensor, ahead: int, count: int, target_ids: Tensor | None,
        noisy: Tensor,
    ) -> list[Continuations]:  # fmt: skip
        keys, sums = candidates(logits, table, rows, ahead, count, target_ids)
        return [Continuations(*parts) for parts in zip(keys.split(len(rows)), sums.split(len(rows)), strict=True)]

    pair_continuations = staticmethod(pair_continuations)

    def keep_first(self, following: Continuations, rows: Tensor, first: First, target_ids: Tensor | None) -> None:
        keys, sums = following
        chunks, topk = keys.shape[1:]
        assert first.ids.shape[1] == topk and first.ids.stride(0) == first.logp.stride(0)
        _keep_first_kernel[(rows.shape[0],)](
            first.ids, first.logp, first.ids.stride(0), keys, sums, target_ids, rows,
            CHUNKS=chunks, CP=triton.next_power_of_2(chunks), TOPK=topk, KP=lanes(topk), num_warps=4,
            **launch_options(rows.device),
        )  # fmt: skip

    def expand(
        self, table: RowTensors, rows: Tensor, shape: TreeShape, first: First, tail: int, lookahead: int,
        target_ids: Tensor | None,
    ) -> Expansion:  # fmt: skip
        return TritonTreeExpansion(table, rows, shape, first, tail, lookahead, target_ids)

    def block_inputs(self, table: RowTensors, rows: Tensor, width: int, mask: int) -> BlockInputs:
        size = len(rows)
        ints, (ids, positions, slots, path_len) = int_fields(4, rows, size, width)
        prefix_len = torch.empty(size, dtype=torch.int64, device=rows.device)
        path = torch.empty(size, width, width, dtype=torch.int64, device=rows.device)
        if size:
            _inputs_kernel[(size,)](
                ints, prefix_len, path, rows, table.kv_len, table.last, table.page_table, table.page_table.stride(0),
                mask, WIDTH=width, LANES=lanes(width), num_warps=4, **launch_options(rows.device),
            )  # fmt: skip
        return BlockInputs(ids.flatten(), positions.flatten(), slots.flatten(), prefix_len, path, path_len)

    def confident(self, draft: Draft, hidden: Tensor, weight: Tensor, token_odds: Tensor) -> Draft:
        assert draft.grade is not None and hidden.stride(1) == 1 and weight.is_contiguous()
        assert all(x.is_contiguous() for x in (draft.grade, draft.parent, draft.tokens))
        (batch, nodes), (rows, size) = draft.grade.shape, hidden.shape
        depth = rows // batch
        out = torch.empty(draft.grade.shape, dtype=torch.int64, device=hidden.device)
        _confident_kernel[(batch,)](
            out, draft.grade, draft.parent, draft.tokens, hidden, hidden.stride(0), weight, token_odds,
            NODES=nodes, LANES=lanes(nodes), DEPTH=depth, DEPTHS=lanes(depth), SIZE=size,
            BLOCK=min(triton.next_power_of_2(size), max(16, _ELEMENTS // lanes(depth))), TILE=_TILE, num_warps=8,
            **launch_options(hidden.device),
        )  # fmt: skip
        return draft._replace(grade=out)
