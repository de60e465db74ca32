"""Experts' products of prompts by gemm_experts_many.cu, beside the kernels before and torch's grouped product.

    python benchmarks/gpu_kernels/many_pairs.py            # checks, then the table
    python benchmarks/gpu_kernels/many_pairs.py check    # or table

Each part is a process of its own with a time limit, so that a kernel that hangs ends one part.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import experts as layers
import torch
from experts import Model, weight_of
from grouped import rows_of
from timing import read_rate, replay_us
from torch import Tensor

from draftwing.ops.experts import cuda as gemm_experts
from draftwing.ops.experts import triton as experts
from draftwing.ops.experts.cuda_many import ManyPairs, Size, compile_ahead
from draftwing.ops.experts.routing import Routed, Routing
from draftwing.ops.experts.triton_gemm import ExpertGemm
from draftwing.ops.experts.triton_order import in_order
from draftwing.ops.experts.triton_tiles import SMALL_TILE, tiles_of

HALF, CUDA = torch.bfloat16, torch.device("cuda")
ALONE = {
    "176": Size(176, (64, 176), (232, 40)),
    "160": Size(160, (32, 96, 160), (232, 40)),
    "128": Size(128, (64, 96, 128), (208, 88)),
}
IN_PAIRS = {f"{name}x2": size._replace(cluster=2) for name, size in ALONE.items()}
IN_PAIRS["192x2"] = Size(192, (64, 192), (232, 40), 2)
ALL = ALONE | IN_PAIRS
UNGATED = -1.0
SHAPES = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768, 0.0, ()),
    "granite-4-tiny": Model(64, 6, 1536, 512, 0.0, ()),
    "nemotron-3-nano": Model(128, 6, 2688, 1856, UNGATED, ()),
    "mixtral-8x7b": Model(8, 2, 4096, 14336, 0.0, ()),
}
TOKENS, LAYERS, PEAK = (256, 1024, 4096, 8192), 2, 790e6  # FLOPs a microsecond


def kernels(sizes: dict[str, Size]) -> dict[str, ManyPairs]:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda size: compile_ahead(HALF, (9, 0), size), sizes.values()))
    return {name: ManyPairs(CUDA, HALF, size) for name, size in sizes.items()}


def in_tiles(routed: Routed, pairs: int) -> Routed:
    return replace(routed, tiles=tiles_of(routed.experts, routed.count, pairs, True))


# -- right ------------------------------------------------------------------------------------------------------------


def check(sizes: dict[str, Size]) -> None:
    """Bits are those of gemm_experts.cu, in tiles of 16 pairs."""
    wrong = done = 0
    every = kernels(sizes)
    for (count, top, hidden, width), tokens, liked in (
        (shape, tokens, liked)
        for shape in ((6, 3, 1664, 192), (16, 2, 512, 160), (8, 2, 2048, 1856))
        for tokens in (1, 7, 130, 700, 8192)
        for liked in (0.0, 9.0)
    ):
        logits = torch.randn(tokens, count, device=CUDA)
        logits[:, 1], logits[:, 2] = logits[:, 1] + liked, logits[:, 2] - liked
        if liked and tokens == 130:
            logits[:, 1:3] = 50  # all rows choose the same two
        routed = experts.route(logits, Routing(top))
        x, bias = torch.randn(tokens, hidden, device=CUDA).to(HALF), torch.randn(count * width, device=CUDA).to(HALF)
        w = weight_of("bfloat16", count * width, hidden)
        few, its = in_tiles(routed, SMALL_TILE), in_order(x, 32)
        for kind, limit in (("plain", 0.0), ("plain", gemm_experts.SQUARES), ("silu", 0.0), ("clamped", 1.5)):
            wide = width if kind == "plain" else width // 2
            expected = gemm_experts.multiply(kind, x, w, bias, few, wide, limit)
            for name, run in every.items():
                tiles = in_tiles(routed, sizes[name].tile)
                found = run(kind, its, w, bias, tiles, wide, limit)
                torch.cuda.synchronize()
                bad = int((found != expected).sum())
                done, wrong = done + 1, wrong + bool(bad)
                if bad:
                    what = f"{name} {kind} {hidden}x{width} {tokens} tokens liked {liked}"
                    print(f"  WRONG {what}: {bad} {(found != expected).nonzero()[:2].tolist()}", flush=True)
    print(f"check: {done - wrong} of {done} results have the bits of gemm_experts.cu", flush=True)


# -- fast -------------------------------------------------------------------------------------------------------------


def timed(call: Callable[[int], object]) -> float:
    return replay_us(lambda: [call(layer) for layer in range(LAYERS)], 5, least=True) / LAYERS


class Case:
    """Layers of a model with weights of their own, and so many tokens that choose of each at random."""

    def __init__(self, model: Model, weights: list[tuple[Tensor, Tensor]], every: dict[str, ManyPairs], tokens: int):
        self.model, self.weights, self.every = model, weights, every
        self.is_gated = model.limit != UNGATED
        self.gemms = [[ExpertGemm(part, model.count) for part in layer] for layer in weights]
        self.routes = [experts.route(layers.scores(model, tokens), Routing(model.top_k), exact=True) for _ in weights]
        self.rows = [rows_of(model, tokens, routed.experts) for routed in self.routes]
        pairs = {name: size.tile for name, size in ALL.items() if name in every}
        self.tiles = {name: [in_tiles(routed, most) for routed in self.routes] for name, most in pairs.items()}
        self.ordered = [[in_order(part, 32) for part in (row.x, row.inner)] for row in self.rows]

    def kind(self, which: int) -> str:
        return "silu" if self.is_gated and not which else "plain"

    def x(self, i: int, which: int) -> Tensor:
        return self.rows[i].inner if which else self.rows[i].x

    def torchs(self, which: int, i: int, x: Tensor | None = None) -> Tensor:
        row, weight = self.rows[i], self.weights[i][which]
        x = x if x is not None else row.inner_by_expert if which else row.by_expert
        return torch._grouped_mm(x, weight.view(self.model.count, -1, weight.shape[1]).transpose(1, 2), offs=row.ends)

    def now(self, which: int, i: int, x: Tensor | None = None) -> Tensor:
        gemm, x = self.gemms[i][which], self.x(i, which) if x is None else x
        if self.kind(which) == "silu":
            return gemm.gated(x, None, self.routes[i], 0.0)
        return gemm.linear(x, None, self.routes[i])

    def new(self, size: str, which: int, i: int) -> Tensor:
        width, tiles = (self.model.ffn, self.model.hidden)[which], self.tiles[size][i]
        return self.every[size](self.kind(which), self.ordered[i][which], self.weights[i][which], None, tiles, width)

    def torch_layer(self, i: int) -> Tensor:
        made = self.torchs(0, i, self.rows[i].x[self.rows[i].order // self.model.top_k])
        if not self.is_gated:
            return self.torchs(1, i, made.relu().square())
        gate, up = made.chunk(2, -1)
        return self.torchs(1, i, torch.nn.functional.silu(gate) * up)

    def layer_now(self, i: int) -> Tensor:
        made = self.now(0, i)
        return self.now(1, i, made if self.is_gated else made.relu().square())

    def layer_new(self, size: str, i: int) -> Tensor:
        run, tiles, (first, second) = self.every[size], self.tiles[size][i], self.weights[i]
        limit = 0.0 if self.is_gated else gemm_experts.SQUARES
        inner = run(self.kind(0), in_order(self.rows[i].x, 32), first, None, tiles, self.model.ffn, limit)
        return run("plain", in_order(inner, 32), second, None, tiles, self.model.hidden)


def table(sizes: dict[str, Size], counts: tuple[int, ...], before: bool = True) -> None:
    every, rate = kernels(sizes), read_rate()
    print(f"read {rate * 1e-6:.2f} TB/s. us; copy: of x in order, which is no part of the others")
    heads = ("floor", "torch", "now", *every, "copy", "share")
    print(f"{'':<34}" + "".join(f"{head:>8}" for head in heads))
    for name, model in SHAPES.items():
        rows = model.ffn * (1 if model.limit == UNGATED else 2)
        shapes = ((model.count * rows, model.hidden), (model.count * model.hidden, model.ffn))
        weights = [(weight_of("bfloat16", *shapes[0]), weight_of("bfloat16", *shapes[1])) for _ in range(LAYERS)]
        for tokens in counts:
            case = Case(model, weights, every, tokens)
            for which in (0, 1):
                products(f"{name}, {tokens}, {'down' if which else 'first'}", case, tokens, which, rate, before)
            found = {size: timed(partial(case.layer_new, size)) for size in every}
            us = " ".join(f"{form} {each:.0f}" for form, each in found.items())
            now = timed(case.layer_now) if before else 0
            others = f"torch with gather and activation {timed(case.torch_layer):.0f}, now {now:.0f}"
            print(f"    both: {others}, new with copies in order {us}", flush=True)


def products(head: str, case: Case, tokens: int, which: int, rate: float, before: bool) -> None:
    """before: whether the kernels before are timed and compared, too, which takes Triton's compiler half a minute."""
    weight = case.weights[0][which]
    expected = case.now(which, 0) if before else case.new(next(iter(case.every)), which, 0)
    same = [torch.equal(case.new(size, which, 0), expected) for size in case.every]
    share = sum(routed.experts.unique().numel() for routed in case.routes) / len(case.routes) / case.model.count
    work = 2 * tokens * case.model.top_k * weight.numel() / case.model.count
    us = [max(work / PEAK, share * weight.nbytes / rate)]
    us += [timed(partial(case.torchs, which)), timed(partial(case.now, which)) if before else 0]
    us += [timed(partial(case.new, size, which)) for size in case.every]
    us.append(timed(lambda i: in_order(case.x(i, which), 32)))
    best = min(us[3:-1])
    print(f"{head:<34}" + "".join(f"{each:8.0f}" for each in us) + f"{us[1] / best:8.2f}  "
          f"{work / best * 1e-6:4.0f} TFLOP/s" + ("" if all(same) else f" WRONG {same}"), flush=True)  # fmt: skip


PARTS = {
    "check": (partial(check, ALONE), 90),
    "check2": (partial(check, IN_PAIRS), 90),
    "table": (partial(table, ALL, TOKENS), 150),
    "table1": (partial(table, ALONE, TOKENS), 100),
}


def run(name: str) -> bool:
    begin, ended = time.monotonic(), "HANGS, or took too long"
    with contextlib.suppress(subprocess.TimeoutExpired):
        ended = str(subprocess.run([sys.executable, __file__, "only", name], timeout=PARTS[name][1]).returncode)
    print(f"-- {name}: {ended}, {time.monotonic() - begin:.0f} s", flush=True)
    return ended == "0"


def main() -> None:
    if sys.argv[1:2] == ["only"]:
        PARTS[sys.argv[2]][0]()
    elif sys.argv[1:]:
        for name in sys.argv[1:]:
            run(name)
    else:
        run("check")
        run("table" if run("check2") else "table1")


if __name__ == "__main__":
    main()
