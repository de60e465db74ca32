"""GEMMs in fp8 x fp8 (gemm_fp8.cu) with the weights of Qwen3.5-27B or, with `8b`, of Llama 3.1 8B: their times.

    python benchmarks/gpu_kernels/fp8.py [8b]

By rows of x: microseconds with x in bfloat16, which a kernel quantises first, and in fp8; what weights are read at, and
operations. `all`: one after the other. Weights are random, and more than the L2 cache holds.
"""

from __future__ import annotations

import sys

import torch
from timing import read_rate, replay_us
from torch import Tensor

from draftwing.ops.fp8.spec import TALL, WIDE, Fp8Blocks, Fp8Rows
from draftwing.ops.gemm.cuda_fp8 import Fp8Gemm, fp8_gemm

PRODUCTS = {  # rows and columns of a weight; are they gates and ups
    "27b": {
        "gates and ups": (34816, 5120, True),
        "down": (5120, 17408, False),
        "q, k, v and z": (16384, 5120, False),
        "q, k, v": (14336, 5120, False),
        "o": (5120, 6144, False),
    },
    "8b": {
        "gates and ups": (28672, 4096, True),
        "down": (4096, 14336, False),
        "q, k, v": (6144, 4096, False),
        "o": (4096, 4096, False),
    },
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
BYTES = 400 << 20  # of weights that take turns
LAUNCHES = 12  # of a product in a graph, at least


def weight_of(rows: int, columns: int) -> Fp8Blocks:
    codes = torch.randn(columns // WIDE, rows, WIDE, device="cuda") * 60
    scales = torch.rand(rows // TALL, columns // WIDE, device="cuda") * 1e-3
    return Fp8Blocks(codes.to(torch.float8_e4m3fn), scales)


def run(gemm: Fp8Gemm, x: Tensor | Fp8Rows, weight: Fp8Blocks, gated: bool) -> Tensor:
    return gemm.gated(x, weight, None) if gated else gemm.linear(x, weight, None)


def each_us(gemm: Fp8Gemm, x: Tensor | Fp8Rows, weights: list[Fp8Blocks], gated: bool) -> float:
    count = len(weights) * -(-LAUNCHES // len(weights))

    def products() -> None:
        for i in range(count):
            run(gemm, x, weights[i % len(weights)], gated)

    return replay_us(products) / count


def layers_us(
    gemm: Fp8Gemm, rows: int, layers: list[dict[str, Fp8Blocks]], shapes: dict[str, tuple[int, int, bool]]
) -> float:
    """Of all products of one of these layers, one after the other."""
    inputs = {columns: torch.randn(rows, columns, device="cuda").bfloat16() for _, columns, _ in shapes.values()}

    def chain() -> None:
        for layer in layers:
            for name, (_, columns, gated) in shapes.items():
                run(gemm, inputs[columns], layer[name], gated)

    return replay_us(chain) / len(layers)


def main() -> None:
    shapes = PRODUCTS["8b" if "8b" in sys.argv[1:] else "27b"]
    gemm = fp8_gemm(torch.device("cuda", torch.cuda.current_device()))
    print(f"{torch.cuda.get_device_name()}, a pure read {read_rate() / 1e6:.2f} TB/s")
    for name, (height, columns, gated) in shapes.items():
        weights = [weight_of(height, columns) for _ in range(-(-BYTES // (height * columns)))]
        for rows in ROWS:
            x = torch.randn(rows, columns, device="cuda").bfloat16()
            whole, took = (each_us(gemm, given, weights, gated) for given in (x, gemm.quantise(x)))
            size = height * columns
            print(
                f"{name} {height} x {columns}, {rows} rows: {whole:.1f} and {took:.1f} us, "
                f"{size / took / 1e6:.2f} TB/s, {2e-6 * size * rows / took:.0f} TFLOP/s",
                flush=True,
            )
        del weights
    layers = [{name: weight_of(*shape[:2]) for name, shape in shapes.items()} for _ in range(2)] * 4
    for rows in ROWS:
        print(f"all, {rows} rows: {layers_us(gemm, rows, layers, shapes):.1f} us", flush=True)


if __name__ == "__main__":
    main()
