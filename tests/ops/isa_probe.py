"""Runs every kernel that text depends on, on inputs that are the same everywhere, and prints hashes of what they give.

A program of its own, for the instruction set is chosen when the extension is loaded: `python isa_probe.py` prints one
JSON object, {case: sha256}. A new kernel is a function here with `@case`. Inputs are made of integers: a generator of
normal numbers has other bits on another CPU.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwing.kv.pool import DeltaSpec, KVPool, KVSpec, StateSpec
from draftwing.layers.rope import RopeConfig, rope_table
from draftwing.ops import make_ops
from draftwing.ops.adapters.spec import AdapterWeights
from draftwing.ops.attention.batch import AttentionKind, Batch, ChunkSpan, HeadNorms
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.experts.routing import MixtureWeights, Routing
from draftwing.ops.gemm.contract import Gemm
from draftwing.ops.gemm.stored import BlockRows
from draftwing.ops.types import (
    Continuations,
    Draft,
    Edits,
    NoiseKey,
    Rescoring,
    SampleInputs,
    SamplingGroups,
    SamplingRows,
)

sys.path.append(str(Path(__file__).resolve().parents[1]))
from delta_steps import DeltaSteps

Case = Callable[[CpuOps, "Inputs", torch.dtype], Iterable[Tensor]]
CASES: dict[str, Case] = {}
NONE = torch.zeros(0, dtype=torch.int64)
# Values and bytes of a block of each kind, and where its float16 numbers stand.
BLOCKS = {
    "Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q5_0": (32, 22, (0,)), "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)), "Q4_K": (256, 144, (0, 2)), "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,)),
    "MXFP4": (32, 17, ()),
}  # fmt: skip


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


class Inputs:
    """Seeded numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 below `high`."""
        return torch.from_numpy(self.rng.integers(low, high, shape))

    def floats(self, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
        """About normal: the sum of four uniform numbers, each a multiple of 2^-12."""
        total = self.rng.integers(-4096, 4096, (4, *shape)).sum(0)
        return (torch.from_numpy(total).double() * (scale / 4096)).to(dtype)

    def some(self, values: list[float], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)[self.ints(0, len(values), *shape)]


@case
def norms(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    for size in (48, 576, 1000):
        x, delta, weight = made.floats(dtype, 7, size), made.floats(dtype, 7, size), made.floats(dtype, size)
        yield ops.rms_norm(x, weight, 1e-5)
        yield ops.layer_norm(x, weight, 1e-5)
        yield ops.layer_norm(x, weight, 1e-5, delta[0])
        yield from ops.add_rms_norm(x, delta, weight, 1e-6)


@case
def gated(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    for ffn, scale in ((96, 1.0), (1000, 40.0)):
        yield ops.silu_mul(made.floats(dtype, 5, 2 * ffn, scale=scale))
        yield ops.gelu_mul(made.floats(dtype, 5, 2 * ffn, scale=scale))
        yield ops.relu_squared(made.floats(dtype, 5, ffn))
        yield from (ops.gelu(made.floats(dtype, 5, ffn, scale=scale), exact) for exact in (False, True))
        yield ops.xielu(made.floats(dtype, 5, ffn, scale=3.0), torch.tensor([0.8, 1.3, 0.5, -1e-6]))
        yield ops.soft_cap(made.floats(dtype, 5, ffn, scale=scale), 30.0)
        yield ops.add_scaled(made.floats(dtype, 5, ffn), made.floats(dtype, 5, ffn), scale / 3)


@case
def memories(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """Text depends on none of it, but what is accepted does."""
    for size, scale in ((40, 1.0), (64, 30.0)):
        read, kept = made.floats(dtype, 5, 3 * size, scale=scale), made.floats(dtype, 5, 3 * size, scale=scale)
        state = made.floats(dtype, 5, size)
        yield from (ops.gru(read, kept, state), *ops.recur(read, state), ops.gate(read, kept))
        yield ops.concat_columns(state, read[:, 3:20])


@case
def adapters(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """Ranks and outputs that fill vectors and such that do not; factors in bfloat16 beside float32, too."""
    for factors, ends in ((dtype, [33, 96]), (torch.bfloat16, [64])):
        weights = AdapterWeights.empty(2, 12, 100, ends, factors, ops.device)
        for slot, rank in ((1, 12), (2, 5)):
            for place, (begin, end) in enumerate(itertools.pairwise((0, *ends))):
                weights.set(slot, place, made.floats(factors, rank, 100), made.floats(factors, end - begin, rank), 0.7)
        y, slots = made.floats(dtype, 5, ends[-1]), torch.tensor([1, 0, 2, 2, 1])
        ops.adapt(y, made.floats(dtype, 5, 100), weights, slots)
        yield y
    for most, in_blocks in ((40, True), (256, True), (256, False)):
        weights = ops.empty_adapters(2, most, 96, [32, 80], dtype, ops.device, in_blocks)
        for slot, rank in ((1, most), (2, 5)):
            for place, outputs in enumerate((32, 48)):
                weights.set(slot, place, made.floats(dtype, rank, 96), made.floats(dtype, outputs, rank), 0.7)
        for rows in (1, 3, 40):
            slots = torch.tensor([1, 0, 2, *[1] * 12, *[2] * 25])[-rows:]
            y = made.floats(dtype, rows, 80)
            ops.adapt(y, made.floats(dtype, rows, 96), weights, slots)
            yield y


@case
def pairs(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """Convolutions along blocks, and candidates after the tokens above; equal scores among them."""
    for size, groups in ((64, 4), (60, 12)):
        x, factors = made.floats(dtype, 6, size), made.floats(dtype, 6, 4 * groups)
        yield ops.block_conv(x, factors, made.floats(dtype, 2, 2, size), 1, 3, x)
    before, after, gate = made.floats(dtype, 50, 20), made.floats(dtype, 50, 20), made.floats(dtype, 2, 20)
    after[:9] = 0
    likely = -made.floats(torch.float32, 2, 16).abs().mul(4).round()
    candidates = Continuations(made.ints(0, 50, 2, 16), likely)
    yield from ops.pair_continuations(candidates, made.ints(0, 50, 6), gate, before, after, 4, None)


@case
def clusters(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """Equal scores among them: the lower cluster comes first."""
    ids = ops.cluster_tokens(made.floats(dtype, 3, 41).mul_(4).round_(), 5, torch.arange(41 * 3).flip(0))
    yield from (ids, ops.spread_logits(made.floats(torch.float32, 3, 15), ids, 41 * 3, dtype))


@case
def latents(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """What latent attention multiplies heads with and turns, and a step over what it keeps."""
    for heads, inputs, outputs in ((3, 24, 56), (2, 130, 128)):
        products = ops.head_products(made.floats(dtype, heads * outputs, inputs), heads, dtype)
        assert products is not None
        for rows in (1, 2, 3, 5, 13):
            yield products(made.floats(dtype, rows, heads, inputs + 8)[..., :inputs])
    blocks = ops.head_products([ops.quantize(made.floats(torch.float32, 3 * 48, 64), "Q8_0")], 3, dtype)
    assert blocks is not None
    for rows in (1, 7, 33):
        yield blocks(made.floats(dtype, rows, 3, 72)[..., :64])
    cos, sin = rope_table(RopeConfig(), 24, 8, dtype, "cpu")[:7].unsqueeze(2).unbind(1)
    for factor in (1.0, 1.87):
        yield ops.concat_rope(made.floats(dtype, 7, 3, 40), made.floats(dtype, 7, 3, 24), cos, sin, factor)
    pool = KVPool([KVSpec(1, 64, shared=True)], 40, dtype, torch.device("cpu"))
    chunk = Batch(
        torch.tensor([0]), NONE, torch.arange(7), torch.arange(1, 8), torch.arange(1, 41).view(1, 40),
        bound=40, chunks=(ChunkSpan(0, 0, 0, 7),), prefix_len=NONE,
    )  # fmt: skip
    kept = made.floats(dtype, 7, 1, 64)
    for cap in (0.0, 1.5):
        kind = AttentionKind(scalar=40, cap=cap, values=40)
        yield ops.attention(pool).bind(chunk, 0)(0, made.floats(dtype, 7, 3, 64), kept, kept[..., :40], kind)


@case
def picks(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """What queries of an indexer attend to, by small numbers, of which many scores are nearly the same."""
    yield ops.every_logit(made.floats(dtype, 5, 104), made.floats(torch.float32, 11, 104))
    wide = made.floats(torch.float32, 96)
    yield ops.layer_norm(made.floats(dtype, 7, 96), wide, 1e-6, wide)
    for heads, size in ((3, 32), (40, 96), (64, 128)):
        pool = KVPool([KVSpec(1, 64, shared=True, index_size=size)], 400, dtype, torch.device("cpu"))
        chunk = Batch(
            torch.tensor([0]), NONE, torch.arange(160), torch.arange(1, 161), torch.arange(1, 401).view(1, 400),
            bound=400, chunks=(ChunkSpan(0, 0, 0, 160),), prefix_len=NONE,
        )  # fmt: skip
        bound = ops.attention(pool).bind(chunk, 0)
        bound.write_index(0, made.floats(dtype, 160, size))
        bound.pick(0, made.floats(dtype, 160, heads, size), made.floats(torch.float32, 160, heads), 70)
        kept = made.floats(dtype, 160, 1, 64)
        yield bound.picked(0, made.floats(dtype, 160, 2, 64), kept, kept[..., :40], AttentionKind(scalar=40, values=40))


@case
def fused_inputs(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    size = 104
    ids, table, feature = made.ints(0, 50, 6), made.floats(dtype, 50, size), made.floats(dtype, 6, size)
    norms = made.floats(dtype, size), made.floats(dtype, size)
    yield ops.fuse_inputs(ids, table, feature, norms, 1e-5, made.ints(0, 3, 6))
    yield ops.fuse_inputs(ids, table, feature, feature_first=True)


@case
def candidates(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    for size in (40, 576, 2048):
        hidden, weight = made.floats(dtype, 3, 2, size), made.floats(dtype, 90, size)
        yield ops.exact_logits(hidden, weight, made.ints(0, 90, 3, 2, 8))


@case
def rope_tables(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    yield rope_table(RopeConfig(100000.0), 64, 5000, dtype, "cpu")
    yield rope_table(RopeConfig(500000.0, "llama3", 32.0), 128, 3000, dtype, "cpu")
    yield rope_table(RopeConfig(10000.0, "linear", 4.0), 80, 3000, dtype, "cpu")


@case
def attention_of_small_numbers(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """Products and sums below the normal numbers, zeros of both signs, an odd head_dim."""
    table, plain = torch.arange(1, 601).view(1, 600), torch.zeros(1, 1, 1, dtype=torch.int64)
    for dim, size in itertools.product((64, 25), (1e-38, 1e-36)):
        pool = KVPool([KVSpec(2, dim)], 600, dtype, torch.device("cpu"))
        backend = ops.attention(pool)
        for start, length in ((0, 301), (301, 1)):
            how: dict[str, Any] = dict(chunks=(ChunkSpan(0, 0, start, length),), prefix_len=NONE)
            if start:
                how = dict(prefix_len=torch.tensor([start]), path=plain, path_len=plain[0] + 1)
            positions = torch.arange(start, start + length)
            batch = Batch(torch.tensor([0]), NONE, positions, table[0, positions], table, bound=600, **how)
            k, v = (made.floats(dtype, length, 2, dim, scale=size) for _ in range(2))
            v[..., ::3] *= 0
            yield backend.bind(batch, 0)(0, made.floats(dtype, length, 6, dim, scale=3e34), k, v)


@case
def attention_of_sums_that_round_up(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """Values whose sums are, before they are rounded, just below the normal numbers: small or not?"""
    dim, table = 32, torch.arange(1, 301).view(1, 300)
    for length in (2, 9, 280):
        pool = KVPool([KVSpec(1, dim)], 300, dtype, torch.device("cpu"))
        positions = torch.arange(length)
        how: dict[str, Any] = dict(chunks=(ChunkSpan(0, 0, 0, length),), prefix_len=NONE)
        batch = Batch(torch.tensor([0]), NONE, positions, table[0, :length], table, bound=300, **how)
        q, k, v = (torch.zeros(length, 1, dim, dtype=dtype) for _ in range(3))
        q[..., 0], k[1:, :, 0] = 1, made.ints(-160, -100, length - 1, 1).to(dtype)  # weights of the others: below 2^-25
        v[0], v[1:] = 2.0**-126, -(2.0**-126) * made.ints(1, 9, length - 1, 1, dim).to(dtype)
        yield ops.attention(pool).bind(batch, 0)(0, q, k, v)


@case
def attention(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """A prompt in two chunks, a tree, and a plain step behind them: rope, the pool, scores, softmax and sums."""
    shapes, types = ((9, 3, 64), (4, 2, 24), (4, 1, 100), (8, 2, 128)), (dtype, torch.int8)
    for (heads, kv_heads, dim), pool_dtype in itertools.product(shapes, types):
        pool = KVPool([KVSpec(kv_heads, dim)], 700, pool_dtype, torch.device("cpu"))
        backend, table = ops.attention(pool), torch.arange(1, 701).view(1, 700)
        cos_sin = rope_table(RopeConfig(), dim, 700, dtype, "cpu")
        norms = None
        if dim >= 100:
            norms = HeadNorms(
                made.floats(dtype, dim), made.floats(dtype, dim), 1e-6, values=dim > 100, after=dim == 100
            )
        spans = [(0, 150), (150, 260)]
        batches = [
            (torch.arange(start, end), dict(chunks=(ChunkSpan(0, 0, start, end - start),), prefix_len=NONE))
            for start, end in spans
        ]
        parents, paths = [0, 0, 0, 1, 1, 2, 5], [[0]]
        for node, parent in enumerate(parents[1:], 1):
            paths.append([*paths[parent], node])
        path = torch.tensor([[[*own, *[own[-1]] * (4 - len(own))] for own in paths]])
        lengths = torch.tensor([[len(own) for own in paths]])
        tree = dict(prefix_len=torch.tensor([260]), path=path, path_len=lengths)
        batches.append((260 + lengths[0] - 1, tree))
        plain = torch.zeros(1, 1, 1, dtype=torch.int64)
        batches.append((torch.tensor([260]), dict(prefix_len=torch.tensor([260]), path=plain, path_len=plain[0] + 1)))
        for positions, how in batches:
            count = len(positions)
            first = int(positions[0])
            slots = table[0, first : first + count].contiguous()
            batch = Batch(torch.tensor([0]), NONE, positions, slots, table, bound=700, **how)
            qkv = made.floats(dtype, count, heads + 2 * kv_heads, dim, scale=1.5)
            cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)
            yield backend.bind(batch, 0).fused(0, qkv, cos, sin, norms)
        yield pool.kv[0][1:268]


@case
def delta_nets(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    mamba, kimi = DeltaSpec(2, 4, 32, 144, 4, corrects=0), DeltaSpec(2, 4, 32, 144, 4, by_channel=True)
    ling = kimi._replace(floor=-5.0)
    for spec in (DeltaSpec(2, 4, 32, 144, 4), DeltaSpec(1, 3, 16, 32, 2, tiled=True), mamba, kimi, ling):
        yield from DeltaSteps(ops, spec, dtype, functools.partial(made.floats, dtype, scale=1.5)).all()


@case
def short_convs(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    for channels, width in ((40, 3), (144, 4)):
        pool = KVPool([StateSpec((channels,), None)], 100, dtype, torch.device("cpu"))
        backend, rows = ops.attention(pool), torch.tensor([0])
        table, taps = torch.arange(1, 101).view(1, 100), made.floats(torch.float32, channels, width)
        for start, count in ((0, 20), (20, 3), (23, 1)):
            at = torch.arange(start, start + count)
            chunks = (ChunkSpan(0, 0, start, count),)
            batch = Batch(rows, at, at, table[0, at], table, torch.tensor([start]), chunks=chunks, bound=100)
            yield backend.bind(batch, 0).short_conv(0, made.floats(dtype, count, 3 * channels), taps)
        yield pool.kv[0]


@case
def blocks(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """GEMMs and rows of weights in all kinds of blocks, and the blocks that are made here."""
    inputs = 512
    for kind, (values, size, halves) in BLOCKS.items():
        data = made.ints(0, 256, 60, inputs // values, size).to(torch.uint8)
        for at in halves:
            scale = made.floats(torch.float16, 60, inputs // values, 1, scale=0.01)
            data[:, :, at : at + 2] = scale.view(torch.uint8)
        if kind == "MXFP4":  # an exponent
            data[:, :, 0] = 115 + data[:, :, 0] % 8
        gemm = ops.block_gemm([BlockRows(kind, data.view(60, -1), inputs)], dtype)
        x, bias = made.floats(dtype, 37, inputs), made.floats(dtype, 60)
        yield gemm.linear(x, bias, made.floats(dtype, 37, 60))
        yield gemm.linear(x[:1], None, None)
        yield gemm.rows(torch.arange(60))
    weight = made.floats(dtype, 32, inputs)
    for kind in ("Q8_0", "Q4_0", "Q4_K"):
        yield ops.quantize(weight, kind).data


@case
def blocks_at_their_ends(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """The largest sums of both signs, with scales of any size, and few rows beside each other."""
    scales = torch.tensor([6e-8, -6e-8, 5.9e-5, -0.37, 65504.0, 0.0, -0.0, 1.0], dtype=torch.float16)
    x = torch.full((9, 512), 127.0)
    x[1], x[2, ::2], x[3], x[4], x[5] = -127, -127, 1e-38, 1e-41, 0
    for kind, (values, size, halves) in BLOCKS.items():
        for fill in (0x00, 0xFF, 0x7F, 0x80):
            data = torch.full((40, 512 // values, size), fill, dtype=torch.uint8)
            for at in halves:
                data[:, :, at : at + 2] = scales.repeat(5)[:, None, None].view(torch.uint8)
            if kind == "MXFP4":  # an exponent
                data[:, :, 0] = torch.tensor([0, 1, 2, 3, 100, 127, 200, 201], dtype=torch.uint8).repeat(5)[:, None]
            gemm = ops.block_gemm([BlockRows(kind, data.view(40, -1), 512)], dtype)
            for rows in range(1, 10):
                yield gemm.linear(x[:rows].to(dtype), None, None)


@case
def mixtures(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    count, hidden, ffn = 21, 96, 64
    for kind, limit, routing, parts in (  # parts: gates and ups, or ups alone
        ("Q8_0", 0.0, Routing(5), 2),
        ("Q4_0", 7.0, Routing(5, False, groups=7, top_groups=3), 2),
        ("Q4_0", 0.0, Routing(4, sigmoid=True, groups=7, top_groups=2, scale=2.5), 2),
        ("Q4_0", 0.0, Routing(4, corrected=True), 2),
        ("Q8_0", 0.0, Routing(4, sigmoid=True), 1),
    ):

        def gemms(rows: int, columns: int, kind: str = kind) -> list[Gemm | None]:
            weights = [made.floats(torch.float32, rows, columns, scale=columns**-0.5) for _ in range(count)]
            return [ops.block_gemm([ops.quantize(weight, kind)], dtype) for weight in weights]

        router, bias = made.floats(dtype, count, hidden, scale=0.3), made.floats(dtype, count)
        biases = made.floats(dtype, count * parts * ffn), made.floats(dtype, count * hidden)
        correction = made.floats(torch.float32, count) if routing.has_correction else None
        router = router.float() if routing.has_correction else router
        bias = None if routing.has_correction else bias
        ups, downs = gemms(parts * ffn, hidden), gemms(hidden, ffn)
        more = (None, False) if limit else (made.floats(torch.float32, count), True, parts == 2)
        mixture = ops.whole_mixture(MixtureWeights(router, bias, correction, ups, downs, biases, routing, limit, *more))
        assert mixture is not None
        for rows in (1, 37):
            yield mixture(made.floats(dtype, rows, hidden), made.floats(dtype, rows, hidden), None)


@case
def noise(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    seed, position = made.ints(-(1 << 62), 1 << 62, 3), made.ints(0, 9000, 3, 2)
    yield ops.gumbel(seed, position, 5003)
    yield ops.gumbel_at(seed, position, made.ints(0, 1 << 20, 77))


@case
def draws(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """Greedy and with all filters."""
    rows, nodes = 24, 3
    for vocab in (257, 5000):
        logits, depth = made.floats(dtype, rows, nodes, vocab, scale=3.0), made.ints(0, 3, rows, nodes)
        params = SamplingRows(
            made.ints(-(1 << 62), 1 << 62, rows), made.some([0.0, 0.4, 1.0, 1.7], rows),
            made.ints(-1, 60, rows), made.some([0.1, 0.5, 0.9, 0.99, 1.0], rows),
            made.some([0.0, 0.01, 0.1, 0.5, 1.0], rows), torch.zeros(rows, dtype=torch.int64),
            torch.full((rows, 1), -1),
        )  # fmt: skip
        positions, noisy = made.ints(0, 4000, rows, nodes), (params.temperature > 0).nonzero().flatten()
        yield from ops.candidates(logits, positions, depth, None, NONE, 8)
        for filtered in (NONE, noisy):
            yield from ops.candidates(logits, positions, depth, params, filtered, 8)
            yield ops.sample(logits, positions, depth, 2, params, noisy, filtered, NONE)


@case
def edited_draws(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """With penalties, biases and bans of a row table."""
    from draftwing.engine.devices import pick_device
    from draftwing.engine.row_table import RowTable

    rows, nodes, vocab = 4, 3, 501
    table, every = RowTable(rows, 90, pick_device(ops.device.type, ops=ops)), torch.arange(rows)
    table.tokens[:] = made.ints(0, 60, rows + 1, 90)
    table.kv_len[:rows], table.ban_until[:rows] = made.ints(30, 80, rows), made.ints(0, 90, rows)
    table.seed[:rows], table.ban_ids[:] = made.ints(-(1 << 62), 1 << 62, rows), -1
    table.ban_ids[:, :3] = made.ints(0, vocab, rows + 1, 3)
    table.floats[:rows, 0], table.floats[:, 2] = made.some([0.0, 0.7], rows), 0.05
    path = torch.tensor([[[0, 0, 0], [0, 1, 1], [0, 1, 2]]]).expand(rows, -1, -1)
    depth = torch.arange(nodes).expand(rows, -1)
    edits = Edits(
        made.ints(0, 40, rows + 1), made.some([0.4, 1.0, 1.7], rows + 1, 3), made.ints(0, vocab, rows + 1, 9),
        made.some([-3.0, 0.0, 2.5], rows + 1, 9), made.some([0.0, 0.3, 2.0], rows + 1, 9),
    )  # fmt: skip
    tokens = made.ints(0, 60, rows, nodes)
    logits = made.floats(dtype, rows, nodes, vocab, scale=3.0)
    hidden, weight = made.floats(dtype, rows, nodes, 96), made.floats(dtype, vocab, 96)
    rescoring = Rescoring(hidden, weight, lambda x, ids: ops.exact_logits(x, weight, ids))
    asked, positions = SamplingGroups(NONE, NONE, NONE), table.kv_len[:rows, None] + depth
    drawn = SampleInputs(every, logits, hidden, positions, depth, 2, tokens, path, depth + 1)
    for one in (None, rescoring):
        yield ops.draw(drawn, table, asked, True, one, edits)


@case
def drafts(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    logits = made.floats(dtype, 12, 3001, scale=3.0)
    key = NoiseKey(made.ints(-(1 << 62), 1 << 62, 4), made.ints(0, 4000, 4), made.some([0.0, 0.7], 3, 4))
    yield from ops.top_tokens(logits, 4, 10, None, None)
    yield from ops.top_tokens(logits, 4, 5, key, None)
    yield from ops.top_tokens(logits, 4, 5, key, made.ints(0, 9000, 3001))
    yield edited_drafts(ops, made, logits)


def edited_drafts(ops: CpuOps, made: Inputs, logits: Tensor) -> Tensor:
    """Logits [12, 3001] of 4 rows after penalties and biases."""
    from draftwing.engine.devices import pick_device
    from draftwing.engine.row_table import RowTable

    table, every = RowTable(4, 90, pick_device("cpu", ops=ops)), torch.arange(4)
    table.tokens[:], table.kv_len[:] = made.ints(0, 60, 5, 90), 80
    edits = Edits(
        made.ints(0, 40, 5), made.some([0.4, 1.0, 1.7], 5, 3), made.ints(0, 60, 5, 9),
        made.some([-3.0, 0.0, 2.5], 5, 9), torch.arange(9.0).expand(5, -1).contiguous(),
    )  # fmt: skip
    logits = logits.clone()
    ops.logit_editor(table, every, edits, 80, 3001, None).apply(logits)
    return logits


@case
def trees(ops: CpuOps, made: Inputs, dtype: torch.dtype) -> Iterable[Tensor]:
    """Integers."""
    from draftwing.engine.devices import pick_device
    from draftwing.engine.row_table import RowTable

    table, nodes = RowTable(5, 200, pick_device(ops.device.type, ops=ops)), 9
    table.page_table[:5] = made.ints(1, 1 << 40, 5, 200)
    table.tokens[:] = made.ints(0, 4, 6, 200)
    table.kv_len[:5] = made.ints(0, 120, 5)
    rows = torch.tensor([3, 0, 4])
    parent = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 4, 5]] * 3)
    draft = Draft(made.ints(0, 3, 3, nodes), parent, torch.ones(3, nodes, dtype=torch.bool))
    tree, inputs = ops.tree_inputs(table, rows, draft, 3)
    yield from (*tree, *inputs)
    done = ops.commit(table, rows, draft, tree, made.ints(0, 3, 3, nodes), inputs.prefix_len, 3, True)
    yield from (done.packed, *done.path, table.page_table, table.tokens, table.kv_len)


def digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    ops, hashes = make_ops(torch.device("cpu")), {}
    assert isinstance(ops, CpuOps), "the C extension was not built, or is not wanted"
    asked = os.environ.get("DRAFTWING_CPU_ISA")
    assert asked is None or ops.title == f"cpu, C for {asked}", "another set runs than the one that is named"
    for name, function in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            hashes[f"{name}, {str(dtype).removeprefix('torch.')}"] = digest(function(ops, Inputs(7), dtype))
    print(json.dumps(hashes))


if __name__ == "__main__":
    main()
