"""GEMMs of many rows by Triton against float64, and on a GPU against the bits of gemm.cu."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
HALVES = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def made(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.further(dtype=torch.float16)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows, features, columns", [(70, 200, 640), (150, 64, 1024), (1, 30, 64)])
def test_products(
    rows: int, features: int, columns: int, dtype: torch.dtype, device: torch.device, mended_interpreter: None
) -> None:
    from draftwing.ops.gemm.triton_shares import TritonSharesGemm

    gemm, unit = TritonSharesGemm(), HALVES[dtype]
    x, weight = (made(n, columns, seed=n, dtype=dtype, device=device) for n in (rows, features))
    x, weight = x / columns**0.25, weight / columns**0.25
    bias = made(features, seed=3, dtype=dtype, device=device)
    residual = made(rows, features, seed=4, dtype=dtype, device=device)
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(gemm.linear(x, weight, None).double(), exact, atol=unit, rtol=unit)
    expected = exact + bias.double() + residual.double()
    torch.testing.assert_close(gemm.linear(x, weight, bias, residual).double(), expected, atol=unit, rtol=unit)
    gate, up = (exact + bias.double()).chunk(2, 1)
    found = gemm.gated(x, weight, bias)
    torch.testing.assert_close(found.double(), gate * gate.sigmoid() * up, atol=4 * unit, rtol=4 * unit)


def test_columns_in_lanes() -> None:
    """A thread of an instruction has lanes 2t, 2t + 1, 2t + 8 and 2t + 9 of 16; gemm.cu gives it eight neighbours for
    two instructions."""
    from draftwing.ops.gemm.triton_shares import in_lanes

    found = in_lanes(torch.arange(64, dtype=torch.int16).view(1, 64))[0].tolist()
    for start in (0, 32):
        for instruction in (0, 1):
            for lane in range(16):
                thread, half, which = lane % 8 // 2, lane // 8, lane % 2
                expected = start + 8 * thread + 4 * instruction + 2 * half + which
                assert found[start + 16 * instruction + lane] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows, features, columns", [(700, 2048, 2048), (300, 1000, 4160), (512, 4096, 8192)])
def test_bits_are_those_of_few_rows(rows: int, features: int, columns: int, dtype: torch.dtype) -> None:
    from draftwing.ops.gemm.cuda import small_m_gemm
    from draftwing.ops.gemm.triton_shares import TritonSharesGemm

    device = torch.device("cuda", torch.cuda.current_device())
    few, many = small_m_gemm(device, dtype), TritonSharesGemm()
    x, weight = (made(n, columns, seed=n, dtype=dtype, device=device) for n in (rows, features))
    bias = made(features, seed=3, dtype=dtype, device=device)
    residual = made(rows, features, seed=4, dtype=dtype, device=device)
    assert torch.equal(many.linear(x, weight, bias, residual), few.linear(x, weight, bias, residual))
    assert torch.equal(many.gated(x, weight, bias), few.gated(x, weight, bias))
