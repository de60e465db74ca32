"""The kernels of gemm_groups.cu in C++ on the CPU (gemm_host.cpp): the bits are those of gemm.cu's smallest kernel with
the dequantised matrix, whatever tile and batch. What only a GPU can tell is in test_cuda_groups.py."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from gemm_inputs import compiled, exact, launch, pointer, quantized, random, stored_kernels, without_ptx
from torch import Tensor

from draftwing.ops.cuda import gemm, gemm_groups
from draftwing.ops.cuda.gemm import Shape
from draftwing.ops.cuda.gemm_groups import TILES, Width
from draftwing.ops.groups import WHOLE, PackedGroups, pack, unpacked, unsupported_reason

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

EVERY = Width(4, True, -1), Width(8, False, WHOLE, True)
FURTHER = [width for width in LAYOUTS if width not in EVERY]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.further(width=FURTHER),
]


class Host:
    """The kernels of one width, and those of gemm.cu."""

    def __init__(self, folder: Path, width: Width) -> None:
        self.width = width
        self.shapes = {f"{kind}_{tile}": shape for (kind, tile), shape in shapes_of(width).items()}
        self.plain = {f"{kind}_{tile}": shape for (kind, tile), shape in gemm.shapes_for((9, 0)).items() if tile == 8}
        source = without_ptx(gemm_groups.read_source(width, shapes_of(width)))
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

    def dense(self, w: PackedGroups, room: int) -> Tensor:
        out = torch.full((w.rows, w.columns), torch.nan, dtype=torch.bfloat16)
        grid = gemm_groups.unpack_blocks(w.rows, w.columns, room), 1
        self._library.run_unpack(*map(pointer, (w.codes, w.scales, w.zeros, out)), w.rows, w.columns, *grid)
        return out


def shapes_of(width: Width) -> dict[tuple[str, int], Shape]:
    """Every kernel of some widths. Of the others all tiles of one kind, and one tile of the other kinds: how a tile
    reads weights is a matter of the width, and what it adds to a product is not. Those of gemm_tall.cu have tests of
    their own."""
    shapes = {
        key: shape for key, shape in gemm_groups.shapes_for(width.bits, (9, 0)).items() if isinstance(shape, Shape)
    }
    return {key: shape for key, shape in shapes.items() if width in EVERY or key[0] == "plain" or key[1] == 8}


@pytest.fixture(
    scope="module",
    params=LAYOUTS,
    ids=lambda width: f"{'fp' * width.fp8}{width.bits}{'z' if width.zeros else ''}{width.shift}",
)
def width(request: pytest.FixtureRequest) -> Width:
    return request.param


@pytest.fixture(scope="module")
def run(width: Width, tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("groups"), width)


def test_unpacking(run: Host, width: Width) -> None:
    for columns, layout in itertools.product((320, 576, 640), LAYOUTS[width]):
        rows = quantized(width, 48, columns, *layout)
        assert unsupported_reason(rows, torch.bfloat16) is None
        packed = pack(rows, torch.bfloat16, "cpu")
        expected = rows._replace(scales=rows.scales.bfloat16()).dense(torch.bfloat16)
        assert packed.shift == width.shift and torch.equal(unpacked(packed), expected)
        for room in (1, 100):
            assert torch.equal(run.dense(packed, room), expected)


@pytest.mark.further(kind=["add", "silu"], depth=[64, 704])
@pytest.mark.further(kind="add", depth=1152)
@pytest.mark.parametrize("depth", [64, 704, 1152])  # one chunk, two for some shares, two or three for all
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
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
