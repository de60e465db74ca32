"""Mixtures of experts: the kernels of ops/triton/expert{s,_gemm}.py and ops/experts/cuda.py, right and how fast,
at the sizes of four models.

    python benchmarks/gpu_kernels/experts.py                 # all models and formats of weights
    python benchmarks/gpu_kernels/experts.py gpt-oss-20b     # one of them
    python benchmarks/gpu_kernels/experts.py triton          # Triton's kernels for few tokens, too
    python benchmarks/gpu_kernels/experts.py sweep [seconds] # other cuts and shapes, for 1, 4, 16, 64 and 1,024 tokens
    python benchmarks/gpu_kernels/experts.py sweep few       # cuts alone, for up to 64

First each format is compared with its dequantised matrices in float64, and a token alone with the same token in a
batch, bit for bit; what differs is said to be WRONG. Then a layer's router, GEMMs and sum are timed, over several
layers of different weights and choices, which are in no cache. Tokens choose independently of each other. The floor is
the time to read the experts that were chosen, at `timing.read_rate`. Kernels are compiled first, by processes without a
GPU, into Triton's cache.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from timing import read_rate, replay_us
from torch import Tensor

from draftwing.engine.startup import precompile
from draftwing.layers.linear_ops.groups import dequantised
from draftwing.ops.experts import cuda as gemm_experts
from draftwing.ops.experts import triton as experts
from draftwing.ops.experts import triton_gemm
from draftwing.ops.experts.cuda import Cut, Cuts, FewPairs, Layout, Stream
from draftwing.ops.experts.routing import Routed, Routing
from draftwing.ops.experts.rows import FP8, INT4, MX
from draftwing.ops.experts.triton_gemm import DENSE, ExpertGemm
from draftwing.ops.experts.triton_tiles import LARGE_TILE, tile_rows
from draftwing.ops.gemm.groups import WHOLE, PackedGroups, pack, quantized
from draftwing.ops.gemm.stored import MXRows

LAYERS = 6
CAPABILITY = 90  # that kernels are compiled for ahead
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
FEW, MANY = (1, 4, 16, 64), 1024  # tokens of a sweep
# Outputs of a program, warps, stages; of tiles of many pairs.
TRIED = [(f, w, s) for f, w in ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8)) for s in (3, 4)]
# Cuts of few pairs; weights that are quantised take fewer registers.
CUTS = [
    Cut(*cut)
    for cut in (
        (4, 1, 1, 2), (3, 1, 1, 2), (2, 1, 1, 2), (2, 1, 1, 3), (2, 2, 1, 2), (2, 2, 2, 2), (1, 2, 2, 2), (1, 2, 2, 3),
        (1, 3, 3, 2), (1, 4, 1, 2), (1, 4, 2, 2),
    )
]  # fmt: skip
SHORT = [
    Cut(*cut)
    for cut in (
        (3, 1, 1, 3), (4, 2, 1, 2), (3, 2, 1, 2), (3, 2, 2, 2), (2, 2, 2, 3), (2, 3, 1, 2), (2, 3, 3, 2), (1, 3, 3, 3),
        (1, 4, 4, 2), (1, 6, 2, 2),
    )
]  # fmt: skip
STREAMS = (1, 2, 3, 4)  # row tiles
HALF, CUDA = torch.bfloat16, torch.device("cuda")
Weight = Tensor | PackedGroups | MXRows
Tried = Cut | int  # row tiles of a stream


class Model(NamedTuple):
    count: int
    top_k: int
    hidden: int
    ffn: int
    limit: float
    formats: tuple[str, ...]


MODELS = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768, 0.0, ("bfloat16", "fp8", "w4a16")),
    "qwen3.5-35b-a3b": Model(256, 8, 2048, 512, 0.0, ("bfloat16", "fp8")),
    "gpt-oss-20b": Model(32, 4, 2880, 2880, 7.0, ("bfloat16", "mxfp4")),
    "gpt-oss-120b": Model(128, 4, 2880, 2880, 7.0, ("mxfp4",)),
}


KINDS = {"bfloat16": DENSE, "w4a16": INT4, "fp8": FP8, "mxfp4": MX}


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
        code = fn.jit_function.cache_key
        launches.append(precompile.Launch(fn.module, fn.name, compile["specialization_data"], code))
        fn.jit_function.device_caches[precompile._Driver.DEVICE][0][key] = precompile._Nothing()
        return True

    driver.set_active(precompile._Driver(GPUTarget("cuda", CAPABILITY, 32)))
    knobs.runtime.jit_cache_hook = note
    model, tokens = MODELS[wanted.model], wanted.tokens
    if wanted.shape is not None:
        triton_gemm.SHAPES[KINDS[wanted.kind], LARGE_TILE] = wanted.shape, wanted.shape
    routed = experts.route(torch.empty(tokens, model.count, dtype=HALF, device="meta"), Routing(model.top_k))
    x = torch.empty(tokens, model.hidden, dtype=HALF, device="meta")
    gate_up = without_data(wanted.kind, model.count * 2 * model.ffn, model.hidden)
    down = without_data(wanted.kind, model.count * model.hidden, model.ffn)
    for kernels in (nullcontext(), TritonsOwn()):
        with kernels:
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


def compile_cut(layout: Layout, tried: Tried | None) -> str | None:
    """Kernels of few pairs; tried: of all of them, None: as the engine has them."""
    try:
        of, cuts = (layout, None) if tried is None else all_cut(layout, tried)
        gemm_experts.compile_ahead(HALF, of, divmod(CAPABILITY, 10), cuts)
    except Exception as error:
        return f"{layout} {tried}: {str(error)[:120]}"
    return None


def all_cut(layout: Layout, tried: Tried) -> tuple[Layout, Cuts]:
    """What few pairs of this layout are multiplied with."""
    every = gemm_experts.cuts_for(Layout())
    if isinstance(tried, Cut):
        return layout._replace(chunks=0), dict.fromkeys(every, tried)
    cuts: Cuts = {}
    for kind, tile in every:
        most = [cut for tiles in range(1, tried + 1) if (cut := Stream.of(layout, tiles, tile)).stages > 1]
        cuts[kind, tile] = most[-1]
    return layout, cuts


def to_try(layout: Layout) -> list[Tried]:
    return [*CUTS, *([] if layout.kind == DENSE else SHORT), *(STREAMS if layout.chunks else ())]


def compile_all(wanted: Iterable[Kernels], few: Iterable[tuple[Layout, Tried | None]]) -> None:
    begin, jobs = time.monotonic(), list(wanted)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as workers:
        cuts = [workers.submit(compile_cut, *one) for one in few]
        failed = list(filter(None, workers.map(compile_one, jobs)))
        failed += filter(None, (cut.result() for cut in cuts))
    took = time.monotonic() - begin
    count = len(jobs) + len(cuts)
    print(f"{count} layers and cuts compiled, {took:.0f} s; failed: {len(failed)} {failed[:2]}", flush=True)


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
    matrices = [dequantised(w, HALF) if not isinstance(w, Tensor) else w for w in layer]
    gemms = [ExpertGemm(w, model.count) for w in layer]
    wrong, most = [], min(gemm.most_pairs(HALF) for gemm in gemms)
    for tokens, exact in ((1, False), (9, False), (40, False), (200, True), (200, False)):
        x, logits = torch.randn(tokens, model.hidden, dtype=HALF, device=CUDA), scores(model, tokens)
        routed = experts.route(logits, Routing(model.top_k), exact=exact, most_pairs=most)
        inner = gemms[0].gated(x, None, routed, model.limit)
        outs = gemms[1].linear(inner, None, routed)
        for name, found, expected in (
            ("gate_up", inner, act(by_hand(x, matrices[0], routed), model.limit)),
            ("down", outs, by_hand(inner, matrices[1], routed)),
        ):
            error = float((found.double() - expected).abs().max() / expected.abs().max())
            if not error < 0.02:
                wrong.append(f"{name} of {tokens} tokens by {error:.3f}")
        if tile_rows(tokens, model.top_k, model.count) > gemm_experts.MAX_PAIRS:
            continue
        for token in (0, tokens - 1):
            alone = experts.route(logits[token : token + 1], Routing(model.top_k), exact=True)
            first = gemms[0].gated(x[token : token + 1], None, alone, model.limit)
            own = slice(token * model.top_k, (token + 1) * model.top_k)
            if not torch.equal(first, inner[own]) or not torch.equal(gemms[1].linear(first, None, alone), outs[own]):
                wrong.append(f"bits of token {token} of {tokens}")
    print(f"  {kind}: {'right' if not wrong else 'WRONG: ' + ', '.join(wrong)}", flush=True)


# -- fast -------------------------------------------------------------------------------------------------------------


def scores(model: Model, tokens: int) -> Tensor:
    return torch.randn(tokens, model.count, dtype=HALF, device=CUDA)


class Timed(NamedTuple):
    """Microseconds of a layer."""

    route: float
    gate_up: float
    down: float
    mix: float
    whole: float  # all of it in one graph


class Bench:
    """Layers of different weights, and rows that choose of them at random.

    most_pairs: of a tile, None: as the engine has them."""

    def __init__(
        self, model: Model, layers: list[Layer], tokens: int, exact: bool = False, most_pairs: int | None = None
    ) -> None:
        self.model = model
        self._x, self._residual = (torch.randn(tokens, model.hidden, dtype=HALF, device=CUDA) for _ in range(2))
        self._logits = [scores(model, tokens) for _ in layers]
        self._inner = torch.randn(tokens * model.top_k, model.ffn, dtype=HALF, device=CUDA)
        self._outs = torch.randn(tokens * model.top_k, model.hidden, dtype=HALF, device=CUDA)
        self._gate_ups = [ExpertGemm(layer.gate_up, model.count) for layer in layers]
        self._downs = [ExpertGemm(layer.down, model.count) for layer in layers]
        own = min(gemm.most_pairs(HALF) for gemm in (self._gate_ups[0], self._downs[0]))
        self._how: dict[str, Any] = {"exact": exact, "most_pairs": own if most_pairs is None else most_pairs}
        self._routes = [experts.route(each, Routing(model.top_k), **self._how) for each in self._logits]
        self.distinct = sum(r.experts.unique().numel() for r in self._routes) / len(layers)
        share = self.distinct / model.count
        self.floors = [share * nbytes(part) / read_rate() for part in layers[0]]

    def route(self) -> None:
        for each in self._logits:
            experts.route(each, Routing(self.model.top_k), **self._how)

    def gate_up(self) -> None:
        for gemm, routed in zip(self._gate_ups, self._routes, strict=True):
            gemm.gated(self._x, None, routed, self.model.limit)

    def down(self) -> None:
        for gemm, routed in zip(self._downs, self._routes, strict=True):
            gemm.linear(self._inner, None, routed)

    def mix(self) -> None:
        for routed in self._routes:
            experts.mix(self._outs, routed, self._residual)

    def whole(self) -> None:
        for each, gate_up, down in zip(self._logits, self._gate_ups, self._downs, strict=True):
            routed = experts.route(each, Routing(self.model.top_k), **self._how)
            inner = gate_up.gated(self._x, None, routed, self.model.limit)
            experts.mix(down.linear(inner, None, routed), routed, self._residual)

    def timed(self, call: Callable[[], object]) -> float:
        return replay_us(call, 20, least=True) / len(self._routes)

    def all(self) -> Timed:
        return Timed(*(self.timed(call) for call in (self.route, self.gate_up, self.down, self.mix, self.whole)))


class TritonsOwn:
    """While it holds, Triton's kernels have all tiles."""

    def __enter__(self) -> None:
        self._takes = gemm_experts.takes
        gemm_experts.takes = lambda *_: False

    def __exit__(self, *_: object) -> None:
        gemm_experts.takes = self._takes


def table(name: str, model: Model, kind: str, beside_triton: bool) -> None:
    layers = [layer_of(model, kind) for _ in range(LAYERS)]
    print(f"\n{name}, {kind}: microseconds of a layer")
    heads = [("tokens", 7), ("distinct", 9), ("route", 8), ("gate_up", 9), ("down", 8), ("mix", 7), ("layer", 8),
             ("floor", 8), ("share", 7)]  # fmt: skip
    print("".join(f"{head:>{width}}" for head, width in heads))
    for tokens, exact in (*((tokens, False) for tokens in TOKENS), (512, True), (2048, True)):
        bench = Bench(model, layers, tokens, exact)
        now, bound = bench.all(), sum(bench.floors)
        label, beside = f"{tokens}{' exact' if exact else ''}", ""
        small = tile_rows(tokens, model.top_k, model.count) <= gemm_experts.MAX_PAIRS
        if beside_triton and small:
            with TritonsOwn():
                triton = bench.all()
            beside = f"; Triton's {triton.gate_up:.1f}, {triton.down:.1f}, layer {triton.whole:.1f}"
        print(
            f"{label:>9}{bench.distinct:>7.1f}{now.route:>8.1f}{now.gate_up:>9.1f}{now.down:>8.1f}{now.mix:>7.1f}"
            f"{now.whole:>8.1f}{bound:>8.1f}{bound / now.whole:>7.0%}{beside}", flush=True,
        )  # fmt: skip


def sweep(name: str, model: Model, kind: str, until: float) -> None:
    """The best of all cuts and streams of few pairs and of all of Triton's programs of many for each GEMM, beside the
    engine's own, of many pairs Triton's."""
    layers = [layer_of(model, kind) for _ in range(LAYERS)]
    own_shapes, own_kernels = triton_gemm.SHAPES[KINDS[kind], LARGE_TILE], gemm_experts.few_pairs
    made: dict[tuple[Layout, Tried], FewPairs] = {}

    def kernels(layout: Layout, tried: Tried) -> FewPairs:
        if (layout, tried) not in made:
            made[layout, tried] = FewPairs(CUDA, HALF, *all_cut(layout, tried))
        return made[layout, tried]

    for tokens in FEW if "few" in sys.argv else (*FEW, MANY):
        bench, found = Bench(model, layers, tokens, most_pairs=LARGE_TILE), list[tuple[float, float, Any]]()
        now = bench.timed(bench.gate_up), bench.timed(bench.down)
        with TritonsOwn():
            triton = bench.timed(bench.gate_up), bench.timed(bench.down)
        for tried in to_try(layouts_of(model, kind)[0]) if tokens in FEW else TRIED:
            if time.monotonic() > until:
                break
            try:
                if isinstance(tried, Cut | int):
                    gemm_experts.few_pairs = lambda _, __, layout, tried=tried: kernels(layout, tried)
                else:
                    triton_gemm.SHAPES[KINDS[kind], LARGE_TILE] = tried, tried
                shown = tried if isinstance(tried, int) else tuple(tried)
                found.append((bench.timed(bench.gate_up), bench.timed(bench.down), shown))
            except Exception as error:  # too much shared memory, for one
                print(f"  {tried}: {str(error)[:60]}")
        gemm_experts.few_pairs, triton_gemm.SHAPES[KINDS[kind], LARGE_TILE] = own_kernels, own_shapes
        for part, label in enumerate(("gate_up", "down")):
            best = sorted(found, key=lambda one, part=part: one[part])  # type: ignore[misc]
            print(
                f"{name}, {kind}, {tokens} tokens, {bench.distinct:.0f} experts, {label}: floor "
                f"{bench.floors[part]:.1f}, now {now[part]:.1f}, Triton's {triton[part]:.1f};",
                *(f"{one[2]} {one[part]:.1f}" for one in best), flush=True,
            )  # fmt: skip


def layouts_of(model: Model, kind: str) -> list[Layout]:
    """Of gate_up and down."""
    weights = (weight_of(kind, 16, columns) for columns in (model.hidden, model.ffn))
    return [gemm_experts.layout_of(ExpertGemm(weight, 1).weight) for weight in weights]


def main() -> None:
    begin, sweeps = time.monotonic(), "sweep" in sys.argv
    until = begin + max([float(arg) for arg in sys.argv[1:] if arg.isdigit()], default=1e9)
    asked = [arg for arg in sys.argv[1:] if arg in MODELS] or list(MODELS)
    kinds = [(name, kind) for name in asked for kind in MODELS[name].formats]
    only = [arg for arg in sys.argv[1:] if arg in {kind for _, kind in kinds}]
    kinds = [(name, kind) for name, kind in kinds if not only or kind in only]
    wanted = [Kernels(name, kind, tokens) for name, kind in kinds for tokens in (1, 512)]
    layouts = {layout for name, kind in kinds for layout in layouts_of(MODELS[name], kind)}
    few: list[tuple[Layout, Tried | None]] = [(layout, None) for layout in layouts]
    if sweeps:
        wanted += [Kernels(*kind, 512, shape) for kind in kinds for shape in TRIED if "few" not in sys.argv]
        few += [(layout, tried) for layout in layouts for tried in to_try(layout)]
    compile_all(wanted, few)
    for name, kind in kinds:
        print(f"\n{name}")
        check(MODELS[name], kind)
        if sweeps:
            sweep(name, MODELS[name], kind, until)
        else:
            table(name, MODELS[name], kind, "triton" in sys.argv)


if __name__ == "__main__":
    main()
