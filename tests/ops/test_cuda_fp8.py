"""GEMMs in fp8 x fp8 on a GPU vs float64, and that a row has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwing.ops.cuda.gemm_fp8 import MANY_FROM, SHARED, Cut, Fp8Gemm, ManySize, Size, cut_of, fp8_gemm, ranges_of
from draftwing.ops.fp8_blocks import TALL, WIDE, Fp8Blocks, Fp8Rows, pack, packed_rows, quantised
from draftwing.ops.types import QuantizedRows

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a GPU of Hopper's"
    ),
]
MOST = 2 * MANY_FROM + 300  # rows of x
ROWS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 200, MANY_FROM - 1, MANY_FROM, MANY_FROM + 1, MANY_FROM + 100)
SHAPES = [  # rows and columns of a weight: one, two and four ranges of K; whole blocks of a grid, and others
    (17440, 384), (8736, 1152), (4128, 1408), (96, 1024), (32, 128), (64, 8448), (5120, 512), (16384, 256),
]  # fmt: skip
SERVED = [(34816, 5120), (5120, 17408), (16384, 5120), (14336, 5120), (5120, 6144), (28672, 4096), (6144, 4096)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows, columns", [*SHAPES, *SERVED, (248320, 5120)])
def test_cuts(rows: int, columns: int, gated: bool) -> None:
    """Blocks have all features, room for what they do, and one number of ranges."""
    features = rows // 2 if gated else rows
    if features % 16:
        return
    for tokens in (1, 8, 64, 65, 128, 129, MANY_FROM - 1):
        for clusters in ((30, 66, 132), (32, 64, 128)):
            cut = cut_of(tokens, features, gated, columns, clusters)
            own = cut.rows // 2 if gated else cut.rows
            assert isinstance(cut.size, Size)
            assert own % 8 == 0 and cut.rows <= 2 * cut.size.part
            assert (cut.grid[1] - 1) * own < features <= cut.grid[1] * own
            assert cut.cluster == ranges_of(rows, columns)
            assert cut.grid[0] == -(-tokens // (64 * cut.size.groups)) * cut.cluster
            assert cut.stages >= 1 and (cut.stages >= 3 or cut.stages * cut.cluster * WIDE >= columns - 3 * WIDE)
            if tokens <= 128 and rows <= 34816:
                assert cut.grid[1] <= clusters[(4, 2, 1).index(cut.cluster)]


@pytest.mark.parametrize("rows, columns", [*SHAPES, *SERVED])
@pytest.mark.parametrize("tokens", [MANY_FROM, 2048, 8192])
def test_cuts_of_many_rows(rows: int, columns: int, tokens: int) -> None:
    """Pairs of blocks, no more than run at once, with a ring that finds room and as many ranges as few rows have."""
    cut = cut_of(tokens, rows, False, columns, (30, 66, 132))
    assert isinstance(cut.size, ManySize) and cut.size.ranges == ranges_of(rows, columns)
    assert cut.cluster == 2 and cut.grid[0] % 2 == 0 and cut.grid[0] <= 132
    assert cut.stages >= 3 and cut.stages * (128 + cut.rows) * WIDE < SHARED


def test_cut_of_gates_and_ups() -> None:
    assert cut_of(64, 17408, True, 5120, (30, 66, 132)) == Cut(Size(1, 136), 272, 5, 1, (1, 128))


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


def ours() -> Fp8Gemm:
    return fp8_gemm(torch.device("cuda", torch.cuda.current_device()))


def assert_close(found: Tensor, expected: Tensor, size: Tensor) -> None:
    """size: of the parts that a result is the sum of. Tensor cores add products in fp8 with fewer bits than float32
    has: up to 1e-3 of the size was seen on an H200."""
    assert found.dtype == torch.bfloat16 and found.isfinite().all()
    error = (found.double() - expected).abs() - expected.abs() / 256
    assert (error <= size * 4e-3).all(), (error / size).max()


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("rows, columns", [(1, 128), (5, 1408), (64, 5120), (300, 2048), (500, 1408), (1027, 128)])
    def test_quantise(self, rows: int, columns: int) -> None:
        x = rows_of(rows, columns, 1)
        found, expected = ours().quantise(x), packed_rows(*quantised(x))
        for mine, its in zip(found.plain(), expected.plain(), strict=True):
            assert torch.equal(mine.float(), its.float())

    @pytest.mark.parametrize("rows, columns", SHAPES)
    def test_products(self, rows: int, columns: int) -> None:
        weight, gemm = weight_of(rows, columns, 2), ours()
        x, bias = rows_of(MOST, columns, 3), torch.randn(rows, device="cuda").bfloat16()
        residual = torch.randn(MOST, rows, device="cuda").bfloat16()
        plain = product(x, weight)
        size = plain.abs().mean(1, keepdim=True) + 1
        whole, added = gemm.linear(x, weight, None), gemm.linear(x, weight, bias, residual)
        assert_close(whole, plain, size)
        assert_close(added, plain + bias.double() + residual.double(), size)
        gated = None
        if rows % 32 == 0:
            gated = gemm.gated(x, weight, bias)
            gates, ups = (plain + bias.double()).chunk(2, 1)
            assert_close(gated, torch.nn.functional.silu(gates) * ups, size * (gates.abs() + ups.abs() + 1))
        for tokens in ROWS:
            for first in {0, MOST - tokens}:
                part = slice(first, first + tokens)
                assert torch.equal(gemm.linear(x[part], weight, None), whole[part]), tokens
                assert torch.equal(gemm.linear(x[part], weight, bias, residual[part]), added[part]), tokens
                if gated is not None:
                    assert torch.equal(gemm.gated(x[part], weight, bias), gated[part]), tokens

    def test_takes_what_is_quantised(self) -> None:
        weight, x = weight_of(160, 512, 4), rows_of(9, 512, 5)
        rows = ours().quantise(x)
        assert isinstance(rows, Fp8Rows)
        assert torch.equal(ours().linear(rows, weight, None), ours().linear(x, weight, None))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_not_finite_stays_so(self, value: float) -> None:
        weight, x = weight_of(160, 512, 4), rows_of(9, 512, 5)
        x[3, 200] = value
        for found in (ours().linear(x, weight, None), ours().gated(x, weight, None)):
            assert (~found.isfinite().all(1)).nonzero().flatten().tolist() == [3] and not found[3].isfinite().any()
