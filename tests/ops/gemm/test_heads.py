"""Products of each head with a matrix of its own: in C, and by gemm_heads.cu in C++ on the CPU (gemm_host.cpp) and on a
GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from gemm_inputs import compiled, device, launch, on_gpu, on_host, pointer, random
from torch import Tensor

from draftwing.ops import make_ops
from draftwing.ops.cpu.extension import load_extension
from draftwing.ops.gemm import cuda_heads
from draftwing.ops.gemm.contract import HeadProducts
from draftwing.ops.gemm.cuda_heads import HeadGemm, grid
from draftwing.ops.table import PLAIN

in_c = pytest.mark.skipif(load_extension() is None, reason="the C extension was not built")
CPU = torch.device("cpu")
OPS = make_ops(CPU)


def made(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@in_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [24, 64, 200])  # of panels of 64
@pytest.mark.parametrize("inputs", [7, 128])
def test_products_of_heads(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    heads, rows = 3, 20
    weight = made(heads * outputs, inputs, dtype=dtype)
    products = OPS.head_products(weight, heads, dtype)
    assert products is not None and torch.equal(products.weight, weight)
    x = made(rows, heads, inputs + 5, dtype=dtype, seed=1)[..., 3 : 3 + inputs]  # rows and heads are apart
    found = products(x)
    expected = torch.einsum("mhi,hoi->mho", x.double(), weight.double().view(heads, outputs, inputs))
    error = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), expected, rtol=error, atol=error * inputs**0.5)
    for count in range(1, 8):  # a row has the same bits among any others
        assert torch.equal(products(x[5 : 5 + count]), found[5 : 5 + count])
    assert products(x[:0]).shape == (0, heads, outputs)


@in_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_products_of_heads_with_weights_in_blocks(kind: str, dtype: torch.dtype) -> None:
    """The bits are those of a GEMM for each head. Rows come in slices of 512."""
    heads, outputs, inputs = 3, 48, 256
    each = [OPS.quantize(made(outputs, inputs, dtype=torch.float32, seed=head), kind) for head in range(heads)]
    whole = each[0]._replace(data=torch.cat([one.data for one in each]))
    products = OPS.head_products([whole], heads, dtype)
    assert products is not None
    gemms = [OPS.block_gemm([one], dtype) for one in each]
    x = made(515, heads, inputs + 7, dtype=dtype, seed=9)[..., 5 : 5 + inputs]  # rows and heads are apart
    for rows in (0, 1, 7, 40, 515):
        found = products(x[:rows])
        expected = [gemm.linear(x[:rows, head].contiguous(), None, None) for head, gemm in enumerate(gemms)]
        assert torch.equal(found, torch.stack(expected, 1))
    assert torch.equal(products.weight.float(), torch.cat([gemm.dense() for gemm in gemms]).float())


@in_c
def test_heads_that_share_panels_of_blocks_are_left_to_others() -> None:
    odd = OPS.quantize(made(3 * 24, 64, dtype=torch.float32), "Q8_0")
    assert OPS.head_products([odd], 3, torch.float32) is None


# -- gemm_heads.cu in C++ ---------------------------------------------------------------------------------------------

HEADS, OUTPUTS, TURNED = 3, 48, 8  # an odd number of warps' features in all


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    _, begin, source = cuda_heads.read_source((2, 3, 8)).partition("enum { PLAIN")
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


@on_host
@pytest.mark.further(chunks=2, rows=41)
@pytest.mark.parametrize("rows", [1, 8, 41])
@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_cuda_products_are_right_and_rows_are_alone(library: ctypes.CDLL, chunks: int, rows: int) -> None:
    """Of rows and heads that are apart."""
    x = random(rows, HEADS, chunks * 64 + 16, seed=1)[..., : chunks * 64]
    w = random(HEADS * OUTPUTS, chunks * 64, seed=2)
    found = run(library, x, w)
    expected = torch.einsum("mhi,hoi->mho", x.double(), w.double().unflatten(0, (HEADS, -1)))
    torch.testing.assert_close(found.double(), expected, rtol=8e-3, atol=8e-3)
    for row in {0, rows - 1}:
        assert torch.equal(found[row], run(library, x[row : row + 1], w)[0])


@on_host
@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("rows", [1, 41])
def test_cuda_queries_are_products_beside_what_is_turned(library: ctypes.CDLL, rows: int, factor: float) -> None:
    made = random(rows, HEADS, 128 + TURNED, seed=1)
    w, angles = random(HEADS * OUTPUTS, 128, seed=2), torch.arange(rows * TURNED).view(rows, 1, TURNED) / 7
    table = torch.stack((angles.cos(), angles.sin())).bfloat16()
    plain, turned = made.split((128, TURNED), 2)
    found = run(library, plain, w, turned, table, factor)
    expected = PLAIN.concat_rope(run(library, plain, w), turned, *table, factor)
    assert torch.equal(found[..., :OUTPUTS], expected[..., :OUTPUTS])
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=8e-3)


def test_which_matrices_have_kernels() -> None:
    def taken(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        weight = torch.empty(HEADS * outputs, inputs, dtype=dtype, device="meta")
        return cuda_heads.takes(weight, HEADS, torch.bfloat16)

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


# -- on a GPU ---------------------------------------------------------------------------------------------------------

DTYPES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
# GLM-4.7-Flash's and DeepSeek-V2-Lite's heads, inputs and outputs, of keys and of values.
SIZES = [(20, 192, 512), (20, 512, 256), (16, 128, 512), (16, 512, 128)]
GPU_ROWS, MOST = (1, 2, 7, 8, 9, 32, 33, 64, 300), 300
GPU_TURNED = 64


def products_of(heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> HeadProducts:
    from draftwing.ops.triton.ops import TritonOps

    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(heads * outputs, inputs, device="cuda", generator=generator) * inputs**-0.5
    products = TritonOps(weight.device).head_products(weight.to(dtype), heads, dtype)
    assert products is not None
    return products


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "inputs", "outputs"), SIZES)
def test_cuda_products_on_a_gpu(heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    products = products_of(heads, inputs, outputs, dtype)
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(MOST, heads, inputs + GPU_TURNED, device="cuda", generator=generator).to(dtype)[..., :inputs]
    exact = torch.einsum("mhi,hoi->mho", x.double(), products.weight.double().unflatten(0, (heads, -1)))
    whole = products(x)
    torch.testing.assert_close(whole.double(), exact, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    for rows in GPU_ROWS:
        assert torch.equal(products(x[:rows]), whole[:rows])
        assert torch.equal(products(x[rows - 1 : rows]), whole[rows - 1 : rows])


@on_gpu
@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize(("heads", "inputs", "outputs"), SIZES[::2])
def test_cuda_queries_in_a_graph(heads: int, inputs: int, outputs: int, factor: float) -> None:
    """Behind the GEMM that makes what they read; in each replay the bits that launches one by one have."""
    from draftwing.ops.gemm.cuda import small_m_gemm
    from draftwing.ops.triton.ops import TritonOps

    dtype = torch.bfloat16
    products, ops, key = products_of(heads, inputs, outputs, dtype), TritonOps(device()), inputs + GPU_TURNED
    generator, gemm = torch.Generator("cuda").manual_seed(3), small_m_gemm(device(), dtype)
    source = torch.randn(MOST, 768, device="cuda", generator=generator).to(dtype)
    matrix = (torch.randn(heads * key, 768, device="cuda", generator=generator) / 28).to(dtype)
    angles = torch.rand(MOST, 1, GPU_TURNED, device="cuda", generator=generator) * 6
    table = torch.stack((angles.cos(), angles.sin())).to(dtype)

    def queries(rows: int) -> torch.Tensor:
        plain, turned = gemm.linear(source[:rows], matrix, None).view(rows, heads, key).split((inputs, GPU_TURNED), 2)
        return ops.head_queries(products, plain, turned, *table[:, :rows], factor)

    plain, turned = gemm.linear(source, matrix, None).view(MOST, heads, key).split((inputs, GPU_TURNED), 2)
    torch.cuda.synchronize()
    expected = PLAIN.concat_rope(products(plain), turned, *table, factor)
    found = queries(MOST)
    torch.testing.assert_close(found, expected, atol=1.6e-2, rtol=1.6e-2)
    assert torch.equal(found[..., :outputs], expected[..., :outputs])
    for rows in (1, 8, 40):
        graph = torch.cuda.CUDAGraph()
        queries(rows)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            again = [queries(rows) for _ in range(8)]
        for _ in range(3):
            for made in again:
                made.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(made, found[:rows]) for made in again)
