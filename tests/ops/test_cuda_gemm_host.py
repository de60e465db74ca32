"""The kernels of gemm.cu in C++ on the CPU (gemm_host.cpp): right, and a row's bits are those of the smallest tile
whatever tile and batch it is in. What only a GPU can tell is in test_cuda_gemm.py."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from gemm_inputs import compiled, exact, launch, random
from torch import Tensor

from draftwing.ops.cuda.gemm import PART, Shape, read_source, shapes_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
KINDS = ("plain", "add", "silu")
PROCESSORS = 1  # so few that blocks that stay have work
# Kernels of devices with clusters, and those of devices without that are others, by name.
SHAPES = {f"{kind}_{tile}": shape for (kind, tile), shape in shapes_for((9, 0)).items()}
OLDER = {
    f"{kind}_{tile}": shape for (kind, tile), shape in shapes_for((8, 0)).items() if shape != SHAPES[f"{kind}_{tile}"]
}


def kind_of(name: str) -> str:
    return name.removeprefix("older_").partition("_")[0]


class Host:
    """The kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.shapes: dict[str, Shape] = SHAPES | {f"older_{name}": shape for name, shape in OLDER.items()}

    def __call__(
        self, name: str, x: Tensor, w: Tensor, bias: Tensor | None = None, extra: Tensor | None = None,
        early: bool = False,
    ) -> Tensor:  # fmt: skip
        kind, shape = kind_of(name), self.shapes[name]
        rows, width = x.shape[0], w.shape[0] // (2 if kind == "silu" else 1)
        out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
        sizes = (rows, width, x.shape[1], *shape.grid(kind, rows, width, PROCESSORS))
        cut = (shape.warps * 32, shape.cluster, shape.shared_bytes(PART))
        launch(self._library, name, cut, (x, w, bias, extra if kind == "add" else None, out), sizes, early)
        return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Host:
    folder = tmp_path_factory.mktemp("gemm")
    _, begin, source = read_source(shapes_for((9, 0))).partition("enum { PLAIN")
    assert source.count("extern __shared__ float sums[];") == 5
    for line in read_source(shapes_for((8, 0))).splitlines():
        name, _, rest = line.removeprefix("KERNEL(").partition(",")
        if line.startswith("KERNEL(") and name in OLDER:
            source += f"KERNEL(older_{name},{rest}\n"
    return Host(compiled(folder, begin + source))


@pytest.mark.parametrize("name", [*SHAPES, *(f"older_{name}" for name in OLDER)])
def test_against_float64(run: Host, name: str) -> None:
    kind, shape = kind_of(name), run.shapes[name]
    features, depth = {8: (34, 192), 16: (32, 64), 32: (18, 1088), 64: (72, 704), 128: (140, 128)}[shape.tokens]
    rows = shape.tokens + 3
    x, w = random(rows, depth, seed=0), random(features, depth, seed=1) * depth**-0.5
    bias, extra = random(features, seed=2), random(rows, features, seed=3)
    expected = exact(kind, x, w, bias, extra)
    torch.testing.assert_close(run(name, x, w, bias, extra).double(), expected, rtol=2e-2, atol=2e-2)


def cancelling(rows: int, features: int, depth: int) -> tuple[Tensor, Tensor]:
    """x, w whose GEMMs are 0: what comes out is what rounding left, which shows any change of order."""
    pairs = torch.randperm(depth, generator=torch.Generator().manual_seed(depth)).view(2, -1)
    x, w = random(rows, depth, seed=0), random(features, depth, seed=1)
    x[:, pairs[1]], w[:, pairs[1]] = x[:, pairs[0]], -w[:, pairs[0]]
    return x, w


@pytest.mark.further(kind=[kind for kind in KINDS if kind != "plain"], depth=[64, 704])
@pytest.mark.parametrize("depth", [64, 704, 1152])  # one chunk, two for some shares, two or three for all
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_smallest_tile(run: Host, kind: str, depth: int) -> None:
    x, w = cancelling(35, 36, depth)
    bias, extra = (
        (random(36, seed=2), random(35, 36, seed=3)) if depth == 704 else (None, torch.zeros(35, 36).bfloat16())
    )
    expected = run(f"{kind}_8", x, w, bias, extra)
    assert not expected.isnan().any() and expected.any()
    assert torch.equal(run(f"{kind}_8", x[34:], w, bias, extra[34:]), expected[34:])
    for name, shape in run.shapes.items():
        if kind_of(name) == kind and shape.tokens > 8:
            for early in (False, True):
                assert torch.equal(run(name, x, w, bias, extra, early), expected), (name, early)
