"""Norms and gated activations of training against autograd in float64."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.slow

kernels = pytest.importorskip("draftwing.train.kernels.layer_ops")

# One rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if CUTS else 2**-8}


def inputs(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are part of longer ones, and gradients that are, too."""
    generator = torch.Generator().manual_seed(size)
    wide = torch.randn(2, rows, size + 8, generator=generator).to(device, dtype)[:, :, :size]
    return wide[0].detach().requires_grad_(), wide[1]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", [96, 577])
def test_norm(size: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)  # fewer than rows: each sums over several
    x, grad = inputs(7, size, dtype, device)
    weight = (1 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(1))).to(device).requires_grad_()
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    expected = exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact[1]
    wanted = torch.autograd.grad(expected, exact, grad.double())
    found = kernels.TrainingOps().rms_norm(x, weight, 1e-5)
    back = torch.autograd.grad(found, (x, weight), grad)
    tolerance = 1.05 * TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=2e-6)
    torch.testing.assert_close(back[0].double(), wanted[0], rtol=tolerance, atol=4e-6)
    assert back[0].dtype == dtype and back[1].dtype == torch.float32
    torch.testing.assert_close(back[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_silu_mul(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 32)  # several, the last one short
    x, _ = inputs(5, 2 * 72, dtype, device)
    _, grad = inputs(5, 72, dtype, device)
    exact = x.detach().double().requires_grad_()
    gate, up = exact.chunk(2, 1)
    expected = gate * torch.sigmoid(gate) * up
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    found = kernels.TrainingOps().silu_mul(x)
    (back,) = torch.autograd.grad(found, x, grad)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=2.1 * tolerance, atol=2e-6)  # silu is rounded on its own
    torch.testing.assert_close(back.double(), wanted, rtol=1.05 * tolerance, atol=4e-6)
