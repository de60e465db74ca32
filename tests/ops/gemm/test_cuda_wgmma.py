"""GEMMs by Hopper's instructions, gemm_dense.cu in bfloat16 and gemm_fp8.cu in fp8 x fp8: how they cut their work; in
C++ on the CPU (gemm_host.cpp) and on a GPU against float64, and a row has the same bits in any batch."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gemm_inputs import (
    EARLY,
    LATE,
    check_gates,
    compiled,
    device,
    exact,
    launch,
    off_by,
    on_hopper,
    on_host,
    pointer,
    random,
)
from torch import Tensor

from draftwing.errors import ConfigError
from draftwing.ops.fp8.spec import TALL, WIDE, Fp8Blocks, Fp8Rows, pack, packed_rows, quantised
from draftwing.ops.gemm import cuda_dense, cuda_fp8, cuda_many, cuda_wgmma, gpu
from draftwing.ops.gemm.cuda import read_files, small_m_gemm
from draftwing.ops.gemm.cuda_fp8 import MANY_FROM, MANY_SIZES, ManySize, Size, cut_of, ranges_of
from draftwing.ops.gemm.stored import QuantizedRows
from draftwing.parallel.cut import Cut
from draftwing.parallel.ranks import Share

DENSE_ROWS = (1, 2, 7, 8, 16, 17, 33, 63, 64, 65, 90, 128, 129, 192, 193, 256, 330, 385)
DENSE_MANY = 700  # rows of x
DENSE_SHAPES = [  # rows and columns of a weight: one, two and four ranges of K; whole blocks of a grid, and others
    (17440, 384), (8736, 1088), (4128, 1408), (96, 1024), (16, 64), (64, 8448), (5120, 576), (16384, 256),
    (14336, 576), (34816, 1024),
]  # fmt: skip
DENSE_SERVED = [
    (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (34816, 5120), (5120, 17408), (2048, 2048), (16384, 2048),
]  # fmt: skip

CLUSTERS = (30, 66, 132), (32, 64, 128)


@pytest.mark.parametrize("gated", [False, True])
def test_dense_cuts(gated: bool) -> None:
    """Blocks have all features, room for what they do, and one number of ranges."""
    for rows, columns in (*DENSE_SHAPES, *DENSE_SERVED, (248320, 5120)):
        features = rows // 2 if gated else rows
        for tokens, clusters in itertools.product((1, 8, 64, 65, 128, cuda_dense.MOST, 193, 2048), CLUSTERS):
            cut = cuda_dense.cut_of(tokens, features, gated, columns, clusters)
            own = cut.rows // 2 if gated else cut.rows
            assert own % 8 == 0 and cut.rows % 16 == 0
            assert cut.rows <= cut.size.features * (1 if cut.size.groups == 2 else 2)
            assert (cut.grid[1] - 1) * own < features <= cut.grid[1] * own
            assert cut.x_rows % 8 == 0 and cut.ranges == cuda_dense.ranges_of(rows, columns)
            held = cut.size.groups * cuda_dense.TOKENS
            blocks = cut.grid[0] * cut.chain // cut.ranges
            assert blocks == -(-tokens // held) and cut.x_rows <= held
            assert (blocks - 1) * cut.x_rows < tokens <= blocks * cut.x_rows
            assert cut.stages >= 2 or columns // cuda_dense.PANEL // cut.ranges == 1
            ring, sums = (
                cut.stages * (cut.rows + cut.x_rows) * cuda_dense.PANEL * 2,
                held * (cut.rows + (8 - cut.rows) % 32) * 4,
            )
            assert max(ring, sums) + (cut.chain - 1) * sums < cuda_dense.SHARED[cut.blocks]


@pytest.mark.parametrize("gated", [False, True])
def test_a_share_of_a_matrix_is_cut_as_all_of_it(gated: bool) -> None:
    """With as many ranges of K, by kernels that there are; a share alone would mostly have more."""
    own_ranges = 0
    for rows, columns in (*DENSE_SERVED, (57344, 8192), (8192, 28672)):
        for size, tokens in itertools.product((2, 4, 8), (1, 8, 64, 129, 700)):
            share, ranges = rows // size, cuda_dense.ranges_of(rows, columns)
            own_ranges += cuda_dense.ranges_of(share, columns) != ranges
            cut = cuda_dense.cut_of(tokens, share // 2 if gated else share, gated, columns, CLUSTERS[0], ranges)
            assert cut.ranges == ranges and cut.stages >= 2 and cut.grid[0] % (ranges // cut.chain) == 0
            ranges = cuda_fp8.ranges_of(rows, columns)
            features = share // 2 if gated else share
            of_fp8 = cuda_fp8.cut_of(tokens, features, gated, columns, CLUSTERS[0], ranges=ranges)
            found = of_fp8.size.ranges if isinstance(of_fp8.size, cuda_fp8.ManySize) else of_fp8.cluster
            assert found == ranges and of_fp8.stages >= 2
    assert own_ranges > 20


def test_kernels_of_a_share_are_those_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.gemm, "takes", lambda weight: True)
    monkeypatch.setattr(gpu.gemm, "small_m_gemm", lambda device, dtype: "few")
    monkeypatch.setattr(gpu.cuda_dense, "takes", lambda weight: len(weight) % 16 == 0)
    ops = gpu.GpuGemmOps(torch.device("cpu"))

    def kernels(rows: int, columns: int, whole: int) -> Any:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        (found,) = ops.gemms(weight, deterministic=True, whole=whole)
        return getattr(found.kernels, "ranges", found.kernels)  # type: ignore[attr-defined]

    for rows, columns in ((8192, 28672), (57344, 8192), (4096, 4096), (2048, 2048), (1536, 576)):
        assert {kernels(rows // size, columns, rows) for size in (1, 2, 4, 8)} == {kernels(rows, columns, 0)}
    assert kernels(1024, 4096, 4096) != kernels(1024, 4096, 0)
    assert kernels(8064, 4096, 32003) == kernels(32003, 4096, 0) == "few"  # of a vocabulary, a multiple alone
    with pytest.raises(ConfigError, match="leaves each rank a multiple of 16 of a matrix's 4096 rows; found 1000"):
        kernels(1000, 4096, 4096)
    blocks = Fp8Blocks(torch.empty(64, 2048, 128, device="meta"), torch.empty(128, 64, device="meta"))
    ranges = [ops.gemms(blocks, whole=whole)[0].kernels.ranges for whole in (0, 57344)]  # type: ignore[attr-defined]
    assert ranges == [4, 1]


def test_cuts_of_many_rows_in_16_bits() -> None:
    """Blocks have all features and rows, and there is room for a ring and for results."""
    for size in cuda_many.SIZES:
        width = size.features // 2 if size.gated else size.features
        ring, boxes = size.stages * (128 + size.features) * cuda_wgmma.PANEL * 2, 3 if size.held else -(-width // 32)
        assert size.stages >= 4 and ring + boxes * 8192 < (227 << 10) - 1024
    for (rows, columns), tokens, ranges in itertools.product(DENSE_SERVED, (193, 512, 2048, 8192), cuda_many.RANGES):
        for gated, adds in ((False, False), (False, True), (True, False)):
            size = cuda_many.cut_of(tokens, rows, columns, gated, adds, ranges, 66)
            assert (size.ranges, size.gated, size.held) == (ranges, gated, ranges == 1 and not adds)
            assert size.tiles(tokens, rows) == -(-tokens // 128) * -(-rows // (2 * size.features))
    assert not cuda_many.cut_of(512, 4096, 448, False, False, 1, 66).held


@pytest.mark.parametrize(
    "rows, columns, gated, adds, tokens",
    [
        (28672, 4096, True, False, {192: False, 256: True, 320: True, 384: True}),
        (14336, 5120, False, False, {256: True, 320: False, 384: False, 385: True}),
        (10240, 8192, False, False, {192: False, 256: True, 384: False}),
        (6144, 4096, False, False, {256: False, 384: False, 512: True}),
        (4096, 14336, False, True, {256: False, 384: False, 512: True}),
    ],
)
def test_from_which_rows_many_are(rows: int, columns: int, gated: bool, adds: bool, tokens: dict[int, bool]) -> None:
    """As they were measured: see docs/dev/gpu_kernels.md."""
    ranges = cuda_dense.ranges_of(rows, columns)
    for count, expected in tokens.items():
        assert cuda_many.beats_few(count, rows, columns, gated, adds, ranges, 66) == expected, count


def alike(at_once: int) -> dict[int, int]:
    return dict.fromkeys(cuda_wgmma.RANGES, at_once)


def on_device(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def check_products(
    gemm: Any, weight: Any, x: Tensor, plain: Tensor, gates: bool, counts: tuple[int, ...], share: float
) -> None:
    """Products, plain ones in float64 given, and a row's bits among so many others. share: of the parts that a result
    is the sum of, what tensor cores may be off by."""
    bias, residual = on_device(plain.shape[1], seed=4), on_device(*plain.shape, seed=5)
    size = plain.abs().mean(1, keepdim=True) + 1

    def close(found: Tensor, expected: Tensor, size: Tensor) -> None:
        assert found.dtype == torch.bfloat16 and found.isfinite().all()
        error = (found.double() - expected).abs() - expected.abs() / 256
        assert (error <= size * share).all(), (error / size).max()

    whole, added = gemm.linear(x, weight, None), gemm.linear(x, weight, bias, residual)
    close(whole, plain, size)
    close(added, plain + bias.double() + residual.double(), size)
    gated = gemm.gated(x, weight, bias) if gates else None
    if gated is not None:
        from draftwing.ops.elementwise.triton import silu_mul

        assert torch.equal(gated, silu_mul(gemm.linear(x, weight, bias)))
    for tokens in counts:
        for first in {0, len(x) - tokens}:
            part = slice(first, first + tokens)
            assert torch.equal(gemm.linear(x[part], weight, None), whole[part]), tokens
            assert torch.equal(gemm.linear(x[part], weight, bias, residual[part]), added[part]), tokens
            if gated is not None:
                assert torch.equal(gemm.gated(x[part], weight, bias), gated[part]), tokens


@on_hopper
@pytest.mark.parametrize("rows, columns", DENSE_SHAPES)
def test_dense_products(rows: int, columns: int) -> None:
    weight, x = on_device(rows, columns, seed=2), on_device(DENSE_MANY, columns, seed=3)
    plain = x.double() @ weight.double().T
    check_products(cuda_dense.dense_gemm(device()), weight, x, plain, True, DENSE_ROWS, 1e-4)


@on_hopper
@pytest.mark.parametrize("rows, columns", [(14336, 1088), (8736, 1088), (4128, 1600)])
@pytest.mark.parametrize("gated", [False, True])
def test_each_dense_kernel_of_many_rows(rows: int, columns: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of few rows, whatever size is chosen."""
    gemm, ranges = cuda_dense.dense_gemm(device()), cuda_dense.ranges_of(rows, columns)
    weight, x = on_device(rows, columns, seed=2), on_device(DENSE_MANY, columns, seed=3)
    bias = on_device(rows, seed=4)

    def product(x: Tensor) -> Tensor:
        return gemm.gated(x, weight, bias) if gated else gemm.linear(x, weight, bias)

    few = torch.cat([product(part) for part in x.split(128)])
    for size in cuda_many.SIZES:
        if (size.ranges, size.gated) == (ranges, gated):
            monkeypatch.setattr(cuda_many, "cut_of", lambda *given, size=size: size)
            for tokens in (385, 512, DENSE_MANY):
                assert torch.equal(product(x[:tokens]), few[:tokens]), (size, tokens)


@on_hopper
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(6144, 4096), (4096, 14336), (28672, 4096)])
def test_a_share_of_a_matrix_has_the_bits_of_all_of_it(rows: int, columns: int, fp8: bool) -> None:
    """As ranks have it, in the kernels that the engine chooses, also where the share alone would have others."""
    ops, dense = gpu.GpuGemmOps(device()), on_device(rows, columns, seed=2)
    made = ops.quantize_groups(dense, "fp8", True) if fp8 else None

    def products(begin: int, size: int) -> list[Any]:
        if made is None:
            weight: Any = dense[begin : begin + size].clone()
        else:
            part = Cut(0, Share(begin, size, rows)).of("", made)
            assert isinstance(part, QuantizedRows)
            weight = ops.pack_fp8(part)
        return ops.gemms(weight, deterministic=True, whole=rows)

    def run(gemms: list[Any], x: Tensor) -> Any:
        return next(one for one in gemms if len(x) <= one.max_rows).linear(x, None)

    whole = products(0, rows)
    for size in (2, 4):
        share = products(rows // size, rows // size)
        for tokens in (1, 7, 64, 200, 500):
            x = on_device(tokens, columns, seed=tokens)
            assert torch.equal(run(share, x), run(whole, x)[:, rows // size : 2 * rows // size]), tokens


@on_hopper
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rows", [70, 400])
@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_not_finite_stays_in_its_row(fp8: bool, rows: int, value: float) -> None:
    gemm = cuda_fp8.fp8_gemm(device()) if fp8 else cuda_dense.dense_gemm(device())
    weight, x = weight_of(160, 512, 4) if fp8 else on_device(160, 512, seed=4), on_device(rows, 512, seed=5)
    x[3, 200] = value
    for found in (gemm.linear(x, weight, None), gemm.gated(x, weight, None)):
        assert (~found.isfinite().all(1)).nonzero().flatten().tolist() == [3] and not found[3].isfinite().any()


# -- gemm_dense.cu in C++ ---------------------------------------------------------------------------------------------

DENSE_SIZES = [
    cuda_dense.Size(groups, part * (2 if groups == 2 else 1)) for groups in cuda_dense.GROUPS for part in (32, 88)
]


@dataclass
class DenseHost:
    library: ctypes.CDLL

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor | None, gated: bool, cut: cuda_dense.Cut,
        early: int,
    ) -> Tensor:  # fmt: skip
        sizes = cut.x_rows, cut.rows, cut.stages, cut.chain, int(gated), 0
        shape = cut.size.threads, cut.ranges // cut.chain, cuda_dense.SHARED[cut.blocks]
        return self._run(cut.size.name, shape, sizes, cut.grid, x, weight, bias, extra, early)

    def many(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor | None, gated: bool, ranges: int,
        at_once: int, early: int, size: cuda_many.Size | None = None,
    ) -> Tensor:  # fmt: skip
        """size: in place of the one that is chosen."""
        adds = extra is not None
        size = size or cuda_many.cut_of(len(x), len(weight), x.shape[1], gated, adds, ranges, at_once)
        blocks = 2 * min(at_once, size.tiles(len(x), len(weight)))
        sizes = 64, size.features, size.stages, 1, int(gated), 1
        return self._run(size.name, (384, 2, 227 << 10), sizes, (blocks, 1), x, weight, bias, extra, early)

    def _run(
        self, name: str, shape: tuple[int, int, int], sizes: tuple[int, ...], grid: tuple[int, int], x: Tensor,
        weight: Tensor, bias: Tensor | None, extra: Tensor | None, early: int,
    ) -> Tensor:  # fmt: skip
        features = len(weight) // (2 if sizes[4] else 1)
        out = torch.full((len(x), features), torch.nan, dtype=torch.bfloat16)
        self.library.dense_sizes(*sizes)
        launch(
            self.library, name, shape, (x, weight, bias, extra, out), (len(x), features, weight.shape[1], *grid), early
        )
        return out


@pytest.fixture(scope="module")
def run_dense(tmp_path_factory: pytest.TempPathFactory) -> DenseHost:
    lines = [f"DENSE_KERNEL({size.name}, {size.groups}, {size.features}, {size.threads})\n" for size in DENSE_SIZES]
    files = ("gemm_bulk.cu", "gemm_wgmma.cu", "gemm_dense.cu", "gemm_dense_many.cu")
    many = [line for program in cuda_many.PROGRAMS for line in cuda_many.kernel_lines(program)]
    source = "".join([*read_files(files), *lines, *many])
    return DenseHost(compiled(tmp_path_factory.mktemp("dense"), source, "-DDENSE"))


@on_host
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns, ranges", [(96, 768, 2), (176, 640, 1), (64, 1024, 4)])
@pytest.mark.covering
def test_dense_against_float64(run_dense: DenseHost, rows: int, columns: int, ranges: int, kind: str) -> None:
    """Rows of x have the same bits in any batch, whatever a block takes."""
    weight, x, bias = random(rows, columns, seed=1), random(150, columns, seed=2), random(rows, seed=3)
    gated = kind == "silu"
    extra = random(150, rows, seed=4) if kind == "add" else None

    def found(first: int, last: int, at_once: int, early: int, gated: bool = gated) -> Tensor:
        features = rows // 2 if gated else rows
        cut = cuda_dense.make_cut(last - first, features, gated, columns, ranges, alike(at_once), at_once)
        fits = [size for size in DENSE_SIZES if size.groups == cut.size.groups and size.features >= cut.size.features]
        its = None if extra is None else extra[first:last]
        return run_dense(x[first:last], weight, bias, its, gated, cut._replace(size=fits[0]), early)

    whole = found(0, 150, 2, EARLY)
    torch.testing.assert_close(whole.double(), exact(kind, x, weight, bias, extra), rtol=off_by(kind), atol=2e-3)
    if gated:
        check_gates(whole, found(0, 150, 2, EARLY, False))
    for first, last, at_once, early in ((149, 150, 1, LATE), (100, 150, 1, EARLY), (3, 100, 2, LATE), (5, 90, 1, LATE)):
        assert torch.equal(found(first, last, at_once, early), whole[first:last])


@on_host
@pytest.mark.further(kind=["plain", "add"], rows=176)
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns, ranges", [(96, 768, 2), (176, 704, 2), (64, 1024, 4)])
@pytest.mark.parametrize("early", [LATE, EARLY])
@pytest.mark.further(kind="add", early=EARLY)
@pytest.mark.further(kind="silu", early=LATE)
@pytest.mark.further(kind="plain", early=EARLY)
def test_two_ranges_of_a_block(
    run_dense: DenseHost, rows: int, columns: int, ranges: int, kind: str, early: int
) -> None:
    """They give the bits of blocks with a range each."""
    tokens = 230
    weight, x, bias = random(rows, columns, seed=1), random(tokens, columns, seed=2), random(rows, seed=3)
    gated = kind == "silu"
    features = rows // 2 if gated else rows
    extra = random(tokens, rows, seed=4) if kind == "add" else None

    def found(first: int, last: int, at_once: dict[int, int]) -> tuple[Tensor, int]:
        cut = cuda_dense.make_cut(last - first, features, gated, columns, ranges, at_once)
        fits = [size for size in DENSE_SIZES if size.groups == cut.size.groups and size.features >= cut.size.features]
        its = None if extra is None else extra[first:last]
        return run_dense(x[first:last], weight, bias, its, gated, cut._replace(size=fits[0]), early), cut.chain

    whole, chain = found(0, tokens, {4: 1, 2: 64 if ranges == 4 else 1, 1: 64})
    assert chain == 2
    for first, last in ((0, 64), (60, 190), (170, tokens)):
        expected, alone = found(first, last, alike(64))
        assert alone == 1 and torch.equal(whole[first:last], expected)


@on_host
@pytest.mark.further(kind="plain", rows=[32, 544])
@pytest.mark.further(rows=416)  # eight seconds each
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns, ranges", [(96, 768, 2), (544, 512, 1), (32, 384, 1), (416, 1536, 4)])
@pytest.mark.parametrize("early", [LATE, EARLY])
@pytest.mark.further(kind="add", early=EARLY)
@pytest.mark.further(kind="silu", early=LATE)
@pytest.mark.further(kind="plain", early=EARLY)
def test_dense_many_rows(run_dense: DenseHost, rows: int, columns: int, ranges: int, kind: str, early: int) -> None:
    """The bits of few rows, with blocks that have no rows of x and others that take several tiles."""
    weight, x, bias = random(rows, columns, seed=1), random(300, columns, seed=2), random(rows, seed=3)
    gated = kind == "silu"
    extra = random(len(x), rows, seed=4) if kind == "add" else None
    expected = by_few(run_dense, x, weight, bias, extra, gated, ranges)
    for tokens, at_once in ((len(x), 1), (7, 3)):
        some = None if extra is None else extra[:tokens]
        found = run_dense.many(x[:tokens], weight, bias, some, gated, ranges, at_once, early)
        assert torch.equal(found, expected[:tokens])


def by_few(
    run_dense: DenseHost, x: Tensor, weight: Tensor, bias: Tensor, extra: Tensor | None, gated: bool, ranges: int
) -> Tensor:
    """Returns results of kernels for few rows."""
    cut = cuda_dense.make_cut(128, len(weight) // (1 + gated), gated, weight.shape[1], ranges, alike(64))
    fits = [size for size in DENSE_SIZES if size.groups == cut.size.groups and size.features >= cut.size.features]
    return torch.cat([
        run_dense(x[at : at + 128], weight, bias, None if extra is None else extra[at : at + 128], gated,
                  cut._replace(size=fits[0]), EARLY)
        for at in range(0, len(x), 128)
    ])  # fmt: skip


@on_host
@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [size for size in cuda_many.SIZES if size.ranges <= 4], ids=lambda size: size.name)
def test_each_kernel_of_many_rows(run_dense: DenseHost, size: cuda_many.Size) -> None:
    """The bits of few rows, also where the last tile has rows of the one before."""
    rows, columns = 2 * size.features + 32, 512 * size.ranges + 64
    weight, x, bias = random(rows, columns, seed=1), random(300, columns, seed=2), random(rows, seed=3)
    extra = None if size.gated or size.held else random(300, rows, seed=4)
    expected = by_few(run_dense, x, weight, bias, extra, size.gated, size.ranges)
    for tokens, at_once, early in ((300, 1, LATE), (300, 2, EARLY), (140, 3, LATE)):
        its = None if extra is None else extra[:tokens]
        found = run_dense.many(x[:tokens], weight, bias, its, size.gated, size.ranges, at_once, early, size)
        assert torch.equal(found, expected[:tokens]), tokens


@on_host
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns", [(96, 576), (384, 1152)])
@pytest.mark.further(rows=384, kind=["plain", "add"])
def test_shares_of_many_rows(run_dense: DenseHost, rows: int, columns: int, kind: str) -> None:
    """Rows have the same bits however tiles are shared out."""
    weight, x, bias = random(rows, columns, seed=1), random(300, columns, seed=2), random(rows, seed=3)
    gated = kind == "silu"
    extra = random(len(x), rows, seed=4) if kind == "add" else None
    whole = run_dense.many(x, weight, bias, extra, gated, cuda_many.SHARES, 1, EARLY)
    torch.testing.assert_close(whole.double(), exact(kind, x, weight, bias, extra), rtol=off_by(kind), atol=2e-3)
    if gated:
        check_gates(whole, run_dense.many(x, weight, bias, None, False, cuda_many.SHARES, 1, EARLY))
    for first, last, at_once, early in ((0, 300, 30, LATE), (100, 290, 2, LATE), (3, 4, 1, EARLY)):
        its = None if extra is None else extra[first:last]
        found = run_dense.many(x[first:last], weight, bias, its, gated, cuda_many.SHARES, at_once, early)
        assert torch.equal(found, whole[first:last])


def test_in_sets() -> None:
    """Of 32 columns first those that an instruction of gemm.cu takes: the first four of each eight."""
    found = cuda_many.in_sets(torch.arange(128, dtype=torch.int16).view(2, 64))
    first = [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27]
    one = torch.tensor([*first, *(column + 4 for column in first)], dtype=torch.int16)
    assert torch.equal(found, torch.stack([torch.cat([one, one + 32]), torch.cat([one + 64, one + 96])]))


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, columns", [(96, 576), (2048, 2048), (4128, 1408), (512, 8448)])
def test_shares_have_the_bits_of_few_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight, x, bias, residual = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()
        for seed, shape in enumerate([(rows, columns), (700, columns), (rows,), (700, rows)])
    )
    few, many = small_m_gemm(device(), dtype), cuda_many.SharesGemm(device(), dtype, False)
    assert torch.equal(many.linear(x, weight, bias, residual), few.linear(x, weight, bias, residual))
    for part in (slice(7, 300), slice(3, 4), slice(0, 129)):
        assert torch.equal(many.linear(x[part], weight, None), few.linear(x[part], weight, None))
        assert torch.equal(many.gated(x[part], weight, None), few.gated(x[part], weight, None))
    assert torch.equal(many.gated(x, weight, bias), few.gated(x, weight, bias))


# -- gemm_fp8.cu ------------------------------------------------------------------------------------------------------

MOST = 2 * MANY_FROM + 300  # rows of x
ROWS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 200, MANY_FROM - 1, MANY_FROM, MANY_FROM + 1, MANY_FROM + 100)
SHAPES = [  # rows and columns of a weight: one, two and four ranges of K; whole blocks of a grid, and others
    (17440, 384), (8736, 1152), (4128, 1408), (96, 1024), (32, 128), (64, 8448), (5120, 512), (16384, 256),
]  # fmt: skip
SERVED = [(34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (28672, 4096), (6144, 4096)]


@pytest.mark.parametrize("gated", [False, True])
def test_cuts(gated: bool) -> None:
    """Blocks have all features, room for what they do, and one number of ranges."""
    for rows, columns in (*SHAPES, *SERVED, (248320, 5120)):
        features = rows // 2 if gated else rows
        for tokens, clusters in itertools.product((1, 8, 64, 65, 128, 129, MANY_FROM - 1), CLUSTERS):
            if features % 16:
                continue
            cut = cut_of(tokens, features, gated, columns, clusters, False)
            own = cut.rows // 2 if gated else cut.rows
            assert isinstance(cut.size, Size)
            assert own % 8 == 0 and cut.rows <= 2 * cut.size.part
            assert (cut.grid[1] - 1) * own < features <= cut.grid[1] * own
            assert cut.cluster == ranges_of(rows, columns)
            assert cut.grid[0] == -(-tokens // (64 * cut.size.groups)) * cut.cluster
            assert cut.stages >= 1 and (cut.stages >= 3 or cut.stages * cut.cluster * WIDE >= columns - 3 * WIDE)
            if tokens <= 128 and rows <= 34816:
                assert cut.grid[1] <= clusters[(4, 2, 1).index(cut.cluster)]


def test_cuts_of_many_rows() -> None:
    """Pairs of blocks, no more than run at once, with a ring that finds room and as many ranges as few rows have."""
    for (rows, columns), tokens in itertools.product((*SHAPES, *SERVED), (MANY_FROM, 2048, 8192)):
        cut = cut_of(tokens, rows, False, columns, CLUSTERS[0])
        assert isinstance(cut.size, ManySize) and cut.size.ranges == ranges_of(rows, columns)
        assert cut.cluster == 2 and cut.grid[0] % 2 == 0 and cut.grid[0] <= 132
        assert cut.stages >= 3 and cut.stages * (128 + cut.rows) * WIDE < cuda_fp8.SHARED


def test_cuts_of_129_to_384_rows() -> None:
    """The kernels that took less on an H200, of those where one took a tenth less: microseconds of few and of many."""
    took = {
        (6144, 4096, 256, False): (29.1, 19.2), (5120, 6144, 256, False): (31.2, 26.6),
        (57344, 8192, 256, True): (310.7, 248.4), (10240, 8192, 192, False): (56.3, 44.2),
        (16384, 5120, 256, False): (47.7, 40.7), (4096, 4096, 256, False): (23.1, 18.6),
        (34816, 5120, 320, True): (148.8, 180.8), (5120, 17408, 384, False): (77.5, 88.4),
        (10240, 8192, 320, False): (74.0, 83.3), (8192, 28672, 384, False): (211.1, 255.3),
    }  # fmt: skip
    for (rows, columns, tokens, gated), (few, many) in took.items():
        cut = cut_of(tokens, rows // 2 if gated else rows, gated, columns, (30, 66, 132))
        assert isinstance(cut.size, ManySize) == (many < few), (rows, columns, tokens)
    for rows, columns in SERVED:  # one block of rows reads weights once
        assert isinstance(cut_of(128, rows, False, columns, (30, 66, 132)).size, Size)


def test_cut_of_gates_and_ups() -> None:
    assert cut_of(64, 17408, True, 5120, (30, 66, 132)) == cuda_fp8.Cut(Size(1, 136), 272, 5, 1, (1, 128))


def weight_of(rows: int, columns: int, seed: int, device: str = "cuda") -> Fp8Blocks:
    """With scales of 1 x 1 to 2 x 2 blocks of 16 rows and 128 columns that differ."""
    make = torch.Generator().manual_seed(seed)
    codes = (torch.randn(rows, columns, generator=make) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(rows // TALL, columns // WIDE, generator=make) * 1e-3 + 1e-4
    return pack(QuantizedRows(codes, 8, scales, None, TALL, WIDE, None), device)


def rows_of(rows: int, columns: int, seed: int) -> Tensor:
    """With columns of very different sizes, and zeros."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=make) * torch.exp(
        torch.randn(1, columns // WIDE, generator=make) * 2
    ).repeat_interleave(WIDE, 1)
    x[rows // 2, :WIDE] = 0
    return x.bfloat16().cuda()


def product(x: Tensor, weight: Fp8Blocks) -> Tensor:
    codes, scales = quantised(x)
    values = codes.double().unflatten(1, (-1, WIDE)) * scales.double().unsqueeze(2)
    return values.flatten(1) @ weight.dense(torch.float32).double().T


@on_hopper
@pytest.mark.parametrize("rows, columns", [(1, 128), (5, 1408), (64, 5120), (300, 2048), (500, 1408), (1027, 128)])
def test_quantise(rows: int, columns: int) -> None:
    x = rows_of(rows, columns, 1)
    found, expected = cuda_fp8.fp8_gemm(device()).quantise(x), packed_rows(*quantised(x))
    for mine, its in zip(found.plain(), expected.plain(), strict=True):
        assert torch.equal(mine.float(), its.float())


@on_hopper
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_products(rows: int, columns: int) -> None:
    """Tensor cores add products in fp8 with fewer bits than float32 has: up to 1e-3 of the size was seen on an H200."""
    weight, x = weight_of(rows, columns, 2), rows_of(MOST, columns, 3)
    gemm = cuda_fp8.fp8_gemm(device())
    check_products(gemm, weight, x, product(x, weight), rows % 32 == 0, ROWS, 4e-3)
    quantised_rows = gemm.quantise(x[:9])
    assert isinstance(quantised_rows, Fp8Rows)
    assert torch.equal(gemm.linear(quantised_rows, weight, None), gemm.linear(x[:9], weight, None))


# -- gemm_fp8.cu in C++ -----------------------------------------------------------------------------------------------

LONG = pytest.mark.exhaustive  # the largest of the grid: a minute in all


@dataclass
class Host:
    library: ctypes.CDLL

    def __call__(
        self, x: Tensor, weight: Fp8Blocks, bias: Tensor | None, extra: Tensor | None, gated: bool, early: int,
        clusters: tuple[int, ...], many: bool = False,
    ) -> Tensor:  # fmt: skip
        rows, features = packed_rows(*quantised(x)), weight.rows // 2 if gated else weight.rows
        cut = cut_of(len(x), features, gated, weight.columns, clusters, many)
        out = torch.full((len(x), features), torch.nan, dtype=torch.bfloat16)
        self.library.fp8_sizes(
            pointer(rows.scales), pointer(weight.scales), rows.codes.shape[1], cut.rows, cut.stages, int(gated)
        )
        self.library.source(None, 0)
        for tensor in (rows.codes, rows.scales, weight.codes):
            self.library.source(pointer(tensor), ctypes.c_long(tensor.nbytes))
        tensors, sizes = (rows.codes, weight.codes, bias, extra, out), (len(x), features, weight.columns, *cut.grid)
        launch(self.library, cut.size.name, (cut.size.threads, cut.cluster, cuda_fp8.SHARED), tensors, sizes, early)
        return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Host:
    files = read_files(("gemm_bulk.cu", "gemm_wgmma.cu", "gemm_fp8.cu", "gemm_fp8_many.cu"))
    source = "".join([*files, *cuda_fp8.kernel_lines([*cuda_fp8.SIZES, *MANY_SIZES])])
    return Host(compiled(tmp_path_factory.mktemp("fp8"), source, "-DFP8"))


def host_weight(rows: int, columns: int) -> Fp8Blocks:
    made = torch.Generator().manual_seed(1)
    codes = (torch.randn(rows, columns, generator=made) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(rows // TALL, columns // WIDE, generator=made) + 0.5) * 1e-3
    return pack(QuantizedRows(codes, 8, scales, None, TALL, WIDE, None), "cpu")


@on_host
@pytest.mark.further(clusters=[(1, 1, 1), (32, 66, 132)], kind=["plain", "add"])  # what else is done with a sum
@pytest.mark.further(clusters=(2, 4, 8), rows=[32, 288], kind="plain")
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns", [(96, 1152), (288, 640), (32, 128), pytest.param(352, 1024, marks=LONG)])
@pytest.mark.parametrize("clusters", [(2, 4, 8), (1, 1, 1), (32, 66, 132)])
@pytest.mark.covering
def test_against_float64(run: Host, rows: int, columns: int, kind: str, clusters: tuple[int, int, int]) -> None:
    """Rows of x have the same bits in any batch, whatever a block takes."""
    weight, x, bias = host_weight(rows, columns), random(150, columns, seed=2), random(rows, seed=3)
    gated = kind == "silu"
    extra = random(150, rows, seed=4) if kind == "add" else None
    codes, scales = quantised(x)
    values = (codes.float().unflatten(1, (-1, WIDE)) * scales.unsqueeze(2)).flatten(1)
    expected = exact(kind, values, weight.dense(torch.float32), bias, extra)
    some = slice(130, 147)
    whole = run(x, weight, bias, extra, gated, EARLY, (2, 4, 8))
    torch.testing.assert_close(whole.double(), expected, rtol=off_by(kind), atol=2e-3)
    if gated:
        check_gates(whole, run(x, weight, bias, None, False, EARLY, (2, 4, 8)))
    for part, early in ((slice(149, 150), LATE), (some, LATE), (some, EARLY), (slice(3, 150), LATE)):
        found = run(x[part], weight, bias, None if extra is None else extra[part], gated, early, clusters)
        assert torch.equal(found, whole[part])


@on_host
@pytest.mark.further(kind="plain", rows=[32, 800])
@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns", [(96, 1152), pytest.param(288, 640, marks=LONG), (32, 128), (800, 256)])
@pytest.mark.parametrize("early", [LATE, EARLY])
@pytest.mark.further(kind="add", early=LATE)
@pytest.mark.further(kind=["plain", "silu"], early=EARLY)
def test_many_rows(run: Host, rows: int, columns: int, kind: str, early: int) -> None:
    """The bits of few rows, with blocks that have no rows of x and others that take several tiles."""
    weight, x, bias = host_weight(rows, columns), random(300, columns, seed=2), random(rows, seed=3)
    extra = random(len(x), rows, seed=4) if kind == "add" else None
    expected = run(x, weight, bias, extra, kind == "silu", EARLY, (2, 4, 8))
    for tokens, clusters in ((len(x), (30, 1, 132)), (7, (30, 3, 132))):
        some = None if extra is None else extra[:tokens]
        found = run(x[:tokens], weight, bias, some, kind == "silu", early, clusters, many=True)
        assert torch.equal(found, expected[:tokens])
