"""The kernels of gemm_heads.cu in C++ on the CPU (gemm_host.cpp): right, and a row has the bits that it has alone, in
any batch. On a GPU: test_cuda_heads.py."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch
from gemm_inputs import compiled, launch, pointer, random
from torch import Tensor

from draftwing.ops.cuda import gemm_heads
from draftwing.ops.cuda.gemm_heads import HeadGemm, grid
from draftwing.ops.torch.layer_ops import LayerOps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.further(chunks=2, rows=41),
]
HEADS, OUTPUTS, TURNED = 3, 48, 8  # an odd number of warps' features in all


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    _, begin, source = gemm_heads.read_source((2, 3, 8)).partition("enum { PLAIN")
    return compiled(tmp_path_factory.mktemp("heads"), begin + source, "-DHEADS")


def run(
    library: ctypes.CDLL, x: Tensor, w: Tensor, turned: Tensor | None = None, table: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """table [2, M, 1, TURNED]: cosines and sines."""
    rows, width = len(x), 0 if turned is None else turned.shape[2]
    out = torch.full((rows, HEADS, OUTPUTS + width), torch.nan, dtype=torch.bfloat16)
    cos, sin = (None, None) if table is None else table
    beside = (0, 0, 0, 0) if turned is None or cos is None else (width, *turned.stride()[:2], cos.stride(0))
    strides = (*x.stride()[:2], *out.stride()[:2])
    library.experts(0, 0, 0, 1, None, None, ctypes.c_float(0), 1)  # x is read after the kernel in front, w before
    library.head_sizes(HEADS, *strides, ctypes.c_float(factor), *map(pointer, (turned, cos, sin)), *beside)
    sizes = rows, OUTPUTS, x.shape[2], *grid(rows, HEADS, OUTPUTS, width)
    launch(library, f"heads_{x.shape[2] // 64}", (64, 1, 0), (x, w, None, None, out), sizes, 0)
    return out


@pytest.mark.parametrize("rows", [1, 8, 41])
@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_products_are_right_and_rows_are_alone(library: ctypes.CDLL, chunks: int, rows: int) -> None:
    """Of rows and heads that are apart."""
    x = random(rows, HEADS, chunks * 64 + 16, seed=1)[..., : chunks * 64]
    w = random(HEADS * OUTPUTS, chunks * 64, seed=2)
    found = run(library, x, w)
    expected = torch.einsum("mhi,hoi->mho", x.double(), w.double().unflatten(0, (HEADS, -1)))
    torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=8e-3)
    for row in {0, rows - 1}:
        assert torch.equal(found[row], run(library, x[row : row + 1], w)[0])


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("rows", [1, 41])
def test_queries_are_products_beside_what_is_turned(library: ctypes.CDLL, rows: int, factor: float) -> None:
    made = random(rows, HEADS, 128 + TURNED, seed=1)
    w, angles = random(HEADS * OUTPUTS, 128, seed=2), torch.arange(rows * TURNED).view(rows, 1, TURNED) / 7
    table = torch.stack((angles.cos(), angles.sin())).bfloat16()
    plain, turned = made.split((128, TURNED), 2)
    found = run(library, plain, w, turned, table, factor)
    expected = LayerOps().concat_rope(run(library, plain, w), turned, *table, factor)
    assert torch.equal(found[..., :OUTPUTS], expected[..., :OUTPUTS])
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=8e-3)


def test_which_matrices_have_kernels() -> None:
    def taken(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        weight = torch.empty(HEADS * outputs, inputs, dtype=dtype, device="meta")
        return gemm_heads.takes(weight, HEADS, torch.bfloat16)

    assert taken(512, 192) and taken(128, 512)
    assert not taken(512, 96) and not taken(512, 576) and not taken(24, 128) and not taken(512, 128, torch.float32)


def test_shapes_of_results() -> None:
    """On the meta device nothing runs."""
    products = HeadGemm(torch.empty(HEADS * 32, 128, dtype=torch.bfloat16, device="meta"), HEADS)
    x, angles = products.weight.new_empty(5, HEADS, 128), products.weight.new_empty(5, 1, 16)
    assert products(x).shape == (5, HEADS, 32)
    assert products.queries(x, x[..., :16], angles, angles, 1.0).shape == (5, HEADS, 48)
    plain, turned = products.weight.new_empty(5, HEADS, 132).split((128, 4), 2)
    assert products.queries(plain, turned, turned, turned, 1.0).shape == (5, HEADS, 36), "of heads at odd places"
