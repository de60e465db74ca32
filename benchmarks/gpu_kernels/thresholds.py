"""From where on one way is faster than another, for constants that say so.

    python benchmarks/gpu_kernels/thresholds.py [router] [upload]

router: microseconds of a float32 router's logits by rows, each summed by itself and as one product (`ROUTER_ROWS`).
upload: milliseconds of a copy to the device by bytes, as torch makes it and by threads (`ops.upload`), the least of
some, the first with its pinned buffers.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

import torch
from timing import replay_us
from torch import Tensor

from draftwing.layers.experts import EachLogit
from draftwing.layers.linear import Linear
from draftwing.ops import make_ops
from draftwing.ops.upload import Uploader

ROUTERS = {"GLM-4.7-Flash": (64, 2048), "DeepSeek-V3": (256, 7168)}  # experts, hidden size
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64)
MEGABYTES = (1, 2, 4, 8, 16, 32, 64, 256)


@torch.inference_mode()
def routers(device: torch.device) -> None:
    ops = make_ops(device)
    print(f"{'us of a router, by rows':32s}", *(f"{rows:6d}" for rows in ROWS))
    for name, (experts, hidden) in ROUTERS.items():
        layer = Linear(hidden, experts, False, torch.float32, device)
        torch.nn.init.normal_(layer.weight, std=0.02)
        for way, most in (("each logit", None), ("one product", 0)):
            op = EachLogit(layer, ops, most)
            took = []
            for rows in ROWS:
                x = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device)
                took.append(replay_us(functools.partial(op, x, None)))
            print(f"{name + ', ' + way:32s}", *(f"{us:6.1f}" for us in took), flush=True)


def uploads(device: torch.device) -> None:
    print(f"{'ms of a copy, by MB':32s}", *(f"{size:6d}" for size in MEGABYTES), " (by threads: the first)")
    sources = [torch.ones(size << 20, dtype=torch.uint8) for size in MEGABYTES]

    def by_threads(source: Tensor) -> None:
        out = torch.empty_like(source, device=device)
        with Uploader(device) as uploader:
            uploader.copy(out, source)

    ways: tuple[tuple[str, Callable[[Tensor], object]], ...] = (
        ("torch", lambda source: source.to(device)), ("by threads", by_threads),
    )  # fmt: skip
    for name, way in ways:
        took = [[timed(functools.partial(way, source)) for _ in range(7)] for source in sources]
        first = " ".join(f"{times[0]:.1f}" for times in took)
        print(f"{name:32s}", *(f"{min(times[1:]):6.2f}" for times in took), f" ({first})", flush=True)


def timed(copy: Callable[[], object]) -> float:
    """Milliseconds until the copy has arrived."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    copy()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin)


def main() -> None:
    parts, device = {"router": routers, "upload": uploads}, torch.device("cuda")
    print(torch.cuda.get_device_name())
    for name in sys.argv[1:] or parts:
        parts[name](device)


if __name__ == "__main__":
    main()
