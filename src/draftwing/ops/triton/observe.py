"""Triton kernels of a drafter that observes committed text: what it reads, and what it keeps of the newest row."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.triton.common import FEATURE_COLUMNS, field_pitch, int_fields, lanes, launch_options, start
from draftwing.ops.triton.continuations import merge_chunks

if TYPE_CHECKING:
    from draftwing.engine.row_table import SlotTable


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


def newest_rows(hidden: Tensor, count: Tensor, lookahead: int, rows: Tensor, seed_feature: Tensor | None) -> Tensor:
    """hidden [B * Q, H], Q rows of each batch row -> its row count[b] - lookahead, [B, H]; also written into
    seed_feature [R + 1, H], at rows [B]."""
    size = rows.shape[0]
    width = hidden.shape[1]
    newest = hidden.new_empty(size, width)
    assert hidden.shape[0] % size == 0 and hidden.stride(1) == 1
    assert seed_feature is None or (seed_feature.shape[1] == width and seed_feature.is_contiguous())
    _newest_kernel[(size, triton.cdiv(width, FEATURE_COLUMNS))](
        newest, seed_feature, hidden, hidden.stride(0), rows, count, QUERIES=hidden.shape[0] // size,
        LOOKAHEAD=lookahead, SIZE=width, COLUMNS=FEATURE_COLUMNS, num_warps=4, **launch_options(hidden.device),
    )  # fmt: skip
    return newest


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


def keep_first(
    following: tuple[Tensor, Tensor], rows: Tensor, first_ids: Tensor, first_logp: Tensor, target_ids: Tensor | None
) -> None:
    """Merges `Continuations` of one node for each of rows [B] into first_ids, first_logp [R + 1, topk]."""
    keys, sums = following
    chunks, topk = keys.shape[1:]
    assert first_ids.shape[1] == topk and first_ids.stride(0) == first_logp.stride(0)
    _keep_first_kernel[(rows.shape[0],)](
        first_ids, first_logp, first_ids.stride(0), keys, sums, target_ids, rows,
        CHUNKS=chunks, CP=triton.next_power_of_2(chunks), TOPK=topk, KP=lanes(topk), num_warps=4,
        **launch_options(rows.device),
    )  # fmt: skip


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


class Chain(NamedTuple):
    """A chain of Q known tokens in each row of a batch, as `ops.attention.Batch` has them."""

    ids: Tensor  # [B, Q]
    positions: Tensor  # [B, Q]
    write_slots: Tensor  # [B, Q]
    path_len: Tensor  # [B, Q]
    path: Tensor  # [B, Q, Q]


def chain(slots: SlotTable, rows: Tensor, prefix: Tensor, width: int) -> Chain:
    """Tokens at the positions prefix[b] .. prefix[b] + width - 1 of rows [B], from the token history."""
    size = rows.shape[0]
    ints, fields = int_fields(4, rows, size, width)
    path = torch.empty(size, width, width, dtype=torch.int64, device=rows.device)
    _chain_kernel[(size,)](
        ints, path, slots.tokens, slots.tokens.stride(0), slots.table, slots.table.stride(0), rows, prefix,
        WIDTH=width, WP=lanes(width), num_warps=1, **launch_options(rows.device),
    )  # fmt: skip
    ids, positions, write_slots, path_len = fields
    return Chain(ids, positions, write_slots, path_len, path)
