"""How long prefills take, and how long they may be while requests decode."""

from __future__ import annotations

import random

import numpy as np
import pytest

from draftwing.core import Chunk
from draftwing.sched.policy.cost import RECENT
from draftwing.sched.policy.prefill_budget import (
    CROWD,
    CROWD_GAP,
    LONG,
    PART,
    UNNOTICED_GAP,
    UNNOTICED_WAIT,
    PrefillBudget,
)

SIZES = [60, 600, 200, 250, 500] * 20


def part(tokens: int, start: int = 0) -> list[Chunk]:
    return [Chunk(0, start, tokens, True)] if tokens else []


def learnt(base: float, slope: float, sizes: list[int] = SIZES, noise: float = 0.0, step: float = 0.0) -> PrefillBudget:
    """step: seconds of those that decode, where they are not the shortest prefill's."""
    budget, rng = PrefillBudget(), random.Random(0)
    for tokens in sizes:
        budget.record_step((step or base) * (1 + noise * rng.random()))
        budget.record(part(tokens), (base + slope * tokens) * (1 + noise * rng.uniform(-1, 1)))
    return budget


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("base", "slope"), [(0.004, 2e-5), (0.0104, 2.2e-5), (0.006, 0.85e-3)])
def test_times_lie_on_the_line_that_was_seen(base: float, slope: float, noise: float) -> None:
    budget = learnt(base, slope, noise=noise)
    for tokens in (64, 300, 1000):
        assert budget.seconds(part(tokens)) == pytest.approx(base + slope * tokens, rel=0.02 + noise)
    assert budget.seconds([]) == 0 == PrefillBudget().seconds(part(100))


def test_a_machine_that_becomes_slower_is_followed() -> None:
    budget = learnt(0.004, 2e-5)
    for tokens in SIZES * 2:
        budget.record_step(0.01)
        budget.record(part(tokens), 0.01 + 5e-5 * tokens)
    assert budget.seconds(part(400)) == pytest.approx(0.03, rel=0.1)


def test_tokens_that_attend_to_many_others_take_longer() -> None:
    """As on a CPU, where prompts of 6,000 tokens go on with short ones."""
    budget, rng, start = PrefillBudget(), random.Random(0), 0
    for step in range(400):
        length, at = (rng.randrange(5, 20), 0) if step % 8 == 0 else (16, start)
        start = (start + 16 * bool(at)) % 6000 if step else 16
        took = 0.008 + length * (0.85e-3 + 0.92e-6 * (at + length / 2)) * rng.uniform(0.8, 1.2)
        budget.record_step(0.008)
        budget.record(part(length, at), took)
    assert budget.token_seconds(4000) == pytest.approx(0.85e-3 + 4000 * 0.92e-6, rel=0.2)
    assert budget.seconds([*part(20), *part(8, 4000)]) == pytest.approx(0.008 + 0.017 + 0.036, rel=0.2)


@pytest.mark.parametrize("sizes", [(128, 256), (512, 1000), (128, 1000)])
def test_keys_of_few_tokens_cost_what_those_of_many_do(sizes: tuple[int, ...]) -> None:
    """As on a GPU, whose blocks for few tokens leave the rest of it idle: short parts behind long contexts do not make
    others look dear, which would be cut shorter then."""
    budget, rng = PrefillBudget(at_once=512), random.Random(0)

    def took(tokens: int, start: int) -> float:
        return 0.005 + 2e-5 * tokens + 1.5e-9 * max(tokens, 512) * (start + tokens / 2)

    for _ in range(200):
        tokens, start = rng.choice(sizes), rng.randrange(16000)
        budget.record_step(0.005)
        budget.record(part(tokens, start), took(tokens, start))
    assert budget.token_seconds(12000) == pytest.approx(2e-5 + 12000 * 1.5e-9, rel=0.1)
    assert budget.seconds(part(200, 9000)) == pytest.approx(took(200, 9000), rel=0.05)
    assert budget.seconds(part(800, 9000)) == pytest.approx(took(800, 9000), rel=0.05)


def test_what_contexts_cost_is_not_guessed_where_all_are_alike() -> None:
    budget, rng = PrefillBudget(), random.Random(0)
    for start in range(4000, 4800, 16):
        budget.record_step(0.008)
        budget.record(part(16, start), 0.008 + 16 * 0.0045 * rng.uniform(0.8, 1.2))
        assert 0 < budget.token_seconds(0) <= budget.token_seconds(4400) < 1.3 * 0.0045


def test_a_pause_of_the_machine_is_no_price() -> None:
    budget = learnt(0.004, 2e-5)
    budget.record(part(300), 100.0)
    assert budget.token_seconds(0) < 2 * 2e-5


@pytest.mark.parametrize(("base", "step"), [(0.01, 0.01), (0.008, 0.002), (0.002, 0.002)])
def test_while_requests_decode_it_is_a_part(base: float, step: float) -> None:
    """A step reads few of a mixture's experts, a prefill all of them; and of short steps a part is not too short."""
    budget = learnt(base, 2e-5, step=step)
    longest = max(PART * base, UNNOTICED_GAP)
    assert budget.max_seconds([0.8 * longest] * 3, 3, False) == pytest.approx(longest - base, rel=0.15)
    assert budget.in_parts(round(1.2 * longest / 2e-5)) and not budget.in_parts(round(0.5 * (longest - base) / 2e-5))


def test_where_nobody_decodes_it_is_bounded() -> None:
    assert learnt(0.01, 2e-5).max_seconds([9.0], 0) == pytest.approx(CROWD * PART * 0.01, rel=0.1)
    assert learnt(0.001, 2e-5).max_seconds([9.0], 0) == pytest.approx(UNNOTICED_WAIT, rel=0.1)
    assert PrefillBudget().max_seconds([2.0, 7.0], 1) == 9.0, "nothing is known"


def test_of_long_prompts_it_is_shorter() -> None:
    budget, base = learnt(0.01, 2e-5), 0.01
    assert budget.max_seconds([1.1 * LONG * base], 1) == pytest.approx(base, rel=0.1)
    assert budget.max_seconds([9.0] * 4, 1) == budget.max_seconds([9.0], 1)
    assert budget.max_seconds([9.0, 1.5 * base], 1) == pytest.approx(1.5 * base, rel=0.1), "a short one with it"
    for _ in range(RECENT):
        budget.record_step(0.04)  # usual steps of many requests
    assert budget.max_seconds([9.0], 1) == pytest.approx(0.04 - base, rel=0.15)


def test_long_prompts_beside_rows_have_as_much_as_others() -> None:
    budget = learnt(0.005, 4e-5)
    some, long = ([one] * 2 for one in (0.02, 9.0))
    assert budget.max_seconds(long, 8) < budget.max_seconds(some, 8), "they take turns"
    for spared in (0.004, 0.0, -0.004):
        assert budget.max_seconds(long, 8, spared=spared) == pytest.approx(budget.max_seconds(some, 8, spared=spared))


def test_beside_rows_of_the_same_forward_gaps_stay_as_they_are() -> None:
    """The weights are read once, so that there is as much more time for tokens."""
    budget = learnt(0.005, 4e-5)
    for waiting in ([0.16] * 3, [0.005], [0.3] * 40):
        alone, mixed = (budget.max_seconds(waiting, 8, spared=spared) for spared in (0.0, budget.start))
        assert mixed - alone == pytest.approx(0.005, rel=0.1) or mixed >= sum(waiting)


@pytest.mark.parametrize("tokens", [256, 700, 1000])
def test_prefills_beside_trees_teach_prices(tokens: int) -> None:
    """Nodes cost what tokens do. What the shortest takes is known from others, as these are of about one length."""
    budget, rng = PrefillBudget(), random.Random(0)
    budget.record(part(30), 0.009)  # the first one, which loads kernels
    for _ in range(2 * RECENT):
        budget.record_step(0.004)
        length, nodes = tokens + rng.randrange(-20, 20), rng.choice((8, 32, 64))
        budget.record(part(length), (0.004 + 2e-5 * (length + nodes)) * rng.uniform(0.97, 1.03), nodes)
    assert budget.start == pytest.approx(0.004, rel=0.15)
    assert budget.token_seconds(0) == pytest.approx(2e-5, rel=0.15)


@pytest.mark.parametrize("first", [0.025, 0.06, 0.15])
def test_what_was_measured_before_the_first_request_stands_against_one_slow_prefill(first: float) -> None:
    """A prefill that loads kernels, as the first of its kind in operation, two long ones, and then those beside trees,
    of about one length: an 8B model on an H200 whose four requests have 15,800 tokens."""

    def seconds(tokens: int, start: int) -> float:
        return 0.0045 + 1.6e-5 * tokens + 1.2e-9 * tokens * (start + tokens / 2)

    measured = [(size, seconds(size, 0)) for size in (256, 384, 512, 640, 768, 1024)]
    budget, rng = PrefillBudget(256, measured), random.Random(0)
    budget.record(part(1200), first)
    for _ in range(30):
        budget.record_step(0.0045)
    for start in (0, 8192):
        budget.record(part(8000, start), seconds(8000, start))
    for _ in range(4):
        for start in range(0, 15_000, 1_000):
            tokens = 1008 - rng.randrange(10)
            budget.record(part(tokens, start), seconds(tokens, start) + 8 * 1.6e-5, 8)
    assert budget.start == pytest.approx(0.0045, rel=0.35)
    assert budget.token_seconds(0) == pytest.approx(1.6e-5, rel=0.2)
    assert budget.max_seconds([0.3] * 4, 4) < 1.3 * PART * 0.0045


def test_half_of_a_part_is_left_where_trees_take_long() -> None:
    budget = learnt(0.005, 4e-5)
    alone = budget.max_seconds([0.3] * 40, 8)
    assert budget.max_seconds([0.3] * 40, 8, spared=-1.0) == pytest.approx(alone / 2)
    assert budget.max_seconds([0.3] * 40, 8, spared=-0.1 * alone) == pytest.approx(0.9 * alone)


def test_long_contexts_do_not_make_prefills_long() -> None:
    budget = PrefillBudget()
    for start in [*range(0, 16000, 1000)] * 4:
        budget.record_step(0.005)
        budget.record(part(1000, start), 0.005 + 2e-5 * 1000 * (1 + start / 16000))
    for context in (0, 8000, 15000):
        tokens = budget.max_seconds([1.0], 1) / budget.token_seconds(context)
        assert 2e-5 * tokens * (1 + context / 16000) < 0.012


def test_where_many_wait_it_goes_in_large_parts() -> None:
    budget = learnt(0.004, 2e-5)
    each = max(PART * 0.004, UNNOTICED_GAP) - 0.004
    assert budget.max_seconds([0.006] * 100, 1, False) == pytest.approx(0.6 / CROWD)
    assert budget.max_seconds([1.0] * 100, 1) == pytest.approx(100 * each / CROWD, rel=0.1)
    assert budget.max_seconds([0.006] * 40, 1) == pytest.approx(max(CROWD_GAP, 0.24 / CROWD)), "one client's crowd"
    assert budget.max_seconds([0.006] * 10, 5 * CROWD) == pytest.approx(2 * each, rel=0.1)
    assert budget.max_seconds([0.006] * 10, 1, False) == pytest.approx(each, rel=0.1), "others' streams go on"


def test_after_a_prefill_a_step_is_no_longer_than_waits_are_in_any_case() -> None:
    budget = learnt(0.004, 2e-5)
    for step in range(300):
        budget.plan_step(part(1000 if step % 8 == 0 else 0), False)  # more often than two in `RECENT`
    assert budget.latency_slack([]) == float("inf")
    assert budget.latency_slack(part(1000)) == 0
    for _ in range(3):
        assert budget.latency_slack(part(100)) == pytest.approx(2e-5 * 900, rel=0.05), "who asks changes nothing"
    for _ in range(300):
        budget.plan_step([], False)
    assert budget.latency_slack(part(100)) == 0, "long waits have become rare"


def test_steps_with_prompts_beside_them_have_no_slack_while_they_are_few() -> None:
    budget = learnt(0.004, 2e-5)
    for step in range(300):
        budget.plan_step([], False, mixed=step % 10 == 0)
    assert budget.latency_slack([], mixed=True) == 0 and budget.latency_slack([]) == float("inf")
    for step in range(300):
        budget.plan_step([], False, mixed=step % 4 > 0)
    assert budget.latency_slack([], mixed=True) == float("inf"), "there drafts are worth more than what each gap gains"


def test_there_is_no_slack_while_prompts_wait_all_the_time() -> None:
    budget = learnt(0.004, 2e-5)
    for number in range(RECENT):
        assert budget.crowded_out == (number > RECENT // 4)
        budget.plan_step(part(1000), waiting=True)
    assert budget.latency_slack(part(100)) == 0 == budget.latency_slack([])
    budget.plan_step(part(1000), waiting=False)
    assert budget.latency_slack(part(100)) > 0
    for _ in range(RECENT):
        budget.plan_step([], waiting=True)
    assert not budget.crowded_out, "where none is prefilled they wait for something else"
    for _ in range(RECENT):
        budget.plan_step(part(1000), waiting=True)
    budget.rest()
    assert not budget.crowded_out


def test_gaps_with_long_prompts_are_those_of_one_request_more() -> None:
    """Small requests that decode with one prompt of 6,000 tokens, on a CPU, against the same with one more."""
    from served import LongPrompts  # a simulation: `benchmarks/sim`

    late = []
    for small, heavy in ((5, 1), (6, 0)):
        load = LongPrompts(small, heavy, 0.1)
        load.run(15.0)
        late.append(np.quantile(load.small, 0.99))
    assert late[0] < 1.6 * late[1]
