"""The kernels of gemm_fp8.cu in C++ on the CPU (gemm_host.cpp), vs a product in float64. What only a GPU can tell is in
test_cuda_fp8.py."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass

import pytest
import torch
from gemm_inputs import compiled, exact, launch, pointer, random
from torch import Tensor

from draftwing.ops.cuda.gemm import read_files
from draftwing.ops.cuda.gemm_fp8 import MANY_SIZES, SHARED, SIZES, cut_of, kernel_lines
from draftwing.ops.fp8_blocks import TALL, WIDE, Fp8Blocks, pack, packed_rows, quantised
from draftwing.ops.types import QuantizedRows

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
LATE, EARLY = 0, 1  # copies and instructions, as gemm_host.cpp has them
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
        launch(self.library, cut.size.name, (cut.size.threads, cut.cluster, SHARED), tensors, sizes, early)
        return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Host:
    files = read_files(("gemm_wgmma.cu", "gemm_fp8.cu", "gemm_fp8_many.cu"))
    source = "".join([*files, *kernel_lines([*SIZES, *MANY_SIZES])])
    return Host(compiled(tmp_path_factory.mktemp("fp8"), source, "-DFP8"))


def weight_of(rows: int, columns: int) -> Fp8Blocks:
    made = torch.Generator().manual_seed(1)
    codes = (torch.randn(rows, columns, generator=made) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(rows // TALL, columns // WIDE, generator=made) + 0.5) * 1e-3
    return pack(QuantizedRows(codes, 8, scales, None, TALL, WIDE, None), "cpu")


@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns", [(96, 1152), (288, 640), (32, 128), pytest.param(352, 1024, marks=LONG)])
@pytest.mark.parametrize("clusters", [(2, 4, 8), (1, 1, 1), (32, 66, 132)])
def test_against_float64(run: Host, rows: int, columns: int, kind: str, clusters: tuple[int, int, int]) -> None:
    """Rows of x have the same bits in any batch, whatever a block takes."""
    weight, x, bias = weight_of(rows, columns), random(150, columns, seed=2), random(rows, seed=3)
    gated = kind == "silu"
    extra = random(150, rows, seed=4) if kind == "add" else None
    codes, scales = quantised(x)
    values = (codes.float().unflatten(1, (-1, WIDE)) * scales.unsqueeze(2)).flatten(1)
    expected = exact(kind, values, weight.dense(torch.float32), bias, extra)
    some = slice(130, 147)
    whole = run(x, weight, bias, extra, gated, EARLY, (2, 4, 8))
    torch.testing.assert_close(whole.double(), expected, rtol=2**-7, atol=2e-3)
    for part, early in ((slice(149, 150), LATE), (some, LATE), (some, EARLY), (slice(3, 150), LATE)):
        found = run(x[part], weight, bias, None if extra is None else extra[part], gated, early, clusters)
        assert torch.equal(found, whole[part])


@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns", [(96, 1152), pytest.param(288, 640, marks=LONG), (32, 128), (800, 256)])
@pytest.mark.parametrize("early", [LATE, EARLY])
def test_many_rows(run: Host, rows: int, columns: int, kind: str, early: int) -> None:
    """The bits of few rows, with blocks that have no rows of x and others that take several tiles."""
    weight, x, bias = weight_of(rows, columns), random(300, columns, seed=2), random(rows, seed=3)
    extra = random(len(x), rows, seed=4) if kind == "add" else None
    expected = run(x, weight, bias, extra, kind == "silu", EARLY, (2, 4, 8))
    for tokens, clusters in ((len(x), (30, 1, 132)), (7, (30, 3, 132))):
        some = None if extra is None else extra[:tokens]
        found = run(x[:tokens], weight, bias, some, kind == "silu", early, clusters, many=True)
        assert torch.equal(found, expected[:tokens])
