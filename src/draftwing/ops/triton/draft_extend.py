"""A drafter's work around its head in Triton: what it reads of committed text and keeps of the newest row."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.core import TreeShape
from draftwing.ops.torch.expansion import ExpansionOps
from draftwing.ops.triton.common import FEATURE_COLUMNS, field_pitch, int_fields, lanes, launch_options, start
from draftwing.ops.triton.continuations import continuations, merge_chunks
from draftwing.ops.triton.expansion import TritonTreeExpansion
from draftwing.ops.types import Chain, Continuations, Expansion, First, RowTensors, Unseen


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
