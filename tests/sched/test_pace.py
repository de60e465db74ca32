"""How long prefills take, and how long they may be beside requests that decode."""

import random

import pytest

from draftwing.sched.pace import EACH, LEAST, SHARE, STALL, Pace

SIZES = [60, 600, 200, 250, 500] * 20


def learnt(base: float, slope: float, sizes: list[int], noise: float = 0.0) -> Pace:
    pace, rng = Pace(), random.Random(0)
    for tokens in sizes:
        pace.record_step(base * (1 + noise * rng.random()))
        pace.record(tokens, (base + slope * tokens) * (1 + noise * rng.uniform(-1, 1)))
    return pace


def test_times_lie_on_the_line_that_was_seen() -> None:
    pace = learnt(0.004, 2e-5, SIZES, noise=0.1)
    for tokens in (64, 300, 1000):
        assert pace.seconds(tokens) == pytest.approx(0.004 + 2e-5 * tokens, rel=0.1)
    assert pace.seconds(0) == 0 == Pace().seconds(100)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    for tokens in SIZES:
        pace.record_step(0.01)
        pace.record(tokens, 0.01 + 5e-5 * tokens)
    assert pace.seconds(400) == pytest.approx(0.03, rel=0.05)


def test_a_prefill_is_short_beside_those_who_decode() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    part = pace.most([2000])
    assert pace.seconds(part) == pytest.approx(STALL * 0.004, rel=0.02) and LEAST < part < 2000
    assert pace.most([part - 100]) == part - 100
    assert pace.most([part + 15]) == part + 15  # no rest of a few tokens
    assert learnt(1e-4, 4e-4, SIZES).most([400] * 10) == 4000 // SHARE  # a slow machine
    assert learnt(1e-4, 4e-4, SIZES).most([300]) == LEAST


def test_long_contexts_do_not_make_prefills_long() -> None:
    """Their tokens take longer the later they are."""
    pace = Pace()
    for start in [*range(0, 16000, 1000)] * 4:
        pace.record_step(0.005)
        pace.record(1000, 0.005 + 2e-5 * 1000 * (1 + start / 16000))
    assert pace.seconds(pace.most([2000])) < 1.5 * STALL * 0.005


def test_where_many_wait_it_goes_in_large_parts_but_not_for_a_few_long_prompts() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    assert pace.most([300] * 100) == 30_000 // SHARE
    assert pace.most([6000] * 4) == pace.most([600]) < 4 * EACH
    assert Pace().most([100_000, 7]) == 100_007


def test_after_a_prefill_a_step_is_no_longer_than_waits_are_in_any_case() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    for step in range(300):
        pace.longer(1000 if step % 10 == 0 else 0)  # more often than one in `RARE`
    assert pace.longer(0) == float("inf")
    assert pace.longer(1000) == 0
    assert pace.longer(100) == pytest.approx(2e-5 * 900, rel=0.01)
    for _ in range(300):
        pace.longer(0)
    assert pace.longer(100) == 0  # long waits have become rare
