"""keep_mask against a plain Python filter over the sorted vocabulary."""

import math

import pytest
import torch
from torch import Tensor

from draftwing.ops.torch.filters import keep_mask


def expected_mask(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[set[int], float]:
    """Kept ids in float64, and how far the nearest decision was from falling the other way (relative)."""
    largest = max(logits)
    weight = [math.exp((x - largest) / temperature) for x in logits]
    kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1] if top_k > 0 else -math.inf
    kept = {i for i, x in enumerate(logits) if x >= kth}
    margin = 1.0
    if top_p < 1:
        total, mass, crossing = sum(weight[i] for i in kept), 0.0, math.inf
        for level in sorted({logits[i] for i in kept}, reverse=True):
            if mass >= top_p * total:
                break
            crossing = level
            mass += sum(weight[i] for i in kept if logits[i] == level)
            margin = min(margin, abs(mass / (top_p * total) - 1))
        kept = {i for i in kept if logits[i] >= crossing}
    if min_p > 0:
        margin = min(margin, *(abs(w / min_p - 1) for w in weight))
    return {i for i in kept if weight[i] >= min_p}, margin


def random_case(generator: torch.Generator, rows: int, vocab: int, coarse: bool) -> tuple[Tensor, ...]:
    def pick(choices: list[float]) -> Tensor:
        return torch.tensor(choices)[torch.randint(0, len(choices), (rows,), generator=generator)]

    logits = torch.randn(rows, vocab, generator=generator) * pick([0.1, 2.0, 10.0])[:, None]
    if coarse:
        logits = (logits * 4).round() / 4  # many ties
    logits[torch.rand(rows, vocab, generator=generator) < 0.05] = -math.inf
    logits[:, 0] = 0.0
    return (
        logits,
        pick([0.1, 0.7, 1.0, 3.0]),
        pick([-1, 0, 1, 2, 5, vocab // 2, vocab, vocab + 9]).long(),
        pick([1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]),
        pick([0.0, 0.01, 0.2, 1.0]),
    )


@pytest.mark.parametrize("vocab", [2, 37, 300])
@pytest.mark.parametrize("coarse", [False, True])
def test_equals_sorting(vocab: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(vocab)
    case = random_case(generator, 150, vocab, coarse)
    got = keep_mask(*case)
    checked = removed = 0
    for row, values in enumerate(zip(*(x.tolist() for x in case), strict=True)):
        want, margin = expected_mask(*values)
        if margin < 1e-5 and values[4] != 1.0:
            continue  # float32 may decide either way
        assert set(got[row].nonzero()[:, 0].tolist()) == want, values[1:]
        checked += 1
        removed += vocab - len(want)
    assert checked > 120 and removed > 80


@pytest.mark.parametrize("k", [1, 2, 50, 1024, 5000, 49_151])
def test_top_k_of_a_real_vocabulary(k: int) -> None:
    logits = torch.randn(2, 49_152, generator=torch.Generator().manual_seed(k)) * 4
    one = torch.ones(2)
    got = keep_mask(logits, one, torch.tensor([k, 0]), one, torch.zeros(2))
    smallest = logits[0].topk(k).values[-1]
    # The gap to the maximum may round two logits onto one value: nothing else may be kept beyond the k largest.
    gap = logits[0].max() - logits[0]
    assert torch.equal(got[0], gap <= logits[0].max() - smallest)
    assert k <= got[0].sum() <= k + 3
    assert got[1].all()


def test_nothing_is_removed_when_off() -> None:
    logits = torch.linspace(-1000, 0, 500)[None].repeat(2, 1)  # most tokens underflow to probability 0
    off = keep_mask(logits, torch.full((2,), 0.5), torch.tensor([0, -1]), torch.ones(2), torch.zeros(2))
    assert off.all()


def test_signed_zeros_tie() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0]])
    one = torch.ones(1)
    assert keep_mask(logits, one, torch.tensor([1]), one, torch.zeros(1)).tolist() == [[True, True, False]]


@pytest.mark.slow
@pytest.mark.further(vocab=[1000, 20_000])
@pytest.mark.parametrize("vocab", [1000, 1001, 20_000])
@pytest.mark.parametrize("threads", [1, 2])
def test_mask_does_not_depend_on_the_batch(vocab: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = random_case(torch.Generator().manual_seed(vocab), 9, vocab, coarse=False)
        together = keep_mask(*case)
        assert not together.all()
        for rows in ([0], [8], [7, 2, 5]):
            assert torch.equal(keep_mask(*(x[rows] for x in case)), together[rows])
    finally:
        torch.set_num_threads(before)


def test_rows_without_a_maximum_do_no_harm() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    good = keep_mask(logits, torch.ones(3), torch.full((3,), 7), torch.full((3,), 0.9), torch.zeros(3))
    logits[0, 5] = math.nan
    logits[2] = -math.inf
    got = keep_mask(logits, torch.ones(3), torch.full((3,), 7), torch.full((3,), 0.9), torch.zeros(3))
    assert torch.equal(got[1], good[1])
