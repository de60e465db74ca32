"""Finds the best shapes of the GEMM kernels on this machine's GPU, and writes them where draftwing looks for them.

    python tools/tune_gemms.py [--widths dense 4bit 8bit] [--seconds 600] [--most 16] [--out FOLDER]

For each kind of product and number of rows it times many ways to cut the work (`draftwing.ops.gemm.shapes`) on the
four products of an 8B model, whose weights are not in cache, and keeps the one that takes the least time over the
products of its kind. A way with other bits than those of the kernels that are there is left out, and said to be wrong.
Each row of a file has the microseconds of its best candidates, those of the row that was there before as `before`.
Without --out files go to the user's cache folder, where the engine finds them at its next start; with --out they can
be looked at first, or be put into `src/draftwing/ops/gemm/cards/`.
"""

from __future__ import annotations

import argparse
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_kernels"))
from quantised import MODELS, WIDTHS, Product, call, each_us, inputs, packed
from timing import read_rate

from draftwing.ops.gemm import cuda as gemm
from draftwing.ops.gemm import cuda_groups
from draftwing.ops.gemm.cuda import PART, SmallMGemm, key_of, small_m_gemm
from draftwing.ops.gemm.cuda_groups import GroupGemm
from draftwing.ops.gemm.shapes import (
    SHARES,
    WARP_GROUPS,
    Shape,
    Shapes,
    TallShape,
    find_file,
    make_shape,
    read_shapes,
    user_folder,
)

SHARED_BYTES = 227 << 10  # of a multiprocessor
FILLED = 0.6  # share of the room in a grid's turns that its blocks take at least
MEASURED = 160  # microseconds that a measurement takes at least: less than what processes have in turn
KEPT = 6  # candidates whose times are written
PRODUCTS = MODELS["8b"]
BITS = {"dense": 16, "4bit": 4, "8bit": 8}
LABELS = {"4bit": "int4", "8bit": "fp8"}  # of weights that stand for the width
Row = dict[str, Any]  # of a file: a form, and what it is called with


# -- what there is to try --------------------------------------------------------------------------------------------


def rings(bits: int, silu: bool) -> Iterator[Row]:
    for row_tiles, ahead, blocks in itertools.product((2, 4) if silu else (1, 2), (2, 3, 4, 5, 6, 8, 10), (1, 2, 3)):
        if 32 << 10 <= 8 * blocks * ahead * row_tiles * bits * 128 <= 140 << 10:  # bytes in flight
            yield {"form": "ring", "row_tiles": row_tiles, "ahead": ahead, "blocks": blocks}


def fews(bits: int, silu: bool) -> Iterator[Row]:
    numbers = itertools.product((2, 4) if silu else (1, 2), (1, 2, 4, 8), (1, 2, 4), (1, 2, 3))
    for row_tiles, ahead, x_ahead, blocks in numbers:
        if x_ahead <= ahead:
            yield {"form": "few_rows", "row_tiles": row_tiles, "ahead": ahead, "x_ahead": x_ahead, "blocks": blocks}


def shareds(bits: int, silu: bool) -> Iterator[Row]:
    warps = ((4, 1), (8, 1), (2, 2), (2, 4), (1, 4))
    numbers = itertools.product(warps, (2, 4) if silu else (1, 2, 4), (1, 2, 4, 8), (4, 8), (1, 2, 3, 4))
    for (by_features, by_k), row_tiles, ahead, stages, blocks in numbers:
        cut = {"row_tiles": row_tiles, "ahead": ahead, "stages": stages, "blocks": blocks, "cluster": SHARES // by_k}
        yield {"form": "shared", "warps": [by_features, by_k], **cut}


def wides(bits: int, silu: bool) -> Iterator[Row]:
    numbers = itertools.product(((4, 1), (8, 1)), (1, 2, 4), (3, 4, 5, 6), (1, 2), (1, 2, 3))
    for warps, row_tiles, ahead, panel, blocks in numbers:
        if not (bits == 16 and panel > 1) and not (silu and row_tiles == 1):
            cut = {
                "row_tiles": row_tiles,
                "ahead": ahead,
                "panel": panel,
                "blocks": blocks,
                "cluster": 1 if silu else 8,
            }
            yield {"form": "wide", "warps": [*warps], **cut}


def talls(bits: int, silu: bool) -> Iterator[Row]:
    for groups, row_tiles, stages, ahead, blocks in itertools.product((1, 2), (1, 2), (4, 6), (3, 4, 6), (1, 2, 3)):
        cut = {"groups": groups, "row_tiles": row_tiles, "stages": stages, "ahead": ahead, "blocks": blocks}
        if bits < 16:
            yield {"form": "tall", **cut, "cluster": SHARES}


def has_registers(shape: Shape | TallShape, row: Row, bits: int, tile: int) -> bool:
    """Of a thread: weights on their way, sums, and some 40."""
    if row["form"] in ("ring", "tall"):
        return True
    needed = row["row_tiles"] * (row["ahead"] * bits // (4 if row["form"] == "wide" else 1) + tile // 2) + 40
    return bool(needed <= min(255, 65536 // (32 * shape.warps * shape.blocks)))


def candidates(width: str, product: Product, tile: int, hopper: bool, most: int) -> list[Row]:
    """Returns ways to cut with room and work enough, evenly spread, at most so many of a form."""
    bits, silu, found = BITS[width], product.kind == "silu", []
    features = product.features // (2 if silu else 1)
    part = PART if bits == 16 else WIDTHS[LABELS[width]].part
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    for form, takes in (
        (rings, hopper and tile <= 16), (fews, 8 <= tile <= 64), (shareds, 8 <= tile <= 64),
        (wides, hopper and tile == 64), (talls, hopper and tile > 16),
    ):  # fmt: skip
        fit = []
        for row in form(bits, silu) if takes else ():
            shape = make_shape(row, tile)
            x, y = shape.grid(product.kind, tile, features, processors)
            room = processors * shape.blocks
            filled = getattr(shape, "stays", False) or x * y >= FILLED * room * -(-x * y // room)
            fits = shape.blocks * (shape.shared_bytes(part) + 1024) <= SHARED_BYTES
            if fits and filled and (hopper or shape.cluster == 1) and has_registers(shape, row, bits, tile):
                fit.append(row)
        count = min(len(fit), most)
        found += [fit[i * len(fit) // count] for i in range(count)]
    return found


# -- trying ----------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    width: str
    product: Product
    key: tuple[str, int]  # of the row that the product has now
    rows: list[Row]  # candidates, the present one first

    def shapes(self) -> Shapes:
        return {(self.product.kind, i): make_shape(row, self.key[1]) for i, row in enumerate(self.rows)}


def kernels(width: str, device: torch.device, shapes: Shapes | None = None) -> SmallMGemm | GroupGemm:
    if width == "dense":
        return SmallMGemm(device, torch.bfloat16, shapes=shapes)
    return GroupGemm(device, torch.bfloat16, WIDTHS[LABELS[width]], shapes)


def compile_job(job: Job, capability: tuple[int, int]) -> str | None:
    """Fills the cache of compiled kernels; runs in a process without a GPU. Returns what the compiler complains of."""
    try:
        if job.width == "dense":
            gemm.compile_ahead(torch.bfloat16, capability, job.shapes())
        else:
            cuda_groups.compile_ahead(torch.bfloat16, WIDTHS[LABELS[job.width]], capability, job.shapes())
    except RuntimeError as error:
        return str(error)[-300:]
    return None


def weights_of(width: str, product: Product) -> list[Any]:
    """Returns the weight so often that it is not in cache when its turn comes again."""
    if width == "dense":
        first: Any = torch.randn(product.features, product.depth, device="cuda").bfloat16() / 64
    else:
        first = packed(product, WIDTHS[LABELS[width]])
    count = max(2, int(MEASURED * read_rate() / first.nbytes), (160 << 20) // first.nbytes)
    clone = (lambda w: w.clone()) if isinstance(first, Tensor) else (lambda w: type(w)(*map(_copied, w)))
    return [first, *(clone(first) for _ in range(min(count, 24) - 1))]


def _copied(part: Any) -> Any:
    return part.clone() if isinstance(part, Tensor) else part


def times_of(job: Job, weights: list[Any], device: torch.device) -> list[float | None]:
    """Returns microseconds of each candidate, None of those with other bits or no room."""
    x, extra = inputs(job.product, job.key[1])
    matrix = weights[0] if isinstance(weights[0], Tensor) else kernels(job.width, device).dense(weights[0])  # type: ignore[union-attr]
    dense = small_m_gemm(device, torch.bfloat16)
    expected = torch.cat([call(dense, job.product, x[i : i + 1], extra[i : i + 1], matrix) for i in range(len(x))])
    ours, found = kernels(job.width, device, job.shapes()), []
    for i, row in enumerate(job.rows):
        ours.only = job.product.kind, i
        try:
            if not torch.equal(call(ours, job.product, x, extra, weights[0]), expected):
                print(f"WRONG: {job.width} {job.product.name} {job.key}: {row}", flush=True)
                found.append(None)
                continue
            found.append(each_us(lambda w: call(ours, job.product, x, extra, w), weights, 25))
        except RuntimeError as error:  # there is no room for it
            print(f"no room: {row}: {str(error)[:80]}", flush=True)
            found.append(None)
    return found


def tune(width: str, most: int, until: float, workers: ProcessPoolExecutor) -> dict[tuple[str, int], Row]:
    """Returns the best row of each key that a product of the model has, with the times of its candidates."""
    device = torch.device("cuda", torch.cuda.current_device())
    capability = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    present, jobs = read_shapes(width, capability, torch.bfloat16), []
    tiles = sorted({tile for _, tile in present} & {2, 8, 16, 32, 64})
    known = dict(rows_of(width, capability))
    for product, tile in itertools.product(PRODUCTS, tiles):
        made = product.features // (2 if product.kind == "silu" else 1)
        key = key_of(present, product.kind, tile, made, processors)
        key = key if key in present else ("add", tile)  # for which `add_long` stands
        if key in present:
            others = candidates(width, product, tile, capability[0] == WARP_GROUPS, most)
            jobs.append(Job(width, product, key, [known[key], *(row for row in others if row != known[key])]))
    began = time.monotonic()
    failed = list(filter(None, workers.map(compile_job, jobs, itertools.repeat(capability))))
    count = sum(len(job.rows) for job in jobs)
    print(f"{width}: {count} kernels, {time.monotonic() - began:.0f} s to compile; failed: {failed[:2]}", flush=True)
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    for job in jobs:
        if time.monotonic() > until:
            print(f"no time left for {width} {job.product.name} {job.key}", flush=True)
            continue
        for row, took in zip(job.rows, times_of(job, weights_of(width, job.product), device), strict=True):
            if took is not None:
                times.setdefault(job.key, {}).setdefault(json.dumps(row), []).append(took)
    return {key: best_of(known[key], found) for key, found in times.items()}


def best_of(before: Row, times: dict[str, list[float]]) -> Row:
    """Returns the fastest row over the products of a key, with microseconds of the best and of the one before."""
    products = max(map(len, times.values()))
    whole = {text: round(sum(each), 2) for text, each in times.items() if len(each) == products}
    ranked = sorted(whole, key=lambda text: whole[text])
    shown = {text: whole[text] for text in ranked[:KEPT]}
    return {**json.loads(ranked[0]), "us": {"before": whole.get(json.dumps(before)), **shown}}


def rows_of(width: str, capability: tuple[int, int]) -> Iterator[tuple[tuple[str, int], Row]]:
    """Yields the rows that are used now, by key, without their times."""
    file = find_file(width, capability, torch.bfloat16)
    assert file is not None
    for row in json.loads(file.read_text(encoding="utf-8"))["shapes"]:
        key = row.pop("kind"), row.pop("rows")
        yield key, {name: value for name, value in row.items() if name != "us"}


def write(width: str, best: dict[tuple[str, int], Row], folder: Path) -> Path:
    """Writes the file of this width: the rows that there were, with the best in place of those that were tried."""
    capability = torch.cuda.get_device_capability()
    rows = {**dict(rows_of(width, capability)), **best}
    lines = [json.dumps({"kind": kind, "rows": tile, **row}) for (kind, tile), row in rows.items()]
    name = torch.cuda.get_device_name()
    head = f'{{\n"for": {json.dumps(name)},\n"measured": {json.dumps("tools/tune_gemms.py, " + name)},\n"shapes": [\n'
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sm{capability[0]}{capability[1]}-{width}.json"
    new = path.with_suffix(".new")
    new.write_text(head + ",\n".join(lines) + "\n]\n}\n", encoding="utf-8")
    new.replace(path)  # whole: an engine may read it now
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", choices=list(BITS), default=list(BITS))
    parser.add_argument("--seconds", type=float, default=600, help="no product is begun after so many")
    parser.add_argument("--most", type=int, default=16, help="candidates of a form")
    parser.add_argument("--out", type=Path, default=user_folder())
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected an NVIDIA GPU; found none")
    if torch.cuda.get_device_capability()[0] == WARP_GROUPS and args.out == user_folder():
        parser.error(
            "shapes for compute capability 9.0 were chosen in whole steps, where what is best alone is not always so: "
            "give --out, and compare steps (benchmarks/gpu_kernels/step.py) before you use them"
        )
    until = time.monotonic() + args.seconds
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        for width in args.widths:
            best = tune(width, args.most, until, workers)
            for key, row in best.items():
                times = row["us"]
                fastest = min(value for value in times.values() if value is not None)
                print(f"{width} {key[0]:16s}{key[1]:4d} {times['before']} -> {fastest} us, {row['form']}", flush=True)
            print(write(width, best, args.out), flush=True)


if __name__ == "__main__":
    main()
