"""What a head that drafts blocks needs besides forward pass and expansion, in Triton: a launch for the inputs, and
one for what its confidence head says of the nodes.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.drafts import LEVELS, MIDDLE, SLOPE
from draftwing.ops.torch.expansion import ExpansionOps
from draftwing.ops.triton.common import field_pitch, int_fields, lanes, launch_options, start
from draftwing.ops.types import BlockInputs, Draft, RowTensors

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


class TritonBlockOps(ExpansionOps):
    """The operations of heads that draft blocks."""

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
