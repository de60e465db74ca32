"""A layer's mixture of experts with one that all rows go to, and its dense GEMMs of fp8 weights, at the sizes of
Qwen3.5-35B-A3B: right and how fast.

    python benchmarks/gpu_kernels/mixture.py [seconds]    # begin nothing more from then on

The mixture is compared with float64, and rows alone with rows in a batch, bit for bit; what differs is said to be
WRONG. Then it is timed with the shared expert apart and as one of the others, kernel by kernel, and with other cuts of
the GEMMs. Times are microseconds of a layer among several of different weights, which are in no cache.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from timing import read_rate, replay_us
from torch import Tensor

from draftwing.layers.attention import AttentionConfig
from draftwing.layers.config import LayerConfig
from draftwing.layers.experts import ExpertMLP
from draftwing.layers.linear_ops.base import PackMode, ParamSlice
from draftwing.layers.linear_ops.groups import GroupFormat
from draftwing.layers.norm import RMSNorm
from draftwing.layers.part_configs import ExpertConfig
from draftwing.models.decoder import pack_layers
from draftwing.ops.experts import cuda as gemm_experts
from draftwing.ops.experts.cuda import Cut, Cuts, FewPairs, Layout, Stream
from draftwing.ops.experts.routing import Routed, Routing
from draftwing.ops.experts.rows import FP8
from draftwing.ops.gemm import cuda as gemm
from draftwing.ops.gemm import cuda_groups
from draftwing.ops.gemm.cuda import SmallMGemm
from draftwing.ops.gemm.cuda_groups import GroupGemm, Width
from draftwing.ops.gemm.groups import PackedGroups, pack
from draftwing.ops.gemm.shapes import Shape, TallShape, few_rows, ring, shared, wide
from draftwing.ops.gemm.stored import QuantizedRows
from draftwing.ops.triton.ops import TritonOps

CUDA, HALF, CAPABILITY = torch.device("cuda"), torch.bfloat16, (9, 0)
COUNT, TOP, HIDDEN, FFN, LAYERS = 256, 8, 2048, 512, 6
WIDTH = Width(8, False, 1, True)
LAYOUTS = {"gate_up": Layout(FP8, 1, chunks=HIDDEN // 64), "down": Layout(FP8, 1, chunks=FFN // 64)}
MATRICES = {"qkvz": (12288, 2048), "out": (2048, 4096), "qkv": (9216, 2048)}


ONE_ROW = {
    "gate_up": [
        (3, 1, 1, 2), (4, 1, 1, 2), (2, 1, 1, 3), (2, 2, 1, 2), (2, 2, 2, 3), (1, 4, 2, 2), (1, 4, 4, 3), (1, 2, 2, 4),
        (1, 2, 1, 5),
    ],
    "down": [(4, 1, 1, 2), (4, 1, 1, 3), (3, 1, 1, 3), (2, 1, 1, 4), (2, 1, 1, 3), (1, 1, 1, 5)],
}  # fmt: skip


def tried_cuts(rows: int) -> dict[str, dict[str, Cut | Stream]]:
    """By GEMM other cuts for tiles of 8 and 16 pairs."""
    found: dict[str, dict[str, Cut | Stream]] = {"gate_up": {}, "down": {}}
    if rows == 1:
        return {name: {str(cut): Cut(*cut) for cut in cuts} for name, cuts in ONE_ROW.items()}
    for name, layout in LAYOUTS.items():
        for row_tiles in (1, 2, 3, 4):
            found[name][f"stream {row_tiles}"] = Stream.of(layout, row_tiles, 16)
        found[name]["registers"] = Cut(4, 1, 1, 2)
    return found


def cuts_with(name: str, cut: Cut | Stream) -> Cuts:
    kind = "silu" if name == "gate_up" else "plain"
    return {(kind, tile): cut for tile in (8, 16)}


def tried_shapes() -> dict[int, list[Shape | TallShape]]:
    """By rows of x."""
    tall = [
        TallShape(64, *cut, cluster=cluster, blocks=blocks)
        for cut, cluster, blocks in (
            ((1, 2, 4, 3), 8, 3), ((1, 1, 4, 4), 8, 3), ((1, 1, 4, 4), 8, 4), ((2, 1, 4, 4), 8, 2),
            ((2, 2, 4, 3), 8, 1), ((2, 2, 4, 3), 8, 2), ((1, 2, 4, 4), 8, 2),
        )
    ]  # fmt: skip
    tall += [
        TallShape(64, *cut, cluster=1, blocks=blocks)
        for cut, blocks in (
            ((1, 1, 4, 6), 2), ((1, 1, 4, 8), 2), ((1, 1, 8, 8), 1), ((2, 1, 6, 6), 1), ((2, 1, 4, 4), 2),
            ((1, 2, 6, 6), 1),
        )
    ]  # fmt: skip
    tall += [TallShape(32, 1, 2, 4, 4, cluster=8, blocks=3), TallShape(32, 1, 1, 4, 6, cluster=1, blocks=2)]
    return {
        64: [
            *tall,
            wide(64, (8, 1), 1, 5, 1, 2, 8), wide(64, (8, 1), 2, 5, 1, 1, 8), wide(64, (4, 1), 2, 5, 1, 2, 8),
            wide(64, (8, 1), 1, 5, 1, 2), wide(64, (4, 1), 1, 8, 1, 2), wide(64, (4, 2), 1, 6, 1, 1, 4),
            shared(64, (4, 1), 2, 2, 4, 2, 8), shared(64, (4, 1), 1, 4, 4, 3, 8), shared(64, (4, 1), 1, 8, 4, 2),
            shared(64, (8, 1), 1, 4, 4, 1), few_rows(64, 2, 2, 1, 1),
        ],
        16: [
            few_rows(16, 1, 1, 1, 3), few_rows(16, 1, 2, 1, 2), few_rows(16, 2, 1, 1, 2), few_rows(16, 2, 2, 1, 2),
            few_rows(16, 1, 4, 2, 2), ring(16, 1, 4, 2), ring(16, 2, 3, 1), ring(16, 2, 4, 1), ring(16, 4, 2, 1),
            shared(16, (4, 1), 2, 4, 4, 3, 8), shared(16, (2, 4), 2, 4, 4, 1, 2), shared(16, (2, 2), 2, 4, 4, 2, 4),
        ],
        1: [
            ring(2, 2, 2, 2), ring(2, 2, 5, 1), ring(2, 4, 3, 1), ring(2, 1, 6, 2), ring(2, 1, 4, 3),
            few_rows(8, 2, 4, 2, 2), few_rows(8, 1, 4, 4, 3),
        ],
    }  # fmt: skip


# Of a router and of b and a of a delta net, in bfloat16.
NARROW = {"router": (264, 2048), "ba": (64, 2048)}
NARROW_SHAPES = [
    few_rows(16, 1, 2, 1, 3), few_rows(32, 1, 2, 1, 2), few_rows(64, 1, 2, 1, 1), few_rows(64, 2, 2, 1, 1),
    shared(64, (2, 1), 1, 4, 4, 2, 8), shared(64, (1, 4), 1, 4, 4, 1, 2), shared(32, (1, 4), 1, 4, 4, 1, 2),
    shared(32, (1, 2), 1, 4, 4, 2, 4), shared(16, (1, 4), 1, 4, 4, 2, 2),
]  # fmt: skip


def compile_narrow(shape: Shape) -> str | None:
    return _failed(lambda: gemm.compile_ahead(HALF, CAPABILITY, {("plain", shape.tokens): shape}))


def each_us(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    return replay_us(lambda: [product(w) for w in weights], 15, least=True) / len(weights)


def time_narrow(rows: int) -> None:
    known = gemm.small_m_gemm(CUDA, HALF)
    for name, (features, columns) in NARROW.items():
        x = torch.randn(rows, columns, device=CUDA, dtype=HALF)
        weights = [torch.randn(features, columns, device=CUDA, dtype=HALF) for _ in range(20)]
        expected = known.linear(x[:1], weights[0], None)
        took = [
            (each_us(lambda w, x=x: x @ w.T, weights), "cuBLAS"),
            (each_us(lambda w, x=x: known.linear(x, w, None), weights), "now"),
        ]
        for shape in NARROW_SHAPES:
            try:
                ours = SmallMGemm(CUDA, HALF, shapes={("plain", shape.tokens): shape})
                ours.only = "plain", shape.tokens
                right = torch.equal(ours.linear(x, weights[0], None)[:1], expected)
                us = each_us(lambda w, x=x, ours=ours: ours.linear(x, w, None), weights)
                took.append((us, f"{shape.call}, {shape.cluster}{'' if right else ' WRONG'}"))
            except Exception as error:
                took.append((1e9, f"{shape.call}: {str(error)[:40]}"))
        print(f"{rows:3d} rows, {name}:", "; ".join(f"{us:.2f} {label}" for us, label in sorted(took)), flush=True)


def compile_shape(shape: Shape | TallShape | None) -> str | None:
    return _failed(lambda: cuda_groups.compile_ahead(HALF, WIDTH, CAPABILITY, None if shape is None else named(shape)))


def compile_cut(name: str, cut: Cut | Stream | None) -> str | None:
    layout = LAYOUTS[name]._replace(chunks=0) if isinstance(cut, Cut) else LAYOUTS[name]
    cuts = None if cut is None else cuts_with(name, cut)
    return _failed(lambda: gemm_experts.compile_ahead(HALF, layout, CAPABILITY, cuts))


def compile_dense() -> str | None:
    return _failed(lambda: gemm.compile_ahead(HALF, CAPABILITY))


def _failed(compile_it: Callable[[], object]) -> str | None:
    try:
        compile_it()
    except Exception as error:
        return str(error)[-200:]
    return None


def named(shape: Shape | TallShape) -> dict[tuple[str, int], Shape | TallShape]:
    return {("plain", shape.tokens): shape}


def blocks_of(rows: int, columns: int, seed: int = 0) -> QuantizedRows:
    """fp8 in blocks of 128 x 128, with a variance of about 1 / columns."""
    generator = torch.Generator(CUDA).manual_seed(seed)
    codes = torch.randn(rows, columns, generator=generator, device=CUDA, dtype=HALF).to(torch.float8_e4m3fn)
    scales = (torch.rand(-(-rows // 128), columns // 128, generator=generator, device=CUDA) + 0.5) * columns**-0.5
    return QuantizedRows(codes, 8, scales, None, 128, 128, None)


def mixture(ops: TritonOps, merges: bool, seed: int, exact: bool = False) -> ExpertMLP:
    form = GroupFormat(ops=ops)
    experts = ExpertConfig(COUNT, Routing(TOP), FFN, shared=FFN, shared_gate=True)
    config = LayerConfig(HIDDEN, AttentionConfig(16, 2, 128), FFN, experts=experts, weight_format=form)
    layer = ExpertMLP(config, HALF, CUDA)
    assert layer.shared is not None and layer.shared_gate is not None
    for i, part in enumerate((layer.gate_up, layer.down, layer.shared.gate_up, layer.shared.down)):
        rows = blocks_of(part.out_features, part.in_features, 4 * seed + i)
        assert part.op.keep(ParamSlice("weight", 0, part.out_features), rows)
    generator = torch.Generator(CUDA).manual_seed(seed)
    for param in (layer.router.weight, layer.shared_gate):
        param.data.normal_(0, HIDDEN**-0.5, generator=generator)
    ops.merges_matrices = merges
    pack_layers(layer, ops, PackMode(exact))
    return layer


def by_hand(layer: ExpertMLP, x: Tensor, residual: Tensor) -> Tensor:
    """Of a merged layer, float64, with the routes that it takes."""
    _, routed = layer._inner(x)
    gate_up = layer.gate_up.dense_weight().view(COUNT + 1, 2 * FFN, HIDDEN)
    down = layer.down.dense_weight().view(COUNT + 1, HIDDEN, FFN)
    logits = x.double() @ layer.router.dense_weight().double().T
    least, chosen = logits[:, :COUNT].topk(TOP, 1).values[:, -1:], logits.gather(1, routed.experts[:, :TOP])
    assert bool((chosen > least - 0.05).all()) and bool((routed.experts[:, TOP:] == COUNT).all())
    weights = torch.cat((chosen.softmax(1), logits[:, COUNT : COUNT + 1].sigmoid()), 1)
    total = residual.double()
    for row, (experts, by) in enumerate(zip(routed.experts.tolist(), weights, strict=True)):
        for expert, weight in zip(experts, by, strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            total[row] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return total


def check(layer: ExpertMLP, exact: bool) -> None:
    """exact: rows are to have the same bits in any batch."""
    norm = RMSNorm(HIDDEN, 1e-6, HALF, CUDA)
    norm.pack(layer._ops)
    x, residual = torch.randn(2, 300, HIDDEN, device=CUDA, dtype=HALF)
    wrong = []
    for rows in (1, 2, 5, 16, 17, 64, 128, 300):
        found, normed = layer.under(norm, x[:rows], residual[:rows])
        part = slice(0, rows, 1 + rows // 9)
        error = (found[part].double() - by_hand(layer, x[part], residual[part])).abs().max()
        if not error < 0.1:
            wrong.append(f"{rows} rows by {float(error):.3f}")
        for row in range(0, rows if exact else 0, 1 + rows // 5):
            one, its = layer.under(norm, x[row : row + 1], residual[row : row + 1])
            if not torch.equal(one[0], found[row]) or not torch.equal(its[0], normed[row]):
                wrong.append(f"bits of row {row} of {rows}")
    print(f"mixture, {exact=}: {'right' if not wrong else 'WRONG: ' + ', '.join(wrong)}", flush=True)


def time_mixture(ops: TritonOps, rows: int, apart: list[ExpertMLP], merged: list[ExpertMLP]) -> None:
    norm = RMSNorm(HIDDEN, 1e-6, HALF, CUDA)
    norm.pack(ops)
    x, residual = torch.randn(2, rows, HIDDEN, device=CUDA, dtype=HALF)

    def us(call: Callable[[ExpertMLP], object], layers: list[ExpertMLP]) -> float:
        return replay_us(lambda: [call(layer) for layer in layers], 20, least=True) / len(layers)

    whole = us(lambda layer: layer.under(norm, x, residual), merged)
    before = us(lambda layer: layer.under(norm, x, residual), apart)
    logits = [layer.router(x)[:, : COUNT + 1] for layer in merged]
    routes = [ops.route(each, layer._routing) for each, layer in zip(logits, merged, strict=True)]
    distinct = sum(routed.experts.unique().numel() for routed in routes) / len(routes)
    inner = torch.randn(rows * (TOP + 1), FFN, device=CUDA, dtype=HALF)
    outs = torch.randn(rows * (TOP + 1), HIDDEN, device=CUDA, dtype=HALF)
    of: dict[ExpertMLP, tuple[Tensor, Routed]] = {
        layer: (each, routed) for layer, each, routed in zip(merged, logits, routes, strict=True)
    }
    parts = {
        "router": us(lambda layer: layer.router(x), merged),
        "route": us(lambda layer: ops.route(of[layer][0], layer._routing), merged),
        "gate_up": us(lambda layer: layer.gate_up.gated(x, of[layer][1]), merged),
        "down": us(lambda layer: layer.down(inner, of[layer][1]), merged),
        "mix": us(lambda layer: ops.mix_norm(outs, of[layer][1], residual, norm.weight, 1e-6), merged),
    }
    one = HIDDEN * FFN * 1.0001
    print(
        f"{rows:3d} rows, {distinct:.0f} experts: floors of gate_up and down {2 * distinct * one / read_rate():.1f}, "
        f"{distinct * one / read_rate():.1f}; layer {before:.1f} apart, {whole:.1f} merged;",
        ", ".join(f"{name} {took:.1f}" for name, took in parts.items()), flush=True,
    )  # fmt: skip
    for name, cuts in tried_cuts(rows).items():
        shown = []
        for label, cut in cuts.items():
            layout = LAYOUTS[name]._replace(chunks=0) if isinstance(cut, Cut) else LAYOUTS[name]
            try:
                kernels = FewPairs(CUDA, HALF, layout, cuts_with(name, cut))
                arguments = ("silu", x) if name == "gate_up" else ("plain", inner)
                width = FFN if name == "gate_up" else HIDDEN
                took = us(
                    lambda layer, kernels=kernels, arguments=arguments, width=width, name=name: kernels(
                        *arguments, getattr(layer, name).device_weight, None, of[layer][1], width
                    ), merged,
                )  # fmt: skip
                shown.append(f"{label} {took:.1f}")
            except Exception as error:
                shown.append(f"{label} {str(error)[:30]}")
        print(f"    {name}: {', '.join(shown)}", flush=True)


def time_shapes(rows: int, shapes: list[Shape | TallShape], until: float) -> None:
    known = GroupGemm(CUDA, HALF, WIDTH)
    for name, (features, columns) in MATRICES.items():
        x = torch.randn(rows, columns, device=CUDA, dtype=HALF)
        first = pack(blocks_of(features, columns), HALF, CUDA)
        weights = [PackedGroups(*(v.clone() if isinstance(v, Tensor) else v for v in first)) for _ in range(8)]

        def us(kernels: GroupGemm, weights: list[PackedGroups] = weights, x: Tensor = x) -> float:
            return replay_us(lambda: [kernels.linear(x, w, None) for w in weights], 15, least=True) / len(weights)

        expected = known.linear(x, first, None)
        dense = [known.dense(w) for w in weights[:4]]
        cublas = each_us(lambda w, x=x: x @ w.T, dense)
        found = []
        for shape in shapes:
            if time.monotonic() > until:
                print("no time")
                break
            try:
                kernels = GroupGemm(CUDA, HALF, WIDTH, named(shape))
                right = torch.equal(kernels.linear(x, first, None), expected)
                call = f"{shape.call}, {shape.cluster} | {shape.blocks}"
                found.append((us(kernels), f"{call}{'' if right else ' WRONG'}"))
            except Exception as error:
                print(f"{shape.call}: {error}", flush=True)
        print(
            f"{rows:3d} rows, {name}: floor {first.nbytes / read_rate():.1f}, cuBLAS in bfloat16 {cublas:.1f}, now "
            f"{us(known):.1f};", "; ".join(f"{took:.1f} {label}" for took, label in sorted(found)[:7]), flush=True,
        )  # fmt: skip


def main() -> None:
    until = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 1e9)
    begin, shapes = time.monotonic(), tried_shapes()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), get_context("spawn")) as workers:
        jobs = [workers.submit(compile_dense), workers.submit(compile_shape, None)]
        jobs += [workers.submit(compile_cut, name, None) for name in LAYOUTS]
        for rows in (1, 16):
            tried = tried_cuts(rows).items()
            jobs += [workers.submit(compile_cut, name, cut) for name, cuts in tried for cut in cuts.values()]
        jobs += [workers.submit(compile_narrow, shape) for shape in NARROW_SHAPES]
        jobs += [workers.submit(compile_shape, shape) for some in shapes.values() for shape in some]
        failed = list(filter(None, (job.result() for job in jobs)))
    print(f"compiled in {time.monotonic() - begin:.0f} s; failed: {len(failed)} {failed[:3]}", flush=True)
    ops = TritonOps(CUDA)
    with torch.inference_mode():
        merged = [mixture(ops, True, seed) for seed in range(LAYERS)]
        check(merged[0], False)
        check(mixture(ops, True, 0, True), True)
        apart = [mixture(ops, False, seed) for seed in range(LAYERS)]
        for rows in (64, 16, 4, 1):
            time_mixture(ops, rows, apart, merged)
        for rows, some in shapes.items():
            time_shapes(rows, some, until)
            if rows > 1 and time.monotonic() < until:
                time_narrow(rows)


if __name__ == "__main__":
    main()
