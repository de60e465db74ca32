"""What adapters add to a product: parts of the kernel that does it, and of those that read the product next and do it
on their way, of few rows, so that a step has a kernel less for each matrix. Either gives the same bits: by products of
16 rows with 16 factors, of which one row may be there."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, Final

import triton.language as tl
from triton import jit

from draftwing.ops.adapters.spec import Added

FACTORS = tl.constexpr(16)  # of a product
TILE = tl.constexpr(16)  # rows of a product
# Rows up to which other kernels add: each of them reads its factors, where rows of a tile share them. A norm's program
# has a whole row of one matrix, which takes hardly longer than its own kernel would; other products have more outputs.
MOST_ROWS: Final = 64
FEW_ROWS: Final = 16
CHUNK: Final = 512  # outputs of a row that are added to at once
HELD: Final = 4  # chunks whose factors are read ahead: for all of a row a program would need a whole multiprocessor


@jit
def up_factors(up, slot, begin, out, RANK: tl.constexpr, OUTPUTS: tl.constexpr):
    """-> 16 factors of the outputs `out`, which may be read before `wait`; zeros of slot 0"""
    factor = begin + tl.arange(0, FACTORS)
    there = ((factor < RANK) & (slot > 0))[:, None] & (out < OUTPUTS)[None, :]
    w = up + ((tl.maximum(slot, 1) - 1) * RANK + factor)[:, None] * OUTPUTS + out[None, :]
    return tl.load(w, mask=there, other=0.0)


@jit
def with_products(total, u, w, WIDE: tl.constexpr):
    """total + u @ w; u float32, of which two numbers in bfloat16 are enough where the result is not WIDE"""
    if w.dtype == tl.bfloat16 and not WIDE:
        near = u.to(tl.bfloat16)
        total = tl.dot(near, w, total)
        return tl.dot((u - near.to(tl.float32)).to(tl.bfloat16), w, total)
    return tl.dot(u, w.to(tl.float32), total, input_precision="ieee")


@jit
def sums_made(made, row, has, place, begin, SLICES: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr):
    """-> [16, 16] float32 of the rows that there are: the parts of what `down` made, summed in turn, all of them on
    their way at once"""
    factor = begin + tl.arange(0, FACTORS)[None, :]
    at = made + (row[:, None] * (PARTS * SLICES) + place) * RANK + factor
    there = has[:, None] & (factor < RANK)
    total = tl.load(at, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * (SLICES * RANK), mask=there, other=0.0)
    return total


@jit
def row_added(
    y, first, made, row, slot, place, up, out, SLICES: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):  # fmt: skip
    """y [N] of outputs `out` -> the same and what the adapter adds, rounded once more; of slot 0 y. first: the first 16
    factors, as `up_factors` has them."""
    has = (tl.arange(0, TILE) == 0) & (slot > 0)
    rows, total = tl.zeros((TILE,), tl.int64) + row, tl.zeros((TILE, out.shape[0]), tl.float32)
    for begin in tl.static_range(0, RANK, FACTORS):
        w = first
        if begin > 0:
            w = up_factors(up, slot, begin, out, RANK, OUTPUTS)
        sums = sums_made(made, rows, has, place, begin, SLICES, RANK, PARTS)
        total = with_products(total, sums, w, y.dtype == tl.float32)
    more = tl.sum(tl.where(has[:, None], total, 0.0), 0)
    return tl.where(slot > 0, (y.to(tl.float32) + more).to(y.dtype), y)


@jit
def held_of_row(up, slot, RANK: tl.constexpr, OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """-> factors of so many chunks of a row's outputs, read before `wait`"""
    held = ()
    for chunk in tl.static_range(CHUNKS):
        out = chunk * CHUNK + tl.arange(0, CHUNK)
        held = held + (up_factors(up, slot, 0, out, RANK, OUTPUTS),)  # type: ignore[assignment]  # noqa: RUF005
    return held


@jit
def add_to_row(
    y, made, row, slot, up, held, RANK: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds to a row of a matrix of one slice where it lies, before the program reads it; held: of the first chunks."""
    sums = ()
    for chunk in tl.static_range(BLOCK // CHUNK):  # nothing is stored in between, so all is on its way at once
        out = chunk * CHUNK + tl.arange(0, CHUNK)
        old = tl.load(y + out, mask=out < OUTPUTS, other=0.0)
        w = held[chunk] if chunk < len(held) else up_factors(up, slot, 0, out, RANK, OUTPUTS)
        sums = sums + (row_added(old, w, made, row, slot, 0, up, out, 1, RANK, PARTS, OUTPUTS),)  # type: ignore[assignment]  # noqa: RUF005
    for chunk in tl.static_range(BLOCK // CHUNK):
        out = chunk * CHUNK + tl.arange(0, CHUNK)
        tl.store(y + out, sums[chunk], mask=(out < OUTPUTS) & (slot > 0))
    tl.debug_barrier()


def arguments(left: Added | None, slots: str = "slots") -> dict[str, Any]:
    """Returns what kernels take that may add; None: they do not. slots: what they call the slots of rows."""
    if left is None:
        return {"made": None, slots: None, "up": None, "RANK": 0, "PARTS": 0}
    rank, slices = left.weights.rank, len(left.weights.bounds) - 1
    parts = left.made.shape[1] // (slices * rank)
    return {"made": left.made, slots: left.slots, "up": left.weights.up, "RANK": rank, "PARTS": parts}
