"""Products of each head with a matrix of its own, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwing.kv.pool import KVPool, KVSpec
from draftwing.ops import make_ops
from draftwing.ops.attention import Batch, ChunkSpan
from draftwing.ops.cpu.extension import load_extension

pytestmark = pytest.mark.skipif(load_extension() is None, reason="the C extension was not built")
CPU = torch.device("cpu")
OPS = make_ops(CPU)


def made(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


def test_heads_that_share_panels_of_blocks_are_left_to_others() -> None:
    odd = OPS.quantize(made(3 * 24, 64, dtype=torch.float32), "Q8_0")
    assert OPS.head_products([odd], 3, torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_latents_are_kept_as_a_pool_keeps_them(kept: torch.dtype, dtype: torch.dtype) -> None:
    size, none = 56, torch.zeros(0, dtype=torch.int64)
    rows, slots = made(3, 1, size, dtype=dtype), torch.tensor([4, 1, 6])
    pools = [KVPool([KVSpec(1, size, shared=True)], 8, kept, CPU) for _ in range(2)]
    pools[0].write(0, slots, rows, rows)
    batch = Batch(
        torch.tensor([0]), none, torch.arange(3), slots, torch.tensor([[4, 1, 6]]),
        chunks=(ChunkSpan(0, 0, 0, 3),), prefix_len=none,
    )  # fmt: skip
    OPS.attention(pools[1]).bind(batch, 0).write(0, rows, rows)
    assert torch.equal(pools[0].kv[0], pools[1].kv[0]) and bool(pools[0].kv[0].any())
