"""GEMMs in bfloat16 by gemm_dense.cu on a GPU vs float64, and that a row has the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwing.ops.cuda import gemm_dense
from draftwing.ops.cuda.gemm_dense import MOST, PANEL, SHARED, TOKENS, DenseGemm, cut_of, ranges_of

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a GPU of Hopper's"
    ),
]
ROWS = (1, 2, 7, 8, 16, 17, 33, 63, 64, 65, 90, 128, 129, 192, 193)
MANY = 400  # rows of x
SHAPES = [  # rows and columns of a weight: one, two and four ranges of K; whole blocks of a grid, and others
    (17440, 384), (8736, 1088), (4128, 1408), (96, 1024), (16, 64), (64, 8448), (5120, 576), (16384, 256),
]  # fmt: skip
SERVED = [
    (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (34816, 5120), (5120, 17408), (2048, 2048), (16384, 2048),
]  # fmt: skip


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows, columns", [*SHAPES, *SERVED, (248320, 5120)])
def test_cuts(rows: int, columns: int, gated: bool) -> None:
    """Blocks have all features, room for what they do, and one number of ranges."""
    features = rows // 2 if gated else rows
    for tokens in (1, 8, 64, 65, 128, MOST, 193, 2048):
        for clusters in ((30, 66, 132), (32, 64, 128)):
            cut = cut_of(tokens, features, gated, columns, clusters)
            own = cut.rows // 2 if gated else cut.rows
            assert own % 8 == 0 and cut.rows % 16 == 0
            assert cut.rows <= cut.size.features * (1 if cut.size.groups == 2 else 2)
            assert (cut.grid[1] - 1) * own < features <= cut.grid[1] * own
            assert cut.x_rows % 8 == 0 and cut.ranges == ranges_of(rows, columns)
            held = cut.size.groups * TOKENS
            assert min(tokens, held) <= cut.x_rows <= held and cut.grid[0] == -(-tokens // held) * cut.ranges
            assert cut.stages >= 2 or columns // PANEL // cut.ranges == 1
            assert cut.stages * (cut.rows + cut.x_rows) * PANEL * 2 < SHARED[cut.blocks]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def ours() -> DenseGemm:
    return gemm_dense.dense_gemm(torch.device("cuda", torch.cuda.current_device()))


def assert_close(found: Tensor, expected: Tensor, size: Tensor) -> None:
    """size: of the parts that a result is the sum of, which tensor cores round to float32."""
    assert found.dtype == torch.bfloat16 and found.isfinite().all()
    error = (found.double() - expected).abs() - expected.abs() / 256
    assert (error <= size * 1e-4).all(), (error / size).max()


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("rows, columns", SHAPES)
    def test_products(self, rows: int, columns: int) -> None:
        weight, x, bias = random(rows, columns, seed=2), random(MANY, columns, seed=3), random(rows, seed=4)
        residual, gemm = random(MANY, rows, seed=5), ours()
        plain = x.double() @ weight.double().T
        size = plain.abs().mean(1, keepdim=True) + 1
        whole, added = gemm.linear(x, weight, None), gemm.linear(x, weight, bias, residual)
        assert_close(whole, plain, size)
        assert_close(added, plain + bias.double() + residual.double(), size)
        gated = gemm.gated(x, weight, bias)
        gates, ups = (plain + bias.double()).chunk(2, 1)
        assert_close(gated, torch.nn.functional.silu(gates) * ups, size * (gates.abs() + ups.abs() + 1))
        for tokens in ROWS:
            for first in {0, MANY - tokens}:
                part = slice(first, first + tokens)
                assert torch.equal(gemm.linear(x[part], weight, None), whole[part]), tokens
                assert torch.equal(gemm.linear(x[part], weight, bias, residual[part]), added[part]), tokens
                assert torch.equal(gemm.gated(x[part], weight, bias), gated[part]), tokens

    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_not_finite_stays_in_its_row(self, value: float) -> None:
        weight, x = random(160, 512, seed=4), random(70, 512, seed=5)
        x[3, 200] = value
        for found in (ours().linear(x, weight, None), ours().gated(x, weight, None)):
            assert (~found.isfinite().all(1)).nonzero().flatten().tolist() == [3] and not found[3].isfinite().any()
