"""The kernels of gemm_dense.cu in C++ on the CPU (gemm_host.cpp), vs a product in float64. What only a GPU can tell is
in test_cuda_dense.py."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass

import pytest
import torch
from gemm_inputs import compiled, exact, launch, random
from torch import Tensor

from draftwing.ops.cuda.gemm import read_files
from draftwing.ops.cuda.gemm_dense import GROUPS, SHARED, Cut, Size, make_cut

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
LATE, EARLY = 0, 1  # copies and instructions, as gemm_host.cpp has them
SIZES = [Size(groups, part * (2 if groups == 2 else 1)) for groups in GROUPS for part in (32, 88)]


@dataclass
class Host:
    library: ctypes.CDLL

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, extra: Tensor | None, gated: bool, cut: Cut, early: int
    ) -> Tensor:
        features = len(weight) // (2 if gated else 1)
        out = torch.full((len(x), features), torch.nan, dtype=torch.bfloat16)
        self.library.dense_sizes(cut.x_rows, cut.rows, cut.stages, int(gated))
        launch(
            self.library, cut.size.name, (cut.size.threads, cut.ranges, SHARED[cut.blocks]),
            (x, weight, bias, extra, out), (len(x), features, weight.shape[1], *cut.grid), early,
        )  # fmt: skip
        return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Host:
    lines = [f"DENSE_KERNEL({size.name}, {size.groups}, {size.features}, {size.threads})\n" for size in SIZES]
    source = "".join([*read_files(("gemm_wgmma.cu", "gemm_dense.cu")), *lines])
    return Host(compiled(tmp_path_factory.mktemp("dense"), source, "-DDENSE"))


@pytest.mark.parametrize("kind", ["plain", "add", "silu"])
@pytest.mark.parametrize("rows, columns, ranges", [(96, 768, 2), (176, 640, 1), (64, 1024, 4)])
def test_against_float64(run: Host, rows: int, columns: int, ranges: int, kind: str) -> None:
    """Rows of x have the same bits in any batch, whatever a block takes."""
    weight, x, bias = random(rows, columns, seed=1), random(150, columns, seed=2), random(rows, seed=3)
    gated = kind == "silu"
    features = rows // 2 if gated else rows
    extra = random(150, rows, seed=4) if kind == "add" else None

    def found(first: int, last: int, at_once: int, early: int) -> Tensor:
        cut = make_cut(last - first, features, gated, columns, ranges, at_once, at_once)
        fits = [size for size in SIZES if size.groups == cut.size.groups and size.features >= cut.size.features]
        its = None if extra is None else extra[first:last]
        return run(x[first:last], weight, bias, its, gated, cut._replace(size=fits[0]), early)

    whole = found(0, 150, 2, EARLY)
    torch.testing.assert_close(whole.double(), exact(kind, x, weight, bias, extra), rtol=2**-7, atol=2e-3)
    for first, last, at_once, early in ((149, 150, 1, LATE), (100, 150, 1, EARLY), (3, 100, 2, LATE), (5, 90, 1, LATE)):
        assert torch.equal(found(first, last, at_once, early), whole[first:last])
