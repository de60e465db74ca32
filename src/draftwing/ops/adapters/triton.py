"""What adapters add, in Triton. A program has some rows and works on one after the other, so a row has the same bits in
any batch; where rows beside each other have one adapter, its factors come from the caches."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.adapters.spec import FEW_ROWS, AdapterOps, AdapterWeights
from draftwing.ops.triton.common import launch_options, start

_FACTORS = 4  # rows of `down` that a program has
_INPUTS = 1024  # that are summed together
_OUTPUTS = 256  # that a program has
_RANKS = 16  # whose products are summed together
_MANY = 8  # rows of a program where there are more than `FEW_ROWS`


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    made, x, x_stride, slots, rows, down, ranks, scales,
    SLICES: tl.constexpr, RANK: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, FACTORS: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """made [M, SLICES, RANK] float32; x [M, INPUTS]; down [S, SLICES, RANK, INPUTS]"""
    place = tl.program_id(1) // tl.cdiv(RANK, FACTORS)
    factor = tl.program_id(1) % tl.cdiv(RANK, FACTORS) * FACTORS + tl.arange(0, FACTORS)
    start(PDL)
    for i in range(ROWS):
        row = (tl.program_id(0) * ROWS + i).to(tl.int64)
        slot = tl.load(slots + row, mask=row < rows, other=0)
        if slot > 0:
            mine = (slot - 1) * SLICES + place
            there = factor < tl.load(ranks + mine)
            total = tl.zeros((FACTORS,), tl.float32)
            for first in tl.static_range(0, INPUTS, BLOCK):
                at = first + tl.arange(0, BLOCK)
                value = tl.load(x + row * x_stride + at, mask=at < INPUTS, other=0.0).to(tl.float32)
                place_of = (mine * RANK + factor)[:, None] * INPUTS + at[None, :]
                w = tl.load(down + place_of, mask=there[:, None] & (at < INPUTS)[None, :], other=0.0).to(tl.float32)
                total += tl.sum(w * value[None, :], 1)
            scaled = total * tl.load(scales + mine)
            tl.store(made + (row * SLICES + place) * RANK + factor, scaled, mask=factor < RANK)


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    y, y_stride, made, slots, rows, up, ranks, ends,
    SLICES: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, OUTPUTS]; made [M, SLICES, RANK] float32; up [S, RANK, OUTPUTS]"""
    out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.zeros((BLOCK,), tl.int64)
    for i in tl.static_range(SLICES - 1):
        place += (out >= tl.load(ends + i)).to(tl.int64)
    start(PDL)
    for i in range(ROWS):
        row = (tl.program_id(0) * ROWS + i).to(tl.int64)
        slot = tl.load(slots + row, mask=row < rows, other=0)
        if slot > 0:
            most = tl.load(ranks + (slot - 1) * SLICES + place, mask=out < OUTPUTS, other=0)
            total = tl.zeros((BLOCK,), tl.float32)
            for first in tl.static_range(0, RANK, RANKS):
                factor = first + tl.arange(0, RANKS)
                there = (factor[:, None] < most[None, :]) & (out < OUTPUTS)[None, :]
                u = tl.load(made + (row * SLICES + place)[None, :] * RANK + factor[:, None], mask=there, other=0.0)
                at = ((slot - 1) * RANK + factor)[:, None] * OUTPUTS + out[None, :]
                total += tl.sum(u * tl.load(up + at, mask=there, other=0.0).to(tl.float32), 0)
            at = row * y_stride + out
            before = tl.load(y + at, mask=out < OUTPUTS, other=0.0).to(tl.float32)
            tl.store(y + at, (before + total).to(y.dtype.element_ty), mask=out < OUTPUTS)


class TritonAdapterOps(AdapterOps):
    """Takes rows and factors in any floating point type of up to 32 bits."""

    def row_slots(self, table: Tensor, rows: Tensor, each: int) -> Tensor:
        return table.index_select(0, rows).unsqueeze(1).expand(-1, each).reshape(-1)

    def adapter_down(self, x: Tensor, weights: AdapterWeights, slots: Tensor) -> Tensor:
        _, slices, rank, inputs = weights.down.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        made = torch.zeros(len(x), slices * rank, dtype=torch.float32, device=x.device)
        if len(x):
            each = _rows_of(len(x))
            grid = triton.cdiv(len(x), each), slices * triton.cdiv(rank, _FACTORS)
            _down_kernel[grid](
                made, x, x.stride(0), slots, len(x), weights.down, weights.ranks, weights.scales,
                SLICES=slices, RANK=rank, INPUTS=inputs, BLOCK=min(_INPUTS, triton.next_power_of_2(inputs)),
                FACTORS=_FACTORS, ROWS=each, **launch_options(x.device),
            )  # fmt: skip
        return made

    def adapter_up(self, y: Tensor, made: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
        _, rank, outputs = weights.up.shape
        assert y.stride(1) == 1 and made.is_contiguous()
        if len(y):
            each = _rows_of(len(y))
            _up_kernel[triton.cdiv(len(y), each), triton.cdiv(outputs, _OUTPUTS)](
                y, y.stride(0), made, slots, len(y), weights.up, weights.ranks, weights.ends,
                SLICES=len(weights.ends), RANK=rank, OUTPUTS=outputs, BLOCK=_OUTPUTS,
                RANKS=min(_RANKS, triton.next_power_of_2(rank)), ROWS=each, **launch_options(y.device),
            )  # fmt: skip


def _rows_of(rows: int) -> int:
    return 1 if rows <= FEW_ROWS else _MANY
