"""Towers of pictures in the shapes of Qwen3.5: attention of a layer by the engine's kernels and by torch's, and what a
whole tower takes, one picture and eight.

    python benchmarks/gpu_kernels/tower.py [--seconds 50]

host: milliseconds until a picture's work is launched; all: until it is done. Where both are alike the GPU waits for the
host. The largest difference to float64 comes first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from draftwing.layers.linear_ops.dense import DENSE
from draftwing.models.towers.base import Tower
from draftwing.models.towers.patch_merger import PatchMergerConfig
from draftwing.ops.attention.whole import WholeAttention, whole_attention
from draftwing.ops.table import TorchOps

PICTURES = ((736, 416), (2304, 1728))  # 1,196 and 15,552 patches
SHAPES = {  # width of the language model, and of the tower: hidden, ffn, heads, depth
    "0.8B": (1024, 768, 3072, 12, 12),
    "4B": (2560, 1024, 4096, 16, 24),
    "9B": (4096, 1152, 4304, 16, 27),
    "27B": (5120, 1152, 4304, 16, 27),
}
Whole = Callable[[Tensor, Tensor, int], WholeAttention]


def heads_of(count: int, heads: int, size: int) -> tuple[Tensor, ...]:
    """Queries, keys and values as a layer has them, side by side in one product."""
    return torch.randn(count, 3, heads, size, device="cuda", dtype=torch.bfloat16).unbind(1)


def difference(attention: Whole, count: int, heads: int, size: int) -> float:
    q, k, v = heads_of(count, heads, size)
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * size**-0.5
    exact = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v.double()).flatten(1)
    return float((attention(k, v, 0)(q).double() - exact).abs().max())


def took(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Milliseconds of a call: until it is launched, and until it is done; medians within so many seconds."""
    found, began = list[tuple[float, float]](), time.perf_counter()
    while not found or (time.perf_counter() - began < seconds and len(found) < 50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        found.append((1e3 * (launched - start), 1e3 * (time.perf_counter() - start)))
    host, whole = (statistics.median(one) for one in zip(*found, strict=True))
    return host, whole


def tower_of(shape: str, ops: TorchOps) -> Tower:
    width, hidden, ffn, heads, depth = SHAPES[shape]
    config = PatchMergerConfig(token=1, width=width, hidden=hidden, ffn=ffn, heads=heads, depth=depth)
    module = config.build(torch.bfloat16, torch.device("cuda"), DENSE).requires_grad_(False)
    for param in module.parameters():
        param.normal_(std=param.shape[-1] ** -0.5 if param.dim() > 1 else 1.0)
    module.settle(torch.device("cuda"))
    module.pack(ops)
    return Tower(config, module, torch.bfloat16)


def several(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50.0, help="after which nothing more is begun")
    args = parser.parse_args()
    began = time.perf_counter()
    if not torch.cuda.is_available():
        sys.exit("tower.py: there is no GPU")
    from draftwing.ops.triton.ops import TritonOps

    ops = TritonOps(torch.device("cuda"))
    own: dict[str, Whole] = {"ours": ops.whole_attention, "torch": whole_attention}
    for heads, size in ((12, 64), (16, 72)):
        errors = ", ".join(f"{name} {difference(each, 300, heads, size):.2g}" for name, each in own.items())
        print(f"{heads} heads of {size}, 300 patches, largest difference to float64: {errors}", flush=True)
    print("\nshape  patches  what               ours: host   all  torch: host   all   ratio", flush=True)
    for shape, (_, hidden, _, heads, _) in SHAPES.items():
        tower = tower_of(shape, ops)
        for width, height in PICTURES:
            if time.perf_counter() - began > args.seconds:
                print(f"{shape}, {width} x {height}: left out, its time is up")
                continue
            patches = width * height // 256
            q, k, v = heads_of(patches, heads, hidden // heads)
            pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, device="cuda")
            rows: dict[str, list[tuple[float, float]]] = {}
            for attention in own.values():
                tower.module.ops.whole_attention = attention
                read = partial(tower.features, pixels, patches // 4)
                layer = partial(lambda whole, q, k, v: whole(k, v, 0)(q), attention, q, k, v)
                for what, call, count in (
                    ("attention", partial(several, layer, 8), 8), ("one picture", read, 1),
                    ("eight pictures", partial(several, read, 8), 8),
                ):  # fmt: skip
                    several(read if what == "one picture" else layer, 2)
                    host, whole = took(call, 0.4)
                    rows.setdefault(what, []).append((host / count, whole / count))
            for what, (ours, theirs) in rows.items():
                figures = " ".join(f"{host:10.3f} {whole:7.3f}" for host, whole in (ours, theirs))
                print(f"{shape:5} {patches:8,}  {what:15} {figures} {ours[1] / theirs[1]:7.2f}", flush=True)


if __name__ == "__main__":
    main()
