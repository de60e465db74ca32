from __future__ import annotations

import pytest
import torch

from draftwing.layers.norm import RMSNorm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_equals_the_formula_in_float64(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(48, 1e-2, dtype, "cpu")
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x = (torch.randn(5, 3, 48) * 0.1).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight.double()
    found = norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_mean_of_squares_beyond_the_range_of_float16() -> None:
    norm = RMSNorm(16, 1e-6, torch.float16, "cpu")
    torch.testing.assert_close(norm(torch.full((1, 16), 1000.0, dtype=torch.float16)), torch.ones(1, 16).half())


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(576, 1e-5, torch.bfloat16, "cpu")
    x = torch.randn(64, 576, dtype=torch.bfloat16)
    assert torch.equal(norm(x), torch.cat([norm(row[None]) for row in x]))
