"""Ways to cut the GEMMs of few rows: many shapes of each kernel, their bits and their times, the best of each.

    python benchmarks/gpu_kernels/cuts.py [most]          # at most so many of a kind for a product and a tile

Shapes are those of an 8B Llama model (quantised.py). A shape whose bits differ from those of the kernels that are there
is said to be WRONG and is not taken. The last tables are those of quantised.py with the best. With $OUT, all results
are written to `cuts.json` there.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from quantised import PRODUCTS, READ_RATE, WIDTHS, Product, call, check, each_us, inputs, table, weights_of

from draftwing.ops.cuda import gemm, gemm_groups
from draftwing.ops.cuda.gemm import PART, Shape, Shapes, SmallMGemm, ring, wide
from draftwing.ops.cuda.gemm_groups import GroupGemm

CAPABILITY = (9, 0)
SHARED_BYTES = 227 << 10  # of a multiprocessor
TILES = (8, 16, 32, 64, 128)
LABELS = {16: "bfloat16", 8: "fp8", 4: "int4"}
BITS = (8, 4, 16)
GRAPH = 160  # microseconds that a measurement takes at least: less than what processes have in turn
MOST = {"ring": 32, "wide": 20}


class Job(NamedTuple):
    bits: int
    product: Product
    tile: int
    shapes: list[Shape]


def part_of(bits: int) -> int:
    return PART if bits == 16 else width_of(bits).part


def width_of(bits: int) -> gemm_groups.Width:
    return WIDTHS[LABELS[bits]]


# -- what there is to try ---------------------------------------------------------------------------------------------


def rings(bits: int, product: Product, tile: int) -> Iterator[Shape]:
    tiles = (2, 4) if product.kind == "silu" else (1, 2)
    for row_tiles, ahead, blocks, x_ahead in itertools.product(tiles, (2, 3, 4, 6, 8, 12), (1, 2, 3, 4), (2, 1)):
        flying = 8 * blocks * ahead * row_tiles * bits * 128  # bytes
        if not 40 << 10 <= flying <= 136 << 10 or (x_ahead == 1 and tile == 8 and blocks != 2):
            continue
        yield ring(tile, row_tiles, ahead, x_ahead, blocks)
        if blocks == 2 and x_ahead == 2 and ahead == 4:
            yield ring(tile, row_tiles, ahead, x_ahead, blocks, room=blocks)


def wides(bits: int, product: Product, tile: int) -> Iterator[Shape]:
    for warps, row_tiles, ahead, panel, blocks, cluster in itertools.product(
        ((4, 1), (8, 1), (4, 2)), (1, 2, 4), (2, 3, 4, 6, 8), (1, 2, 4), (1, 2, 3), (8, 1, 4)
    ):
        parts, threads = warps[1] * cluster, 32 * warps[0] * warps[1]
        if parts not in (1, 8) or (product.kind == "silu" and row_tiles == 1) or (bits == 16 and panel > 1):
            continue
        sums = row_tiles * tile // 2 * (2 if parts == 1 else 1)
        registers = sums + 24 * row_tiles + warps[1] * tile * 8 // threads * 4 + 60
        flying = threads // 32 * blocks * ahead * row_tiles * bits * 128
        if registers > min(255, 65536 // (threads * blocks)) or not 24 << 10 <= flying <= 128 << 10:
            continue
        yield wide(tile, warps, row_tiles, ahead, panel, blocks, cluster)


def to_try(bits: int, product: Product, tile: int, most: float) -> list[Shape]:
    """Those with room and work enough, evenly spread."""
    found: list[Shape] = []
    for name, kind in (("ring", rings), ("wide", wides)):
        if (name == "ring" and tile > 16) or (name == "wide" and tile < 16):
            continue
        fit = []
        for shape in kind(bits, product, tile):
            width = product.features // (2 if product.kind == "silu" else 1)
            blocks, each = shape.grid(product.kind, tile, width, 132)[0], shape.shared_bytes(part_of(bits))
            if shape.blocks * (each + 1024) <= SHARED_BYTES and blocks * shape.warps >= 132 * 4:
                fit.append(shape)
        count = min(len(fit), int(MOST[name] * most))
        found += [fit[i * len(fit) // count] for i in range(count)]
    return found


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


def timed(job: Job, weights: list[Any], known: GroupGemm | SmallMGemm) -> Iterator[tuple[float, float, Shape, bool]]:
    """Microseconds with as many rows as a block takes, and with one where that is up to 8; whether the bits are right.
    The first is what there is."""
    few, many = inputs(job.product, max(1, job.tile - 3)), inputs(job.product, job.tile)
    expected, one = call(known, job.product, *few, weights[0]), inputs(job.product, 1)

    def times(ours: GroupGemm | SmallMGemm) -> tuple[float, float]:
        took = each_us(lambda w: call(ours, job.product, *many, w), weights, 25)
        return took, each_us(lambda w: call(ours, job.product, *one, w), weights, 25) if job.tile == 8 else took

    yield *times(known), Shape(job.tile, 0, 0, 0, 0, 0, "as it is"), True
    for part in parts_of(job):
        ours = kernels_of(job.bits, torch.device("cuda", torch.cuda.current_device()), named(part))
        for i, shape in enumerate(part.shapes):
            ours.only = job.product.kind, i
            try:
                same = all(torch.equal(call(ours, job.product, *few, weights[0]), expected) for _ in range(2))
                yield *times(ours), shape, same
            except RuntimeError as error:  # there is no room for it
                print(shape.call, shape.blocks, error)


def parts_of(job: Job) -> list[Job]:
    """What is compiled at once."""
    return [job._replace(shapes=job.shapes[at : at + 4]) for at in range(0, len(job.shapes), 4)]


def sweep(most: float) -> dict[int, Shapes]:
    """The best shapes by bits."""
    jobs = []
    for bits, product, tile in itertools.product(BITS, PRODUCTS, TILES):
        if bits < 16 or tile < 128:
            jobs.append(Job(bits, product, tile, to_try(bits, product, tile, most / (2 if bits == 16 else 1))))
    begin = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        failed = list(filter(None, pool.map(compile_one, [part for job in jobs for part in parts_of(job)])))
    print(f"{sum(len(job.shapes) for job in jobs)} kernels, {time.monotonic() - begin:.0f} s to compile; failed: "
          f"{failed[:3]}", flush=True)  # fmt: skip
    device, results = torch.device("cuda", torch.cuda.current_device()), []
    best: dict[int, Shapes] = {bits: {} for bits in BITS}
    for bits, product in itertools.product(BITS, PRODUCTS):
        weights, known = weights_of(product, LABELS[bits]), kernels_of(bits, device)
        floor = weights[0].nbytes / READ_RATE
        weights = weights[: max(2, int(GRAPH / floor))]
        for job in jobs:
            if job.bits != bits or job.product != product:
                continue
            found = list(timed(job, weights, known))
            wrong = [shape.call for _, _, shape, same in found if not same]
            if wrong:
                print(f"WRONG: {bits} {product.name} {job.tile}: {len(wrong)} of {len(found)}, {wrong[:3]}")
            before, good = found[0], sorted((f for f in found if f[3]), key=lambda f: f[0] + 2 * f[1])
            if good[0][2].warps:
                best[bits][product.kind, job.tile] = good[0][2]
            for took, single, shape, _ in (before, *good[:3]):
                print(f"{bits:2d} {product.name:8s}{job.tile:4d} {single:6.1f} ({floor / single:4.0%}) {took:6.1f} "
                      f"({floor / took:4.0%}) {shape.call} | {shape.blocks} {shape.room}", flush=True)  # fmt: skip
            results += [(bits, product.name, job.tile, took, single, shape.call, shape.blocks, shape.room, same)
                        for took, single, shape, same in found]  # fmt: skip
            if "OUT" in os.environ:
                Path(os.environ["OUT"], "cuts.json").write_text(json.dumps(results))
    return best


if __name__ == "__main__":
    best = sweep(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
    merged = {
        bits: (gemm.shapes_for(CAPABILITY) if bits == 16 else gemm_groups.shapes_for(bits, CAPABILITY)) | shapes
        for bits, shapes in best.items()
    }
    check(merged)
    table(merged, (1, 8, 16, 32, 64, 128))
