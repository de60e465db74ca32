"""GEMMs of experts in CUDA: how they cut their work; and gemm_experts.cu and gemm_stream.cu in C++ on the CPU
(gemm_host.cpp): a pair has the bits that gemm.cu's smallest kernel gives its row and the matrix of its expert, whatever
tile and batch. What only a GPU can tell is in test_experts.py."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch
from gemm_inputs import compiled, launch, on_host, pointer, quantized, random, stored_kernels, without_ptx
from torch import Tensor

from draftwing.ops.experts import cuda as gemm_experts
from draftwing.ops.experts.cuda import DENSE, MAX_PAIRS, Cut, Cuts, Layout, Stream, cuts_for, layout_of, read_source
from draftwing.ops.experts.routing import ExpertTiles, Routed, Routing
from draftwing.ops.experts.rows import FP8, INT4, INT8, MX, ExpertRows, expert_rows
from draftwing.ops.gemm import cuda as gemm
from draftwing.ops.gemm.cuda_groups import Width
from draftwing.ops.gemm.groups import WHOLE, pack
from draftwing.ops.gemm.shapes import SHARES
from draftwing.ops.gemm.stored import MXRows
from draftwing.ops.table import PLAIN

FORMATS = [Layout(), Layout(MX, 4), Layout(FP8, 0), Layout(FP8, 1), Layout(INT4, 1), Layout(INT4, 4, True)]
MAX_SHARED = 232_448  # bytes that a block can have on an H100 or H200: CUDA's cudaDevAttrMaxSharedMemoryPerBlockOptin


def dense_on_meta(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("layout", FORMATS)
def test_streams_fit(layout: Layout) -> None:
    for chunks in range(1, 65):
        stream = layout._replace(chunks=chunks)
        if Stream.of(stream, 1, MAX_PAIRS).stages < 2:
            assert layout.kind == DENSE and chunks > 45
            continue
        cuts = cuts_for(stream)
        assert {(kind, tile) for kind, tile in cuts if tile > 1} == set(
            itertools.product(gemm_experts.KINDS, (8, MAX_PAIRS))
        )
        for (_, tile), cut in cuts.items():
            assert cut.shared_bytes(tile) <= MAX_SHARED
            assert isinstance(cut, Cut) or cut.stages > 1


def test_which_weights_are_a_stream() -> None:
    assert layout_of(dense_on_meta(64, 2048)) == Layout(chunks=32)
    assert layout_of(dense_on_meta(64, 2880)) == Layout(chunks=45)
    assert layout_of(dense_on_meta(64, 4096)) == Layout(), "two stages of it have no room"
    assert layout_of(dense_on_meta(64, 8192)) == Layout(), "so much of x has no room in registers"
    assert layout_of(dense_on_meta(66, 2048), width=33) == Layout(), "scales of four features are copied at a time"


@pytest.mark.parametrize(
    ("layout", "kind", "tiles", "width", "row_tiles"),
    [
        *((Layout(FP8, 1, chunks=32), *case) for case in (
            ("silu", 8, 768, 3), ("silu", 5, 1536, 4), ("silu", 8, 1408, 6), ("silu", 9, 512, 3),
            ("plain", 8, 2048, 4), ("plain", 5, 2048, 3), ("plain", 9, 2048, 5),
        )),
        *((Layout(chunks=32), *case) for case in (
            ("silu", 8, 512, 2), ("plain", 8, 1536, 3), ("plain", 8, 1856, 4), ("plain", 8, 2688, 3),
            ("silu", 4, 1792, 4), ("plain", 4, 2048, 2), ("silu", 9, 1024, 3), ("plain", 9, 2304, 3),
        )),
    ],
)  # fmt: skip
def test_a_token_takes_the_cut_of_fewest_rounds(
    layout: Layout, kind: str, tiles: int, width: int, row_tiles: int
) -> None:
    """Of Qwen3-30B-A3B, GLM-4.7-Flash, DeepSeek-V2-Lite and Qwen3.5-35B-A3B in FP8, and of Granite-4-Tiny,
    Nemotron-3-Nano, LFM2-8B-A1B and Kimi-Linear in 16 bits, on 132 multiprocessors."""
    cuts = cuts_for(layout)
    tried = [cuts[name, 1] for end in ("", *gemm_experts.OTHERS) if ((name := kind + end), 1) in cuts]
    assert tried[gemm_experts.best_of(tried, kind, tiles, width, 132)].row_tiles == row_tiles


def test_routes_of_heads_are_waited_for() -> None:
    """Nothing behind the kernel that makes them has waited for it when attention lets the next kernel come."""

    def routed(choices: int, count: int, partial: bool = False) -> Routed:
        return Routed(torch.zeros(1, choices, dtype=torch.int64), torch.ones(1, choices), count, None, partial)

    known = gemm_experts.routes_known
    assert not known(routed(4, 4), 1)
    assert known(routed(4, 8), 1) and known(routed(4, 4, partial=True), 1)
    assert not known(routed(4, 8), 4) and not known(routed(1, 8), 1)


def test_devices_without_bulk_copies() -> None:
    layout = Layout(FP8, 1, chunks=32)
    assert layout.on((9, 0)) == layout
    older = layout.on((8, 9))
    assert "cp.async.bulk" in read_source(layout, cuts_for(layout))
    assert "cp.async.bulk" not in read_source(older, cuts_for(older))


# -- in C++ -----------------------------------------------------------------------------------------------------------

COUNT, TOP = 6, 3
MULTIPROCESSORS = 2  # few, so that blocks have several tiles one after the other
WIDTHS = {  # of what is packed, and its groups of rows and columns
    Layout(INT4, 1): (Width(4, False, 1), (1, 128)),
    Layout(INT4, 2, True): (Width(4, True, 0), (1, 64)),
    Layout(INT4, 4): (Width(4, False, -1), (1, 32)),
    Layout(INT8, 0): (Width(8, False, WHOLE), (1, 0)),
    Layout(FP8, 0): (Width(8, False, WHOLE, True), (1, 0)),
    Layout(FP8, 1): (Width(8, False, 1, True), (16, 128)),
}
LAYOUTS = [Layout(), Layout(MX, 4), *WIDTHS]
# Of gemm_stream.cu: fewer chunks than warps; one for some and two for others, in an odd number, too.
STREAMS = [
    (Layout(chunks=3), 1), (Layout(MX, 4, chunks=21), 1), (Layout(FP8, 0, chunks=4), 4),
    (Layout(INT4, 2, True, chunks=18), 1), (Layout(chunks=20), 2), (Layout(MX, 4, chunks=16), 2),
    (Layout(FP8, 1, chunks=18), 1), (Layout(INT4, 1, chunks=20), 2), (Layout(INT4, 4, chunks=18), 1),
    (Layout(INT8, 0, chunks=17), 1),
]  # fmt: skip
# Of those whose warps have features: as many chunks as warps, and fewer.
BY_ROWS = [
    Layout(FP8, 1, chunks=8), Layout(INT4, 2, True, chunks=7), Layout(chunks=3), Layout(INT8, 0, chunks=5),
    Layout(INT4, 4, chunks=8),
]  # fmt: skip


some_layouts = pytest.mark.further(layout=[Layout(), *(layout for layout in WIDTHS if layout != Layout(FP8, 0))])


class Host:
    """The kernels of one layout, and those of gemm.cu."""

    def __init__(self, folder: Path, layout: Layout, cuts: Cuts | None = None) -> None:
        self.cuts = gemm_experts.cuts_for(layout) if cuts is None else cuts
        self.plain = {kind: gemm.shapes_for((8, 0))[kind, 8] for kind in ("plain", "silu")}
        before, _, rest = without_ptx(gemm_experts.read_source(layout, self.cuts)).partition("// Not from the L1 cache")
        source = before + rest[rest.index("// What lane t has") :] + stored_kernels(self.plain)
        self._library = compiled(folder, source, "-DGROUPS", "-DEXPERTS")

    def matrix(self, kind: str, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """By the kernel of gemm.cu."""
        shape, width = self.plain[kind], len(w) // (2 if kind == "silu" else 1)
        out = torch.full((len(x), width), torch.nan, dtype=torch.bfloat16)
        self._library.groups(None, None, 0)
        self._library.experts(0, 0, 0, 0, None, None, ctypes.c_float(0), 0)
        sizes = len(x), width, x.shape[1], *shape.grid(kind, len(x), width, 1)
        cut = shape.warps * 32, 1, shape.shared_bytes(0)
        launch(self._library, f"stored_{kind}", cut, (x, w, bias, None, out), sizes, 0)
        return out

    def __call__(
        self, name: str, x: Tensor, w: Tensor | ExpertRows, bias: Tensor | None, routed: Routed, limit: float = 0.0,
        early: bool = False,
    ) -> Tensor:  # fmt: skip
        (cut_kind, _, tile), tiles = name.rpartition("_"), routed.tiles
        kind, cut = cut_kind.partition("_")[0], self.cuts[cut_kind, int(tile)]
        assert tiles is not None
        codes, scales, zeros = (w, None, None) if isinstance(w, Tensor) else (w.words, w.scales, w.zeros)
        width = len(codes) // COUNT // (1 if kind == "plain" else 2)
        out = torch.full((routed.pairs, width), torch.nan, dtype=torch.bfloat16)
        many, choices = tiles.tiles.shape[1], routed.choices(x)
        self._library.groups(pointer(scales), pointer(zeros), 0)
        self._library.source(None, 0)
        for part in (x, codes, scales, zeros):
            if part is not None:
                self._library.source(pointer(part), ctypes.c_long(part.nbytes))
        places = map(pointer, (tiles.order, tiles.tiles))
        known = int(gemm_experts.routes_known(routed, choices))
        self._library.experts(len(codes), many, choices, known, *places, ctypes.c_float(limit), 1)
        sizes = len(x), width, x.shape[1], gemm_experts.grid(cut, kind, many, width, MULTIPROCESSORS), 1
        launch(
            self._library,
            name,
            (cut.threads, 1, cut.shared_bytes(int(tile))),
            (x, codes, bias, None, out),
            sizes,
            early,
        )
        self._library.source(None, 0)
        return out


def tiled(experts: Tensor, rows: int) -> ExpertTiles:
    """Tiles of up to so many pairs, and two that are not there."""
    flat, tiles = experts.flatten(), list[tuple[int, int, int]]()
    order = flat.argsort(stable=True)
    for expert in range(COUNT):
        begin, number = int((flat < expert).sum()), int((flat == expert).sum())
        tiles += [(expert, begin + at, min(number - at, rows)) for at in range(0, number, rows)]
    tiles += [(-1, 99, 99)] * 2
    return ExpertTiles(order.int(), torch.tensor(tiles, dtype=torch.int32).t().contiguous(), rows)


def routed_of(rows: int) -> Routed:
    """Of many rows; there is one expert that nobody chooses, and one that all do."""
    logits = torch.randn(rows, COUNT, generator=torch.Generator().manual_seed(7))
    logits[:, 2], logits[:, 4] = 9, -9
    routed = PLAIN.route(logits, Routing(TOP))
    if rows == 1:  # as the kernel that routes makes them
        each = torch.stack((routed.experts[0], torch.arange(TOP), torch.ones(TOP, dtype=torch.int64))).int()
        made = ExpertTiles(None, each, gemm_experts.MAX_PAIRS)
        return Routed(routed.experts, routed.weights, COUNT, made)
    return Routed(routed.experts, routed.weights, COUNT, tiled(routed.experts, gemm_experts.MAX_PAIRS))


def weight_of(layout: Layout, rows: int, columns: int) -> tuple[Tensor | ExpertRows, Tensor]:
    """Also as a matrix, bfloat16."""
    if layout.kind == gemm_experts.DENSE:
        dense = random(rows, columns, seed=1)
        return dense, dense
    if layout.kind == MX:
        made = torch.Generator().manual_seed(1)
        codes, exponents = (
            torch.randint(*limits, (rows, columns // part), generator=made).to(torch.uint8)
            for limits, part in (((0, 256), 2), ((118, 128), 32))
        )
        packed = expert_rows(MXRows(codes, exponents))
    else:
        width, groups = WIDTHS[layout]
        packed = expert_rows(pack(quantized(width, rows, columns, *groups), torch.bfloat16, "cpu"))
    assert gemm_experts.layout_of(packed)._replace(chunks=0) == layout
    return packed, packed.dense(torch.bfloat16)


def as_lanes_have_it(layout: Layout, values: Tensor) -> Tensor:
    """Columns of each chunk in the order in which gemm.cu would have to have them for the same sums."""
    if layout.kind == gemm_experts.DENSE:
        return values
    return values.unflatten(1, (-1, 4, 2, 8)).transpose(2, 3).flatten(1).contiguous()


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> Layout:
    return request.param


@pytest.fixture(scope="module")
def run(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("experts"), layout)


def check(
    run: Host, layout: Layout, name: str, rows: int, depth: int, early: bool = False, tile: int | None = None,
    limit: float = 0.0,
) -> None:  # fmt: skip
    """name: of the cut, which begins with its kind."""
    kind = name.partition("_")[0]
    weight, dense = weight_of(layout, COUNT * 80, depth)
    routed, bias = routed_of(rows), random(COUNT * 80, seed=2) if depth > 256 else None
    x = random(rows if kind == "silu" else routed.pairs, depth, seed=3)
    found = run(f"{name}_{tile or (8 if rows <= 8 else 16)}", x, weight, bias, routed, limit, early)
    expected, choices = torch.empty_like(found), routed.choices(x)
    for expert in range(COUNT):
        pairs = (routed.experts.flatten() == expert).nonzero().flatten()
        if len(pairs) == 0:
            continue
        own = slice(expert * 80, expert * 80 + 80)
        args = as_lanes_have_it(layout, x[pairs // choices]), as_lanes_have_it(layout, dense[own])
        expected[pairs] = run.matrix(kind, *args, None if bias is None else bias[own])
    assert expected.isfinite().all() and expected.any()
    assert torch.equal(found, PLAIN.relu_squared(expected) if limit < 0 else expected)


@on_host
@some_layouts
@pytest.mark.further(rows=5, depth=192)
@pytest.mark.parametrize("depth", [192, 704])  # fewer chunks than shares; one chunk for some, two for others
@pytest.mark.parametrize("rows", [1, 5, 23])
@pytest.mark.parametrize("kind", ["plain", "silu"])
@pytest.mark.covering("layout")
def test_bits_are_those_of_the_expert_alone(run: Host, layout: Layout, kind: str, rows: int, depth: int) -> None:
    check(run, layout, kind, rows, depth)
    if kind == "plain":
        check(run, layout, kind, rows, depth, limit=gemm_experts.SQUARES)


@on_host
@some_layouts
def test_clamps(run: Host, layout: Layout) -> None:
    """Against float64; outputs that no block divides."""
    weight, dense = weight_of(layout, COUNT * 2 * 24, 256)
    for rows in (3, 9):
        routed, x, bias = routed_of(rows), random(rows, 256, seed=3), random(COUNT * 48, seed=4)
        scaled = bias * (4 * float(dense.float().std()) * 256**0.5)
        found = run(f"clamped_{8 if rows <= 8 else 16}", x, weight, scaled, routed, 1.5)
        for pair, expert in enumerate(routed.experts.flatten().tolist()):
            own = slice(expert * 48, expert * 48 + 48)
            gate, up = (dense[own].double() @ x[pair // TOP].double() + scaled[own].double()).chunk(2)
            gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
            expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            torch.testing.assert_close(found[pair].double(), expected, rtol=2e-2, atol=2e-2)


@pytest.fixture(scope="module", params=STREAMS, ids=str)
def stream(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Layout, Host]:
    layout, row_tiles = request.param
    cuts: Cuts = {(kind, tile): Stream(row_tiles, 3, layout) for kind in ("plain", "silu") for tile in (8, 16)}
    cuts |= {key: cut for key, cut in gemm_experts.cuts_for(layout).items() if isinstance(cut, Cut)}  # of one token
    return layout._replace(chunks=0), Host(tmp_path_factory.mktemp("stream"), layout, cuts)


@on_host
@pytest.mark.further(stream=STREAMS[1:3] + STREAMS[4:])
@pytest.mark.parametrize("rows", [1, 9, 23])  # 9: a tile of one pair more than half
@pytest.mark.parametrize("kind", ["plain", "silu"])
@pytest.mark.covering("stream")
def test_streams_have_the_bits_of_the_expert_alone(stream: tuple[Layout, Host], kind: str, rows: int) -> None:
    layout, run = stream
    cut = run.cuts[kind, 8]
    assert isinstance(cut, Stream)
    for early in (False, True):
        check(run, layout, kind, rows, 64 * cut.layout.chunks, early)
    if kind == "plain":
        check(run, layout, kind, rows, 64 * cut.layout.chunks, limit=gemm_experts.SQUARES)
    if rows == 1:
        for name, tile in run.cuts:
            if tile == 1 and name.startswith(kind):
                check(run, layout, name, rows, 64 * cut.layout.chunks, tile=1)


@on_host
@pytest.mark.further(short=BY_ROWS[1:])
@pytest.mark.parametrize("short", BY_ROWS, ids=str)
def test_streams_of_short_rows_have_the_bits_of_the_expert_alone(tmp_path: Path, short: Layout) -> None:
    cuts: Cuts = {("plain", tile): Stream(SHARES, 3, short, by_rows=True) for tile in (8, 16)}
    run, layout = Host(tmp_path, short, cuts), short._replace(chunks=0)
    for rows in (1, 9, 23):
        for early in (False, True):
            check(run, layout, "plain", rows, 64 * short.chunks, early)
        check(run, layout, "plain", rows, 64 * short.chunks, limit=gemm_experts.SQUARES)
