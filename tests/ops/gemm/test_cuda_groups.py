"""GEMMs with quantised weights, gemm_groups.cu and gemm_tall.cu: how they cut their work; in C++ on the CPU
(gemm_host.cpp) and on a GPU. A row has the bits that the dequantised matrix gives, in any batch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_inputs import (
    COPIES_EARLY,
    EARLY,
    LATE,
    compiled,
    device,
    exact,
    launch,
    off_by,
    on_gpu,
    on_host,
    pointer,
    quantized,
    random,
    stored_kernels,
    width_name,
    without_ptx,
)  # fmt: skip
from torch import Tensor

from draftwing.ops.gemm import cuda as gemm
from draftwing.ops.gemm import cuda_groups, cuda_many
from draftwing.ops.gemm.cuda import cuts_of, key_of, small_m_gemm
from draftwing.ops.gemm.cuda_groups import (
    TILES,
    GroupGemm,
    Width,
    _from_feature,
    group_gemm,
    kernel_lines,
    read_source,
    shapes_for,
    tile_of,
)
from draftwing.ops.gemm.groups import CHUNK, WHOLE, PackedGroups, pack, unpacked, unsupported_reason
from draftwing.ops.gemm.shapes import Shape, TallShape

ROWS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 70, 130)
MAX_ROWS = ROWS[-1]
CASES = [  # a width, and rows, columns and columns of a group
    (Width(4, False, 0), 96, 128, 64), (Width(4, False, 0), 224, 576, 192), (Width(4, False, 1), 320, 4096, 128),
    (Width(4, False, -1), 96, 8256, 32), (Width(4, False, WHOLE), 96, 8256, 8256), (Width(4, True, 0), 224, 576, 64),
    (Width(4, True, 1), 320, 4096, 128), (Width(4, True, -1), 96, 704, 32), (Width(8, False, WHOLE), 224, 576, 576),
    (Width(8, False, WHOLE, True), 224, 576, 576), (Width(8, False, 1, True), 320, 4096, 128),
    (Width(8, False, WHOLE, True), 96, 8256, 8256),
    # Features that no `key_of` takes for narrow.
    (Width(4, False, 1), 4352, 8320, 128), (Width(8, False, WHOLE, True), 4352, 8256, 8256),
]  # fmt: skip


def test_tiles() -> None:
    assert [tile_of(rows, TILES) for rows in (1, 8, 9, 17, 33, 64, 65, 300)] == [8, 8, 16, 32, 64, 64, 64, 64]
    assert [tile_of(rows, (2, 64, 128)) for rows in (1, 3, 65, 300)] == [2, 64, 128, 128]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("bits", [4, 8])
def test_shapes(bits: int, capability: tuple[int, int]) -> None:
    """There is a kernel for every GEMM and there is room for it."""
    shapes = shapes_for(bits, capability)
    assert {(kind, tile) for kind in ("plain", "add", "silu") for tile in TILES} <= shapes.keys()
    most = 227 << 10 if capability[0] == 9 else 99 << 10  # bytes that a block may have
    usual, largest = Width(bits, False, 1).part, Width(bits, bits == 4, -1).part
    for (_, tile), shape in shapes.items():
        assert shape.tokens == tile and shape.shared_bytes(largest) <= most and shape.blocks * shape.warps * 32 <= 1536
        assert shape.cluster in ((1, 2, 4, 8) if capability >= (9, 0) else (1,))
        assert shape.blocks * (shape.shared_bytes(usual) + 1024) <= 228 << 10


def on_device(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width, features, depth, wide", CASES)
def test_bits(width: Width, dtype: torch.dtype, features: int, depth: int, wide: int) -> None:
    if width.bits == 8 and dtype != torch.bfloat16:
        return
    ours: GroupGemm = group_gemm(device(), dtype, width)
    weight = pack(quantized(width, features, depth, 1, wide), dtype, device())
    matrix, plain = ours.dense(weight), small_m_gemm(device(), dtype)
    many = cuda_many.shares_gemm(device(), (features, depth), dtype, weights_in_sets=True)
    if many is not None:
        ordered = ours.dense(weight, in_sets=True)
        every = on_device(400, depth, seed=5, dtype=dtype)
        assert torch.equal(many.linear(every, ordered, None), plain.linear(every, matrix, None))
    assert weight.shift == width.shift and torch.equal(matrix, unpacked(weight))
    x, extra = on_device(MAX_ROWS, depth, seed=2, dtype=dtype), on_device(MAX_ROWS, features, seed=3, dtype=dtype)
    bias = on_device(features, seed=4, dtype=dtype) if depth > 600 else None
    for rows in ROWS:
        for first in (0, MAX_ROWS - rows):
            part = slice(first, first + rows)
            assert torch.equal(ours.linear(x[part], weight, bias), plain.linear(x[part], matrix, bias)), rows
            expected = plain.linear(x[part], matrix, bias, extra[part])
            assert torch.equal(ours.linear(x[part], weight, bias, extra[part]), expected), rows
            assert torch.equal(ours.gated(x[part], weight, bias), plain.gated(x[part], matrix, bias)), rows


def test_narrow_widths_may_be_cut_otherwise() -> None:
    kernels = {("plain", 8), ("plain_narrow", 8), ("plain_tiny", 8), ("plain", 64), ("plain_slim", 64), ("silu", 8)}
    assert key_of(kernels, "plain", 8, 32 * 132, 132) == ("plain_narrow", 8)
    assert key_of(kernels, "plain", 8, 32 * 132 + 16, 132) == ("plain", 8)
    assert key_of(kernels, "plain", 8, 4 * 132 + 16, 132) == ("plain_narrow", 8)
    assert key_of(kernels, "plain", 8, 4 * 132, 132) == ("plain_tiny", 8)
    assert key_of(kernels, "plain", 64, 64, 132) == ("plain_slim", 64) and key_of(kernels, "silu", 8, 64, 132) == (
        "silu",
        8,
    )


def test_cuts_that_fill_their_turns() -> None:
    """Gates and ups of 17,408 features are 136 blocks of 64 rows, of which 132 run at once, and 544 smaller ones, of
    which 528 do, or 264 of 128 rows."""
    shapes: dict[tuple[str, int], tuple[Any, Shape | TallShape]] = {
        key: (None, shape) for key, shape in shapes_for(8, (9, 0)).items()
    }
    for kind, features, rows, processors, expected in (
        ("silu", 17408, 64, 132, [("silu_turns", range(16896)), ("silu_uneven", range(16896, 17408))]),
        ("silu", 17408, 128, 132, [("silu_turns", range(16896)), ("silu_uneven", range(16896, 17408))]),
        ("silu", 17408, 32, 132, [("silu_uneven", range(17408))]), ("silu", 17408, 16, 132, [("silu", range(17408))]),
        ("silu", 14336, 32, 132, [("silu", range(14336))]), ("silu", 14336, 64, 132, [("silu", range(14336))]),
        ("silu", 14336, 128, 132, [("silu", range(14336))]), ("silu", 17408, 64, 144, [("silu_turns", range(17408))]),
        ("silu", 27648, 64, 132, [("silu", range(27648))]), ("silu", 128, 64, 132, [("silu", range(128))]),
        ("plain", 17408, 64, 132, [("plain", range(17408))]),
        ("plain", 16384, 128, 132, [("plain_turns", range(16384))]),
        ("plain", 17408, 128, 132, [("plain_turns", range(16896)), ("plain", range(16896, 17408))]),
        ("plain", 6144, 128, 132, [("plain", range(6144))]),
        # Not so many that the blocks of the other cut are whole.
        ("silu", 16912, 64, 132, [("silu_uneven", range(16912))]),
    ):  # fmt: skip
        found = cuts_of(shapes, (kind, rows), rows, features, processors)
        assert found == [((name, rows), part) for name, part in expected], (kind, features, rows)
        assert [one for _, part in found for one in part] == list(range(features))


@on_gpu
@pytest.mark.parametrize("rows", [17, 32, 33, 64, 100, 128])
@pytest.mark.parametrize("width", [Width(8, False, 1, True), Width(4, True, 1)])
def test_bits_of_other_cuts(rows: int, width: Width) -> None:
    """Those for turns of few blocks, and products in two parts, with so many features that they are taken."""
    ours, plain = GroupGemm(device(), torch.bfloat16, width), small_m_gemm(device(), torch.bfloat16)
    x = on_device(rows, 704, seed=2, dtype=torch.bfloat16)
    processors = torch.cuda.get_device_properties(device()).multi_processor_count
    for outputs in (128 * processors, 128 * processors + 512):
        weight = pack(quantized(width, 2 * outputs, 704, 1, 128), torch.bfloat16, device())
        matrix, bias = ours.dense(weight), on_device(2 * outputs, seed=4, dtype=torch.bfloat16)
        assert torch.equal(ours.gated(x, weight, bias), plain.gated(x, matrix, bias))
        extra = on_device(rows, 2 * outputs, seed=3, dtype=torch.bfloat16)
        assert torch.equal(ours.linear(x, weight, bias), plain.linear(x, matrix, bias))
        assert torch.equal(ours.linear(x, weight, bias, extra), plain.linear(x, matrix, bias, extra))


# -- gemm_groups.cu in C++ --------------------------------------------------------------------------------------------

PROCESSORS = 1  # so few that blocks that stay have work
LAYOUTS = {  # groups of rows and columns, 0: all of them
    Width(4, False, 1): [(1, 128)],
    Width(4, False, 0): [(1, 64), (1, 192)],
    Width(4, False, -1): [(1, 32), (1, 96)],
    Width(4, False, WHOLE): [(1, 0)],
    Width(4, True, 1): [(1, 128)],
    Width(4, True, -1): [(1, 32)],
    Width(8, False, WHOLE, True): [(1, 0), (0, 0)],
    Width(8, False, 1, True): [(128, 128), (16, 256)],
    Width(8, False, WHOLE): [(1, 0)],
    Width(8, False, -1): [(1, 32), (1, 96)],
}
EVERY = (Width(4, True, -1),)
FURTHER = [width for width in LAYOUTS if width not in (*EVERY, Width(8, False, WHOLE, True))]


class Host:
    """The kernels of one width, and those of gemm.cu."""

    def __init__(self, folder: Path, width: Width) -> None:
        self.width = width
        self.shapes = {f"{kind}_{tile}": shape for (kind, tile), shape in shapes_of(width).items()}
        self.plain = {f"{kind}_{tile}": shape for (kind, tile), shape in gemm.shapes_for((9, 0)).items() if tile == 8}
        source = without_ptx(cuda_groups.read_source(width, shapes_of(width)))
        self._library = compiled(folder, source + stored_kernels(self.plain), "-DGROUPS")

    def __call__(
        self, name: str, x: Tensor, w: PackedGroups | Tensor, bias: Tensor | None, extra: Tensor | None,
        early: bool = False,
    ) -> Tensor:  # fmt: skip
        """Of a packed weight, or of a matrix by the kernel of gemm.cu."""
        kind, stored = name.partition("_")[0], isinstance(w, Tensor)
        shape = self.plain[name] if stored else self.shapes[name]
        rows, width = len(x), (len(w) if isinstance(w, Tensor) else w.rows) // (2 if kind == "silu" else 1)
        out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
        codes, groups = (w, (None, None)) if isinstance(w, Tensor) else (w.codes, (w.scales, w.zeros))
        self._library.groups(*map(pointer, groups), int(not stored))
        tensors = (x, codes, bias, extra if kind == "add" else None, out)
        sizes = (rows, width, x.shape[1], *shape.grid(kind, rows, width, PROCESSORS))
        cut = (shape.warps * 32, shape.cluster, shape.shared_bytes(0 if stored else self.width.part))
        launch(self._library, f"stored_{name}" if stored else name, cut, tensors, sizes, early)
        return out

    def dense(self, w: PackedGroups, room: int, in_sets: bool = False) -> Tensor:
        out = torch.full((w.rows, w.columns), torch.nan, dtype=torch.bfloat16)
        grid = cuda_groups.unpack_blocks(w.rows, w.columns, room), 1
        self._library.run_unpack(
            *map(pointer, (w.codes, w.scales, w.zeros, out)), w.rows, w.columns, int(in_sets), *grid
        )
        return out


def shapes_of(width: Width) -> dict[tuple[str, int], Shape]:
    """Every kernel of some widths. Of the others all tiles of one kind, and one tile of the other kinds: how a tile
    reads weights is a matter of the width, and what it adds to a product is not. Those of gemm_tall.cu have tests of
    their own."""
    shapes = {
        key: shape for key, shape in cuda_groups.shapes_for(width.bits, (9, 0)).items() if isinstance(shape, Shape)
    }
    return {key: shape for key, shape in shapes.items() if width in EVERY or key[0] == "plain" or key[1] == 8}


@pytest.fixture(scope="module", params=LAYOUTS, ids=width_name)
def width(request: pytest.FixtureRequest) -> Width:
    return request.param


@pytest.fixture(scope="module")
def run(width: Width, tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("groups"), width)


@on_host
@pytest.mark.further(width=FURTHER)
def test_unpacking(run: Host, width: Width) -> None:
    for columns, layout in itertools.product((320, 576, 640), LAYOUTS[width]):
        rows = quantized(width, 48, columns, *layout)
        assert unsupported_reason(rows, torch.bfloat16) is None
        packed = pack(rows, torch.bfloat16, "cpu")
        expected = rows._replace(scales=rows.scales.bfloat16()).dense(torch.bfloat16)
        assert packed.shift == width.shift and torch.equal(unpacked(packed), expected)
        for room in (1, 100):
            assert torch.equal(run.dense(packed, room), expected)
        assert torch.equal(run.dense(packed, 3, in_sets=True), cuda_many.in_sets(expected))


@on_host
@pytest.mark.further(width=FURTHER)
@pytest.mark.further(kind=["add", "silu"], depth=[64, 704])
@pytest.mark.further(kind="add", depth=1152)
@pytest.mark.parametrize("depth", [64, 704, 1152])  # one chunk, two for some shares, two or three for all
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.covering("width")
def test_bits_are_those_of_the_dequantised_matrix(run: Host, width: Width, kind: str, depth: int) -> None:
    packed = pack(quantized(width, 96, depth, *LAYOUTS[width][-1]), torch.bfloat16, "cpu")
    if depth == 64 and packed.shift != width.shift:
        return  # there is but one group
    matrix = unpacked(packed)
    x = random(67, depth, seed=0)
    out = 48 if kind == "silu" else 96
    bias, extra = (
        (random(96, seed=2), random(67, out, seed=3)) if depth == 704 else (None, torch.zeros(67, out).bfloat16())
    )
    expected = run(f"{kind}_8", x, matrix, bias, extra)
    assert not expected.isnan().any() and expected.any()
    names = [name for name in run.shapes if name.startswith(f"{kind}_")]
    assert len(names) >= (len(TILES) if kind == "plain" or width in EVERY else 1)
    for name in names:
        rows = min(67, run.shapes[name].tokens + 3)
        for early in (False, True):
            got = run(name, x[:rows], packed, bias, extra[:rows], early)
            assert torch.equal(got, expected[:rows]), (name, early)


@on_host
@pytest.mark.further(width=FURTHER)
@pytest.mark.parametrize("larger", [1, 30])
def test_against_float64(run: Host, width: Width, larger: int) -> None:
    """larger: scales, which may be beyond 1."""
    rows = quantized(width, 64, 320, *LAYOUTS[width][0])
    rows = rows._replace(scales=rows.scales * larger)
    x = random(5, 320, seed=0)
    bias, extra = random(64, seed=2) * larger, random(5, 64, seed=3) * larger
    expected = exact("add", x, rows.dense(torch.float64), bias, extra)
    got = run("add_8", x, pack(rows, torch.bfloat16, "cpu"), bias, extra)
    torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-2 * larger)


# -- gemm_tall.cu in C++ ----------------------------------------------------------------------------------------------

TALL_LAYOUTS = {  # groups of rows and columns, 0: all of them
    Width(4, False, 1): (1, 128),
    Width(4, True, -1): (1, 32),
    Width(8, False, WHOLE, True): (1, 0),
    Width(8, False, 0): (1, 64),
}
CUTS = tuple(dict.fromkeys(s for bits in (4, 8) for s in shapes_for(bits, (9, 0)).values() if isinstance(s, TallShape)))
FEW = {key: shape for key, shape in shapes_for(4, (8, 0)).items() if key[1] == 8}  # kernels that have the bits
SHAPES = {(kind, most): shape for most, shape in enumerate(CUTS) for kind in ("plain", "add", "silu")}
some_widths = pytest.mark.further(run_tall=[width for width in TALL_LAYOUTS if width != EVERY[0]])


class TallHost:
    """The kernels of one width."""

    def __init__(self, folder: Path, width: Width) -> None:
        self.width = width
        source = without_ptx(read_source(width, tall_shapes_of(width)))
        source += "".join(f"GROUP_KERNEL(few_{line})\n" for line in kernel_lines(FEW))
        assert source.count("extern __shared__ float sums[];") == 6
        self._library = compiled(folder, source, "-DGROUPS", "-DTALL")

    def __call__(
        self, key: tuple[str, int], x: Tensor, w: PackedGroups, bias: Tensor | None, extra: Tensor | None, early: int
    ) -> Tensor:
        (kind, most), shape = key, SHAPES[key]
        width = w.rows // (2 if kind == "silu" else 1)
        grid, rows = shape.grid(kind, len(x), width), self.ordered(shape, x)
        return self._run(f"{kind}_{most}", shape, grid, rows, len(x), width, w, bias, extra, early)

    def in_parts(
        self, keys: Sequence[tuple[str, int]], begins: Sequence[int], x: Tensor, w: PackedGroups, bias: Tensor,
        extra: Tensor,
    ) -> Tensor:  # fmt: skip
        """By several kernels, whose features begin at these, as `GroupGemm` does it."""
        width = w.rows // (2 if keys[0][0] == "silu" else 1)
        out = torch.full((len(x), width), torch.nan, dtype=torch.bfloat16)
        for key, begin, end in zip(keys, begins, [*begins[1:], width], strict=True):
            kind, shape = key[0], SHAPES[key]
            codes, scales, zeros, *rest = _from_feature(begin, w.codes, w.scales, w.zeros, bias, extra, out)
            if kind != "add":
                rest[1] = None
            self._library.groups(pointer(scales), pointer(zeros), 1)
            cut = shape.warps * 32, shape.cluster, shape.shared_bytes(self.width.part)
            sizes = len(x), width, w.columns, *shape.grid(kind, len(x), end - begin)
            launch(self._library, f"{kind}_{key[1]}", cut, (self.ordered(shape, x), codes, *rest), sizes, LATE)
        return out

    def few(self, kind: str, x: Tensor, w: PackedGroups, bias: Tensor | None, extra: Tensor | None) -> Tensor:
        """By the kernel of gemm.cu for up to eight rows."""
        shape, width = FEW[kind, 8], w.rows // (2 if kind == "silu" else 1)
        grid = shape.grid(kind, len(x), width, 1)
        return self._run(f"few_{kind}_8", shape, grid, x, len(x), width, w, bias, extra, LATE)

    def _run(
        self, name: str, shape: Shape | TallShape, grid: tuple[int, int], x: Tensor, rows: int, width: int,
        w: PackedGroups, bias: Tensor | None, extra: Tensor | None, early: int,
    ) -> Tensor:  # fmt: skip
        out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
        self._library.groups(pointer(w.scales), pointer(w.zeros), 1)
        tensors = (x, w.codes, bias, extra if "add" in name else None, out)
        cut = (shape.warps * 32, shape.cluster, shape.shared_bytes(self.width.part))
        launch(self._library, name, cut, tensors, (rows, width, w.columns, *grid), early)
        return out

    def ordered(self, shape: TallShape, x: Tensor) -> Tensor:
        rows, depth = x.shape
        blocks, tiles = -(-rows // shape.tokens), shape.tokens // 8
        panels = torch.full((blocks * shape.tokens, depth), torch.nan, dtype=torch.bfloat16)
        order = ctypes.cast(getattr(self._library, f"order_{shape.tokens}"), ctypes.c_void_p)
        self._library.run_order(
            order, pointer(x), pointer(panels), rows, depth, -(-depth // (4 * CHUNK)), blocks * tiles
        )
        return panels


def tall_shapes_of(width: Width) -> dict[tuple[str, int], TallShape]:
    """Every kernel of some widths; of the others all cuts of plain products, and the smallest of the other kinds."""
    return {key: shape for key, shape in SHAPES.items() if width in EVERY or key[0] == "plain" or key[1] == 0}


@pytest.fixture(scope="module", params=TALL_LAYOUTS, ids=width_name)
def run_tall(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TallHost:
    return TallHost(tmp_path_factory.mktemp("tall"), request.param)


@on_host
@some_widths
def test_panels(run_tall: TallHost) -> None:
    x = random(70, 192, seed=0)
    for shape in CUTS[:2]:
        blocks = -(-70 // shape.tokens)
        whole = torch.zeros(blocks * shape.tokens, 192, dtype=torch.bfloat16)
        whole[:70] = x
        # By block, tile and row of 8; chunk, half, unit t and word i of it, and its two columns.
        split = whole.view(blocks, shape.tokens // 8, 8, 3, 2, 4, 4, 2)
        expected = split.permute(0, 3, 4, 6, 1, 2, 5, 7)
        assert torch.equal(run_tall.ordered(shape, x).flatten(), expected.flatten())


@on_host
@some_widths
@pytest.mark.further(key=[(kind, number) for kind in ("add", "silu") for number in range(1, len(CUTS))])
@pytest.mark.parametrize("key", SHAPES, ids=lambda key: f"{key[0]}{CUTS[key[1]].tokens}x{CUTS[key[1]].cluster}")
def test_tall_against_float64(run_tall: TallHost, key: tuple[str, int]) -> None:
    kind, shape = key[0], SHAPES[key]
    if key not in tall_shapes_of(run_tall.width):
        pytest.skip("larger cuts that add or gate have the other widths")
    # A share has up to three chunks; 64: one chunk, so that most have none.
    for depth, rows, features in ((1152, shape.tokens - 3, 64), (64, 9, 160)):
        layout = TALL_LAYOUTS[run_tall.width]
        if depth == 64 and (run_tall.width.shift != WHOLE and run_tall.width.shift >= 0):
            continue  # there is but one group
        packed = pack(quantized(run_tall.width, features, depth, *layout), torch.bfloat16, "cpu")
        assert packed.shift == run_tall.width.shift
        x = random(rows, depth, seed=0)
        width = features // 2 if kind == "silu" else features
        bias, extra = random(features, seed=2) if rows > 9 else None, random(rows, width, seed=3)
        expected = exact(kind, x, unpacked(packed), bias, extra)
        first = None
        for early in (LATE, EARLY, COPIES_EARLY)[: 3 if rows > 9 else 1]:
            got = run_tall(key, x, packed, bias, extra, early)
            torch.testing.assert_close(got.double(), expected, rtol=off_by(kind), atol=2e-3)
            assert torch.equal(got, run_tall.few(kind, x, packed, bias, extra))
            first = got if first is None else first
            assert torch.equal(got, first), early


@on_host
@some_widths
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
def test_features_in_two_parts(run_tall: TallHost, kind: str) -> None:
    """A product by two cuts has the bits of one."""
    cuts = [CUTS.index(shape) for shape in CUTS if shape.tokens == 64]
    whole, rest = (next(i for i in cuts if (CUTS[i].cluster == 1) == alone) for alone in (True, False))
    keys = [(kind, whole), (kind, rest)]
    if not tall_shapes_of(run_tall.width).keys() >= set(keys):
        pytest.skip("larger cuts that add or gate have the other widths")
    packed = pack(quantized(run_tall.width, 512, 1152, *TALL_LAYOUTS[run_tall.width]), torch.bfloat16, "cpu")
    x, bias = random(9, 1152, seed=0), random(512, seed=2)
    extra = random(9, 256 if kind == "silu" else 512, seed=3)
    first = max(CUTS[i].outputs(kind) for i in (whole, rest))  # blocks of either are whole
    got = run_tall.in_parts(keys, (0, first), x, packed, bias, extra)
    assert torch.equal(got, run_tall.few(kind, x, packed, bias, extra if kind == "add" else None))
