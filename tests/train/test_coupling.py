"""Noise that a text tells against noise that has drawn texts."""

from __future__ import annotations

import pytest
import torch

from draftwing.train.coupling import noise_of_text

DRAWS = 40_000


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.5])
def test_drafts_agree_with_a_text_as_often_as_with_the_noise_that_drew_it(temperature: float) -> None:
    draw = torch.Generator().manual_seed(2)
    target, drafter = (torch.randn(11, generator=draw, dtype=torch.float64) for _ in range(2))
    drafter = target + 0.7 * drafter
    ids = torch.tensor([0, 1, 2, 3, 5, 6, 8, 9, 10])  # that the drafter knows
    noise = -torch.rand(DRAWS, 11, generator=draw, dtype=torch.float64).log().neg().log()
    said = (target / temperature + noise).argmax(1)
    agree = (ids[(drafter[ids] / temperature + noise[:, ids]).argmax(1)] == said).double().mean()
    place, scaled = torch.arange(DRAWS), (target / temperature).expand(DRAWS, -1)
    told = noise_of_text(scaled, scaled.logsumexp(1), said, place % 7, place, torch.arange(11))
    assert torch.equal((scaled + told).argmax(1), said)
    some = noise_of_text(scaled[:, ids], scaled.logsumexp(1), said, place % 7, place, ids)
    torch.testing.assert_close(some, told[:, ids])
    found = (ids[(drafter[ids] / temperature + some).argmax(1)] == said).double().mean()
    assert float(found) == pytest.approx(float(agree), abs=5 * (0.5 / DRAWS) ** 0.5)
    alone = (ids[drafter[ids].argmax()] == said).double().mean()
    assert abs(alone - agree) > 0.05, "noise makes no difference here"
    # Over all texts it is noise as any other.
    assert float(told.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(told.std()) == pytest.approx(1.2825, abs=0.02)
