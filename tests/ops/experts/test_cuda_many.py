"""GEMMs of experts of many pairs: gemm_experts_many.cu in C++ on the CPU (gemm_host.cpp), and on a GPU: a pair has the
bits of the kernels for few pairs."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gemm_inputs import COPIES_EARLY, EARLY, LATE, compiled, device, launch, on_hopper, on_host, pointer, random
from torch import Tensor

from draftwing.ops.experts import cuda as gemm_experts
from draftwing.ops.experts import cuda_many
from draftwing.ops.experts.cuda_many import Size
from draftwing.ops.experts.routing import ExpertTiles, Routed, Routing
from draftwing.ops.gemm.cuda import read_files
from draftwing.ops.table import PLAIN

COUNT, TOP = 5, 2
SIZES = [cuda_many.SIZE, Size(64, (32, 64), (208, 88)), Size(160, (32, 96, 160), (232, 40))]


def in_order(x: Tensor) -> Tensor:
    """x [R, K] in 16 bits -> the same, of each 32 columns word 4 q + t is the source's 4 t + q, by hand."""
    words = x.contiguous().view(torch.int32).view(len(x), -1, 16)
    return words[:, :, [4 * t + q for q in range(4) for t in range(4)]].reshape(len(x), -1).view(x.dtype)


def routed_of(rows: int, pairs: int, dead: int = 2) -> Routed:
    """Of many rows, in tiles of up to so many pairs; there is one expert that nobody chooses, and one that all do."""
    logits = torch.randn(rows, COUNT, generator=torch.Generator().manual_seed(7))
    logits[:, 2], logits[:, 3] = 9, -9
    routed = PLAIN.route(logits, Routing(TOP))
    flat, tiles = routed.experts.flatten(), list[tuple[int, int, int]]()
    for expert in range(COUNT):
        begin, number = int((flat < expert).sum()), int((flat == expert).sum())
        tiles += [(expert, begin + at, min(number - at, pairs)) for at in range(0, number, pairs)]
    tiles += [(-1, 99, 99)] * dead
    made = torch.tensor(tiles, dtype=torch.int32).t().contiguous()
    order = flat.argsort(stable=True).int()
    return Routed(routed.experts, routed.weights, COUNT, ExpertTiles(order, made, pairs))


# -- in C++ -----------------------------------------------------------------------------------------------------------

_OF_EXPERTS = "// KIND and LIMIT's part of it", "// What a block does"
_BEFORE = """enum { PLAIN = 0, ADD = 1, SILU_MUL = 2, CLAMPED = 3 };
#define ALPHA 1.702f
static float rounded(float f) { return to_float(from_float(f)); }
"""


class Host:
    """The kernels of one size."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.size = size
        (few,) = read_files(["gemm_experts.cu"])
        begin, end = map(few.index, _OF_EXPERTS)
        files = read_files(["gemm_bulk.cu", "gemm_wgmma.cu", "gemm_experts_many.cu"])
        source = "".join([_BEFORE, few[begin:end], *files, size.lines()])
        self._library = compiled(folder, source, "-DDENSE", "-DEXPERTS", "-DMANY_PAIRS")

    def __call__(
        self, kind: str, x: Tensor, w: Tensor, bias: Tensor | None, routed: Routed, limit: float = 0.0,
        early: int = EARLY, blocks: int = 3, stages: int = 4,
    ) -> Tensor:  # fmt: skip
        tiles, x = routed.tiles, in_order(x)
        assert tiles is not None
        width = len(w) // COUNT // (1 if kind == "plain" else 2)
        out = torch.full((routed.pairs, width), torch.nan, dtype=torch.bfloat16)
        self._library.source(None, 0)
        self._library.source(pointer(x), ctypes.c_long(x.nbytes))
        places = map(pointer, (tiles.order, tiles.tiles))
        self._library.experts(len(w), tiles.tiles.shape[1], routed.choices(x), 0, *places, ctypes.c_float(limit), 1)
        self._library.many_pairs_sizes(COUNT, int(kind != "plain"), stages)
        sizes = len(x), width, x.shape[1], blocks, 1
        launch(self._library, kind, (384, 1, 227 << 10), (x, w, bias, None, out), sizes, early)
        self._library.source(None, 0)
        return out


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: str(size.pairs))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("many"), request.param)


def alone(kind: str, x: Tensor, w: Tensor, bias: Tensor | None, routed: Routed, limit: float) -> Tensor:
    """[pairs, width] in the order of sums that gemm.cu has, of float32s one after the other."""
    choices, flat = routed.choices(x), routed.experts.flatten()
    matrices = w.view(COUNT, -1, w.shape[1])
    found = torch.empty(routed.pairs, matrices.shape[1])
    words = in_order(torch.arange(w.shape[1], dtype=torch.int16).view(1, -1)).long().view(-1, 16)  # sets
    chunks = words.view(-1, 4, 16)
    for pair in range(routed.pairs):
        row, matrix = x[pair // choices].double(), matrices[flat[pair]].double()
        total = torch.zeros(len(matrix))
        for share in range(8):
            part = torch.zeros(len(matrix))
            for chunk in chunks[share::8]:
                for one in chunk:
                    for k in one.tolist():  # a product of bfloat16s and float32 sum in float64 round once, as fmaf does
                        part = (part.double() + matrix[:, k] * row[k]).float()
            total = total + part
        found[pair] = total
    return found


@on_host
@pytest.mark.parametrize("kind", ["plain", "silu"])
@pytest.mark.parametrize("depth", [192, 704])
def test_bits(run: Host, kind: str, depth: int) -> None:
    rows = 90
    w, x, bias = random(COUNT * 144, depth, seed=1), random(rows, depth, seed=2), random(COUNT * 144, seed=3)
    routed = routed_of(rows, run.size.pairs)
    expected = alone(kind, x, w, None, routed, 0.0) + bias.view(COUNT, -1)[routed.experts.flatten()].float()
    if kind == "silu":
        gate, up = expected.bfloat16().float().chunk(2, 1)
        expected = (gate / ((-gate).exp() + 1)).bfloat16().float() * up
    found = run(kind, x, w, bias, routed)
    assert (found != expected.bfloat16()).sum() <= (2 if kind == "silu" else 0)
    for early in (LATE, COPIES_EARLY):
        assert torch.equal(run(kind, x, w, bias, routed, early=early, blocks=4), found)


@on_host
@pytest.mark.parametrize("kind", ["plain", "silu", "clamped"])
def test_other_forms(run: Host, kind: str) -> None:
    """Squares, no order of pairs, rows by pair, tiles of which most have one pair."""
    rows, depth, width = 40, 256, 96
    w, x = random(COUNT * width * (1 if kind == "plain" else 2), depth, seed=1), random(rows, depth, seed=2)
    routed, limit = routed_of(rows, 32), 1.5 if kind == "clamped" else 0.0
    found = run(kind, x, w, None, routed, limit, LATE)
    assert found.isfinite().all()
    assert torch.equal(run(kind, x, w, None, routed, limit, EARLY), found)
    by_pair = x.repeat_interleave(TOP, 0)
    assert torch.equal(run(kind, by_pair, w, None, routed, limit, LATE, blocks=1), found)
    small = routed_of(rows, 1)
    for blocks, stages in ((7, 4), (1, run.size.stages)):  # copies are ahead by two tiles at most, of four chunks each
        assert torch.equal(run(kind, x, w, None, small, limit, COPIES_EARLY, blocks, stages), found)
    if kind == "plain":
        assert torch.equal(run(kind, x, w, None, routed, gemm_experts.SQUARES), PLAIN.relu_squared(found))
    flat = routed.experts.flatten()
    tiles = torch.stack((flat[:6], torch.arange(6), torch.ones(6, dtype=torch.int64))).int()
    few = Routed(routed.experts[:3], routed.weights[:3], COUNT, ExpertTiles(None, tiles, 1))
    assert torch.equal(run(kind, x[:3], w, None, few, limit), found[:6])


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count, top, depth, rows", [(6, 3, 1664, 192), (64, 6, 512, 1856), (16, 2, 2688, 80)])
def test_bits_are_those_of_few_pairs(count: int, top: int, depth: int, rows: int, dtype: torch.dtype) -> None:
    """Whatever is chosen: experts that nobody and that all tokens chose, and pairs that are left out."""
    from draftwing.ops.experts import triton as experts
    from draftwing.ops.experts.triton_order import in_order as made
    from draftwing.ops.experts.triton_tiles import tiles_of

    shapes = ((8192, depth), 1.0), ((count * rows, depth), depth**-0.5), ((count * rows,), 1.0)
    x, weight, bias = (
        (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(device())
        for seed, (shape, scale) in enumerate(shapes)
    )
    few = gemm_experts.few_pairs(device(), dtype, gemm_experts.layout_of(weight, rows))
    many = cuda_many.many_pairs(device(), dtype)
    for tokens, liked, own in ((1, 0, None), (7, 9, None), (130, 99, None), (700, 0, range(2, 5)), (8192, 2, None)):
        logits = torch.randn(tokens, count, generator=torch.Generator().manual_seed(tokens)).to(device())
        logits[:, :top] += liked
        logits[:, top] -= liked
        routed = experts.route(logits, Routing(top), exact=True, own=own)
        here = weight if own is None else weight.view(count, rows, depth)[own.start : own.stop].flatten(0, 1)
        its_bias = bias if own is None else bias.view(count, rows)[own.start : own.stop].flatten()
        one, other = (
            replace(routed, tiles=tiles_of(routed.experts, routed.count, size, True))
            for size in (gemm_experts.MAX_PAIRS, cuda_many.SIZE.pairs)
        )
        there = routed.experts.flatten() >= 0
        for kind, limit in (("plain", 0.0), ("plain", gemm_experts.SQUARES), ("silu", 0.0), ("clamped", 1.5)):
            width = rows // (1 if kind == "plain" else 2)
            expected = few(kind, x[:tokens], here, its_bias, one, width, limit)[there]
            found = many(kind, made(x[:tokens], 32), here, its_bias, other, width, limit)[there]
            assert torch.equal(found, expected), (tokens, kind)


def test_order(mended_interpreter: None) -> None:
    from draftwing.ops.experts.triton_order import in_order as made

    place = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    x = torch.randint(-(1 << 15), 1 << 15, (150, 96), generator=torch.Generator().manual_seed(1)).short()
    assert torch.equal(made(x.to(place), 32).cpu(), in_order(x))
