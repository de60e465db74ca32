"""Ways to cut the GEMMs of few rows: many shapes of each kernel, their bits and their times, the best of each.

    python benchmarks/gpu_kernels/cuts.py [share] [seconds] [32b | 27b] [bits=8] [tiles=16,32] [only=gate_up,o]

Tries this share of all, and no more after so many seconds. Shapes are those of quantised.py; with 27b, fp8 has scales
of 128 x 128. bits, tiles, only: of weights, rows of x, products, in place of all. A shape whose bits differ from those
of the kernels that are there is said to be WRONG and is not taken. Where all are tried the last tables are those of
quantised.py with the best. With $OUT, all results are written to `cuts.json` there.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from quantised import MODELS, PRODUCTS, WIDTHS, Product, call, check, each_us, inputs, table, weights_of
from timing import read_rate
from torch import Tensor

from draftwing.ops.cuda import gemm, gemm_groups
from draftwing.ops.cuda.gemm import (
    PART,
    SHARES,
    Shape,
    Shapes,
    SmallMGemm,
    TallShape,
    few_rows,
    ring,
    shared,
    small_m_gemm,
    wide,
)
from draftwing.ops.cuda.gemm_groups import GroupGemm

CAPABILITY = (9, 0)
SHARED_BYTES = 227 << 10  # of a multiprocessor
TILES = (2, 64, 8, 32, 16, 128)  # in the order in which they are tried
LABELS = {16: "bfloat16", 8: "fp8 blocks" if "27b" in sys.argv else "fp8", 4: "int4"}
BITS = (8, 4, 16)
# Share of the room in a grid's turns that its blocks take at least.
FILLED = 0.6
GRAPH = 160  # microseconds that a measurement takes at least: less than what processes have in turn
MOST = {2: 32, 8: 16, 16: 16, 32: 16, 64: 32, 128: 12}  # of a kind, by tile


class Job(NamedTuple):
    bits: int
    product: Product
    tile: int
    shapes: list[Shape | TallShape]


def part_of(bits: int) -> int:
    return PART if bits == 16 else width_of(bits).part


def width_of(bits: int) -> gemm_groups.Width:
    return WIDTHS[LABELS[bits]]


# -- what there is to try ---------------------------------------------------------------------------------------------


def rings(bits: int, product: Product, tile: int) -> Iterator[Shape]:
    tiles = (2, 4) if product.kind == "silu" else (1, 2)
    for row_tiles, ahead, blocks in itertools.product(tiles, (2, 3, 4, 5, 6, 8, 10, 12, 16), (1, 2, 3, 4)):
        flying = 8 * blocks * ahead * row_tiles * bits * 128  # bytes
        if 32 << 10 <= flying <= 140 << 10:
            yield ring(tile, row_tiles, ahead, blocks)
            if blocks == 2 and ahead in (4, 8):
                yield ring(tile, row_tiles, ahead, blocks, room=blocks)


def wides(bits: int, product: Product, tile: int) -> Iterator[Shape]:
    for warps, row_tiles, ahead, panel, blocks, cluster in itertools.product(
        ((4, 1), (8, 1), (4, 2)), (1, 2, 4), (3, 4, 5, 6, 8), (1, 2), (1, 2, 3), (8, 1, 4)
    ):
        parts, threads = warps[1] * cluster, 32 * warps[0] * warps[1]
        if parts not in (1, 8) or (product.kind == "silu" and row_tiles == 1) or (bits == 16 and panel > 1):
            continue
        if (parts == 1) != (product.kind == "silu"):  # as measured
            continue
        sums = row_tiles * tile // 2 * (2 if parts == 1 else 1)
        registers = sums + 24 * row_tiles + 60
        flying = threads // 32 * blocks * ahead * row_tiles * bits * 128
        if registers <= min(255, 65536 // (threads * blocks)) and 32 << 10 <= flying <= 140 << 10:
            yield wide(tile, warps, row_tiles, ahead, panel, blocks, cluster)


def has_registers(bits: int, tile: int, row_tiles: int, ahead: int, warps: int) -> bool:
    """Of a thread: weights on their way, sums, and some 40. warps: of a multiprocessor."""
    return row_tiles * (ahead * bits + tile // 2) + 40 <= min(255, 65536 // (32 * warps))


def fews(bits: int, product: Product, tile: int) -> Iterator[Shape]:
    tiles = (2, 4) if product.kind == "silu" else (1, 2)
    for row_tiles, ahead, x_ahead, blocks in itertools.product(tiles, (1, 2, 4, 8), (1, 2), (1, 2, 3, 4)):
        if x_ahead <= ahead and has_registers(bits, tile, row_tiles, ahead, SHARES * blocks):
            yield few_rows(tile, row_tiles, ahead, x_ahead, blocks)


def shareds(bits: int, product: Product, tile: int) -> Iterator[Shape]:
    warps = ((4, 1), (8, 1), (2, 2), (2, 4), (1, 4), (1, 8), (4, 2))
    for (by_features, by_k), row_tiles, ahead, stages, blocks in itertools.product(
        warps, (1, 2, 4), (1, 2, 4, 8), (4, 8), (1, 2, 3, 4)
    ):
        fits = has_registers(bits, tile, row_tiles, ahead, by_features * by_k * blocks)
        if fits and (product.kind != "silu" or row_tiles > 1) and (tile <= 16 or by_features < 8):
            yield shared(tile, (by_features, by_k), row_tiles, ahead, stages, blocks, SHARES // by_k)


def talls(bits: int, product: Product, tile: int) -> Iterator[TallShape]:
    for groups, row_tiles, stages, ahead, blocks in itertools.product(
        (1, 2), (1, 2), (3, 4, 6), (2, 3, 4, 6), (1, 2, 3, 4)
    ):
        if bits < 16:
            yield TallShape(tile, groups, row_tiles, stages, ahead, SHARES, blocks)


def is_filled(shape: Shape | TallShape, blocks: int) -> bool:
    room = 132 * shape.blocks
    return getattr(shape, "stays", False) or blocks >= FILLED * room * -(-blocks // room)


def to_try(bits: int, product: Product, tile: int, most: float) -> list[Shape | TallShape]:
    """Those with room and work enough, evenly spread."""
    found: list[Shape | TallShape] = []
    for kind, takes in ((rings, tile <= 16), (fews, 8 <= tile <= 32), (shareds, 8 <= tile <= 32), (wides, tile > 16),
                        (talls, tile > 16)):  # fmt: skip
        if not takes:
            continue
        fit = []
        for shape in kind(bits, product, tile):
            width = product.features // (2 if product.kind == "silu" else 1)
            (x, y), each = shape.grid(product.kind, tile, width, 132), shape.shared_bytes(part_of(bits))
            enough = x * y * shape.warps >= 132 * 4 and is_filled(shape, x * y)
            if shape.blocks * (each + 1024) <= SHARED_BYTES and enough:
                fit.append(shape)
        count = min(len(fit), int(MOST[tile] * most))
        found += [fit[i * len(fit) // count] for i in range(count)]
    return found


def compile_all(bits: int, width: gemm_groups.Width | None, shapes: Shapes) -> None:
    """As `quantised.kernels` makes them; in a process without a GPU."""
    if width is None:
        gemm.compile_ahead(torch.bfloat16, CAPABILITY, shapes)
    else:
        gemm_groups.compile_ahead(torch.bfloat16, width, CAPABILITY, shapes)


def whole(shapes: dict[int, Shapes]) -> list[tuple[int, gemm_groups.Width | None, Shapes]]:
    return [(16, None, shapes[16]), *((width.bits, width, shapes[width.bits]) for width in WIDTHS.values())]


def compile_one(job: Job) -> str | None:
    """Fills the cache; runs in a process without a GPU."""
    try:
        if job.bits == 16:
            gemm.compile_ahead(torch.bfloat16, CAPABILITY, named(job))
        else:
            gemm_groups.compile_ahead(torch.bfloat16, width_of(job.bits), CAPABILITY, named(job))
    except RuntimeError as error:
        return str(error)[-300:]
    return None


def named(job: Job) -> Shapes:
    return {(job.product.kind, i): shape for i, shape in enumerate(job.shapes)}


# -- trying -----------------------------------------------------------------------------------------------------------


def kernels_of(bits: int, device: torch.device, shapes: Shapes | None = None) -> GroupGemm | SmallMGemm:
    if bits == 16:
        return SmallMGemm(device, torch.bfloat16, shapes=shapes)
    return GroupGemm(device, torch.bfloat16, width_of(bits), shapes)


@functools.cache
def known_kernels(bits: int, device: torch.device) -> GroupGemm | SmallMGemm:
    return kernels_of(bits, device)


@functools.cache
def by_rows(bits: int, product: Product, device: torch.device) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A weight, x and what is added to 128 rows of results, and those by the bfloat16 kernel, one row at a time."""
    weight, (x, extra) = weights_of(product, LABELS[bits])[0], inputs(product, 128)
    known = known_kernels(bits, device)
    matrix = known.dense(weight) if isinstance(known, GroupGemm) else weight
    dense = small_m_gemm(device, torch.bfloat16)
    each = [call(dense, product, x[i : i + 1], extra[i : i + 1], matrix) for i in range(len(x))]
    return weight, x, extra, torch.cat(each)


def timed(job: Job, weights: list[Any], known: GroupGemm | SmallMGemm) -> Iterator[tuple[float, float, Shape, bool]]:
    """Microseconds with as many rows as a block takes, and with one where that is 8; whether the bits are right.
    The first is what there is."""
    device = torch.device("cuda", torch.cuda.current_device())
    weight, x, extra, expected = by_rows(job.bits, job.product, device)
    some, many, one = max(1, job.tile - 3), inputs(job.product, job.tile), inputs(job.product, 1)

    def times(ours: GroupGemm | SmallMGemm) -> tuple[float, float]:
        took = each_us(lambda w: call(ours, job.product, *many, w), weights, 25)
        return took, each_us(lambda w: call(ours, job.product, *one, w), weights, 25) if job.tile == 8 else took

    yield *times(known), Shape(job.tile, 0, 0, 0, 0, 0, "as it is"), True
    for part in parts_of(job):
        ours = kernels_of(job.bits, device, named(part))
        for i, shape in enumerate(part.shapes):
            ours.only = job.product.kind, i
            try:
                got = [call(ours, job.product, x[:rows], extra[:rows], weight) for rows in (some, job.tile)]
                same = all(torch.equal(part, expected[: len(part)]) for part in got)
                yield *times(ours), shape, same
            except RuntimeError as error:  # there is no room for it
                print(shape.call, shape.blocks, error)


def parts_of(job: Job) -> list[Job]:
    """What is compiled at once."""
    return [job._replace(shapes=job.shapes[at : at + 4]) for at in range(0, len(job.shapes), 4)]


def sweep(
    workers: ProcessPoolExecutor,
    most: float,
    until: float,
    tiles: Sequence[int],
    widths: Sequence[int],
    products: Sequence[Product],
) -> dict[int, Shapes]:
    """The best shapes by bits."""
    jobs = []
    for tile, bits, product in itertools.product(tiles, widths, products):
        if bits < 16 or tile == 64:
            jobs.append(Job(bits, product, tile, to_try(bits, product, tile, most / (2 if bits == 16 else 1))))
    begin = time.monotonic()
    base = workers.map(compile_all, *zip(*(one for one in whole(SHAPES) if one[0] in (*widths, 16)), strict=True))
    failed = list(filter(None, workers.map(compile_one, [part for job in jobs for part in parts_of(job)])))
    list(base)
    print(f"{sum(len(job.shapes) for job in jobs)} kernels, {time.monotonic() - begin:.0f} s to compile; failed: "
          f"{failed[:3]}", flush=True)  # fmt: skip
    device, results = torch.device("cuda", torch.cuda.current_device()), []
    best: dict[int, Shapes] = {bits: {} for bits in BITS}
    made: dict[tuple[int, Product], Any] = {}
    for job in jobs:
        bits, product = job.bits, job.product
        if time.monotonic() > until:
            print(f"no time for {bits} {product.name} {job.tile}")
            continue
        if (bits, product) not in made:
            weights = weights_of(product, LABELS[bits])
            made[bits, product] = weights[: max(2, int(GRAPH * read_rate() / weights[0].nbytes))]
        weights, known = made[bits, product], known_kernels(bits, device)
        bound = weights[0].nbytes / read_rate()
        if job.shapes:
            found = list(timed(job, weights, known))
            wrong = [shape.call for _, _, shape, same in found if not same]
            if wrong:
                print(f"WRONG: {bits} {product.name} {job.tile}: {len(wrong)} of {len(found)}, {wrong[:3]}")
            before, good = found[0], sorted((f for f in found if f[3]), key=lambda f: f[0] + 2 * f[1])
            if good[0][2].warps:
                best[bits][product.kind, job.tile] = good[0][2]
            for took, single, shape, _ in (before, *good[:3]):
                print(f"{bits:2d} {product.name:8s}{job.tile:4d} {single:6.1f} ({bound / single:4.0%}) {took:6.1f} "
                      f"({bound / took:4.0%}) {shape.call} | {shape.blocks} {shape.room}", flush=True)  # fmt: skip
            results += [(bits, product.name, job.tile, took, single, shape.call, shape.blocks, shape.room, same)
                        for took, single, shape, same in found]  # fmt: skip
            if "OUT" in os.environ:
                Path(os.environ["OUT"], "cuts.json").write_text(json.dumps(results))
    return best


SHAPES = {
    bits: gemm.shapes_for(CAPABILITY) if bits == 16 else gemm_groups.shapes_for(bits, CAPABILITY) for bits in BITS
}

if __name__ == "__main__":
    start = time.monotonic()
    words = [word for word in sys.argv[1:] if word not in MODELS]
    some = {name: found.split(",") for name, _, found in (word.partition("=") for word in words) if found}
    tiles, widths = (tuple(map(int, some.get(name, every))) for name, every in (("tiles", TILES), ("bits", BITS)))
    named_so = {product.name: product for product in PRODUCTS}
    given = [float(word) for word in words if "=" not in word]
    share, seconds = [*given, *(1.0, 1e9)[len(given) :]]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        products = [named_so[name] for name in some.get("only", named_so)]
        best = sweep(workers, share, start + seconds, tiles, widths, products)
        merged = {bits: SHAPES[bits] | shapes for bits, shapes in best.items()}
        if not some:
            list(workers.map(compile_all, *zip(*whole(merged), strict=True)))
    if not some:
        check(merged)
        table(merged, (1, 8, 16, 32, 64, 128), ("bfloat16", LABELS[8], "int4"))
