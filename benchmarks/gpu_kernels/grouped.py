"""Experts' products of prompts in bfloat16, beside torch's grouped product (`torch._grouped_mm`): microseconds of each.

    python benchmarks/gpu_kernels/grouped.py [qwen3.5-35b-a3b gpt-oss-20b glm-4.7-flash] [tokens=256,1024,4096,8192]

Ours, with the default numerics and with `--fast-numerics`, read rows of tokens by their choices, and the first ends
with the activation. torch's multiplies rows that lie by expert already, and has no activation. Tokens choose
independently of each other; several layers of weights take turns, which no cache holds. The share is torch's time by
ours with the default numerics. First both are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import experts as layers
import torch
from experts import MODELS, Model, weight_of
from timing import replay_us
from torch import Tensor

from draftwing.ops.experts import triton as experts
from draftwing.ops.experts.routing import Routing
from draftwing.ops.experts.triton_gemm import ExpertGemm

SHAPES = {name: MODELS[name] for name in ("qwen3.5-35b-a3b", "gpt-oss-20b")}
SHAPES["glm-4.7-flash"] = Model(64, 4, 2048, 1536, 0.0, ("bfloat16",))
TOKENS = (256, 512, 1024, 2048, 4096, 8192)
LAYERS, REPEATS = 3, 7


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


def timed(call: Callable[[int], object]) -> float:
    """Microseconds of one call of `LAYERS`."""
    return replay_us(lambda: [call(layer) for layer in range(LAYERS)], REPEATS, least=True) / LAYERS


def measured(model: Model, tokens: int, weights: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, list[float]]]:
    """Yields of gate_up and of down the microseconds of torch's, ours by default and ours fast, and torch's distance
    from ours."""
    logits = [layers.scores(model, tokens) for _ in weights]
    routes = [[experts.route(each, Routing(model.top_k), exact=exact) for each in logits] for exact in (True, False)]
    rows = [rows_of(model, tokens, routed.experts) for routed in routes[0]]
    stacked = [[part.view(model.count, -1, part.shape[1]).transpose(1, 2) for part in layer] for layer in weights]
    gemms = [[ExpertGemm(part, model.count) for part in layer] for layer in weights]

    def theirs(which: int) -> Callable[[int], Tensor]:
        return lambda i: torch._grouped_mm(
            rows[i].inner_by_expert if which else rows[i].by_expert, stacked[i][which], offs=rows[i].ends
        )

    def ours(which: int, fast: bool) -> Callable[[int], Tensor]:
        def call(i: int) -> Tensor:
            routed = routes[fast][i]
            if which:
                return gemms[i][1].linear(rows[i].inner, None, routed)
            return gemms[i][0].gated(rows[i].x, None, routed, model.limit)

        return call

    for which, name in enumerate(("gate_up", "down")):
        expected, found = theirs(which)(0).float(), ours(which, False)(0)[rows[0].order].float()
        if not which:
            expected = layers.act(expected, model.limit)
        error = float((found - expected).abs().max() / expected.abs().max())
        yield name, [timed(theirs(which)), timed(ours(which, False)), timed(ours(which, True)), error]


def main() -> None:
    given = [arg.partition("=")[2] for arg in sys.argv[1:] if arg.startswith("tokens=")]
    counts = [int(count) for count in given[0].split(",")] if given else TOKENS
    for name in [arg for arg in sys.argv[1:] if arg in SHAPES] or SHAPES:
        model = SHAPES[name]
        weights = [
            (
                weight_of("bfloat16", model.count * 2 * model.ffn, model.hidden),
                weight_of("bfloat16", model.count * model.hidden, model.ffn),
            )
            for _ in range(LAYERS)
        ]
        for tokens in counts:
            for part, (torchs, own, fast, error) in measured(model, tokens, weights):
                work = 2e-6 * tokens * model.top_k * model.hidden * model.ffn * (1 if part == "down" else 2)
                print(
                    f"{name}, {tokens} tokens, {part}: torch {torchs:.1f} us ({work / torchs:.0f} TFLOP/s), ours "
                    f"{own:.1f} ({work / own:.0f}), fast {fast:.1f}; share {torchs / own:.2f}; apart by {error:.4f}",
                    flush=True,
                )
        del weights


if __name__ == "__main__":
    main()
