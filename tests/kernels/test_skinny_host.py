"""The kernels of skinny.cu in C++ on the CPU (skinny_host.cpp): right, and a row's bits are those of the smallest tile
whatever tile and batch it is in. What only a GPU can tell is in test_skinny.py."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftwing.kernels.skinny import grid_of, read_source, tile_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
KINDS = ("plain", "add", "silu")


class Host:
    """The kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(
        self, kind: str, tile: int, x: Tensor, w: Tensor, bias: Tensor | None = None, extra: Tensor | None = None,
        early: bool = False,
    ) -> Tensor:  # fmt: skip
        rows, width = x.shape[0], w.shape[0] // (2 if kind == "silu" else 1)
        out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
        pointers = (ctypes.c_void_p(0 if part is None else part.data_ptr()) for part in (x, w, bias, extra, out))
        sizes = (rows, width, x.shape[1], *grid_of(kind, tile, rows, width))
        self._library.run(KINDS.index(kind), tile, *pointers, *sizes, int(early))
        return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Host:
    folder = tmp_path_factory.mktemp("skinny")
    _, begin, source = read_source().partition("enum { PLAIN")
    (folder / "skinny.inc").write_text(begin + source)
    library = folder / "skinny.so"
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-ffp-contract=off",
         f'-DSOURCE="{folder / "skinny.inc"}"', str(Path(__file__).with_name("skinny_host.cpp")), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return Host(ctypes.CDLL(str(library)))


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def case(rows: int, features: int, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, w = random(rows, depth, seed=0), random(features, depth, seed=1, scale=depth**-0.5)
    return x, w, random(features, seed=2), random(rows, features, seed=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tile, rows, features, depth",
    [(8, 11, 34, 192), (16, 16, 32, 64), (32, 40, 18, 1088), (64, 70, 72, 704), (128, 131, 140, 128)],
)  # fmt: skip
def test_against_float64(run: Host, kind: str, tile: int, rows: int, features: int, depth: int) -> None:
    x, w, bias, extra = case(rows, features, depth)
    expected = x.double() @ w.double().T + bias.double()
    if kind == "add":
        expected = expected + extra.double()
    if kind == "silu":
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    found = run(kind, tile, x, w, bias, extra if kind == "add" else None)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)


def cancelling(rows: int, features: int, depth: int) -> tuple[Tensor, Tensor]:
    """x, w whose products are 0: what comes out is what rounding left, which shows any change of order."""
    pairs = torch.randperm(depth, generator=torch.Generator().manual_seed(depth)).view(2, -1)
    x, w = random(rows, depth, seed=0), random(features, depth, seed=1)
    x[:, pairs[1]], w[:, pairs[1]] = x[:, pairs[0]], -w[:, pairs[0]]
    return x, w


@pytest.mark.parametrize("depth", [64, 704, 1152])  # one chunk, two for some warps, two or three for all
def test_bits_are_those_of_the_smallest_tile(run: Host, depth: int) -> None:
    x, w = cancelling(67, 36, depth)
    expected = run("plain", 8, x, w)
    assert not expected.isnan().any() and expected.any()
    for tile in (16, 32, 64, 128):
        assert torch.equal(run("plain", tile, x, w, early=tile == 128), expected), tile
    assert torch.equal(run("plain", 8, x[66:], w), expected[66:])
    if depth == 704:
        x, w, bias, extra = case(67, 36, depth)
        assert torch.equal(run("add", 128, x, w, bias, extra), run("add", 8, x, w, bias, extra))
        for tile in (32, 64, 128):
            assert torch.equal(run("silu", tile, x, w, bias, early=True), run("silu", 8, x, w, bias))


def test_tiles() -> None:
    tiles = [tile_of(rows, 4096, 132) for rows in (1, 8, 9, 17, 32, 33, 64, 65, 256, 257)]
    assert tiles == [8, 8, 16, 32, 32, 64, 64, 64, 64, 128]
    assert tile_of(128, 128256, 132) == 128 and tile_of(8192, 4096, 132) == 128
    assert grid_of("plain", 8, 9, 33) == (2, 2) and grid_of("silu", 32, 32, 33) == (3, 1)
    assert grid_of("silu", 128, 129, 65) == (2, 2)
