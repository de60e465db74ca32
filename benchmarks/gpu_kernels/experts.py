"""Mixtures of experts: the kernels of ops/triton/expert{s,_gemm}.py, right and how fast, at the sizes of two models.

    python benchmarks/gpu_kernels/experts.py                 # all models and formats of weights
    python benchmarks/gpu_kernels/experts.py gpt-oss-20b     # one of them
    python benchmarks/gpu_kernels/experts.py sweep [seconds] # other shapes of a program, for 1, 8, 64 and 1,024 tokens

First each format is compared with its matrices multiplied out in float64, and a token alone with the same token in a
batch, bit for bit; what differs is said to be WRONG. Then a layer's router, GEMMs and sum are timed, over several
layers of different weights and choices, which are in no cache. Tokens choose independently of each other. The floor is
the time to read the experts that were chosen, at `READ_RATE`. Kernels are compiled by processes without a GPU first,
into Triton's cache.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from timing import replay_us
from torch import Tensor

from draftwing.engine.startup import precompile
from draftwing.layers.linear_ops.groups import multiplied_out
from draftwing.ops.expert_rows import FP8, INT4, MX
from draftwing.ops.groups import WHOLE, PackedGroups, pack, quantized
from draftwing.ops.torch.experts import Routed
from draftwing.ops.triton import expert_gemm, experts
from draftwing.ops.triton.expert_gemm import ExpertGemm
from draftwing.ops.types import MXRows

READ_RATE = 4.55e6  # bytes per microsecond, a pure read on an H200
LAYERS = 6
CAPABILITY = 90  # that kernels are compiled for ahead
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
SWEPT = {1: "small", 8: "small", 64: "small", 1024: "large"}
# Outputs of a program, warps, stages
TRIED = {
    "small": [(f, w, s) for f, w in ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4))
              for s in (3, 4, 6)],
    "large": [(f, w, s) for f, w in ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8)) for s in (3, 4)],
}  # fmt: skip
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


KINDS = {"bfloat16": expert_gemm.DENSE, "w4a16": INT4, "fp8": FP8, "mxfp4": MX}


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


# -- compiled ---------------------------------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """Those of a layer for so many tokens; shape: of a program, None: as the engine has it."""

    model: str
    kind: str
    tokens: int
    shape: tuple[int, int, int] | None = None


def without_data(kind: str, rows: int, columns: int) -> Weight:
    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    if kind == "bfloat16":
        return empty(rows, columns, dtype=HALF)
    if kind == "mxfp4":
        return MXRows(empty(rows, columns // 2), empty(rows, columns // 32))
    bits, groups, shift = (4, columns // 128, 1) if kind == "w4a16" else (8, 1, WHOLE)
    codes, scales = empty(rows // 16, columns * 2 * bits), empty(rows // 16, groups, 8, 2, dtype=HALF)
    return PackedGroups(codes, scales, None, bits, shift, None, kind == "fp8")


def compile_one(wanted: Kernels) -> str | None:
    """Fills the cache; runs in a process without a GPU. -> what failed"""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    launches: list[precompile.Launch] = []

    def note(*, fn: Any, key: str, compile: dict[str, Any], **rest: Any) -> bool:
        launches.append(precompile.Launch(fn.module, fn.name, compile["specialization_data"]))
        fn.jit_function.device_caches[precompile._Driver.DEVICE][0][key] = precompile._Nothing()
        return True

    driver.set_active(precompile._Driver(GPUTarget("cuda", CAPABILITY, 32)))
    knobs.runtime.jit_cache_hook = note
    model, tokens = MODELS[wanted.model], wanted.tokens
    if wanted.shape is not None:
        expert_gemm.SHAPES[KINDS[wanted.kind], experts.tile_rows(tokens, False)] = wanted.shape, wanted.shape
    routed = experts.route(torch.empty(tokens, model.count, dtype=HALF, device="meta"), model.top_k, True, False)
    x = torch.empty(tokens, model.hidden, dtype=HALF, device="meta")
    gate_up = without_data(wanted.kind, model.count * 2 * model.ffn, model.hidden)
    down = without_data(wanted.kind, model.count * model.hidden, model.ffn)
    inner = ExpertGemm(gate_up, model.count).gated(x, None, routed, model.limit)
    experts.mix(ExpertGemm(down, model.count).linear(inner, None, routed), routed, x)
    knobs.runtime.jit_cache_hook = None
    try:
        for launch in launches:
            precompile.compile_launch(launch)
            getattr(importlib.import_module(launch.module), launch.name).device_caches.clear()
    except Exception as error:
        return f"{wanted}: {str(error)[:120]}"
    return None


def compile_all(wanted: Iterable[Kernels]) -> None:
    begin, jobs = time.monotonic(), list(wanted)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        failed = list(filter(None, workers.map(compile_one, jobs)))
    took = time.monotonic() - begin
    print(f"{len(jobs)} layers compiled, {took:.0f} s; failed: {len(failed)} {failed[:2]}", flush=True)


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


def sweep(name: str, model: Model, kind: str, until: float) -> None:
    """Outputs of a program, warps and stages; the best of them for each GEMM, beside the engine's own."""
    layers = [layer_of(model, kind) for _ in range(LAYERS)]
    for tokens, size in SWEPT.items():
        tile = KINDS[kind], experts.tile_rows(tokens, False)
        own = expert_gemm.SHAPES[tile]
        distinct, (_, *now, _, _), size_read = timed(model, layers, tokens, False)
        found: list[tuple[float, float, tuple[int, int, int]]] = []
        for shape in TRIED[size]:
            if time.monotonic() > until:
                break
            expert_gemm.SHAPES[tile] = shape, shape
            try:
                _, (_, gate_up, down, _, _), _ = timed(model, layers, tokens, False)
            except Exception as error:  # too much shared memory, for one
                print(f"  {shape}: {str(error)[:60]}")
                continue
            found.append((gate_up, down, shape))
        expert_gemm.SHAPES[tile] = own
        floors = [size_read / READ_RATE * part for part in (2 / 3, 1 / 3)]
        for part, label in enumerate(("gate_up", "down")):
            best = sorted(found, key=lambda one, part=part: one[part])[:5]  # type: ignore[misc]
            print(
                f"{name}, {kind}, {tokens} tokens, {distinct:.0f} experts, {label}: floor {floors[part]:.1f}, now "
                f"{now[part]:.1f};", *(f"{one[2]} {one[part]:.1f}" for one in best), flush=True,
            )  # fmt: skip


def main() -> None:
    begin, sweeps = time.monotonic(), "sweep" in sys.argv
    until = begin + max([float(arg) for arg in sys.argv[1:] if arg.isdigit()], default=1e9)
    asked = [arg for arg in sys.argv[1:] if arg in MODELS] or list(MODELS)
    kinds = [(name, kind) for name in asked for kind in MODELS[name].formats]
    only = [arg for arg in sys.argv[1:] if arg in {kind for _, kind in kinds}]
    kinds = [(name, kind) for name, kind in kinds if not only or kind in only]
    wanted = [Kernels(name, kind, tokens) for name, kind in kinds for tokens in (1, 512)]
    if sweeps:
        sizes = ((1, "small"), (512, "large"))
        wanted += [Kernels(*kind, tokens, shape) for kind in kinds for tokens, size in sizes for shape in TRIED[size]]
    compile_all(wanted)
    for name, kind in kinds:
        print(f"\n{name}")
        check(MODELS[name], kind)
        if sweeps:
            sweep(name, MODELS[name], kind, until)
        else:
            table(name, MODELS[name], kind)


if __name__ == "__main__":
    main()
