"""GEMMs in bfloat16 with the weights of Llama 3.1 8B or, with `27b`, of Qwen3.5-27B: gemm_dense.cu, for many rows
gemm_dense_many.cu, gemm.cu, cuBLAS.

    python benchmarks/gpu_kernels/dense.py [27b] [rows=512,2048,8192] [2048x2048 ...]

By rows of x: microseconds of a product among others in a graph, by turns, and what the weights are read at by the
first; `many` and `few`: gemm_dense_many.cu and gemm.cu, whatever is chosen. cuBLAS gives gates and ups, the others
silu(gates) * ups. `all`: the products of a layer one after the other; `rows x columns` of other weights take their
place. Weights are random, and more than the L2 cache holds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from fp8 import BYTES, LAUNCHES, PRODUCTS
from timing import read_rate, replay_us
from torch import Tensor

from draftwing.ops.gemm import cuda_dense, cuda_many
from draftwing.ops.gemm.contract import DenseKernels
from draftwing.ops.gemm.cuda import small_m_gemm

ROWS = (1, 8, 16, 17, 32, 64, 96, 128)
FEW, MANY = 64, 128  # rows up to which gemm.cu is timed, and above which gemm_dense_many.cu
TURNS = 3
Product = Callable[[Tensor, Tensor, bool], Tensor]


def weight_of(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda").mul_(0.02).bfloat16()


def own(gemm: DenseKernels) -> Product:
    return lambda x, weight, gated: gemm.gated(x, weight, None) if gated else gemm.linear(x, weight, None)


def many(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    ranges = cuda_dense.ranges_of(*weight.shape)
    return cuda_many.many_gemm(x.device, x.dtype, ranges).run(x, weight, None, None, gated, False)


def fits(name: str, rows: int) -> bool:
    return (name != "few" or rows <= FEW) and (name != "many" or rows > MANY)


def times(calls: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Microseconds of one of `count` products that each call makes, medians."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            found[name].append(replay_us(call) / count)
    return {name: statistics.median(took) for name, took in found.items()}


def products(given: dict[str, Product], x: Tensor, weights: list[Tensor], gated: bool) -> dict[str, float]:
    count = len(weights) * -(-LAUNCHES // len(weights))
    calls = {
        name: lambda product=product: [product(x, weights[i % len(weights)], gated) for i in range(count)]
        for name, product in given.items()
        if fits(name, len(x))
    }
    return times(calls, count)


def main() -> None:
    shapes = PRODUCTS["27b" if "27b" in sys.argv[1:] else "8b"]
    chosen = [word.removeprefix("rows=") for word in sys.argv[1:] if word.startswith("rows=")]
    counts = [int(rows) for word in chosen for rows in word.split(",")] or ROWS
    others = [tuple(map(int, word.split("x"))) for word in sys.argv[1:] if "x" in word and "=" not in word]
    if others:
        shapes = {f"weight {i}": (height, columns, False) for i, (height, columns) in enumerate(others)}
    device = torch.device("cuda", torch.cuda.current_device())
    given: dict[str, Product] = {
        "ours": own(cuda_dense.dense_gemm(device)),
        "many": many,
        "few": own(small_m_gemm(device, torch.bfloat16)),
        "cuBLAS": lambda x, weight, gated: torch.mm(x, weight.T),
    }
    print(f"{torch.cuda.get_device_name()}, a pure read {read_rate() / 1e6:.2f} TB/s")
    for name, (height, columns, gated) in shapes.items():
        weights = [weight_of(height, columns) for _ in range(max(2, -(-BYTES // (height * columns * 2))))]
        for rows in counts:
            took = products(given, torch.randn(rows, columns, device="cuda").bfloat16(), weights, gated)
            rate = height * columns * 2 / took["ours"] / 1e6
            words = ", ".join(f"{which} {us:.1f}" for which, us in took.items())
            print(
                f"{name} {height} x {columns}, {rows} rows: {words} us, {rate:.2f} TB/s, {2 * rows * rate:.0f} TFLOP/s",
                flush=True,
            )
        del weights
    layers = [{name: weight_of(*shape[:2]) for name, shape in shapes.items()} for _ in range(4)]
    for rows in counts:
        inputs = {columns: torch.randn(rows, columns, device="cuda").bfloat16() for _, columns, _ in shapes.values()}
        steps = [(inputs[shape[1]], layer[name], shape[2]) for layer in layers for name, shape in shapes.items()]
        calls = {
            which: lambda product=product, steps=steps: [product(*step) for step in steps]
            for which, product in given.items()
            if fits(which, rows)
        }
        took = times(calls, len(layers))
        print(f"all, {rows} rows: {', '.join(f'{which} {us:.1f}' for which, us in took.items())} us", flush=True)


if __name__ == "__main__":
    main()
