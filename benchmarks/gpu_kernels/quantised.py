"""GEMMs of few rows with quantised weights: gemm_groups.cu against the bfloat16 ones, alone and as a model's layers.

    python benchmarks/gpu_kernels/quantised.py            # tables
    python benchmarks/gpu_kernels/quantised.py steps      # and whole steps of the engine, random weights
    python benchmarks/gpu_kernels/quantised.py prompts    # and where multiplying the matrix out begins to be worth it

Shapes are those of an 8B Llama model; with `32b` or `27b` of Qwen2.5-32B or of
Qwen3.5-27B's delta nets (whole steps are those of 8B). Weights are not in cache: each product runs over so many
different ones. The floor of a product is the time to read its weight, scales included, at `timing.read_rate`.
`tools/tune_gemms.py` tries other shapes.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import step
import torch
from timing import read_rate, replay_us
from torch import Tensor

from draftwing.ops.gemm.cuda import SmallMGemm, small_m_gemm
from draftwing.ops.gemm.cuda_groups import GroupGemm, Width, group_gemm
from draftwing.ops.gemm.groups import WHOLE, PackedGroups, pack
from draftwing.ops.gemm.shapes import Shapes
from draftwing.ops.gemm.stored import QuantizedRows

COLD = 160 << 20  # bytes of different weights, more than the cache holds
LAYERS = 32


class Product(NamedTuple):
    name: str
    features: int
    depth: int
    kind: str  # of kernel


def products(hidden: int, qkv: int, ffn: int, made: int = 0) -> tuple[Product, ...]:
    """made: columns of the matrix behind the heads, where they are not `hidden`."""
    return (
        Product("qkv", qkv, hidden, "plain"),
        Product("o", hidden, made or hidden, "add"),
        Product("gate_up", 2 * ffn, hidden, "silu"),
        Product("down", hidden, ffn, "add_long"),
    )


MODELS = {
    "8b": products(4096, 6144, 14336),
    "32b": products(5120, 7168, 27648),
    "27b": products(5120, 16384, 17408, 6144),
}
PRODUCTS = MODELS[next((word for word in sys.argv[1:] if word in MODELS), "8b")]
WIDTHS = {
    "fp8": Width(8, False, WHOLE, True),
    "fp8 blocks": Width(8, False, 1, True),
    "int4": Width(4, False, 1),
    "int8": Width(8, False, WHOLE),
    "int4 with zeros": Width(4, True, 1),
}


LABELS = ("bfloat16", *WIDTHS)


def each_us(fn: Callable[[Any], object], weights: Sequence[Any], repeats: int = 30) -> float:
    """Microseconds of one call with one of the weights, the least of several measurements."""
    return replay_us(lambda: [fn(w) for w in weights], repeats, least=True) / len(weights)


def packed(product: Product, width: Width) -> PackedGroups:
    """A random weight: 8 bits with a scale for each row or block of 128 x 128, 4 bits in groups of 128."""
    rows, columns = product.features, product.depth
    if width.bits == 8 and not width.fp8:
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device="cuda")
        scales = torch.full((rows, 1), columns**-0.5 / 64, device="cuda")
        return pack(QuantizedRows(codes, 8, scales, None, 1, columns, None), torch.bfloat16, "cuda")
    if width.fp8:
        codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        tall, wide = (1, columns) if width.shift == WHOLE else (128, 128)
        scales = torch.full((-(-rows // tall), columns // wide), columns**-0.5 / 128, device="cuda")
        return pack(QuantizedRows(codes, 8, scales, None, tall, wide, None), torch.bfloat16, "cuda")
    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, device="cuda")
    scales = torch.full((rows, columns // 128), columns**-0.5 / 4, device="cuda")
    zeros = torch.zeros(scales.shape, dtype=torch.int16, device="cuda") if width.zeros else None
    return pack(QuantizedRows(codes, 4, scales, zeros, 1, 128, None), torch.bfloat16, "cuda")


def copies(weight: PackedGroups, most: int = 24) -> list[PackedGroups]:
    """The weight so often that it is not in cache when its turn comes again."""
    count = max(2, min(most, -(-COLD // weight.nbytes)))
    return [weight, *(PackedGroups(*(part.clone() if isinstance(part, Tensor) else part for part in weight))
                      for _ in range(count - 1))]  # fmt: skip


def call(ours: SmallMGemm | GroupGemm, product: Product, x: Tensor, extra: Tensor, w: Any) -> Tensor:
    if product.kind == "silu":
        return ours.gated(x, w, None)
    return ours.linear(x, w, None, extra if product.kind.startswith("add") else None)


def inputs(product: Product, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, product.depth, device="cuda").bfloat16()
    return x, torch.randn(rows, product.features, device="cuda").bfloat16()


# -- tables -----------------------------------------------------------------------------------------------------------


def kernels(chosen: dict[int, Shapes]) -> dict[str, SmallMGemm | GroupGemm]:
    """chosen: shapes by bits, 16: of bfloat16, in place of those of `shapes_for`."""
    device = torch.device("cuda", torch.cuda.current_device())
    found: dict[str, SmallMGemm | GroupGemm] = {"bfloat16": SmallMGemm(device, torch.bfloat16, shapes=chosen.get(16))}
    for label, width in WIDTHS.items():
        found[label] = GroupGemm(device, torch.bfloat16, width, chosen.get(width.bits))
    return found


def check(chosen: dict[int, Shapes]) -> None:
    """Raises unless each kernel gives the bits of the bfloat16 kernel of one row with the dequantised matrix."""
    dense = small_m_gemm(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    for (label, ours), product in itertools.product(kernels(chosen).items(), PRODUCTS):
        weight = weights_of(product, label)[0]
        matrix = weight if isinstance(weight, Tensor) else ours.dense(weight)
        x, extra = inputs(product, 128)
        each = [call(dense, product, x[i : i + 1], extra[i : i + 1], matrix) for i in range(len(x))]
        for rows in (1, 2, 3, 7, 8, 16, 17, 32, 33, 64, 100, 128):
            got, expected = call(ours, product, x[:rows], extra[:rows], weight), torch.cat(each[:rows])
            assert torch.equal(got, expected), (label, product.name, rows)
    print("all bits are those of the dequantised matrices, one row at a time")


def table(
    chosen: dict[int, Shapes], row_counts: tuple[int, ...] = (1, 8, 16, 32, 64), labels: tuple[str, ...] = LABELS
) -> None:
    """chosen: as for `kernels`. Each product, and 32 layers of them."""
    chains: list[tuple[str, list[tuple[float, int]]]] = []
    print(f"{'':28s}{'floor':>8s}  " + "".join(f"{rows:>4d} rows: us, GB/s, share" for rows in row_counts))
    for label, ours in kernels(chosen).items():
        if label not in labels:
            continue
        every = []
        for product in PRODUCTS:
            weights = weights_of(product, label)
            every.append(weights)
            line = [
                (each_us(functools.partial(call, ours, product, *inputs(product, rows)), weights), weights[0].nbytes)
                for rows in row_counts
            ]
            show(f"{product.name}, {label}", line)
            if label == "bfloat16":
                line = [(each_us(functools.partial(mm, inputs(product, rows)[0]), weights), weights[0].nbytes)
                        for rows in row_counts]  # fmt: skip
                show(f"{product.name}, cuBLAS", line)
        size = LAYERS * sum(each[0].nbytes for each in every)
        for least in (True, False):
            took = [replay_us(functools.partial(chain, ours, every, rows), 30, least) for rows in row_counts]
            name = f"{label}, {'least' if least else 'median'}"
            chains.append((name, [(each, size) for each in took]))
    for label, line in chains:
        show(f"{LAYERS} layers, {label}", line)


def mm(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w.t())


def weights_of(product: Product, label: str) -> list[Any]:
    """So many that they are not in cache. label: of `WIDTHS`, or bfloat16."""
    if label in WIDTHS:
        return copies(packed(product, WIDTHS[label]))
    shape = (product.features, product.depth)
    return [torch.randn(shape, device="cuda").mul_(0.02).bfloat16() for _ in range(8)]


def prompts() -> None:
    """Where multiplying the matrix out begins to be worth it."""
    device = torch.device("cuda", torch.cuda.current_device())
    for label in ("fp8", "int4"):
        ours = group_gemm(device, torch.bfloat16, WIDTHS[label])
        for product in PRODUCTS:
            weights, cells = copies(packed(product, WIDTHS[label]), 6), []
            for rows in (64, 96, 128, 192, 256, 512, 2048):
                x, extra = inputs(product, rows)
                kernel = each_us(functools.partial(call, ours, product, x, extra), weights)
                dense = each_us(functools.partial(unpack_first, ours, x), weights)
                cells.append(f"{rows}: {kernel:.0f} / {dense:.0f}")
            print(
                f"{product.name}, {label}: kernel / dequantised and cuBLAS, us by rows: {', '.join(cells)}",
                flush=True,
            )


def unpack_first(ours: GroupGemm, x: Tensor, w: PackedGroups) -> Tensor:
    return torch.mm(x, ours.dense(w).t())


def show(what: str, line: list[tuple[float, int]]) -> None:
    """line: microseconds and bytes, by rows."""
    cells = "".join(f"{took:10.1f} {size / took / 1e3:6.0f} {size / read_rate() / took:6.0%}" for took, size in line)
    print(f"{what:28s}{line[0][1] / read_rate():8.1f}  {cells}", flush=True)


def chain(ours: SmallMGemm | GroupGemm, weights: list[list[Any]], rows: int) -> Tensor:
    """Layers without attention, as in skinny.py."""
    from draftwing.ops.norms.triton import add_rms_norm, rms_norm

    hidden = PRODUCTS[0].depth
    norm, x = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), inputs(PRODUCTS[0], rows)[0]
    qkv, o, up, down = weights
    for i in range(LAYERS):
        attended = ours.linear(rms_norm(x, norm, 1e-5), qkv[i % len(qkv)], None)
        summed = ours.linear(attended[:, :hidden].contiguous(), o[i % len(o)], None)
        y, normed = add_rms_norm(x, summed, norm, 1e-5)
        x = ours.linear(ours.gated(normed, up[i % len(up)], None), down[i % len(down)], None, y)
    return x


def steps(sizes: tuple[int, ...] = (1, 16, 64)) -> None:
    """Steps without drafts, in microseconds, vs the time to read all their matrices."""
    lines = []
    for scheme in ("none", "fp8", "w4a16"):
        with tempfile.TemporaryDirectory() as folder:
            given = {"speculative_algorithm": "none", "quantization": scheme, "cuda_graph_max_bs": max(sizes)}
            parts = step.build(Path(folder), given, False)
        model = parts.executor.model
        size, totals = sum(model.weight_bytes().values()), dict.fromkeys(sizes, 0.0)
        with torch.inference_mode():
            for key, _, replay in step.stages(parts.executor.graphs, list(sizes)):
                totals[key.size] += step.microseconds(replay)
        lines.append((f"step, --quantization {scheme}", [(took, size) for took in totals.values()]))
        del parts, model
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{'':28s}{'floor':>8s}  " + "".join(f"{rows:>4d} rows: us, GB/s, share" for rows in sizes))
    for label, line in lines:
        show(label, line)


if __name__ == "__main__":
    check({})
    table({}, (1, 16, 64) if "steps" in sys.argv else (1, 8, 16, 32, 64, 128))
    if "steps" in sys.argv:
        steps()
    if "prompts" in sys.argv:
        prompts()
