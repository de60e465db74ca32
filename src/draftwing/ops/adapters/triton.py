"""What adapters add, in Triton. A program takes the rows of a chunk that have one adapter, by the tensor cores'
products of 16 rows at a time, whose bits do not depend on the other rows, and then those that have another one."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwing.ops.adapters.spec import AdapterOps, AdapterWeights
from draftwing.ops.triton.common import launch_options, let_next_come, wait

_STEP = 128  # inputs of one product; several are made beside each other, and then summed
# Inputs that a program sums: their factors wait in its registers, and both take less than 48 KB of shared memory, with
# which a kernel leaves the next ones their L1 cache (`keep_cache`); of float32 there is room for fewer.
_INPUTS, _WIDE_INPUTS = 512, 256
_OUTPUTS = 128  # that a program has
_MOST_PARTS = 8  # that four warps have registers for
_FACTORS = tl.constexpr(16)  # of a product
_TILE = tl.constexpr(16)  # rows of a product
_FEW = 64  # rows of a batch that have chunks of a tile each: two in turn take as long as two steps of memory
# Programs of a kernel beyond which adapters of a chunk take turns: so many fit on a GPU with 132 multiprocessors at
# once, three a multiprocessor by the registers of `_down_kernel`; of `_up_kernel` some more than the five.
_MOST_DOWN, _MOST_UP = 3 * 132, 8 * 132


@triton.jit
def _slots_of(slots, first, rows, CHUNK: tl.constexpr):
    """-> slots of a chunk's rows [CHUNK], and of each how many different ones are larger"""
    at = tl.arange(0, CHUNK)
    mine = tl.load(slots + first + at, mask=first + at < rows, other=0)
    before = (mine[None, :] == mine[:, None]) & (at[None, :] < at[:, None])
    new = (tl.sum(before.to(tl.int32), 1) == 0).to(tl.int32)
    larger = (mine[None, :] > mine[:, None]).to(tl.int32)
    return mine, tl.sum(larger * new[None, :], 1)


@triton.jit
def _slot_at(mine, order, turn):
    """-> the slot of this number in the order, 0: there are fewer"""
    return tl.max(tl.where(order == turn, mine, 0), 0)


@triton.jit
def _down_factors(
    down, ranks, slot, place, factor, at, SLICES: tl.constexpr, RANK: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    own = (tl.maximum(slot, 1) - 1) * SLICES + place
    there = (factor < RANK) & (slot > 0)
    if RANK > _FACTORS:  # else zeros take less time to read than their number
        there &= factor < tl.load(ranks + own)
    w = down + (own * RANK + factor)[None, :, None] * INPUTS + at
    return tl.load(w, mask=there[None, :, None] & (at < INPUTS), other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    made, x, x_stride, slots, rows, down, ranks, scales,
    SLICES: tl.constexpr, RANK: tl.constexpr, INPUTS: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """made [M, PARTS, SLICES, RANK] float32, of as many parts of the inputs; x [M, INPUTS]; down [S, SLICES, RANK,
    INPUTS]"""
    BLOCKS: tl.constexpr = (RANK + _FACTORS - 1) // _FACTORS
    PLACES: tl.constexpr = SLICES * BLOCKS * PARTS
    number = tl.program_id(0) % PLACES
    part, place = number % PARTS, number // PARTS // BLOCKS
    factor = number // PARTS % BLOCKS * _FACTORS + tl.arange(0, _FACTORS)
    at = part * STEPS * STEP + tl.arange(0, STEPS)[:, None, None] * STEP + tl.arange(0, STEP)[None, None, :]
    first = tl.program_id(1) * CHUNK
    let_next_come(PDL)
    # Factors and slots were written long before, so they come while the kernels before this one still run.
    mine, order = _slots_of(slots, first, rows, CHUNK)
    turn, turns = tl.program_id(0) // PLACES, tl.num_programs(0) // PLACES
    slot = _slot_at(mine, order, turn)
    w = _down_factors(down, ranks, slot, place, factor, at, SLICES, RANK, INPUTS)
    wait(PDL)
    while slot > 0:
        scale = tl.load(scales + (slot - 1) * SLICES + place)
        for tile in tl.static_range(CHUNK // _TILE):
            row = first + tile * _TILE + tl.arange(0, _TILE)
            has = mine == slot if CHUNK == _TILE else tl.load(slots + row, mask=row < rows, other=0) == slot
            if CHUNK == _TILE or tl.max(has.to(tl.int32), 0) > 0:
                row64 = row.to(tl.int64)
                source = x + row64[None, :, None] * x_stride + at
                value = tl.load(source, mask=has[None, :, None] & (at < INPUTS), other=0.0)
                product = tl.dot(value, tl.permute(w.to(value.dtype), (0, 2, 1)), input_precision="ieee")
                total = tl.sum(product, 0) * scale
                to = ((row64 * PARTS + part) * SLICES + place)[:, None] * RANK + factor[None, :]
                tl.store(made + to, total, mask=has[:, None] & (factor < RANK)[None, :])
        turn += turns
        slot = _slot_at(mine, order, turn)
        w = _down_factors(down, ranks, slot, place, factor, at, SLICES, RANK, INPUTS)


@triton.jit
def _up_factors(up, slot, begin, out, RANK: tl.constexpr, OUTPUTS: tl.constexpr):
    factor = begin + tl.arange(0, _FACTORS)
    there = ((factor < RANK) & (slot > 0))[:, None] & (out < OUTPUTS)[None, :]
    w = up + ((tl.maximum(slot, 1) - 1) * RANK + factor)[:, None] * OUTPUTS + out[None, :]
    return tl.load(w, mask=there, other=0.0)


@triton.jit
def _added(total, u, w, WIDE: tl.constexpr):
    """total + u @ w; u float32, of which two numbers in bfloat16 are enough where the result is not WIDE"""
    if w.dtype == tl.bfloat16 and not WIDE:
        near = u.to(tl.bfloat16)
        total = tl.dot(near, w, total)
        return tl.dot((u - near.to(tl.float32)).to(tl.bfloat16), w, total)
    return tl.dot(u, w.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _parts_made(made, row, has, place, begin, SLICES: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr):
    """-> what is to be summed over the first axis, all of it at once on its way"""
    LANES: tl.constexpr = triton.next_power_of_2(PARTS)
    part = tl.arange(0, LANES)[:, None, None]
    factor = begin + tl.arange(0, _FACTORS)[None, None, :]
    at = ((row.to(tl.int64)[None, :, None] * PARTS + part) * SLICES + place) * RANK + factor
    return tl.load(made + at, mask=has[None, :, None] & (part < PARTS) & (factor < RANK), other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    y, y_stride, made, slots, rows, up, ends,
    SLICES: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    WHOLE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, OUTPUTS]; made [M, PARTS, SLICES, RANK] float32; up [S, RANK, OUTPUTS]; WHOLE: outputs of a program are of
    one slice."""
    BLOCKS: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    out = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    place = tl.zeros((BLOCK,), tl.int64)
    single = tl.program_id(0) * 0
    for i in tl.static_range(SLICES - 1):
        end = tl.load(ends + i)
        place += (out >= end).to(tl.int64)
        single += (tl.program_id(0) % BLOCKS * BLOCK >= end).to(tl.int32)
    WIDE: tl.constexpr = y.dtype.element_ty == tl.float32
    first = tl.program_id(1) * CHUNK
    let_next_come(PDL)
    mine, order = _slots_of(slots, first, rows, CHUNK)
    turn, turns = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS
    slot = _slot_at(mine, order, turn)
    known = _up_factors(up, slot, 0, out, RANK, OUTPUTS)
    wait(PDL)
    while slot > 0:
        turn += turns
        next_slot = _slot_at(mine, order, turn)
        following = _up_factors(up, next_slot, 0, out, RANK, OUTPUTS)
        for tile in tl.static_range(CHUNK // _TILE):
            row = first + tile * _TILE + tl.arange(0, _TILE)
            has = mine == slot if CHUNK == _TILE else tl.load(slots + row, mask=row < rows, other=0) == slot
            if CHUNK == _TILE or tl.max(has.to(tl.int32), 0) > 0:
                parts = _parts_made(made, row, has, single, 0, SLICES, RANK, PARTS)
                target = y + row.to(tl.int64)[:, None] * y_stride + out[None, :]
                mask = has[:, None] & (out < OUTPUTS)[None, :]
                before = tl.load(target, mask=mask, other=0.0)
                total = tl.zeros((_TILE, BLOCK), tl.float32)
                for begin in tl.static_range(0, RANK, _FACTORS):
                    w = known
                    if begin > 0:
                        w = _up_factors(up, slot, begin, out, RANK, OUTPUTS)
                        parts = _parts_made(made, row, has, single, begin, SLICES, RANK, PARTS)
                    if WHOLE:
                        total = _added(total, tl.sum(parts, 0), w, WIDE)
                    else:
                        for i in tl.static_range(SLICES):
                            u = tl.sum(_parts_made(made, row, has, i, begin, SLICES, RANK, PARTS), 0)
                            total = _added(total, u, tl.where((place == i)[None, :], w, 0.0).to(w.dtype), WIDE)
                tl.store(target, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=mask)
        slot, known = next_slot, following


class TritonAdapterOps(AdapterOps):
    """Takes rows and factors in any floating point type of up to 32 bits."""

    def row_slots(self, table: Tensor, rows: Tensor, each: int) -> Tensor:
        return table.index_select(0, rows).unsqueeze(1).expand(-1, each).reshape(-1)

    def adapter_down(self, x: Tensor, weights: AdapterWeights, slots: Tensor) -> Tensor:
        """As specified, of several parts of the inputs beside each other, which `adapter_up` sums."""
        count, slices, rank, inputs = weights.down.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        most = _WIDE_INPUTS if x.dtype == torch.float32 else _INPUTS
        step = min(_STEP, max(16, triton.next_power_of_2(inputs)))
        steps = max(1, min(most, triton.next_power_of_2(inputs)) // step)
        parts = triton.cdiv(inputs, steps * step)
        made = x.new_empty(len(x), parts * slices * rank, dtype=torch.float32)  # of rows without an adapter unread
        if len(x):
            places = slices * triton.cdiv(rank, 16) * parts
            chunk, grid = _cut(len(x), count, places, _MOST_DOWN)
            _down_kernel[grid](
                made, x, x.stride(0), slots, len(x), weights.down, weights.ranks, weights.scales,
                SLICES=slices, RANK=rank, INPUTS=inputs, STEPS=steps, STEP=step, PARTS=parts, CHUNK=chunk,
                **launch_options(x.device),
            )  # fmt: skip
        return made

    def adapter_up(self, y: Tensor, made: Tensor, weights: AdapterWeights, slots: Tensor) -> None:
        count, rank, outputs = weights.up.shape
        slices = len(weights.ends)
        assert y.stride(1) == 1 and made.is_contiguous()
        if len(y):
            chunk, grid = _cut(len(y), count, triton.cdiv(outputs, _OUTPUTS), _MOST_UP)
            parts = made.shape[1] // (slices * rank)
            _up_kernel[grid](
                y, y.stride(0), made, slots, len(y), weights.up, weights.ends,
                SLICES=slices, RANK=rank, OUTPUTS=outputs, BLOCK=_OUTPUTS, PARTS=parts,
                WHOLE=all(bound % _OUTPUTS == 0 for bound in weights.bounds[:-1]), CHUNK=chunk,
                num_warps=4 if parts <= _MOST_PARTS else 8, **launch_options(y.device),
            )  # fmt: skip


def _cut(rows: int, slots: int, places: int, most: int) -> tuple[int, tuple[int, int]]:
    """Returns rows of a chunk, and the grid: programs of a chunk, and chunks. places: programs for an adapter."""
    chunk = 16 if rows <= _FEW else 32
    chunks = triton.cdiv(rows, chunk)
    turns = min(rows, chunk, slots, max(1, most // (places * chunks)))
    return chunk, (places * turns, chunks)
