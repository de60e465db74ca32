"""Mixtures of experts: the kernels of ops/triton/expert{s,_gemm}.py, right and how fast, at the sizes of two models.

    python benchmarks/gpu_kernels/experts.py                 # all models and formats of weights
    python benchmarks/gpu_kernels/experts.py gpt-oss-20b     # one of them
    python benchmarks/gpu_kernels/experts.py sweep           # other shapes of a program, for 1, 8 and 64 tokens

First each format is compared with its matrices multiplied out in float64, and a token alone with the same token in a
batch, bit for bit; what differs is said to be WRONG. Then a layer's router, GEMMs and sum are timed, over several
layers of different weights and choices, which are in no cache. Tokens choose independently of each other. The floor is
the time to read the experts that were chosen, at `READ_RATE`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import replay_us
from torch import Tensor

from draftwing.layers.linear_ops.groups import multiplied_out
from draftwing.ops.groups import PackedGroups, pack, quantized
from draftwing.ops.torch.experts import Routed
from draftwing.ops.triton import expert_gemm, experts
from draftwing.ops.triton.expert_gemm import ExpertGemm
from draftwing.ops.types import MXRows

READ_RATE = 4.55e6  # bytes per microsecond, a pure read on an H200
LAYERS = 6
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
HALF, CUDA = torch.bfloat16, torch.device("cuda")
Weight = Tensor | PackedGroups | MXRows


class Model(NamedTuple):
    count: int
    top_k: int
    hidden: int
    ffn: int
    limit: float
    formats: tuple[str, ...]


MODELS = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768, 0.0, ("bfloat16", "fp8", "w4a16")),
    "gpt-oss-20b": Model(32, 4, 2880, 2880, 7.0, ("bfloat16", "mxfp4")),
    "gpt-oss-120b": Model(128, 4, 2880, 2880, 7.0, ("mxfp4",)),
}


class Layer(NamedTuple):
    gate_up: Weight
    down: Weight


def weight_of(kind: str, rows: int, columns: int) -> Weight:
    if kind == "mxfp4":
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=CUDA)
        return MXRows(codes, torch.randint(118, 122, (rows, columns // 32), dtype=torch.uint8, device=CUDA))
    dense = torch.randn(rows, columns, dtype=HALF, device=CUDA) * columns**-0.5
    return dense if kind == "bfloat16" else pack(quantized(dense, kind), HALF, CUDA)


def layer_of(model: Model, kind: str) -> Layer:
    return Layer(
        weight_of(kind, model.count * 2 * model.ffn, model.hidden),
        weight_of(kind, model.count * model.hidden, model.ffn),
    )


def nbytes(weight: Weight) -> int:
    return weight.nbytes


# -- right ------------------------------------------------------------------------------------------------------------


def by_hand(x: Tensor, matrix: Tensor, routed: Routed) -> Tensor:
    """[pairs, out] float64, one expert after the other"""
    matrices, flat = matrix.view(routed.count, -1, matrix.shape[1]), routed.experts.flatten()
    rows = x.repeat_interleave(routed.choices(x), 0).double()
    out = rows.new_empty(len(rows), matrices.shape[1])
    for expert in flat.unique().tolist():
        pairs = (flat == expert).nonzero().flatten()
        out[pairs] = rows[pairs] @ matrices[expert].double().t()
    return out


def act(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if not limit:
        return gate * gate.sigmoid() * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def check(model: Model, kind: str) -> None:
    layer = layer_of(model, kind)
    matrices = [multiplied_out(w, HALF) if not isinstance(w, Tensor) else w for w in layer]
    gemms = [ExpertGemm(w, model.count) for w in layer]
    wrong = []
    for tokens, exact in ((1, True), (9, True), (40, True), (200, False)):
        x, logits = torch.randn(tokens, model.hidden, dtype=HALF, device=CUDA), scores(model, tokens)
        routed = experts.route(logits, model.top_k, True, exact)
        inner = gemms[0].gated(x, None, routed, model.limit)
        outs = gemms[1].linear(inner, None, routed)
        for name, found, expected in (
            ("gate_up", inner, act(by_hand(x, matrices[0], routed), model.limit)),
            ("down", outs, by_hand(inner, matrices[1], routed)),
        ):
            error = float((found.double() - expected).abs().max() / expected.abs().max())
            if not error < 0.02:
                wrong.append(f"{name} of {tokens} tokens by {error:.3f}")
        if not exact:
            continue
        for token in (0, tokens - 1):
            alone = experts.route(logits[token : token + 1], model.top_k, True, True)
            first = gemms[0].gated(x[token : token + 1], None, alone, model.limit)
            own = slice(token * model.top_k, (token + 1) * model.top_k)
            if not torch.equal(first, inner[own]) or not torch.equal(gemms[1].linear(first, None, alone), outs[own]):
                wrong.append(f"bits of token {token} of {tokens}")
    print(f"  {kind}: {'right' if not wrong else 'WRONG: ' + ', '.join(wrong)}", flush=True)


# -- fast -------------------------------------------------------------------------------------------------------------


def scores(model: Model, tokens: int) -> Tensor:
    return torch.randn(tokens, model.count, dtype=HALF, device=CUDA)


def timed(model: Model, layers: list[Layer], tokens: int, exact: bool) -> tuple[float, list[float], float]:
    """Distinct experts of a layer; microseconds of its routing, gate and up, down, sum, and all of it in one graph;
    bytes of the weights that were chosen."""
    x, residual = (torch.randn(tokens, model.hidden, dtype=HALF, device=CUDA) for _ in range(2))
    logits = [scores(model, tokens) for _ in layers]
    routes = [experts.route(each, model.top_k, True, exact) for each in logits]
    inner = torch.randn(tokens * model.top_k, model.ffn, dtype=HALF, device=CUDA)
    outs = torch.randn(tokens * model.top_k, model.hidden, dtype=HALF, device=CUDA)
    gate_ups = [ExpertGemm(layer.gate_up, model.count) for layer in layers]
    downs = [ExpertGemm(layer.down, model.count) for layer in layers]

    def whole() -> None:
        for each, gate_up, down in zip(logits, gate_ups, downs, strict=True):
            routed = experts.route(each, model.top_k, True, exact)
            experts.mix(down.linear(gate_up.gated(x, None, routed, model.limit), None, routed), routed, residual)

    calls: list[Callable[[], object]] = [
        lambda: [experts.route(each, model.top_k, True, exact) for each in logits],
        lambda: [g.gated(x, None, r, model.limit) for g, r in zip(gate_ups, routes, strict=True)],
        lambda: [d.linear(inner, None, r) for d, r in zip(downs, routes, strict=True)],
        lambda: [experts.mix(outs, r, residual) for r in routes],
        whole,
    ]
    times = [replay_us(call, 20, least=True) / len(layers) for call in calls]
    distinct = sum(r.experts.unique().numel() for r in routes) / len(routes)
    return distinct, times, distinct / model.count * (nbytes(layers[0].gate_up) + nbytes(layers[0].down))


def table(name: str, model: Model, kind: str) -> None:
    layers = [layer_of(model, kind) for _ in range(LAYERS)]
    print(f"\n{name}, {kind}: microseconds of a layer")
    print(
        f"{'tokens':>7}{'distinct':>9}{'route':>8}{'gate_up':>9}{'down':>8}{'mix':>7}{'layer':>8}{'floor':>8}{'share':>7}"
    )
    for tokens, exact in (*((tokens, False) for tokens in TOKENS), (512, True)):
        distinct, (route, gate_up, down, mix, layer), size = timed(model, layers, tokens, exact)
        floor = size / READ_RATE
        label = f"{tokens}{' exact' if exact else ''}"
        print(
            f"{label:>9}{distinct:>7.1f}{route:>8.1f}{gate_up:>9.1f}{down:>8.1f}{mix:>7.1f}{layer:>8.1f}{floor:>8.1f}"
            f"{floor / layer:>7.0%}",
            flush=True,
        )


def sweep(name: str, model: Model, kind: str) -> None:
    """Outputs of a program, warps and stages; the best of them for each GEMM."""
    layers = [layer_of(model, kind) for _ in range(LAYERS)]
    for tokens in (1, 8, 64, 1024):
        tile = experts.tile_rows(tokens, False)
        found: list[tuple[float, float, tuple[int, int, int]]] = []
        for shape in itertools.product((16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5, 6)):
            expert_gemm.SHAPES[tile] = expert_gemm.GATED_SHAPES[tile] = shape
            try:
                _, (_, gate_up, down, _, _), _ = timed(model, layers, tokens, False)
            except Exception as error:  # too much shared memory, for one
                print(f"  {shape}: {str(error)[:60]}")
                continue
            found.append((gate_up, down, shape))
        for part, label in enumerate(("gate_up", "down")):
            best = sorted(found, key=lambda one, part=part: one[part])[:4]  # type: ignore[misc]
            print(
                f"{name}, {kind}, {tokens} tokens, {label}:", *(f"{one[2]} {one[part]:.1f}" for one in best), flush=True
            )


def main() -> None:
    asked = [arg for arg in sys.argv[1:] if arg != "sweep"]
    for name, model in MODELS.items():
        if asked and name not in asked:
            continue
        print(f"\n{name}")
        for kind in model.formats:
            check(model, kind)
        for kind in model.formats:
            (sweep if "sweep" in sys.argv else table)(name, model, kind)


if __name__ == "__main__":
    main()
