"""How long prefills take, and how long they may be beside requests that decode."""

import random

import pytest

from draftwing.core import Chunk
from draftwing.sched.pace import (
    ALONE,
    BESIDE,
    CALM,
    CROWD,
    CROWDED,
    LEAST,
    LONG,
    MOST,
    PRESSED,
    SHARE,
    STALL,
    SWIFT,
    Pace,
)

SIZES = [60, 600, 200, 250, 500] * 20


def part(tokens: int, start: int = 0) -> list[Chunk]:
    return [Chunk(0, start, tokens, True)] if tokens else []


def learnt(base: float, slope: float, sizes: list[int], noise: float = 0.0) -> Pace:
    pace, rng = Pace(), random.Random(0)
    for tokens in sizes:
        pace.record_step(base * (1 + noise * rng.random()))
        pace.record(part(tokens), (base + slope * tokens) * (1 + noise * rng.uniform(-1, 1)))
    return pace


def test_times_lie_on_the_line_that_was_seen() -> None:
    pace = learnt(0.004, 2e-5, SIZES, noise=0.1)
    for tokens in (64, 300, 1000):
        assert pace.seconds(part(tokens)) == pytest.approx(0.004 + 2e-5 * tokens, rel=0.1)
    assert pace.seconds([]) == 0 == Pace().seconds(part(100))


def test_a_machine_that_becomes_slower_is_followed() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    for tokens in SIZES * 2:
        pace.record_step(0.01)
        pace.record(part(tokens), 0.01 + 5e-5 * tokens)
    assert pace.seconds(part(400)) == pytest.approx(0.03, rel=0.1)


def test_tokens_that_attend_to_many_others_take_longer() -> None:
    """As on a CPU, where prompts of 6,000 tokens go on beside short ones."""
    pace, rng, start = Pace(), random.Random(0), 0
    for step in range(400):
        length, at = (rng.randrange(5, 20), 0) if step % 8 == 0 else (16, start)
        start = (start + 16 * bool(at)) % 6000 if step else 16
        pace.record_step(0.008)
        pace.record(part(length, at), 0.008 + length * (0.85e-3 + 0.92e-6 * (at + length / 2)) * rng.uniform(0.8, 1.2))
    assert pace.price(0) == pytest.approx(0.85e-3, rel=0.3)
    assert pace.price(4000) == pytest.approx(0.85e-3 + 4000 * 0.92e-6, rel=0.15)
    assert pace.seconds([*part(20), *part(8, 4000)]) == pytest.approx(0.008 + 0.017 + 0.036, rel=0.15)


def test_what_contexts_cost_is_not_guessed_where_all_are_alike() -> None:
    pace, rng = Pace(), random.Random(0)
    for start in range(4000, 4800, 16):
        pace.record_step(0.008)
        pace.record(part(16, start), 0.008 + 16 * 0.0045 * rng.uniform(0.8, 1.2))
        assert 0.5 * 0.0045 < pace.price(0) < 1.2 * 0.0045


def test_a_prefill_is_short_beside_those_who_decode() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    most = pace.most([0.02], 1)
    assert pace.seconds(part(round(most / pace.price(0)))) == pytest.approx(STALL * 0.004, rel=0.02)
    assert pace.most([0.9 * most], 1) == 0.9 * most
    assert pace.most([1.03 * most], 1) == 1.03 * most  # no rest of a few tokens
    assert pace.most([9.0], 0) == pytest.approx(CALM - 0.004)


def test_where_steps_are_short_a_prefill_beside_them_is_not_too_short() -> None:
    assert learnt(0.01, 2e-5, SIZES).most([0.02] * 4, 4, False) == pytest.approx((STALL - 1) * 0.01)
    assert learnt(0.002, 2e-5, SIZES).most([0.02] * 4, 4, False) == pytest.approx(SWIFT - 0.002)


def test_alone_it_is_so_many_steps_long_and_never_too_short_for_what_each_takes() -> None:
    """Steps of quantised weights are short, and what each of their prefills takes at least is not."""
    assert learnt(0.01, 2e-5, SIZES).most([9.0], 0) == pytest.approx((ALONE - 1) * 0.01)
    assert learnt(0.001, 2e-5, SIZES).most([9.0], 0) == pytest.approx(CALM - 0.001)


def test_alone_it_is_worth_what_each_takes_at_least() -> None:
    """As with quantised weights, where the shortest prefill takes several times as long as a step."""
    pace = Pace()
    for tokens in SIZES:
        pace.record_step(0.0024)
        pace.record(part(tokens), 0.0104 + 2.2e-5 * tokens)
    tokens = pace.most([9.0], 0) / pace.price(0)
    assert 0.1 * 2.2e-5 * tokens > 0.0104  # of dense weights a part would be half as long


def test_alone_it_is_bounded_whatever_each_takes_at_least() -> None:
    pace = Pace()
    for tokens in SIZES:
        pace.record_step(0.003)
        pace.record(part(tokens), 0.05 + 2e-5 * tokens)
    assert pace.most([9.0], 0) == pytest.approx(MOST * ALONE * 0.003)  # a twentieth would allow 1 s


def test_of_long_prompts_it_is_shorter() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    one = 0.004  # as much again as the shortest one takes
    assert pace.most([1.1 * LONG * 0.004], 1) == pytest.approx(one) == pace.most([9.0] * 4, 1)
    assert pace.most([9.0, 0.5 * one], 1) == pytest.approx(one)  # a short one beside it takes of its part
    assert pace.most([9.0, 1.5 * one], 1) == pytest.approx(1.5 * one)
    for _ in range(40):
        pace.record_step(0.012)  # usual steps of many requests
    assert pace.most([9.0], 1) == pytest.approx(BESIDE * 0.012 - 0.004)


def test_on_a_slow_machine_short_prompts_are_not_cut_into_pieces() -> None:
    pace = learnt(0.004, 0.85e-3, [8, 12, 16, 20] * 20)
    assert pace.most([0.0136], 1) == pace.most([9.0, 0.0136], 1) == 0.0136  # 16 tokens
    assert pace.most([0.06], 1) == pytest.approx(LEAST * 0.85e-3)


def test_long_contexts_do_not_make_prefills_long() -> None:
    pace = Pace()
    for start in [*range(0, 16000, 1000)] * 4:
        pace.record_step(0.005)
        pace.record(part(1000, start), 0.005 + 2e-5 * 1000 * (1 + start / 16000))
    for context in (0, 8000, 15000):
        tokens = pace.most([1.0], 1) / pace.price(context)
        assert 2e-5 * tokens * (1 + context / 16000) == pytest.approx(0.005, rel=0.1)


def test_where_many_wait_it_goes_in_large_parts() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    assert pace.most([0.006] * 100, 1) == pytest.approx(0.6 / SHARE)
    assert pace.most([1.0] * 100, 1) == pytest.approx(100 * (STALL - 1) * 0.004 / SHARE)
    assert Pace().most([2.0, 7.0], 1) == 9.0


def test_of_many_short_prompts_as_many_are_done_at_once_as_few_decode() -> None:
    pace, each = learnt(0.004, 2e-5, SIZES), (STALL - 1) * 0.004
    assert pace.most([0.006] * 4, 1) == pytest.approx(0.024)
    assert pace.most([0.006] * 40, 1) == pytest.approx(CROWD)
    assert pace.most([0.006] * 10, 5 * CROWDED) == pytest.approx(2 * each)
    assert pace.most([0.006] * 10, 10 * CROWDED) == pytest.approx(each)
    assert pace.most([0.01] * 10, 1) == pytest.approx(10 * each / SHARE)  # none that fits in a part
    assert pace.most([0.006] * 10, 1, False) == pytest.approx(each)  # others' streams go on


def test_where_a_prefill_reads_more_than_a_step_it_is_longer() -> None:
    """A step reads few of a mixture's experts, a prefill all of them: 2 and 8 ms."""
    pace = Pace()
    for tokens in SIZES:
        pace.record_step(0.002)
        pace.record(part(tokens), 0.008 + 2e-5 * tokens)
    start = pace.seconds(part(1))
    assert start > 0.006 and pace.most([0.1], 1) == pytest.approx((STALL - 1) * start, rel=0.01)


def test_a_pause_of_the_machine_is_no_price() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    pace.record(part(300), 100.0)
    assert pace.price(0) < 2 * 2e-5


def test_after_a_prefill_a_step_is_no_longer_than_waits_are_in_any_case() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    for step in range(300):
        pace.longer(part(1000 if step % 10 == 0 else 0))  # more often than one in `RARE`
    assert pace.longer([]) == float("inf")
    assert pace.longer(part(1000)) == 0
    assert pace.longer(part(100)) == pytest.approx(2e-5 * 900, rel=0.01)
    for _ in range(300):
        pace.longer([])
    assert pace.longer(part(100)) == 0  # long waits have become rare


def test_nothing_is_longer_while_prompts_wait_all_the_time() -> None:
    pace = learnt(0.004, 2e-5, SIZES)
    for _ in range(PRESSED):
        pace.longer(part(1000), waiting=True)
    allowed = pace.longer(part(100), waiting=True), pace.longer(part(100)), pace.longer(part(100), waiting=True)
    assert allowed == (0.0, pytest.approx(2e-5 * 900, rel=0.01), pytest.approx(2e-5 * 900, rel=0.01))
