"""What adapters add, in Triton. Once for a forward rows are sorted by adapter, and cut into tiles of up to 16 rows of
one. A program takes one tile after the other, by the tensor cores' products of 16 rows, whose bits do not depend on the
other rows; without tiles it ends at once."""

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
_OUTPUTS, _MANY_OUTPUTS = 128, 256  # that a program has, and where there are as many as of gates
_MANY_FROM = 8192  # outputs of a matrix
_MOST_PARTS = 8  # that four warps have registers for
_FACTORS = tl.constexpr(16)  # of a product
_TILE = tl.constexpr(16)  # rows of a product
# Programs of a kernel beyond which tiles take turns: so many fit on a GPU with 132 multiprocessors at once. More end
# late where no row has an adapter; prompts have work for more.
_MOST_DOWN, _MOST_UP, _FEW = 3 * 132, 4 * 132, 256
_HEAD = tl.constexpr(8)  # numbers of a plan before its lists, each of which has one for each row
_CHUNKS = (16, 64, 256)  # rows that are sorted together: so many as there are, at most the last
_BESIDE = 32  # of them that are compared at a time with all of a chunk


@triton.jit(do_not_specialize=["rows"])
def _plan_kernel(plan, slots, rows, CHUNK: tl.constexpr, BESIDE: tl.constexpr, PDL: tl.constexpr):
    """plan [8 + 5 * M] int32, zeros: the number of tiles, at 8 the slot of each, where its rows begin in the order, how
    many they are; the rows in this order; and which are the first of a tile. A program sorts the rows of a chunk; which
    chunk's tiles come first may differ from time to time."""
    wait(PDL)  # who reads the plan ahead begins when it is there: this does not let the next kernel come
    first = tl.program_id(0) * CHUNK
    at = first + tl.arange(0, CHUNK)
    mine = tl.load(slots + at, mask=at < rows, other=0).to(tl.int32)
    rank, before, same = at * 0, at * 0, at * 0
    for other in range(0, CHUNK, BESIDE):
        there = first + other + tl.arange(0, BESIDE)
        theirs = tl.load(slots + there, mask=there < rows, other=0).to(tl.int32)[None, :]
        equal = theirs == mine[:, None]
        earlier = equal & (there[None, :] < at[:, None])
        smaller = (theirs > 0) & (theirs < mine[:, None])
        rank += tl.sum((smaller | earlier).to(tl.int32), 1)
        before += tl.sum(earlier.to(tl.int32), 1)
        same += tl.sum(equal.to(tl.int32), 1)
    heads = (mine > 0) & (before % _TILE == 0)
    lists = plan + _HEAD
    tl.store(lists + 3 * rows + first + rank, at, mask=mine > 0)
    tl.store(lists + 4 * rows + at, heads.to(tl.int32), mask=at < rows)
    tl.debug_barrier()
    number = before // _TILE
    for other in range(0, CHUNK, BESIDE):
        there = first + other + tl.arange(0, BESIDE)
        theirs = tl.load(slots + there, mask=there < rows, other=0).to(tl.int32)[None, :]
        head = tl.load(lists + 4 * rows + there, mask=there < rows, other=0)[None, :]
        number += tl.sum(tl.where(theirs < mine[:, None], head, 0), 1)
    number += tl.atomic_add(plan, tl.sum(heads.to(tl.int32), 0))
    tl.store(lists + number, mine, mask=heads)
    tl.store(lists + rows + number, first + rank, mask=heads)
    tl.store(lists + 2 * rows + number, tl.minimum(same - before, _TILE), mask=heads)


@triton.jit
def _tile_of(plan, rows, number, tiles):
    """-> a tile's slot, 0: there are fewer; its rows [16], and which of them there are"""
    known = number < tiles
    lists = plan + _HEAD
    slot = tl.load(lists + number, mask=known, other=0)
    begin = tl.load(lists + rows + number, mask=known, other=0)
    has = tl.arange(0, _TILE) < tl.load(lists + 2 * rows + number, mask=known, other=0)
    row = tl.load(lists + 3 * rows + begin + tl.arange(0, _TILE), mask=has, other=0)
    return slot.to(tl.int64), row.to(tl.int64), has


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
    made, x, x_stride, plan, rows, down, ranks, scales,
    SLICES: tl.constexpr, RANK: tl.constexpr, INPUTS: tl.constexpr, STEPS: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """made [M, PARTS, SLICES, RANK] float32, of as many parts of the inputs; x [M, INPUTS]; down [S, SLICES, RANK,
    INPUTS]. READY: whether the plan was there before the kernels that may still run."""
    BLOCKS: tl.constexpr = (RANK + _FACTORS - 1) // _FACTORS
    PLACES: tl.constexpr = SLICES * BLOCKS * PARTS
    place_at = tl.program_id(0) % PLACES
    part, place = place_at % PARTS, place_at // PARTS // BLOCKS
    factor = place_at // PARTS % BLOCKS * _FACTORS + tl.arange(0, _FACTORS)
    at = part * STEPS * STEP + tl.arange(0, STEPS)[:, None, None] * STEP + tl.arange(0, STEP)[None, None, :]
    let_next_come(PDL)
    if not READY:
        wait(PDL)
    first, turns, tiles = tl.program_id(0) // PLACES, tl.num_programs(0) // PLACES, tl.load(plan)
    slot, row, has = _tile_of(plan, rows, first, tiles)
    w = _down_factors(down, ranks, slot, place, factor, at, SLICES, RANK, INPUTS)
    if READY:
        wait(PDL)
    for number in tl.range(first, tiles, turns, num_stages=1):
        scale = tl.load(scales + (slot - 1) * SLICES + place)
        value = tl.load(x + row[None, :, None] * x_stride + at, mask=has[None, :, None] & (at < INPUTS), other=0.0)
        next_slot, next_row, next_has = _tile_of(plan, rows, number + turns, tiles)
        following = _down_factors(down, ranks, next_slot, place, factor, at, SLICES, RANK, INPUTS)
        product = tl.dot(value, tl.permute(w.to(value.dtype), (0, 2, 1)), input_precision="ieee")
        to = ((row * PARTS + part) * SLICES + place)[:, None] * RANK + factor[None, :]
        tl.store(made + to, tl.sum(product, 0) * scale, mask=has[:, None] & (factor < RANK)[None, :])
        slot, row, has, w = next_slot, next_row, next_has, following


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
    at = ((row[None, :, None] * PARTS + part) * SLICES + place) * RANK + factor
    return tl.load(made + at, mask=has[None, :, None] & (part < PARTS) & (factor < RANK), other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    y, y_stride, made, plan, rows, up, ends,
    SLICES: tl.constexpr, RANK: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    WHOLE: tl.constexpr, READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, OUTPUTS]; made [M, PARTS, SLICES, RANK] float32; up [S, RANK, OUTPUTS]; WHOLE: outputs of a program are of
    one slice. READY: as of `_down_kernel`."""
    BLOCKS: tl.constexpr = (OUTPUTS + BLOCK - 1) // BLOCK
    out = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    place = tl.zeros((BLOCK,), tl.int64)
    single = tl.program_id(0) * 0
    for i in tl.static_range(SLICES - 1):
        end = tl.load(ends + i)
        place += (out >= end).to(tl.int64)
        single += (tl.program_id(0) % BLOCKS * BLOCK >= end).to(tl.int32)
    WIDE: tl.constexpr = y.dtype.element_ty == tl.float32
    let_next_come(PDL)
    if not READY:
        wait(PDL)
    first, turns, tiles = tl.program_id(0) // BLOCKS, tl.num_programs(0) // BLOCKS, tl.load(plan)
    slot, row, has = _tile_of(plan, rows, first, tiles)
    known = _up_factors(up, slot, 0, out, RANK, OUTPUTS)
    if READY:
        wait(PDL)
    for number in tl.range(first, tiles, turns, num_stages=1):
        parts = _parts_made(made, row, has, single, 0, SLICES, RANK, PARTS)
        target = y + row[:, None] * y_stride + out[None, :]
        mask = has[:, None] & (out < OUTPUTS)[None, :]
        old = tl.load(target, mask=mask, other=0.0)
        next_slot, next_row, next_has = _tile_of(plan, rows, number + turns, tiles)
        following = _up_factors(up, next_slot, 0, out, RANK, OUTPUTS)
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
        tl.store(target, (old.to(tl.float32) + total).to(y.dtype.element_ty), mask=mask)
        slot, row, has, known = next_slot, next_row, next_has, following


class TritonAdapterOps(AdapterOps):
    """Takes rows and factors in any floating point type of up to 32 bits."""

    adapts_ahead = True

    def adapter_plan(self, slots: Tensor) -> Tensor:
        """slots [M] int64 -> as `_plan_kernel` has it"""
        rows = len(slots)
        plan = torch.zeros(8 + 5 * rows, dtype=torch.int32, device=slots.device)
        if rows:
            chunk = next(size for size in _CHUNKS if rows <= size or size == _CHUNKS[-1])
            _plan_kernel[(triton.cdiv(rows, chunk),)](
                plan, slots, rows, CHUNK=chunk, BESIDE=min(_BESIDE, chunk),
                num_warps=8 if chunk > 64 else 4, **launch_options(slots.device),
            )  # fmt: skip
        return plan

    def adapt(self, y: Tensor, x: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None) -> None:
        if len(y):
            ready, plan = plan is not None, self.adapter_plan(slots) if plan is None else plan
            self._up(y, self._down(x, weights, plan, ready), weights, plan, ready)

    def adapter_down(self, x: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None) -> Tensor:
        """As specified, of several parts of the inputs beside each other, which `adapter_up` sums."""
        assert len(slots) == len(x)
        return self._down(x, weights, self.adapter_plan(slots) if plan is None else plan, plan is not None)

    def adapter_up(
        self, y: Tensor, made: Tensor, weights: AdapterWeights, slots: Tensor, plan: Tensor | None = None
    ) -> None:
        assert len(slots) == len(y)
        self._up(y, made, weights, self.adapter_plan(slots) if plan is None else plan, plan is not None)

    def _down(self, x: Tensor, weights: AdapterWeights, plan: Tensor, ready: bool) -> Tensor:
        count, slices, rank, inputs = weights.down.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        most = _WIDE_INPUTS if x.dtype == torch.float32 else _INPUTS
        step = min(_STEP, max(16, triton.next_power_of_2(inputs)))
        steps = max(1, min(most, triton.next_power_of_2(inputs)) // step)
        parts = triton.cdiv(inputs, steps * step)
        made = x.new_empty(len(x), parts * slices * rank, dtype=torch.float32)  # of rows without an adapter unread
        assert len(plan) == 8 + 5 * len(x)
        if len(x):
            _down_kernel[_grid(len(x), count, slices * triton.cdiv(rank, 16) * parts, _MOST_DOWN)](
                made, x, x.stride(0), plan, len(x), weights.down, weights.ranks, weights.scales,
                SLICES=slices, RANK=rank, INPUTS=inputs, STEPS=steps, STEP=step, PARTS=parts, READY=ready,
                **launch_options(x.device),
            )  # fmt: skip
        return made

    def _up(self, y: Tensor, made: Tensor, weights: AdapterWeights, plan: Tensor, ready: bool) -> None:
        count, rank, outputs = weights.up.shape
        slices = len(weights.ends)
        assert y.stride(1) == 1 and made.is_contiguous() and len(plan) == 8 + 5 * len(y)
        wide = outputs >= _MANY_FROM and all(bound % _MANY_OUTPUTS == 0 for bound in weights.bounds)
        block, parts = _MANY_OUTPUTS if wide else _OUTPUTS, made.shape[1] // (slices * rank)
        if len(y):
            _up_kernel[_grid(len(y), count, triton.cdiv(outputs, block), _MOST_UP)](
                y, y.stride(0), made, plan, len(y), weights.up, weights.ends,
                SLICES=slices, RANK=rank, OUTPUTS=outputs, BLOCK=block, PARTS=parts,
                WHOLE=all(bound % block == 0 for bound in weights.bounds[:-1]), READY=ready,
                num_warps=4 if parts <= _MOST_PARTS else 8, **launch_options(y.device),
            )  # fmt: skip


def _grid(rows: int, slots: int, places: int, most: int) -> tuple[int]:
    """Returns how many programs there are. places: for a tile."""
    tiles = min(rows, slots + rows // 16)
    most = most if rows <= _FEW else 2 * most
    return (places * min(tiles, max(1, most // places)),)
