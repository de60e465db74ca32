"""GEMMs of many rows with quantised weights: shapes of gemm_tall.cu, what they compute and their times.

    python benchmarks/gpu_kernels/tall.py [seconds] [32b]    # measure no more from then on

Products are those of quantised.py, vs the matrix dequantised for cuBLAS, and cuBLAS with
bfloat16 weights; those of gate.up are without the activation, which is part of the kernels here. What differs from a
float64 product by more than bfloat16 does is said to be WRONG and is not taken. The last thing is the rows of a card's
file (src/draftwing/ops/gemm/cards) with the best shapes.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from quantised import MODELS, PRODUCTS, WIDTHS, Product, copies, each_us, inputs, mm, packed, unpack_first
from torch import Tensor

from draftwing.ops.gemm.cuda_groups import group_gemm
from draftwing.ops.gemm.cuda_tall import TallGemm, compile_ahead
from draftwing.ops.gemm.groups import PackedGroups
from draftwing.ops.gemm.shapes import TallShape

CAPABILITY = (9, 0)
SHAPES = tuple(
    TallShape(*cut, cluster=cluster, blocks=blocks)
    for cut, clusters, blocks in (
        ((64, 2, 2, 6, 4), (1, 2, 4), 1),  # tokens, warp groups, row tiles, stages, ahead
        ((64, 2, 1, 4, 4), (1, 4), 2),
        ((128, 2, 2, 5, 4), (1, 2, 4), 1),
        ((128, 2, 2, 4, 3), (1,), 1),
        ((128, 2, 1, 3, 3), (1, 2, 4), 2),
        ((192, 2, 1, 4, 4), (1, 2), 1),
        ((256, 2, 1, 4, 4), (1, 2, 4), 1),
    )
    for cluster in clusters
)
KINDS = ("plain", "add", "silu")
ROWS = (96, 128, 192, 256, 512, 1024, 2048)
TIMED = ("fp8", "int4")
NEAR = 1.02  # times the least time: for fewer kernels, a shape that is as good is also that of more rows


class Measured(NamedTuple):
    """Microseconds of a product of so many rows: by shape, and those of the ways without these kernels."""

    label: str
    product: Product
    rows: int
    took: dict[int, float]
    unpacked: float  # the matrix dequantised, and cuBLAS
    plain: float  # cuBLAS in bfloat16

    def __str__(self) -> str:
        ordered = sorted((took, i) for i, took in self.took.items())
        best = "; ".join(f"{took:.0f}: {text(SHAPES[i])}" for took, i in ordered[:3])
        return (f"{self.label:5s}{self.product.name:8s}{self.rows:5d} {ordered[0][0]:7.1f} {self.unpacked:7.1f} "
                f"{self.plain:7.1f} {self.plain / ordered[0][0]:5.0%}  {best}")  # fmt: skip


def compile_one(label: str, index: int) -> str | None:
    """Fills the cache; runs in a process without a GPU."""
    try:
        compile_ahead(torch.bfloat16, WIDTHS[label], CAPABILITY, named(index))
    except RuntimeError as error:
        return f"{SHAPES[index].call}: {str(error)[-200:]}"
    return None


def named(index: int) -> dict[tuple[str, int], TallShape]:
    return {(kind, index): SHAPES[index] for kind in KINDS}


def call(ours: TallGemm, product: Product, x: Tensor, extra: Tensor, bias: Tensor | None, w: PackedGroups) -> Tensor:
    if product.kind == "silu":
        out = ours.gated(x, w, bias)
    else:
        out = ours.linear(x, w, bias, extra if product.kind.startswith("add") else None)
    assert out is not None
    return out


def select(ours: TallGemm, product: Product, index: int) -> None:
    ours.only = product.kind.removesuffix("_long"), index


def expected_of(product: Product, matrix: Tensor, x: Tensor, extra: Tensor, bias: Tensor) -> Tensor:
    y = x.double() @ matrix.double().T + bias.double()
    if product.kind == "silu":
        gate, up = y.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    return y + extra.double() if product.kind.startswith("add") else y


def right(label: str, product: Product, kernels: Sequence[TallGemm | None], weight: PackedGroups) -> list[bool]:
    """By shape: whether the results are those of a float64 product."""
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = group_gemm(device, torch.bfloat16, WIDTHS[label]).dense(weight)
    found = [ours is not None for ours in kernels]
    for rows in (77, 333):
        x, extra = inputs(product, rows)
        bias = torch.randn(product.features, device="cuda").bfloat16()
        expected = expected_of(product, matrix, x, extra, bias)
        for i, ours in enumerate(kernels):
            if ours is None or not found[i]:
                continue
            select(ours, product, i)
            try:
                got = [call(ours, product, x, extra, bias, weight) for _ in range(3)]
                torch.cuda.synchronize()
            except RuntimeError as error:
                if "launch" not in str(error) and "resources" not in str(error) and "argument" not in str(error):
                    raise
                print(f"{label} {product.name} {SHAPES[i].call}: {error}")
                found[i] = False
                continue
            close = torch.isclose(got[0].double(), expected, rtol=2**-7, atol=4e-3)
            same = all(torch.equal(part, got[0]) for part in got)
            if not close.all() or not same:
                worst = (got[0].double() - expected).abs().max().item()
                print(f"WRONG: {label} {product.name} {rows} {SHAPES[i]}: {(~close).sum().item()} of {close.numel()}, "
                      f"by {worst:.3g}, {'the same' if same else 'others'} each time", flush=True)  # fmt: skip
                found[i] = False
    return found


def worth_it(shape: TallShape, product: Product, rows: int) -> bool:
    """Not mostly without work, nor with far more blocks than there is room for."""
    width = product.features // (2 if product.kind == "silu" else 1)
    across, down = shape.grid(product.kind, rows, width)
    return shape.tokens < 2 * rows and (shape.cluster == 1 or across * down <= 300 * shape.blocks)


def cells(label: str, product: Product, until: float) -> list[Measured]:
    device = torch.device("cuda", torch.cuda.current_device())
    every = copies(packed(product, WIDTHS[label]), 6)
    kernels = [kernel_of(label, i) for i in range(len(SHAPES))]
    good, found = right(label, product, kernels, every[0]), []
    groups = group_gemm(device, torch.bfloat16, WIDTHS[label])
    dense = [groups.dense(w) for w in every[:2]]
    for rows in ROWS:
        if time.monotonic() > until:
            break
        x, extra = inputs(product, rows)
        weights: Sequence[Any] = every if rows <= 256 else every[:2]
        took = {}
        for i, ours in enumerate(kernels):
            if ours is not None and good[i] and worth_it(SHAPES[i], product, rows):
                select(ours, product, i)
                took[i] = each_us(functools.partial(call, ours, product, x, extra, None), weights, 7)
        if took:
            unpacked = each_us(functools.partial(unpack_first, groups, x), weights, 7)
            plain = each_us(functools.partial(mm, x), dense, 7)
            found.append(Measured(label, product, rows, took, unpacked, plain))
    return found


def chosen(found: Sequence[Measured]) -> dict[int, dict[tuple[str, int], TallShape]]:
    """By bits, as files of cards have them: the best shape of a kind for so many rows, where it is faster than to
    multiply the matrix out."""
    tables: dict[int, dict[tuple[str, int], TallShape]] = {WIDTHS[label].bits: {} for label in TIMED}
    cases = defaultdict[tuple[str, str], list[Measured]](list)
    for one in found:
        cases[one.label, one.product.kind].append(one)
    for (label, kind), some in cases.items():
        table, last = tables[WIDTHS[label].bits], None  # the key before
        for rows in sorted({one.rows for one in some}):
            same = [one for one in some if one.rows == rows]
            sums = {i: sum(one.took.get(i, float("inf")) for one in same) for i in same[0].took}
            best = min(sums, key=lambda i: sums[i])
            if sums[best] >= sum(one.unpacked for one in same):
                continue
            shape = SHAPES[best]
            if last is not None:
                before = SHAPES.index(table[last])
                if sums.get(before, float("inf")) <= NEAR * sums[best]:
                    shape = table.pop(last)
            last = kind, rows
            table[last] = shape
    return tables


def print_tables(tables: dict[int, dict[tuple[str, int], TallShape]]) -> None:
    print("_HOPPER: dict[int, TallShapes] = {")
    for bits, table in tables.items():
        print(f"    {bits}: {{")
        for (kind, rows), shape in table.items():
            print(f'        ("{kind}", {rows}): TallShape({text(shape)}),')
        print("    },")
    print("}")


def text(shape: TallShape) -> str:
    cut = shape.tokens, shape.groups, shape.row_tiles, shape.stages, shape.ahead, shape.cluster, shape.blocks
    return ", ".join(map(str, cut))


@functools.cache
def kernel_of(label: str, index: int) -> TallGemm | None:
    device, shape = torch.device("cuda", torch.cuda.current_device()), SHAPES[index]
    if shape.blocks * (shape.shared_bytes(WIDTHS[label].part) + 1024) > 228 << 10:
        return None
    return TallGemm(device, WIDTHS[label], named(index))


def main(seconds: float) -> None:
    begin, found = time.monotonic(), list[Measured]()
    jobs = [(label, index) for label in WIDTHS for index in range(len(SHAPES))]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        failed = list(filter(None, workers.map(compile_one, *zip(*jobs, strict=True))))
    print(f"{len(jobs)} modules, {time.monotonic() - begin:.0f} s to compile; failed: {failed[:3]}", flush=True)
    for label in sorted(WIDTHS, key=lambda label: label not in TIMED):
        for product in PRODUCTS:
            try:
                if label in TIMED:
                    found += cells(label, product, begin + seconds)
                elif product.depth == PRODUCTS[0].depth:
                    kernels = [kernel_of(label, i) for i in range(len(SHAPES))]
                    right(label, product, kernels, packed(product, WIDTHS[label]))
            except RuntimeError as error:  # behind some errors a device gives no more results
                print(f"WRONG: {label} {product.name}: {str(error)[:300]}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s; rows, microseconds: best, dequantised and cuBLAS, cuBLAS in bfloat16, "
          "the share of its rate; best three: tokens, groups, row tiles, stages, ahead, cluster, blocks")  # fmt: skip
    print("\n".join(map(str, found)))
    print_tables(chosen(found))


if __name__ == "__main__":
    main(next((float(word) for word in sys.argv[1:] if word not in MODELS), 75.0))
