"""The lm_head of drafts in fewer bits, against bfloat16 as the engine multiplies it: microseconds by rows.

    python benchmarks/gpu_kernels/lm_head.py [27B,9B,35B-A3B,8B,EAGLE-3,64M,32M]

Shapes are those of Qwen3.5 and of Llama 3.1 8B, the head of its own that an EAGLE-3 head has, and two of 64 and 32
million values. The floor is the time to read the matrix, scales included, at `timing.read_rate`. `cut as gate.up` are
the same kernels with the shapes that are for a gated product; their bits are compared with those of the others.
"""

from __future__ import annotations

import functools
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from quantised import WIDTHS, Product, each_us, inputs, packed
from timing import read_rate
from torch import Tensor

from draftwing.layers.linear import Linear
from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.heads.base import linear_of
from draftwing.ops import make_ops
from draftwing.ops.gemm.cuda_groups import GroupGemm, Shapes, compile_ahead, shapes_for

MATRICES = {
    "27B": (248320, 5120), "9B": (248320, 4096), "35B-A3B": (248320, 2048), "8B": (128256, 4096),
    "EAGLE-3": (32000, 4096), "64M": (16384, 4096), "32M": (8192, 4096),
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
LABELS = ("int8", "fp8", "int4")


def as_gate_up(bits: int, capability: tuple[int, int]) -> Shapes:
    """Shapes of gated products, for those that are not."""
    known = shapes_for(bits, capability)
    return {("plain", tile): shape for (kind, tile), shape in known.items() if kind == "silu" and tile <= 32}


def served(features: int, depth: int, device: torch.device) -> Linear:
    """The bfloat16 matrix, packed."""
    made = linear_of(torch.randn(features, depth, device=device).mul_(0.02).bfloat16(), None, DENSE)
    made.pack(make_ops(device))
    return made


def times(product: Product, call: Any, weights: list[Any]) -> list[float]:
    return [each_us(functools.partial(call, inputs(product, rows)[0]), weights, 15) for rows in ROWS]


def show(name: str, floor: float, took: list[float], base: list[float]) -> None:
    cells = (f"{us:8.1f} ({us / other:4.2f})" for us, other in zip(took, base, strict=True))
    print(f"{name:28s} {floor:7.1f} {took[0] and floor / took[0]:5.0%}", *cells, flush=True)


@torch.inference_mode()
def measure(name: str, device: torch.device) -> None:
    product, capability = Product(name, *MATRICES[name], "plain"), torch.cuda.get_device_capability(device)
    print(f"\n{'us (of bfloat16), rows:':28s} {'floor':>7s} {'share':>5s}", *(f"{rows:15d}" for rows in ROWS))
    dense = [served(*MATRICES[name], device) for _ in range(2)]
    base = times(product, lambda x, w: w(x), dense)
    show(f"{name}, bfloat16", dense[0].weight.nbytes / read_rate(), base, base)
    del dense
    for label in LABELS:
        weight = packed(product, WIDTHS[label])
        weights, floor = [weight, weight._replace(codes=weight.codes.clone())], weight.nbytes / read_rate()
        known = GroupGemm(device, torch.bfloat16, WIDTHS[label])
        other = GroupGemm(device, torch.bfloat16, WIDTHS[label], as_gate_up(weight.bits, capability))
        for rows in ROWS:
            x: Tensor = inputs(product, rows)[0]
            if not torch.equal(known.linear(x, weight, None), other.linear(x, weight, None)):
                print("WRONG:", label, rows)
        for cut, ours in (("", known), (", cut as gate.up", other)):
            show(f"{name}, {label}{cut}", floor, times(product, lambda x, w: ours.linear(x, w, None), weights), base)  # noqa: B023
        del weight, weights
        torch.cuda.empty_cache()


def compile_all(capability: tuple[int, int]) -> None:
    """Compiles the kernels at once, in processes that use no GPU."""
    widths = [WIDTHS[label] for label in LABELS]
    with ProcessPoolExecutor(2 * len(widths), get_context("spawn")) as workers:
        jobs = [(width, shapes) for width in widths for shapes in (None, as_gate_up(width.bits, capability))]
        started = [workers.submit(compile_ahead, torch.bfloat16, width, capability, shapes) for width, shapes in jobs]
        for job in started:
            job.result()


def main() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compile_all(torch.cuda.get_device_capability(device))
    print(f"{torch.cuda.get_device_name(device)}, reads {read_rate() / 1e6:.2f} TB/s")
    for name in sys.argv[1].split(",") if len(sys.argv) > 1 else MATRICES:
        measure(name, device)


if __name__ == "__main__":
    main()
