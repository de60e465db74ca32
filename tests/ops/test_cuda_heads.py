"""Products of heads on a GPU: against float64, the bits of a row in any batch, behind kernels that have not ended. What
they compute is tested without one in test_cuda_heads_host.py."""

from __future__ import annotations

import pytest
import torch

from draftwing.ops.contracts import HeadProducts
from draftwing.ops.torch.layer_ops import LayerOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA C++"),
]
DTYPES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
# GLM-4.7-Flash's and DeepSeek-V2-Lite's heads, inputs and outputs, of keys and of values.
SIZES = [(20, 192, 512), (20, 512, 256), (16, 128, 512), (16, 512, 128)]
ROWS, MOST = (1, 2, 7, 8, 9, 32, 33, 64, 300), 300
TURNED = 64


def products_of(heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> HeadProducts:
    from draftwing.ops.triton.ops import TritonOps

    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(heads * outputs, inputs, device="cuda", generator=generator) * inputs**-0.5
    products = TritonOps(weight.device).head_products(weight.to(dtype), heads, dtype)
    assert products is not None
    return products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "inputs", "outputs"), SIZES)
def test_against_float64(heads: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    products = products_of(heads, inputs, outputs, dtype)
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(MOST, heads, inputs + TURNED, device="cuda", generator=generator).to(dtype)[..., :inputs]
    exact = torch.einsum("mhi,hoi->mho", x.double(), products.weight.double().unflatten(0, (heads, -1)))
    whole = products(x)
    torch.testing.assert_close(whole.double(), exact, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    for rows in ROWS:
        assert torch.equal(products(x[:rows]), whole[:rows])
        assert torch.equal(products(x[rows - 1 : rows]), whole[rows - 1 : rows])


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize(("heads", "inputs", "outputs"), SIZES[::2])
def test_queries_in_a_graph(heads: int, inputs: int, outputs: int, factor: float) -> None:
    """Behind the GEMM that makes what they read; in each replay the bits that launches one by one have."""
    from draftwing.ops.cuda.gemm import small_m_gemm
    from draftwing.ops.triton.ops import TritonOps

    dtype, device = torch.bfloat16, torch.device("cuda", torch.cuda.current_device())
    products, ops, key = products_of(heads, inputs, outputs, dtype), TritonOps(device), inputs + TURNED
    generator, gemm = torch.Generator("cuda").manual_seed(3), small_m_gemm(device, dtype)
    source = torch.randn(MOST, 768, device="cuda", generator=generator).to(dtype)
    matrix = (torch.randn(heads * key, 768, device="cuda", generator=generator) / 28).to(dtype)
    angles = torch.rand(MOST, 1, TURNED, device="cuda", generator=generator) * 6
    table = torch.stack((angles.cos(), angles.sin())).to(dtype)

    def queries(rows: int) -> torch.Tensor:
        plain, turned = gemm.linear(source[:rows], matrix, None).view(rows, heads, key).split((inputs, TURNED), 2)
        return ops.head_queries(products, plain, turned, *table[:, :rows], factor)

    plain, turned = gemm.linear(source, matrix, None).view(MOST, heads, key).split((inputs, TURNED), 2)
    torch.cuda.synchronize()
    expected = LayerOps().concat_rope(products(plain), turned, *table, factor)
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
