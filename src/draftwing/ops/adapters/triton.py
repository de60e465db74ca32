"""What adapters add, in Triton. A program has some rows and works on one after the other, so a row has the same bits in
any batch; where rows beside each other have one adapter, its factors come from the caches."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.adapters.spec import AdapterOps, AdapterWeights
from draftwing.ops.triton.common import launch_options, start

_FACTORS = 4  # rows of `down` that a program has
_INPUTS = 2048  # that a program sums
_OUTPUTS = 128  # that a program has
_RANKS = 16  # whose products are summed together


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    made, x, x_stride, slots, rows, down, ranks, scales,
    SLICES: tl.constexpr, RANK: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """made [M, PARTS, SLICES, RANK] float32, of as many parts of the inputs; x [M, INPUTS]; down [S, SLICES, RANK,
    INPUTS]"""
    place, part = tl.program_id(1) // tl.cdiv(RANK, FACTORS), tl.program_id(2)
    factor = tl.program_id(1) % tl.cdiv(RANK, FACTORS) * FACTORS + tl.arange(0, FACTORS)
    at = part * BLOCK + tl.arange(0, BLOCK)
    # Factors and slots were written long before, so they come while the kernels before this one still run.
    first = tl.load(slots + tl.program_id(0) * ROWS)
    mine = (tl.maximum(first, 1) - 1) * SLICES + place
    there = ((factor < tl.load(ranks + mine)) & (first > 0))[:, None] & (at < INPUTS)[None, :]
    known = tl.load(down + (mine * RANK + factor)[:, None] * INPUTS + at[None, :], mask=there, other=0.0)
    start(PDL)
    for i in range(ROWS):
        row = (tl.program_id(0) * ROWS + i).to(tl.int64)
        slot = tl.load(slots + row, mask=row < rows, other=0)
        if slot > 0:
            w = known
            own = (slot - 1) * SLICES + place
            if slot != first:
                has = (factor < tl.load(ranks + own))[:, None] & (at < INPUTS)[None, :]
                w = tl.load(down + (own * RANK + factor)[:, None] * INPUTS + at[None, :], mask=has, other=0.0)
            value = tl.load(x + row * x_stride + at, mask=at < INPUTS, other=0.0).to(tl.float32)
            total = tl.sum(w.to(tl.float32) * value[None, :], 1) * tl.load(scales + own)
            tl.store(made + ((row * PARTS + part) * SLICES + place) * RANK + factor, total, mask=factor < RANK)


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    y, y_stride, made, slots, rows, up, ranks, ends,
    SLICES: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, OUTPUTS]; made [M, PARTS, SLICES, RANK] float32; up [S, RANK, OUTPUTS]"""
    out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.arange(0, RANKS)
    place = tl.zeros((BLOCK,), tl.int64)
    for i in tl.static_range(SLICES - 1):
        place += (out >= tl.load(ends + i)).to(tl.int64)
    first = tl.load(slots + tl.program_id(0) * ROWS)
    there = ((factor < RANK) & (first > 0))[:, None] & (out < OUTPUTS)[None, :]
    at_first = ((tl.maximum(first, 1) - 1) * RANK + factor)[:, None] * OUTPUTS + out[None, :]
    known = tl.load(up + at_first, mask=there, other=0.0)
    start(PDL)
    for i in range(ROWS):
        row = (tl.program_id(0) * ROWS + i).to(tl.int64)
        slot = tl.load(slots + row, mask=row < rows, other=0)
        if slot > 0:
            most = tl.load(ranks + (slot - 1) * SLICES + place, mask=out < OUTPUTS, other=0)
            total = tl.zeros((BLOCK,), tl.float32)
            for begin in tl.static_range(0, RANK, RANKS):
                now = begin + factor
                has = (now[:, None] < most[None, :]) & (out < OUTPUTS)[None, :]
                w = known
                if begin > 0 or slot != first:
                    w = tl.load(up + ((slot - 1) * RANK + now)[:, None] * OUTPUTS + out[None, :], mask=has, other=0.0)
                u = tl.zeros((RANKS, BLOCK), tl.float32)
                for part in tl.static_range(PARTS):
                    of = ((row * PARTS + part) * SLICES + place)[None, :] * RANK + now[:, None]
                    u += tl.load(made + of, mask=has, other=0.0)
                total += tl.sum(u * w.to(tl.float32), 0)
            at = row * y_stride + out
            before = tl.load(y + at, mask=out < OUTPUTS, other=0.0).to(tl.float32)
            tl.store(y + at, (before + total).to(y.dtype.element_ty), mask=out < OUTPUTS)


class TritonAdapterOps(AdapterOps):
    """Takes rows and factors in any floating point type of up to 32 bits."""

    def row_slots(self, table: Tensor, rows: Tensor, each: int) -> Tensor:
        return table.index_select(0, rows).unsqueeze(1).expand(-1, each).reshape(-1)

    def adapter_down(self, x: Tensor, weights: AdapterWeights, slots: Tensor) -> Tensor:
        """As specified, of several parts of the inputs beside each other, which `adapter_up` sums."""
        _, slices, rank, inputs = weights.down.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        block = min(_INPUTS, triton.next_power_of_2(inputs))
        parts = triton.cdiv(inputs, block)
        made = x.new_empty(len(x), parts * slices * rank, dtype=torch.float32)  # of rows without an adapter unread
        if len(x):
            each = _rows_of(len(x))
            grid = triton.cdiv(len(x), each), slices * triton.cdiv(rank, _FACTORS), parts
            _down_kernel[grid](
                made, x, x.stride(0), slots, len(x), weights.down, weights.ranks, weights.scales,
                SLICES=slices, RANK=rank, INPUTS=inputs, BLOCK=block, FACTORS=_FACTORS, PARTS=parts, ROWS=each,
                **launch_options(x.device),
            )  # fmt: skip
        return made

    def adapter_up(self, y: Tensor, made: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
        _, rank, outputs = weights.up.shape
        slices = len(weights.ends)
        assert y.stride(1) == 1 and made.is_contiguous()
        if len(y):
            each = _rows_of(len(y))
            _up_kernel[triton.cdiv(len(y), each), triton.cdiv(outputs, _OUTPUTS)](
                y, y.stride(0), made, slots, len(y), weights.up, weights.ranks, weights.ends,
                SLICES=slices, RANK=rank, OUTPUTS=outputs, BLOCK=_OUTPUTS,
                RANKS=min(_RANKS, triton.next_power_of_2(rank)), PARTS=made.shape[1] // (slices * rank), ROWS=each,
                num_warps=1, **launch_options(y.device),
            )  # fmt: skip


def _rows_of(rows: int) -> int:
    """Returns the rows of a program: more share what it has loaded, and take their turns."""
    return next((each for each, most in ((1, 4), (2, 8), (4, 32)) if rows <= most), 8)
