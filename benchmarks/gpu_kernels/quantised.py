"""GEMMs of few rows with quantised weights: gemm_groups.cu against the bfloat16 ones, alone and as a model's layers.

    python benchmarks/gpu_kernels/quantised.py            # tables
    python benchmarks/gpu_kernels/quantised.py sweep      # other ways to cut the work, the best of each kind

Shapes are those of an 8B Llama model. Weights are not in cache: each product runs over so many different ones. The
floor of a product is the time to read its weight, scales included, at `READ_RATE`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import replay_us
from torch import Tensor

from draftwing.ops.cuda.gemm import Shape, SmallMGemm, few_rows, shared, small_m_gemm
from draftwing.ops.cuda.gemm_groups import GroupGemm, Shapes, Width, compile_ahead, group_gemm
from draftwing.ops.groups import WHOLE, PackedGroups, pack
from draftwing.ops.types import QuantizedRows

READ_RATE = 4.55e6  # bytes per microsecond, a pure read on an H200
COLD = 160 << 20  # bytes of different weights, more than the cache holds
LAYERS = 32
REGISTERS, SHARED_BYTES, CAPABILITY = 65536, 99 << 10, (9, 0)


class Product(NamedTuple):
    name: str
    features: int
    depth: int
    kind: str  # of kernel


PRODUCTS = (
    Product("qkv", 6144, 4096, "plain"),
    Product("o", 4096, 4096, "add"),
    Product("gate_up", 28672, 4096, "silu"),
    Product("down", 4096, 14336, "add_long"),
)
WIDTHS = {"fp8": Width(8, False, WHOLE), "int4": Width(4, False, 1), "int4 with zeros": Width(4, True, 1)}


def each_us(fn: Callable[[Any], object], weights: Sequence[Any], repeats: int = 9) -> float:
    """Microseconds of one call with one of the weights."""
    return replay_us(lambda: [fn(w) for w in weights], repeats) / len(weights)


def packed(product: Product, width: Width) -> PackedGroups:
    """A random weight: fp8 with a scale for each row, 4 bits in groups of 128."""
    rows, columns = product.features, product.depth
    if width.bits == 8:
        codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        scales = torch.full((rows, 1), columns**-0.5 / 128, device="cuda")
        return pack(QuantizedRows(codes, 8, scales, None, 1, columns, None), torch.bfloat16, "cuda")
    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, device="cuda")
    scales = torch.full((rows, columns // 128), columns**-0.5 / 4, device="cuda")
    zeros = torch.zeros(scales.shape, dtype=torch.int16, device="cuda") if width.zeros else None
    return pack(QuantizedRows(codes, 4, scales, zeros, 1, 128, None), torch.bfloat16, "cuda")


def copies(weight: PackedGroups, most: int = 24) -> list[PackedGroups]:
    """The weight so often that it is not in cache when its turn comes again."""
    count = max(2, min(most, -(-COLD // weight.nbytes)))
    return [weight, *(PackedGroups(*(part.clone() if isinstance(part, Tensor) else part for part in weight))
                      for _ in range(count - 1))]  # fmt: skip


def call(ours: GroupGemm, product: Product, x: Tensor, extra: Tensor, w: PackedGroups) -> Tensor:
    if product.kind == "silu":
        return ours.gated(x, w, None)
    return ours.linear(x, w, None, extra if product.kind.startswith("add") else None)


def call_dense(gemm: SmallMGemm | None, product: Product, x: Tensor, w: Tensor) -> Tensor:
    """By cuBLAS, or by a GEMM of ours."""
    if gemm is None:
        return torch.mm(x, w.t())
    return gemm.gated(x, w, None) if product.kind == "silu" else gemm.linear(x, w, None)


def inputs(product: Product, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, product.depth, device="cuda").bfloat16()
    return x, torch.randn(rows, product.features, device="cuda").bfloat16()


# -- tables -----------------------------------------------------------------------------------------------------------


def check() -> None:
    """Raises unless each kernel gives the bits of the bfloat16 kernel with the matrix multiplied out."""
    dense = small_m_gemm(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    for label, width in WIDTHS.items():
        ours = group_gemm(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, width)
        for product in PRODUCTS:
            weight = packed(product, width)
            matrix = ours.dense(weight)
            for rows in (1, 7, 8, 16, 17, 32, 33, 64, 100):
                x, extra = inputs(product, rows)
                got = call(ours, product, x, extra, weight)
                if product.kind == "silu":
                    expected = dense.gated(x, matrix, None)
                else:
                    expected = dense.linear(x, matrix, None, extra if product.kind.startswith("add") else None)
                assert torch.equal(got, expected), (label, product.name, rows)
    print("all bits are those of the matrices multiplied out")


def table(chosen: dict[int, Shapes], row_counts: tuple[int, ...] = (1, 8, 16, 32, 64)) -> None:
    """chosen: shapes by bits, in place of those of `shapes_for`."""
    device = torch.device("cuda", torch.cuda.current_device())
    plain = small_m_gemm(device, torch.bfloat16)
    kernels = {
        label: GroupGemm(device, torch.bfloat16, width, chosen.get(width.bits)) for label, width in WIDTHS.items()
    }
    chains: dict[str, list[list[PackedGroups]]] = {}
    print(f"{'':28s}{'floor':>8s}  " + "".join(f"{rows:>4d} rows: us, GB/s, share" for rows in row_counts))
    for product in PRODUCTS:
        matrices = [torch.randn(product.features, product.depth, device="cuda").mul_(0.02).bfloat16() for _ in range(4)]
        line = []
        for rows in row_counts:
            x, _ = inputs(product, rows)
            took = min(each_us(functools.partial(call_dense, gemm, product, x), matrices) for gemm in (plain, None))
            line.append((took, matrices[0].nbytes))
        show(f"{product.name}, bfloat16 (best)", line)
        for label, ours in kernels.items():
            weights = copies(packed(product, WIDTHS[label]))
            chains.setdefault(label, []).append(weights)
            line = [
                (each_us(functools.partial(call, ours, product, *inputs(product, rows)), weights), weights[0].nbytes)
                for rows in row_counts
            ]
            show(f"{product.name}, {label}", line)
    for label, every in chains.items():
        size = LAYERS * sum(each[0].nbytes for each in every)
        line = [(replay_us(functools.partial(chain, kernels[label], every, rows)), size) for rows in row_counts]
        show(f"chain of {LAYERS} layers, {label}", line)


def prompts() -> None:
    """Where multiplying the matrix out begins to be worth it."""
    device = torch.device("cuda", torch.cuda.current_device())
    for label in ("fp8", "int4"):
        ours = group_gemm(device, torch.bfloat16, WIDTHS[label])
        for product in PRODUCTS:
            weights, cells = copies(packed(product, WIDTHS[label]), 6), []
            for rows in (64, 96, 128, 192, 256, 512, 2048):
                x, extra = inputs(product, rows)
                kernel = each_us(functools.partial(call, ours, product, x, extra), weights, 3)
                dense = each_us(functools.partial(unpack_first, ours, x), weights, 3)
                cells.append(f"{rows}: {kernel:.0f} / {dense:.0f}")
            print(
                f"{product.name}, {label}: kernel / multiplied out and cuBLAS, us by rows: {', '.join(cells)}",
                flush=True,
            )


def unpack_first(ours: GroupGemm, x: Tensor, w: PackedGroups) -> Tensor:
    return torch.mm(x, ours.dense(w).t())


def show(what: str, line: list[tuple[float, int]]) -> None:
    """line: microseconds and bytes, by rows."""
    cells = "".join(f"{took:10.1f} {size / took / 1e3:6.0f} {size / READ_RATE / took:6.0%}" for took, size in line)
    print(f"{what:28s}{line[0][1] / READ_RATE:8.1f}  {cells}", flush=True)


def chain(ours: GroupGemm, weights: list[list[PackedGroups]], rows: int) -> Tensor:
    """Layers without attention, as in skinny.py."""
    from draftwing.ops.triton.layers import add_rms_norm, rms_norm

    hidden = PRODUCTS[0].depth
    norm, x = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), inputs(PRODUCTS[0], rows)[0]
    qkv, o, up, down = weights
    for i in range(LAYERS):
        attended = ours.linear(rms_norm(x, norm, 1e-5), qkv[i % len(qkv)], None)
        summed = ours.linear(attended[:, :hidden].contiguous(), o[i % len(o)], None)
        y, normed = add_rms_norm(x, summed, norm, 1e-5)
        x = ours.linear(ours.gated(normed, up[i % len(up)], None), down[i % len(down)], None, y)
    return x


# -- other ways to cut the work ---------------------------------------------------------------------------------------


def candidates(bits: int, kind: str, tile: int) -> Iterator[Shape]:
    """Shapes whose registers are likely to do."""
    gated, tokens = kind == "silu", tile // 8
    for row_tiles, ahead, blocks in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 3, 4)):
        held = ahead * row_tiles * (bits + 1)  # registers with weights on their way
        if (gated and row_tiles == 1) or not 8 <= held <= 96:
            continue

        def flies(warps: int, part: int = ahead * row_tiles * bits, blocks: int = blocks) -> bool:
            return 24 << 10 <= 32 * warps * blocks * part * 4 <= 160 << 10  # bytes on their way to a multiprocessor

        for x_ahead in (2, 4, 8) if tile == 8 else (1, 2, 4):
            registers = held + x_ahead * tokens * 8 + row_tiles * tokens * 4 + 40
            if tile <= 16 and flies(8) and ahead % x_ahead == 0 and registers <= REGISTERS // (256 * blocks):
                yield few_rows(tile, row_tiles, ahead, x_ahead, blocks)
        for warps, stages, cluster in itertools.product(
            ((2, 1), (4, 1), (8, 1), (1, 8), (2, 4), (4, 2), (2, 2), (1, 4)), (4, 8), (1, 2, 4, 8)
        ):
            parts, threads = warps[1] * cluster, 32 * warps[0] * warps[1]
            registers = held + row_tiles * (tokens * 4 * (2 if parts == 1 else 1) + 8) + 40
            if parts not in (1, 8) or not flies(threads // 32) or registers > min(255, REGISTERS // (threads * blocks)):
                continue
            shape = shared(tile, warps, row_tiles, ahead, stages, blocks, cluster)
            if shape.shared <= SHARED_BYTES and blocks * shape.shared <= 200 << 10 and blocks * threads >= 128:
                yield shape


def chosen(bits: int, product: Product, tile: int, most: int) -> list[Shape]:
    """Candidates with enough blocks for the device, and enough bytes on their way; at most so many, spread evenly."""
    fit = []
    for shape in candidates(bits, product.kind, tile):
        width = product.features // (2 if product.kind == "silu" else 1)
        blocks = shape.grid(product.kind, tile, width)[0]
        if blocks * shape.warps >= 132 * 4 and shape.features >= (16 if tile <= 16 else 32):
            fit.append(shape)
    step = max(1.0, len(fit) / most)
    return [fit[int(i * step)] for i in range(min(most, len(fit)))]


def width_of(bits: int) -> Width:
    return WIDTHS["fp8" if bits == 8 else "int4"]


def compile_one(job: tuple[Width, str, list[Shape]]) -> str | None:
    """Fills the cache; runs in a process without a GPU."""
    width, kind, shapes = job
    try:
        compile_ahead(torch.bfloat16, width, CAPABILITY, named(kind, shapes))
    except RuntimeError as error:
        return str(error)[-300:]
    return None


def named(kind: str, shapes: list[Shape]) -> dict[tuple[str, int], Shape]:
    return {(kind, i): shape for i, shape in enumerate(shapes)}


def timed(
    ours: GroupGemm, product: Product, weights: list[PackedGroups], kind: str, shapes: list[Shape]
) -> Iterator[tuple[float, float, Shape]]:
    """Microseconds with as many rows as a block takes, and with one where that is up to 8."""
    for i, shape in enumerate(shapes):
        ours.only = kind, i
        try:
            call(ours, product, *inputs(product, shape.tokens), weights[0])
        except RuntimeError as error:  # there is no room for it
            print(shape.call, error)
            continue
        many, one = (functools.partial(call, ours, product, *inputs(product, rows)) for rows in (shape.tokens, 1))
        took = each_us(many, weights, 3)
        yield took, each_us(one, weights, 3) if shape.tokens == 8 else took, shape


def sweep(most: int = 48) -> dict[int, Shapes]:
    """The best shapes by bits."""
    jobs = {}
    for bits, product, tile in itertools.product((4, 8), PRODUCTS, (8, 16, 32, 64)):
        shapes = chosen(bits, product, tile, most)
        for part in range(0, len(shapes), 8):
            jobs[bits, product, tile, part] = (width_of(bits), product.kind, shapes[part : part + 8])
    begin = time.monotonic()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        failed = dict(zip(jobs, pool.map(compile_one, jobs.values()), strict=True))
    print(f"compiled {sum(len(job[2]) for job in jobs.values())} kernels in {time.monotonic() - begin:.0f} s; failed:",
          [(key[0], key[1].name, key[2], error) for key, error in failed.items() if error][:3], flush=True)  # fmt: skip
    device, results = torch.device("cuda", torch.cuda.current_device()), []
    best: dict[int, Shapes] = {4: {}, 8: {}}
    for bits, product in itertools.product((4, 8), PRODUCTS):
        weights = copies(packed(product, width_of(bits)), 12)
        floor = weights[0].nbytes / READ_RATE
        for tile in (8, 16, 32, 64):
            found: list[tuple[float, float, Shape]] = []
            for key, (width, kind, shapes) in jobs.items():
                if key[:3] == (bits, product, tile) and not failed[key]:
                    ours = GroupGemm(device, torch.bfloat16, width, named(kind, shapes))
                    found += timed(ours, product, weights, kind, shapes)
            found.sort(key=lambda item: item[0] + 2 * item[1])  # one row is what matters most of up to 8
            best[bits][product.kind, tile] = found[0][2]
            for took, single, shape in found[:2]:
                print(f"{bits} {product.name:8s}{tile:3d} {single:6.1f} ({floor / single:4.0%}) {took:6.1f} "
                      f"({floor / took:4.0%}) {shape.call} | {shape.blocks}", flush=True)  # fmt: skip
            results += [(bits, product.name, tile, took, single, shape.call, shape.blocks)
                        for took, single, shape in found]  # fmt: skip
            if "OUT" in os.environ:
                Path(os.environ["OUT"], "sweep.json").write_text(json.dumps(results))
    return best


if __name__ == "__main__":
    check()
    found: dict[int, Shapes] = {}
    if "sweep" in sys.argv:
        found = sweep()
    table(found)
    prompts()
