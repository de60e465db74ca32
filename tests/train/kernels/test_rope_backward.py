"""The rotary kernel of training, without and with norms of heads, against `rotate` and autograd in float64."""

from __future__ import annotations

import os

import pytest
import torch

from draftwing.layers.rope import RopeConfig, rope_table, rotate
from draftwing.ops.attention import HeadNorms

pytestmark = pytest.mark.slow

kernel = pytest.importorskip("draftwing.train.kernels.rope_backward")

# One rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if CUTS else 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "turned", "dim"), [(15, 12, 64), (3, 2, 20), (4, 4, 128)])
def test_turned_and_back(heads: int, turned: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(heads)
    wide = torch.randn(7, heads + 1, dim, generator=generator).to(device, dtype)
    grad = torch.randn(7, heads, dim, generator=generator).to(device, dtype)
    positions = torch.tensor([0, 1, 2, 3, 40, 5, 99], device=device)
    table = rope_table(RopeConfig(), dim, 100, torch.float32, device)
    cos, sin = table.index_select(0, positions).unsqueeze(2).unbind(1)
    x = wide[:, :heads].detach().requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = torch.cat((rotate(exact[:, :turned], cos.double(), sin.double()), exact[:, turned:]), 1)
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    found = kernel.turn(x, cos, sin, turned)
    (back,) = torch.autograd.grad(found, x, grad)
    assert found.dtype == back.dtype == dtype and found.is_contiguous()
    tolerance = 1.05 * TOLERANCE[dtype]
    torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(back.double(), wanted, rtol=tolerance, atol=2e-6)
    assert torch.equal(found[:, turned:], x[:, turned:]) and torch.equal(back[:, turned:], grad[:, turned:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys", "values", "dim"), [(9, 3, 3, 64), (0, 3, 3, 20)])
def test_heads_normed_and_turned_and_back(
    queries: int,
    keys: int,
    values: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "_PROGRAMS", 3)  # fewer than rows: each sums over several
    generator, heads, eps = torch.Generator().manual_seed(dim), queries + keys + values, 1e-5
    wide = torch.randn(7, heads + 1, dim, generator=generator).to(device, dtype)
    grad = torch.randn(7, heads, dim, generator=generator).to(device, dtype)
    weights = [(1 + 0.3 * torch.randn(dim, generator=generator)).to(device).requires_grad_() for _ in range(2)]
    table = rope_table(RopeConfig(), dim, 100, torch.float32, device)
    cos, sin = table.index_select(0, torch.tensor([0, 1, 2, 3, 40, 5, 99], device=device)).unsqueeze(2).unbind(1)
    x = wide[:, :heads].detach().requires_grad_()
    exact = [one.detach().double().requires_grad_() for one in (x, *weights)]
    by = [(exact[0], weight) for weight in exact[1:]]
    q, k = (one / (one.square().mean(-1, keepdim=True) + eps).sqrt() * weight for one, weight in by)
    normed = torch.cat((q[:, :queries], k[:, queries : queries + keys]), 1)
    expected = torch.cat((rotate(normed, cos.double(), sin.double()), exact[0][:, queries + keys :]), 1)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    found = kernel.turn(x, cos, sin, queries + keys, queries, HeadNorms(*weights, eps))
    back = torch.autograd.grad(found, [x, *weights], grad)
    tolerance = 1.05 * TOLERANCE[dtype]
    torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(back[0].double(), wanted[0], rtol=tolerance, atol=4e-6)
    for one, right in zip(back[1:], wanted[1:], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), right, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:, queries + keys :], x[:, queries + keys :])
