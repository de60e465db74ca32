"""The kernels of losses against log_softmax in float64, gradients by autograd."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.slow

kernel = pytest.importorskip("draftwing.train.kernels.losses")

# One rounding of the result. Triton's interpreter cuts bfloat16 off instead of rounding it.
CUTS = os.environ.get("TRITON_INTERPRET") == "1"
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-7 if CUTS else 2**-8, torch.float16: 2**-10}
BLOCK_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6 if CUTS else 2**-7}
ROWS = 9


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


@pytest.mark.parametrize(
    ("vocab", "dtype", "shares_dtype"),
    [*((vocab, torch.float32, torch.float32) for vocab in (1, 37, 2048, 2049, 12288)),
     *((vocab, torch.bfloat16, torch.bfloat16) for vocab in (1, 2049)),
     (37, torch.float16, torch.bfloat16), (2049, torch.float16, torch.float32), (300, torch.float32, torch.bfloat16)],
)  # fmt: skip
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


def block_inputs(device: torch.device, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def block_reference(
    logits: Tensor, probs: Tensor, place: Tensor, token: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, p = logits.double().requires_grad_(), probs.double()[place]
    log_q = z.log_softmax(-1)
    text = -log_q.gather(-1, token.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    cross, accepted = -(p * log_q).sum(-1), torch.minimum(log_q.exp(), p).sum(-1)
    a, b, c = shares.double()
    loss = (a * text + b * cross + c * (1 - accepted)).sum()
    return text.detach(), cross.detach(), accepted.detach(), torch.autograd.grad(loss, z)[0]


@pytest.mark.parametrize("dtype", list(BLOCK_TOLERANCE))
@pytest.mark.parametrize("vocab", [1, 37, 2049])
def test_facts_and_slopes_of_blocks(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits, probs, place, token = block_inputs(device, vocab, dtype)
    shares = torch.rand(3, ROWS, generator=torch.Generator().manual_seed(1)).to(device)
    shares[0, 3] = 0.0  # it has no token
    shares[:, 5] = 0.0  # it does not count
    text, cross, accepted, slope = block_reference(logits, probs, place, token, shares)
    given = logits.clone()
    best, by_kl, by_text, by_tv, facts = kernel.row_facts(logits, probs, place, token)
    assert torch.equal(logits, given)
    # A loss is a difference of terms that are as large as the logits.
    atol = 1e-6 * given.abs().max().item()
    torch.testing.assert_close(by_kl.double(), cross, rtol=1e-5, atol=atol)
    torch.testing.assert_close(by_tv.double(), accepted, rtol=1e-5, atol=atol)
    known = token >= 0
    torch.testing.assert_close(by_text.double()[known], text[known], rtol=1e-5, atol=atol)
    assert torch.equal(best, torch.stack([(row == row.max()).nonzero()[0, 0] for row in given]))
    out = kernel.slopes(logits, probs, place, token, facts, tuple(shares))
    assert out is logits and not out[5].any()
    torch.testing.assert_close(out.double(), slope, rtol=BLOCK_TOLERANCE[dtype], atol=4e-5)


def test_no_rows_of_blocks(device: torch.device) -> None:
    logits, probs, place, token = block_inputs(device, 37, torch.float32)
    best, by_kl, *_, facts = kernel.row_facts(logits[:0], probs, place[:0], token[:0])
    assert best.shape == by_kl.shape == (0,)
    none = torch.zeros(0, device=device)
    assert kernel.slopes(logits[:0], probs, place[:0], token[:0], facts, (none, none, none)).shape == (0, 37)
