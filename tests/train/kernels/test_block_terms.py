"""The kernels of block losses against the formulas in float64, gradients by autograd."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

kernel = pytest.importorskip("draftwing.train.kernels.block_terms")

# One rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6 if CUTS else 2**-7}
ROWS = 9


def inputs(device: torch.device, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(ROWS, vocab, generator=generator) * 3
    logits[1] += 80  # whose exponentials would overflow
    logits[2] -= 300
    probs = torch.randn(5, vocab, generator=generator).mul(3).softmax(-1)
    probs *= torch.rand(5, 1, generator=generator) + 0.5  # not quite a distribution
    place = torch.randint(5, (ROWS,), generator=generator)
    token = torch.randint(vocab, (ROWS,), generator=generator)
    token[3] = -1
    return logits.to(device, dtype), probs.to(device, dtype), place.to(device), token.to(device)


def reference(
    logits: Tensor, probs: Tensor, place: Tensor, token: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, p = logits.double().requires_grad_(), probs.double()[place]
    log_q = z.log_softmax(-1)
    text = -log_q.gather(-1, token.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    cross, accepted = -(p * log_q).sum(-1), torch.minimum(log_q.exp(), p).sum(-1)
    a, b, c = shares.double()
    loss = (a * text + b * cross + c * (1 - accepted)).sum()
    return text.detach(), cross.detach(), accepted.detach(), torch.autograd.grad(loss, z)[0]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("vocab", [1, 37, 2049])
def test_facts_and_slopes(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits, probs, place, token = inputs(device, vocab, dtype)
    shares = torch.rand(3, ROWS, generator=torch.Generator().manual_seed(1)).to(device)
    shares[0, 3] = 0.0  # it has no token
    shares[:, 5] = 0.0  # it does not count
    text, cross, accepted, slope = reference(logits, probs, place, token, shares)
    given = logits.clone()
    facts = kernel.row_facts(logits, probs, place, token)
    assert torch.equal(logits, given)
    # A loss is a difference of terms that are as large as the logits.
    atol = 1e-6 * given.abs().max().item()
    torch.testing.assert_close(facts.cross.double(), cross, rtol=1e-5, atol=atol)
    torch.testing.assert_close(facts.accepted.double(), accepted, rtol=1e-5, atol=atol)
    known = token >= 0
    torch.testing.assert_close(facts.text.double()[known], text[known], rtol=1e-5, atol=atol)
    assert torch.equal(facts.best, torch.stack([(row == row.max()).nonzero()[0, 0] for row in given]))
    out = kernel.slopes(logits, probs, place, token, facts, tuple(shares))
    assert out is logits and not out[5].any()
    torch.testing.assert_close(out.double(), slope, rtol=TOLERANCE[dtype], atol=4e-5)


def test_no_rows(device: torch.device) -> None:
    logits, probs, place, token = inputs(device, 37, torch.float32)
    facts = kernel.row_facts(logits[:0], probs, place[:0], token[:0])
    assert facts.best.shape == facts.cross.shape == (0,)
    none = torch.zeros(0, device=device)
    assert kernel.slopes(logits[:0], probs, place[:0], token[:0], facts, (none, none, none)).shape == (0, 37)
