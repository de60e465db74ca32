"""The cross-entropy kernel against log_softmax in float64, its gradient by autograd."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

kernel = pytest.importorskip("draftwing.train.kernels.cross_entropy")

# One rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-7 if CUTS else 2**-8, torch.float16: 2**-10}
VOCABS = [1, 37, 2048, 2049, 12288]


def inputs(device: torch.device, vocab: int, dtype: torch.dtype, shares_dtype: torch.dtype):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(7, vocab, generator=generator) * 4
    logits[1] += 80  # whose exponentials would overflow
    logits[2] -= 300
    shares = torch.randn(7, vocab, generator=generator).mul(3).softmax(-1)
    shares *= torch.rand(7, 1, generator=generator) + 0.5  # not quite a distribution
    counts = torch.tensor([True, True, True, False, True, False, True])
    return logits.to(device, dtype), shares.to(device, shares_dtype), counts.to(device)


def reference(logits: Tensor, shares: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.double().requires_grad_()
    loss = -(shares.double() * logits.log_softmax(-1)).sum(-1) * counts
    return loss.detach(), torch.autograd.grad(loss.sum(), logits)[0]


@pytest.mark.parametrize("shares_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("vocab", VOCABS)
def test_loss_place_and_slope(vocab: int, dtype: torch.dtype, shares_dtype: torch.dtype, device: torch.device) -> None:
    logits, shares, counts = inputs(device, vocab, dtype, shares_dtype)
    expected, slope = reference(logits, shares, counts)
    given = logits.clone()
    loss, best, same = kernel.cross_entropy(logits, shares, counts, sloped=False)
    assert same is logits and torch.equal(logits, given)
    # A loss is a difference of terms that are as large as the logits.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6 * given.abs().max().item())
    where = torch.stack([(row == row.max()).nonzero()[0, 0] for row in given])
    assert torch.equal(best, where)
    again, best_again, _ = kernel.cross_entropy(logits, shares, counts, sloped=True)
    assert torch.equal(again, loss) and torch.equal(best_again, best)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(logits.double(), slope, rtol=2 * tolerance, atol=1e-6)
    assert not logits[~counts].any() and not loss[~counts].any()


def test_rows_within_wider_ones_and_nothing_else_is_written(device: torch.device) -> None:
    logits, shares, counts = inputs(device, 300, torch.float32, torch.float32)
    expected, slope = reference(logits, shares, counts)
    wide = torch.full((7, 512), 3.0, device=device)
    wide[:, 100:400] = logits
    loss, *_ = kernel.cross_entropy(wide[:, 100:400], shares, counts, sloped=True)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=3e-4)
    torch.testing.assert_close(wide[:, 100:400].double(), slope, rtol=1e-5, atol=1e-6)
    assert (wide[:, :100] == 3).all() and (wide[:, 400:] == 3).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_row_only_and_its_place_exists(bad: float, device: torch.device) -> None:
    logits, shares, counts = inputs(device, 3000, torch.float32, torch.float32)
    logits[4, 2500] = bad
    logits[6] = float("nan")
    loss, best, _ = kernel.cross_entropy(logits, shares, counts, sloped=False)
    assert loss.isfinite().tolist() == [True] * 4 + [False, True, False]
    assert (best >= 0).all() and (best < 3000).all()


def test_no_rows(device: torch.device) -> None:
    none = [x[:0] for x in inputs(device, 37, torch.float32, torch.float32)]
    loss, best, _ = kernel.cross_entropy(*none, sloped=True)
    assert loss.shape == best.shape == (0,)
