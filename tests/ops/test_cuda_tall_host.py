"""The kernels of gemm_tall.cu in C++ on the CPU (gemm_host.cpp), vs a product in float64. What only a GPU can tell
is in test_cuda_tall.py."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gemm_inputs import compiled, exact, launch, pointer, quantized, random, without_ptx
from torch import Tensor

from draftwing.ops.cuda.gemm import Shape
from draftwing.ops.cuda.gemm_groups import Width, _from_feature, kernel_lines
from draftwing.ops.cuda.gemm_groups import shapes_for as few_row_shapes
from draftwing.ops.cuda.gemm_tall import TallShape, read_source
from draftwing.ops.groups import CHUNK, WHOLE, PackedGroups, pack, unpacked

LAYOUTS = {  # groups of rows and columns, 0: all of them
    Width(4, False, 1): (1, 128),
    Width(4, True, -1): (1, 32),
    Width(8, False, WHOLE, True): (1, 0),
    Width(8, False, 0): (1, 64),
}
CUTS = (
    TallShape(64, groups=1, row_tiles=1, stages=3, ahead=2),
    TallShape(128, groups=2, row_tiles=2, stages=4, ahead=3),
    TallShape(192, groups=2, row_tiles=1, stages=3, ahead=1),
    TallShape(256, groups=2, row_tiles=1, stages=3, ahead=2, cluster=2),
    TallShape(64, groups=2, row_tiles=1, stages=4, ahead=2, cluster=4),
    # Exact ones.
    *dict.fromkeys(s for bits in (4, 8) for s in few_row_shapes(bits, (9, 0)).values() if isinstance(s, TallShape)),
)
FEW = {key: shape for key, shape in few_row_shapes(4, (8, 0)).items() if key[1] == 8}  # kernels that have the bits
SHAPES = {(kind, most): shape for most, shape in enumerate(CUTS) for kind in ("plain", "add", "silu")}
EVERY = [width for width in LAYOUTS if width in (Width(4, True, -1), Width(8, False, WHOLE, True))]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.further(run=[width for width in LAYOUTS if width != EVERY[0]]),
    pytest.mark.further(key=[(kind, number) for kind in ("add", "silu") for number in range(1, len(CUTS))]),
]
LATE, EARLY, COPIES_EARLY = 0, 1, 2  # copies and instructions, as gemm_host.cpp has them


class Host:
    """The kernels of one width."""

    def __init__(self, folder: Path, width: Width) -> None:
        self.width = width
        source = without_ptx(read_source(width, shapes_of(width)))
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


def shapes_of(width: Width) -> dict[tuple[str, int], TallShape]:
    """Every kernel of some widths; of the others all cuts of plain products, and the smallest of the other kinds."""
    return {key: shape for key, shape in SHAPES.items() if width in EVERY or key[0] == "plain" or key[1] == 0}


@pytest.fixture(
    scope="module", params=LAYOUTS, ids=lambda w: f"{'fp' * w.fp8}{w.bits}{'z' if w.zeros else ''}{w.shift}"
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("tall"), request.param)


def test_panels(run: Host) -> None:
    x = random(70, 192, seed=0)
    for shape in CUTS[:2]:
        blocks = -(-70 // shape.tokens)
        whole = torch.zeros(blocks * shape.tokens, 192, dtype=torch.bfloat16)
        whole[:70] = x
        # By block, tile and row of 8; chunk, half, unit t and word i of it, and its two columns.
        split = whole.view(blocks, shape.tokens // 8, 8, 3, 2, 4, 4, 2)
        expected = split.permute(0, 3, 4, 6, 1, 2, 5, 7)
        assert torch.equal(run.ordered(shape, x).flatten(), expected.flatten())


@pytest.mark.parametrize("key", SHAPES, ids=lambda key: f"{key[0]}{CUTS[key[1]].tokens}x{CUTS[key[1]].cluster}")
def test_against_float64(run: Host, key: tuple[str, int]) -> None:
    kind, shape = key[0], SHAPES[key]
    if key not in shapes_of(run.width):
        pytest.skip("larger cuts that add or gate have the other widths")
    # Of exact cuts a share has up to three chunks; 64: one chunk, so that most have none.
    most = (1152, shape.tokens - 3, 64) if shape.exact else (448, shape.tokens + 5, 96)
    for depth, rows, features in (most, (64, 9, 160)):
        layout = LAYOUTS[run.width]
        if depth == 64 and (run.width.shift != WHOLE and run.width.shift >= 0):
            continue  # there is but one group
        packed = pack(quantized(run.width, features, depth, *layout), torch.bfloat16, "cpu")
        assert packed.shift == run.width.shift
        x = random(rows, depth, seed=0)
        width = features // 2 if kind == "silu" else features
        bias, extra = random(features, seed=2) if rows > 9 else None, random(rows, width, seed=3)
        expected = exact(kind, x, unpacked(packed), bias, extra)
        first = None
        for early in (LATE, EARLY, COPIES_EARLY):
            got = run(key, x, packed, bias, extra, early)
            torch.testing.assert_close(got.double(), expected, rtol=2**-7, atol=1e-3)
            if shape.exact:
                assert torch.equal(got, run.few(kind, x, packed, bias, extra))
            first = got if first is None else first
            assert torch.equal(got, first), early


@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
def test_features_in_two_parts(run: Host, kind: str) -> None:
    """A product by two cuts has the bits of one."""
    cuts = [CUTS.index(shape) for shape in CUTS if shape.exact and shape.tokens == 64]
    whole, rest = (next(i for i in cuts if (CUTS[i].cluster == 1) == alone) for alone in (True, False))
    keys = [(kind, whole), (kind, rest)]
    if not shapes_of(run.width).keys() >= set(keys):
        pytest.skip("larger cuts that add or gate have the other widths")
    packed = pack(quantized(run.width, 512, 1152, *LAYOUTS[run.width]), torch.bfloat16, "cpu")
    x, bias = random(9, 1152, seed=0), random(512, seed=2)
    extra = random(9, 256 if kind == "silu" else 512, seed=3)
    first = max(CUTS[i].outputs(kind) for i in (whole, rest))  # blocks of either are whole
    got = run.in_parts(keys, (0, first), x, packed, bias, extra)
    assert torch.equal(got, run.few(kind, x, packed, bias, extra if kind == "add" else None))
