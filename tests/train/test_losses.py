"""Against torch's own log-softmax in float64, gradients by autograd."""

from __future__ import annotations

import pytest
import torch

from draftwing.train import losses
from draftwing.train.losses import linear_cross_entropy


def inputs(rows: int = 23, width: int = 16, vocab: int = 37, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    shares = torch.randn(rows, vocab, generator=generator, dtype=torch.float64).mul(3).softmax(-1)
    shares *= torch.rand(rows, 1, generator=generator, dtype=torch.float64) + 0.5  # not quite a distribution
    counts = torch.rand(rows, generator=generator) < 0.7
    return *(x.to(dtype) for x in (hidden, weight, shares)), counts


def reference(hidden, weight, shares, counts):
    hidden, weight = (x.double().detach().requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight.t()
    loss = -((shares.double() * logits.log_softmax(-1)).sum(-1) * counts).sum()
    return loss, logits.argmax(-1), torch.autograd.grad(3.0 * loss, (hidden, weight))


@pytest.mark.parametrize("elements", [5 * 37, 1 << 21])  # several pieces, the last one short; one
def test_loss_and_gradients_are_those_of_log_softmax(elements, monkeypatch):
    monkeypatch.setattr(losses, "_CPU_ELEMENTS", elements)
    hidden, weight, shares, counts = inputs()
    expected, best, grads = reference(hidden, weight, shares, counts)
    hidden.requires_grad_(), weight.requires_grad_()
    loss, found = linear_cross_entropy(hidden, weight, shares, counts)
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(found, best)
    for grad, want in zip(torch.autograd.grad(3.0 * loss, (hidden, weight)), grads, strict=True):
        torch.testing.assert_close(grad, want)
    assert not counts.all() and not grads[0][~counts].any()


def test_under_autocast_products_are_in_half_precision_and_sums_are_not():
    hidden, weight, shares, counts = inputs(300, 64, 200, torch.float32)
    expected, _, grads = reference(hidden, weight, shares, counts)
    hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(hidden, weight, shares.bfloat16(), counts)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    for grad, want in zip(torch.autograd.grad(3.0 * loss, (hidden, weight)), grads, strict=True):
        assert grad.dtype == torch.float32
        assert (grad - want).norm() < 0.03 * want.norm()


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, shares, counts = inputs()
    loss, _ = linear_cross_entropy(hidden.requires_grad_(), weight, shares, counts)
    loss.backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        loss, _ = linear_cross_entropy(hidden, weight, shares, counts)
    assert not loss.requires_grad


def test_large_logits_do_not_overflow():
    hidden, weight, shares, counts = inputs(dtype=torch.float32)
    loss, _ = linear_cross_entropy(hidden * 1e3, weight, shares, counts)
    assert torch.isfinite(loss)


def test_no_rows_have_no_loss_and_no_gradient():
    hidden, weight, shares, counts = inputs()
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    loss, best = linear_cross_entropy(hidden, weight, shares[:0], counts[:0])
    loss.backward()
    assert loss == 0 and best.shape == (0,) and hidden.grad.shape == hidden.shape and not weight.grad.any()
