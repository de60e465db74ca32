"""GEMMs in fp8 x fp8 (gemm_fp8.cu) with the weights of Qwen3.5-27B, Llama 3.1 8B or 70B: their times.

    python benchmarks/gpu_kernels/fp8.py [27b] [8b] [70b] [rows=256,512,2048,8192] [torch]

By rows of x: microseconds with x in bfloat16, which a kernel quantises first, and in fp8; what weights are read at, and
operations. `all`: one after the other. `torch`: beside `torch._scaled_mm`, whose x is in fp8, too, by the scales that
it is given: of a row of x and a row of the weight, or of 128 columns of x and 128 rows and columns of the weight; its
time by ours. It has no activation behind gates and ups. Weights are random, and more than the L2 cache holds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
    "70b": {
        "gates and ups": (57344, 8192, True),
        "down": (8192, 28672, False),
        "q, k, v": (10240, 8192, False),
        "o": (8192, 8192, False),
    },
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
BYTES = 400 << 20  # of weights that take turns
DEVICE = torch.device("cuda")
LAUNCHES = 12  # of a product in a graph, at least


def weight_of(rows: int, columns: int) -> Fp8Blocks:
    codes = torch.randn(columns // WIDE, rows, WIDE, device=DEVICE) * 60
    scales = torch.rand(rows // TALL, columns // WIDE, device=DEVICE) * 1e-3
    return Fp8Blocks(codes.to(torch.float8_e4m3fn), scales)


def codes_of(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns, device=DEVICE) * 60).to(torch.float8_e4m3fn)


def scaled_us(by: str, x: Tensor, weights: list[Tensor]) -> float:
    """Microseconds of torch's product with weights [rows, columns]; by: a scale for "rows" or for "blocks"."""
    (rows, columns), height, count = x.shape, len(weights[0]), len(weights) * -(-LAUNCHES // len(weights))
    if by == "rows":
        of_x, of_weight = torch.ones(rows, 1, device=DEVICE), torch.ones(1, height, device=DEVICE)
    else:  # rows of scales of a weight begin at 16 bytes, those of x lie by column
        groups = columns // WIDE
        of_x = torch.ones(groups, rows, device=DEVICE).t()
        of_weight = torch.ones(height // WIDE, -(-groups // 4) * 4, device=DEVICE)[:, :groups].t()

    def products() -> None:
        for i in range(count):
            weight = weights[i % len(weights)].t()
            torch._scaled_mm(x, weight, of_x, of_weight, out_dtype=torch.bfloat16, use_fast_accum=by == "rows")

    return replay_us(products) / count


def beside(x: Tensor, weights: list[Tensor], took: float) -> str:
    """Returns what torch's products take, and that by `took`."""
    found = []
    for by in ("rows", "blocks"):
        try:
            theirs = scaled_us(by, x, weights)
            found.append(f"{theirs:.1f} us by {by} ({theirs / took:.2f})")
        except (RuntimeError, ValueError) as error:
            found.append(f"none by {by} ({str(error).splitlines()[0][:60]})")
    return "; torch " + ", ".join(found)


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
    inputs = {columns: torch.randn(rows, columns, device=DEVICE).bfloat16() for _, columns, _ in shapes.values()}

    def chain() -> None:
        for layer in layers:
            for name, (_, columns, gated) in shapes.items():
                run(gemm, inputs[columns], layer[name], gated)

    return replay_us(chain) / len(layers)


def main() -> None:
    given = [arg.partition("=")[2] for arg in sys.argv[1:] if arg.startswith("rows=")]
    counts = [int(count) for count in given[0].split(",")] if given else ROWS
    gemm = fp8_gemm(torch.device("cuda", torch.cuda.current_device()))
    print(f"{torch.cuda.get_device_name()}, a pure read {read_rate() / 1e6:.2f} TB/s")
    for name in [arg for arg in sys.argv[1:] if arg in PRODUCTS] or ["27b"]:
        print(name)
        bench(gemm, PRODUCTS[name], counts, "torch" in sys.argv[1:])


def bench(gemm: Fp8Gemm, shapes: dict[str, tuple[int, int, bool]], counts: Sequence[int], with_torch: bool) -> None:
    for name, (height, columns, gated) in shapes.items():
        copies = -(-BYTES // (height * columns))
        weights = [weight_of(height, columns) for _ in range(copies)]
        plain = [codes_of(height, columns) for _ in range(copies if with_torch else 0)]
        for rows in counts:
            x = torch.randn(rows, columns, device=DEVICE).bfloat16()
            whole, took = (each_us(gemm, given, weights, gated) for given in (x, gemm.quantise(x)))
            size = height * columns
            print(
                f"{name} {height} x {columns}, {rows} rows: {whole:.1f} and {took:.1f} us, "
                f"{size / took / 1e6:.2f} TB/s, {2e-6 * size * rows / took:.0f} TFLOP/s"
                + (beside(codes_of(rows, columns), plain, took) if with_torch else ""),
                flush=True,
            )
        del weights, plain
    if with_torch:
        return
    layers = [{name: weight_of(*shape[:2]) for name, shape in shapes.items()} for _ in range(2)] * 4
    for rows in counts:
        print(f"all, {rows} rows: {layers_us(gemm, rows, layers, shapes):.1f} us", flush=True)


if __name__ == "__main__":
    main()
