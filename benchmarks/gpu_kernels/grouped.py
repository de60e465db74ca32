"""Experts' products of prompts in bfloat16, beside torch's grouped product (`torch._grouped_mm`): microseconds of each.

    python benchmarks/gpu_kernels/grouped.py [qwen3-30b-a3b granite-4-tiny ...] [tokens=256,1024,4096,8192]

Ours read rows of tokens by their choices, and the first ends with the activation. torch's multiplies rows that lie by
expert already, and has no activation; *both* has its gather and activation, too, and ours all that is between tokens
and the sum over choices. Tokens choose independently of each other; several layers of weights take turns, which no
cache holds. The floor is what multiplying takes at 790 TFLOP/s, or reading weights. First results are compared with
those of few pairs, bit for bit: what differs is said to be WRONG.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import experts as layers
import torch
from experts import MODELS, Model, weight_of
from timing import read_rate, replay_us
from torch import Tensor

from draftwing.ops.experts import triton as experts
from draftwing.ops.experts.routing import SMALL_TILE, Routing
from draftwing.ops.experts.triton_gemm import ExpertGemm
from draftwing.ops.experts.triton_tiles import tiles_of

UNGATED = -1.0  # in place of a limit
SHAPES = {name: MODELS[name] for name in ("qwen3-30b-a3b", "qwen3.5-35b-a3b", "gpt-oss-20b")}
SHAPES |= {
    "glm-4.7-flash": Model(64, 4, 2048, 1536, 0.0, ()),
    "granite-4-tiny": Model(64, 6, 1536, 512, 0.0, ()),
    "nemotron-3-nano": Model(128, 6, 2688, 1856, UNGATED, ()),
    "mixtral-8x7b": Model(8, 2, 4096, 14336, 0.0, ()),
}
TOKENS = (256, 1024, 4096, 8192)
LAYERS, REPEATS = 2, 5
PEAK = 790e6  # operations of a microsecond


class Rows(NamedTuple):
    """A layer's choices, and what is multiplied: x by token, both inputs of torch's by expert."""

    x: Tensor  # [tokens, hidden]
    inner: Tensor  # [pairs, ffn], pairs by token
    order: Tensor  # [pairs]: pairs by expert
    by_expert: Tensor  # [pairs, hidden]
    inner_by_expert: Tensor  # [pairs, ffn]
    ends: Tensor  # [count] int32


def rows_of(model: Model, tokens: int, chosen: Tensor) -> Rows:
    """chosen [tokens, top_k]"""
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=model.count).cumsum(0).int()
    x, inner = (torch.randn(count, size, device=layers.CUDA).to(layers.HALF)
                for count, size in ((tokens, model.hidden), (len(flat), model.ffn)))  # fmt: skip
    return Rows(x, inner, order, x[order // model.top_k], inner[order], ends)


class Case:
    """Layers with weights of their own, and so many tokens that choose of each."""

    def __init__(self, model: Model, weights: list[tuple[Tensor, Tensor]], tokens: int) -> None:
        self.model, self.weights, self.gated = model, weights, model.limit != UNGATED
        self.gemms = [[ExpertGemm(part, model.count) for part in layer] for layer in weights]
        most = min(gemm.most_pairs(layers.HALF) for gemm in self.gemms[0])
        scores = [layers.scores(model, tokens) for _ in weights]
        self.routes = [experts.route(each, Routing(model.top_k), exact=True, most_pairs=most) for each in scores]
        self.rows = [rows_of(model, tokens, routed.experts) for routed in self.routes]

    def x(self, which: int, i: int) -> Tensor:
        return self.rows[i].inner if which else self.rows[i].x

    def ours(self, which: int, i: int, x: Tensor | None = None, small: bool = False) -> Tensor:
        """small: by the kernels for few pairs."""
        x, gemm, routed = self.x(which, i) if x is None else x, self.gemms[i][which], self.routes[i]
        if small:
            routed = replace(routed, tiles=tiles_of(routed.experts, routed.count, SMALL_TILE, True))
        if which or not self.gated:
            return gemm.linear(x, None, routed)
        return gemm.gated(x, None, routed, self.model.limit)

    def theirs(self, which: int, i: int, x: Tensor | None = None) -> Tensor:
        row, weight = self.rows[i], self.weights[i][which]
        x = (row.inner_by_expert if which else row.by_expert) if x is None else x
        return torch._grouped_mm(x, weight.view(self.model.count, -1, weight.shape[1]).transpose(1, 2), offs=row.ends)

    def our_layer(self, i: int) -> Tensor:
        if self.gated:
            return self.ours(1, i, self.ours(0, i))
        gemm, x = self.gemms[i][0], self.rows[i].x
        inner = gemm.squared(x, None, self.routes[i])
        return self.ours(1, i, gemm.linear(x, None, self.routes[i]).relu().square() if inner is None else inner)

    def their_layer(self, i: int) -> Tensor:
        made = self.theirs(0, i, self.rows[i].x[self.rows[i].order // self.model.top_k])
        return self.theirs(1, i, layers.act(made, self.model.limit) if self.gated else made.relu().square())


def timed(call: Callable[[int], object]) -> float:
    """Microseconds of one call of `LAYERS`."""
    return replay_us(lambda: [call(layer) for layer in range(LAYERS)], REPEATS, least=True) / LAYERS


def main() -> None:
    given = [arg.partition("=")[2] for arg in sys.argv[1:] if arg.startswith("tokens=")]
    counts = [int(count) for count in given[0].split(",")] if given else TOKENS
    print(f"{'':36}{'floor':>8}{'torch':>8}{'ours':>8}   share", flush=True)
    for name in [arg for arg in sys.argv[1:] if arg in SHAPES] or SHAPES:
        model = SHAPES[name]
        rows = model.count * model.ffn * (1 if model.limit == UNGATED else 2)
        shapes = (rows, model.hidden), (model.count * model.hidden, model.ffn)
        weights = [(weight_of("bfloat16", *shapes[0]), weight_of("bfloat16", *shapes[1])) for _ in range(LAYERS)]
        for tokens in counts:
            case = Case(model, weights, tokens)
            read = sum(routed.experts.unique().numel() for routed in case.routes) / LAYERS / model.count
            for which, part in enumerate(("first", "down")):
                weight = weights[0][which]
                work = 2 * tokens * model.top_k * weight.numel() / model.count
                floor = max(work / PEAK, read * weight.nbytes / read_rate())
                same = torch.equal(case.ours(which, 0), case.ours(which, 0, small=True))
                theirs, ours = timed(partial(case.theirs, which)), timed(partial(case.ours, which))
                print(
                    f"{f'{name}, {tokens}, {part}':36}{floor:8.0f}{theirs:8.0f}{ours:8.0f}{theirs / ours:8.2f}"
                    f"   {work / ours * 1e-6:.0f} TFLOP/s{'' if same else ' WRONG'}",
                    flush=True,
                )
            theirs, ours = timed(case.their_layer), timed(case.our_layer)
            print(f"{f'{name}, {tokens}, both':44}{theirs:8.0f}{ours:8.0f}{theirs / ours:8.2f}", flush=True)


if __name__ == "__main__":
    main()
