"""Norms, gated activations and rotary embeddings of training against autograd in float64, and against `rotate`."""

from __future__ import annotations

import os

import pytest
import torch

from draftwing.layers.rope import RopeConfig, rope_table
from draftwing.ops.attention.batch import HeadNorms
from draftwing.ops.rope.spec import rotate

pytestmark = pytest.mark.slow

kernels = pytest.importorskip("draftwing.train.kernels.layer_ops")

# One rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if CUTS else 2**-8, torch.float16: 2**-11}


def inputs(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are part of longer ones, and gradients that are, too."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.randn(2, rows, size + 8, generator=generator).to(device, dtype)[:, :, :size]
    return wide[0].detach().requires_grad_(), wide[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [96, 577])
def test_norm(size: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)  # fewer than rows: each sums over several
    x, grad = inputs(7, size, dtype, device)
    weight = (1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(1))).to(device).requires_grad_()
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    expected = exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact[1]
    wanted = torch.autograd.grad(expected, exact, grad.double())
    found = kernels.training_ops().rms_norm(x, weight, 1e-5)
    back = torch.autograd.grad(found, (x, weight), grad)
    tolerance = 1.05 * TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(back[0].double(), wanted[0], rtol=tolerance, atol=4e-6)
    assert back[0].dtype == dtype and back[1].dtype == torch.float32
    torch.testing.assert_close(back[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 32)  # several, the last one short
    x, _ = inputs(5, 2 * 72, dtype, device)
    _, grad = inputs(5, 72, dtype, device)
    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, 1)
    expected = gate * torch.sigmoid(gate) * up
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    found = kernels.training_ops().silu_mul(x)
    (back,) = torch.autograd.grad(found, x, grad)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=2.1 * tolerance, atol=2e-6)  # silu is rounded on its own
    torch.testing.assert_close(back.double(), wanted, rtol=1.05 * tolerance, atol=4e-6)


def tables(dim: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """cos and sin of seven positions, [7, 1, dim] each"""
    table = rope_table(RopeConfig(), dim, 100, torch.float32, device)
    return table.index_select(0, torch.tensor([0, 1, 2, 3, 40, 5, 99], device=device)).unsqueeze(2).unbind(1)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("heads", "turned", "dim"), [(15, 12, 64), (3, 2, 20), (4, 4, 128)])
def test_turned_and_back(heads: int, turned: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(heads)
    wide = torch.randn(7, heads + 1, dim, generator=generator).to(device, dtype)
    grad = torch.randn(7, heads, dim, generator=generator).to(device, dtype)
    cos, sin = tables(dim, device)
    x = wide[:, :heads].detach().requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = torch.cat((rotate(exact[:, :turned], cos.double(), sin.double()), exact[:, turned:]), 1)
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    found = kernels.turn(x, cos, sin, turned)
    (back,) = torch.autograd.grad(found, x, grad)
    assert found.dtype == back.dtype == dtype and found.is_contiguous()
    tolerance = 1.05 * TOLERANCE[dtype]
    torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(back.double(), wanted, rtol=tolerance, atol=2e-6)
    assert torch.equal(found[:, turned:], x[:, turned:]) and torch.equal(back[:, turned:], grad[:, turned:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys", "values", "dim"), [(9, 3, 3, 64), (0, 3, 3, 20)])
def test_heads_normed_and_turned_and_back(
    queries: int, keys: int, values: int, dim: int, dtype: torch.dtype, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernels, "_TURN_PROGRAMS", 3)  # fewer than rows: each sums over several
    generator, heads, eps = torch.Generator().manual_seed(dim), queries + keys + values, 1e-5
    wide = torch.randn(7, heads + 1, dim, generator=generator).to(device, dtype)
    grad = torch.randn(7, heads, dim, generator=generator).to(device, dtype)
    weights = [(1 + 0.3 * torch.randn(dim, generator=generator)).to(device).requires_grad_() for _ in range(2)]
    cos, sin = tables(dim, device)
    x = wide[:, :heads].detach().requires_grad_()
    exact = [one.detach().double().requires_grad_() for one in (x, *weights)]
    by = [(exact[0], weight) for weight in exact[1:]]
    q, k = (one / (one.square().mean(-1, keepdim=True) + eps).sqrt() * weight for one, weight in by)
    normed = torch.cat((q[:, :queries], k[:, queries : queries + keys]), 1)
    expected = torch.cat((rotate(normed, cos.double(), sin.double()), exact[0][:, queries + keys :]), 1)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    found = kernels.turn(x, cos, sin, queries + keys, queries, HeadNorms(*weights, eps))
    back = torch.autograd.grad(found, [x, *weights], grad)
    tolerance = 1.05 * TOLERANCE[dtype]
    torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(back[0].double(), wanted[0], rtol=tolerance, atol=4e-6)
    for one, right in zip(back[1:], wanted[1:], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), right, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:, queries + keys :], x[:, queries + keys :])
