"""Skinny GEMMs of gemm.cu: how they cut their work; in C++ on the CPU (gemm_host.cpp) and on a GPU against float64, and
a row's bits, which are those of the smallest tile whatever tile and batch it is in."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from gemm_inputs import check_gates, compiled, device, exact, launch, on_gpu, on_host, random
from torch import Tensor

from draftwing.ops.gemm.cuda import KINDS, PART, read_source, shapes_for, small_m_gemm, tile_of
from draftwing.ops.gemm.shapes import Shape

DTYPES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
TILES = (8, 16, 32, 64, 128)
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 70, 300)
MAX_ROWS = ROWS[-1]
LONG = 8192 + 64  # a K that is cut as a long one, with a chunk more for the first share


def test_tiles() -> None:
    tiles = [tile_of(rows, 4096, 132) for rows in (1, 8, 9, 17, 32, 33, 64, 65, 256, 257)]
    assert tiles == [8, 8, 16, 32, 32, 64, 64, 64, 64, 128]
    assert [tile_of(rows, 264, 132) for rows in (1, 9, 33, 64)] == [8, 16, 16, 16], "few outputs make few blocks"
    assert tile_of(128, 128256, 132) == 128 and tile_of(8192, 4096, 132) == 128


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_shapes(capability: tuple[int, int]) -> None:
    """There is a kernel for every GEMM, there is room for it, and its grid has all results and whole clusters."""
    shapes = shapes_for(capability)
    assert {(kind, tile) for kind in ("plain", "add", "silu") for tile in TILES} <= shapes.keys()
    for (kind, tile), shape in shapes.items():
        assert kind in KINDS and shape.tokens == tile and 32 * shape.warps <= 1024
        assert shape.cluster in ((1, 2, 4, 8) if capability >= (9, 0) else (1,))
        shared = shape.shared_bytes(PART)
        assert shared <= (227 << 10 if capability[0] == 9 else 99 << 10)  # what such a device lets a block have
        assert shape.blocks * (shared + 1024) <= 228 << 10
        assert shape.blocks * shape.warps * 32 <= 1536
        outputs = shape.features // (2 if kind == "silu" else 1)
        for rows, width in ((1, 1), (tile, outputs), (tile + 1, outputs + 1), (5 * tile - 1, 4096)):
            grid = shape.grid(kind, rows, width, 132)
            tokens, features = grid if shape.tokens_first else grid[::-1]
            assert features % shape.cluster == 0
            assert 0 <= features // shape.cluster * outputs - width < outputs and 0 <= tokens * tile - rows < tile


def on_device(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)


def GEMMs(dtype: torch.dtype) -> Any:
    return small_m_gemm(device(), dtype)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width, depth", [(37, 64), (200, 576), (4096, 4096), (300, LONG), (1000, 14336)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_against_float64_on_a_gpu(dtype: torch.dtype, width: int, depth: int, with_bias: bool) -> None:
    ours = GEMMs(dtype)
    x, w = on_device(MAX_ROWS, depth, dtype=dtype), on_device(width, depth, dtype=dtype, seed=1, scale=depth**-0.5)
    bias = on_device(width, dtype=dtype, seed=2) if with_bias else None
    extra = on_device(MAX_ROWS, width, dtype=dtype, seed=3)
    exact = x.double() @ w.double().T + (bias.double() if bias is not None else 0)
    for rows in ROWS:
        for residual in (None, extra[:rows]):
            got = ours.linear(x[:rows], w, bias, residual)
            expected = exact[:rows] + (residual.double() if residual is not None else 0)
            torch.testing.assert_close(got.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ffn, depth", [(8, 64), (37, 576), (300, 4096), (14336, 4096), (200, LONG)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gated_against_float64(dtype: torch.dtype, ffn: int, depth: int, with_bias: bool) -> None:
    x, w = on_device(MAX_ROWS, depth, dtype=dtype), on_device(2 * ffn, depth, dtype=dtype, seed=1, scale=depth**-0.5)
    bias = on_device(2 * ffn, dtype=dtype, seed=2) if with_bias else None
    gate, up = (x.double() @ w.double().T + (bias.double() if bias is not None else 0)).chunk(2, 1)
    for rows in ROWS:
        got = GEMMs(dtype).gated(x[:rows], w, bias)
        expected = (torch.nn.functional.silu(gate) * up)[:rows]
        torch.testing.assert_close(got.double(), expected, atol=2 * DTYPES[dtype], rtol=2 * DTYPES[dtype])


@on_gpu
@pytest.mark.parametrize("processors", [1, 10_000])  # blocks of 128 rows, and of 64
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features, depth", [(74, 64), (200, 576), (300, 4096), (200, LONG), (300, 14336)])
def test_bits_do_not_depend_on_the_batch(
    dtype: torch.dtype, processors: int, features: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = GEMMs(dtype)
    monkeypatch.setattr(ours, "_processors", processors)
    x, extra = on_device(MAX_ROWS, depth, dtype=dtype), on_device(MAX_ROWS, features, dtype=dtype, seed=3)
    w = on_device(features, depth, dtype=dtype, seed=1, scale=depth**-0.5)
    bias = on_device(features, dtype=dtype, seed=2) if depth == LONG else None
    plain, added, gated = ours.linear(x, w, bias), ours.linear(x, w, bias, extra), ours.gated(x, w, bias)
    for rows in ROWS:
        for first in (0, MAX_ROWS - rows):
            part = slice(first, first + rows)
            assert torch.equal(ours.linear(x[part], w, bias), plain[part]), rows
            assert torch.equal(ours.linear(x[part], w, bias, extra[part]), added[part]), rows
            assert torch.equal(ours.gated(x[part], w, bias), gated[part]), rows


@on_gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_a_chain_that_overlaps(rows: int) -> None:
    """In a graph a kernel comes up while those before it run, and tensors lie where others did a moment ago: the same
    bits as with a wait after each kernel."""
    pytest.importorskip("triton")
    from draftwing.ops.elementwise.triton import silu_mul
    from draftwing.ops.norms.triton import add_rms_norm, rms_norm

    dtype, hidden, ffn = torch.bfloat16, 4096, 14336
    ours = GEMMs(dtype)
    scale = hidden**-0.5
    layers = [
        [on_device(n, k, dtype=dtype, seed=4 * i + j, scale=scale)
         for j, (n, k) in enumerate([(hidden, hidden), (2 * ffn, hidden), (hidden, ffn)])]
        for i in range(4)
    ]  # fmt: skip
    norm = torch.ones(hidden, dtype=dtype, device="cuda")
    start = on_device(rows, hidden, dtype=dtype, seed=99)

    def forward(sync: bool) -> Tensor:
        def done(*tensors: Tensor) -> tuple[Tensor, ...]:
            if sync:
                torch.cuda.synchronize()
            return tensors

        x = start
        for i in range(24):
            o, up, down = layers[i % 4]
            (normed,) = done(rms_norm(x, norm, 1e-5))
            if i % 3 == 0:  # a kernel of torch's between ours
                (normed,) = done(normed.mul(1.0))
            if i % 4 == 3:
                (x,) = done(ours.linear(normed, o, None, x))
                (normed,) = done(rms_norm(x, norm, 1e-5))
            else:
                (attended,) = done(ours.linear(normed, o, None))
                x, normed = done(*add_rms_norm(x, attended, norm, 1e-5))
            if i % 2:
                (mixed,) = done(ours.gated(normed, up, None))
            else:
                (mixed,) = done(silu_mul(*done(ours.linear(normed, up, None))))
            (x,) = done(ours.linear(mixed, down, None, x))
        return x

    expected = forward(True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = forward(False)
    for _ in range(50):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, expected)


# -- gemm.cu in C++ ---------------------------------------------------------------------------------------------------

HOST_KINDS = ("plain", "add", "silu")
PROCESSORS = 1  # so few that blocks that stay have work
# Kernels of devices with clusters, and those of devices without that are others, by name.
HOST_SHAPES = {f"{kind}_{tile}": shape for (kind, tile), shape in shapes_for((9, 0)).items()}
OLDER = {
    f"{kind}_{tile}": shape
    for (kind, tile), shape in shapes_for((8, 0)).items()
    if shape != HOST_SHAPES[f"{kind}_{tile}"]
}


def kind_of(name: str) -> str:
    return name.removeprefix("older_").partition("_")[0]


class Host:
    """The kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.shapes: dict[str, Shape] = HOST_SHAPES | {f"older_{name}": shape for name, shape in OLDER.items()}

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


@on_host
@pytest.mark.parametrize("name", [*HOST_SHAPES, *(f"older_{name}" for name in OLDER)])
def test_against_float64(run: Host, name: str) -> None:
    kind, shape = kind_of(name), run.shapes[name]
    features, depth = {8: (34, 192), 16: (32, 64), 32: (18, 1088), 64: (72, 704), 128: (140, 128)}[shape.tokens]
    rows = shape.tokens + 3
    x, w = random(rows, depth, seed=0), random(features, depth, seed=1) * depth**-0.5
    bias, extra = random(features, seed=2), random(rows, features, seed=3)
    expected, found = exact(kind, x, w, bias, extra), run(name, x, w, bias, extra)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    if kind == "silu":
        check_gates(found, run("plain_8", x, w, bias))


def cancelling(rows: int, features: int, depth: int) -> tuple[Tensor, Tensor]:
    """x, w whose GEMMs are 0: what comes out is what rounding left, which shows any change of order."""
    pairs = torch.randperm(depth, generator=torch.Generator().manual_seed(depth)).view(2, -1)
    x, w = random(rows, depth, seed=0), random(features, depth, seed=1)
    x[:, pairs[1]], w[:, pairs[1]] = x[:, pairs[0]], -w[:, pairs[0]]
    return x, w


@on_host
@pytest.mark.further(kind=[kind for kind in HOST_KINDS if kind != "plain"], depth=[64, 704])
@pytest.mark.parametrize("depth", [64, 704, 1152])  # one chunk, two for some shares, two or three for all
@pytest.mark.parametrize("kind", HOST_KINDS)
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
