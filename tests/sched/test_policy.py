"""What the policy chooses, on machines and texts that are made up: expected tokens per second are known here."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from world import MACHINES, TREE, World

from draftwing.core import (
    LOOKUP_ALONE,
    MARK_ONE,
    MARK_SOURCE,
    MARK_SURVIVAL,
    MAX_CONFIDENCE,
    PLAIN,
    Plan,
    StepResult,
    TreeShape,
)
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.choice import ShapeChoice
from draftwing.sched.gains import gains_by_row
from draftwing.sched.pace import Pace
from draftwing.sched.policy import (
    FixedShape,
    Load,
    MostTokens,
    chain_menu,
    half_menu,
    match_menu,
    tree_menu,
)
from draftwing.sched.prices import PricedSteps, Prices
from draftwing.sched.req import Req


@pytest.mark.slow
@pytest.mark.further(batch=64, hit=[0.05, 0.5])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("batch", [1, 4, 16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hit", [0.05, 0.5, 0.95])
def test_never_slower_than_none_and_near_the_best(machine: str, batch: int, hit: float) -> None:
    menu = tree_menu(TREE)
    world = MACHINES[machine](menu)
    policy = MostTokens(menu, world.prices())
    hits = [hit] * batch
    world.run(policy, hits, 60)
    rate, _ = world.run(policy, hits, 1000)
    possible = [shape for shape in menu if batch * shape.queries <= policy.MOST or not shape.depth]
    assert rate > 0.985 * world.rate(PLAIN, hits)
    assert rate > 0.97 * max(world.rate(shape, hits) for shape in possible)


def settle(
    make: Callable[[Sequence[TreeShape]], World],
    before: Sequence[float],
    after: Sequence[float],
    lag: int,
    steps: int = 400,
) -> int:
    """Steps until most of ten choices in a row are within 3% of the best, after the load has changed. steps: before."""
    menu = tree_menu(TREE)
    world = make(menu)
    policy = MostTokens(menu, world.prices())
    world.run(policy, before, steps, lag)
    _, chosen = world.run(policy, after, 200, lag)
    best = max(world.rate(shape, after) for shape in menu if len(after) * shape.queries <= policy.MOST)
    good = [world.rate(shape, after) > 0.97 * best for shape in chosen]
    return next(i for i in range(len(good) - 10) if sum(good[i : i + 10]) >= 8)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("machine", ["gpu", "small machine"])
def test_a_change_is_followed_within_50_steps(machine: str, lag: int) -> None:
    make = MACHINES[machine]
    assert settle(make, [0.8], [0.8] * 64, lag) <= 50
    assert settle(make, [0.8] * 64, [0.8], lag) <= 50
    for batch in (1, 8):
        assert settle(make, [0.95] * batch, [0.1] * batch, lag) <= 50
        assert settle(make, [0.1] * batch, [0.95] * batch, lag) <= 50


@pytest.mark.parametrize("lag", [0, 1])
def test_one_row_on_a_small_machine_is_followed_whenever_it_changes(lag: int) -> None:
    """Here the allowance is for a try in some 45 steps: one that promises more is followed as soon as it may be."""
    make = MACHINES["small machine"]
    took = sorted(settle(make, [0.1], [0.95], lag, steps) for steps in range(350, 414, 4))
    assert took[len(took) // 2] <= 35 and took[-1] <= 2 * MostTokens.REST + 5


def test_an_option_whose_result_is_on_its_way_is_not_tried_again() -> None:
    """With results a step late, as where steps overlap; what comes of a try is known as that."""
    menu = tree_menu(TREE)
    world = MACHINES["small machine"](menu)
    policy = MostTokens(menu, world.prices())
    hits = [0.05] * 8
    world.run(policy, hits, 200, 1)
    alone, learn = list[bool](), policy._gains.learn

    def learnt(*given: Any) -> None:
        alone.append(given[-1])
        learn(*given)

    policy._gains.learn = learnt
    _, chosen = world.run(policy, hits, 2000, 1)
    tries = [shape != PLAIN for shape in chosen]
    assert 10 < sum(tries) == len(alone) and all(alone)
    assert not any(shape == after for shape, after in pairwise(chosen) if shape != PLAIN)


def test_a_try_that_never_ran_is_forgotten() -> None:
    """All of its requests may have been retracted. Drafts are known to be bad here, so that each is a try."""
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.05] * 4
    world = World(menu, 2.0, 0.5, 0.6)
    policy, load = MostTokens(menu, world.prices((4,))), Load([MAX_CONFIDENCE] * 4)
    for _ in range(50):
        policy.record(menu[0], load, world.step(menu[0], hits))
    tries = 0
    for _ in range(1000):
        shape = policy.choose(load)
        if shape == PLAIN:
            policy.record(shape, load, world.step(shape, hits))
        else:
            assert policy._kept.option in policy._tries and policy._best_before == policy._plain
            tries += 1
    assert 4 <= tries < 50


def test_what_was_not_measured_is_tried_for_little() -> None:
    menu = tree_menu(TREE)
    world = MACHINES["gpu"](menu)
    prices = Prices(menu, False)
    prices.measured(PLAIN, 1, 0, world.seconds(PLAIN, 1))
    policy = MostTokens(menu, prices)
    hits = [0.9] * 2
    world.run(policy, hits, 400)
    rate, _ = world.run(policy, hits, 200)
    assert rate > 0.95 * max(world.rate(shape, hits) for shape in menu)


def test_what_no_drafts_cost_is_found_out() -> None:
    """Although drafting is chosen, because a guess from what levels cost here says that they cost much more."""
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.95] * 2
    world = World(menu, 2.0, 0.01, 4.0)
    prices = Prices(menu, False)
    prices.measured(menu[0], 2, 0, world.seconds(menu[0], 2))
    guess = prices.seconds(PLAIN, 2, 0)
    assert guess is not None and guess > 1.8 * world.seconds(PLAIN, 2)
    assert world.rate(menu[0], hits) > MostTokens.MARGIN * 2 / guess
    policy = MostTokens(menu, prices)
    _, chosen = world.run(policy, hits, 200)
    assert chosen[:3] == [menu[0]] * 3
    _, chosen = world.run(policy, hits, 200)
    assert chosen.count(PLAIN) > 190


@pytest.mark.parametrize(("machine", "hit", "by"), [("small machine", 0.05, 1.8), ("gpu", 0.8, 1.4)])
def test_a_machine_that_was_busy_when_it_was_measured(machine: str, hit: float, by: float) -> None:
    """The best option, to draft nothing or something, looks dearer than it is, so that it would never run."""
    menu = tree_menu(TREE)
    world, hits = MACHINES[machine](menu), [hit] * 8
    best = max(menu, key=lambda shape: world.rate(shape, hits))
    assert (best == PLAIN) == (machine == "small machine")
    prices = world.prices((8,))
    prices.measured(best, 8, 0, by * world.seconds(best, 8))
    policy = MostTokens(menu, prices)
    world.run(policy, hits, 2000)
    rate, _ = world.run(policy, hits, 300)
    assert rate > 0.97 * world.rate(best, hits)


@pytest.mark.slow
@pytest.mark.further(which="the best")
@pytest.mark.further(by=2.5)
@pytest.mark.parametrize("by", [2.5, 5.0])
@pytest.mark.parametrize("which", ["the best", "all trees"])
def test_trees_that_were_measured_far_too_slow_are_found_out(by: float, which: str) -> None:
    """By tries that are so rare that they would not matter, were it true."""
    menu, hits = tree_menu(TREE), [0.8] * 4
    world = MACHINES["gpu"](menu)
    best, prices = max(menu, key=lambda shape: world.rate(shape, hits)), world.prices()
    for shape in (best,) if which == "the best" else menu[:-1]:
        for size in (1, 4, 16, 64):
            prices.measured(shape, size, 0, by * world.seconds(shape, size))
    policy = MostTokens(menu, prices)
    world.run(policy, hits, round(8000 * by))
    rate, _ = world.run(policy, hits, 1000)
    assert rate > 0.97 * world.rate(best, hits)


def test_what_never_pays_is_hardly_tried() -> None:
    menu, hits = tree_menu(TREE), [0.8] * 4
    world = World(menu, 4.0, 3.0, 20.0)
    policy = MostTokens(menu, world.prices())
    rate, _ = world.run(policy, hits, 20_000)
    assert rate > 0.98 * world.rate(PLAIN, hits)


@pytest.mark.slow
def test_what_never_pays_with_any_number_of_rows_is_hardly_tried() -> None:
    """Tries with each number of rows do not add up."""
    menu = (*tree_menu(TreeShape(7, 4, 16))[:-1], *tree_menu(TREE))
    world = World(menu, 4.0, 0.2, 4.0)
    policy, rows = MostTokens(menu, world.prices((1, 2, 4, 8, 16, 32, 64))), (1, 2, 4, 8, 16, 32, 64)
    took = ideal = 0.0
    for turn in range(30):
        for batch in rows:
            hits = [0.8] * batch
            rate, _ = world.run(policy, hits, 150)
            if turn > 9:
                took, ideal = took + batch * 150 / rate, ideal + 150 * world.seconds(PLAIN, batch)
    assert ideal > 0.985 * took


@pytest.mark.parametrize(("gain", "drafts"), [(1.02, False), (1.06, True)])
def test_what_drafting_gains_less_than_the_host_loses(gain: float, drafts: bool) -> None:
    """Drafts that are better by 2% are not worth the work of choosing them."""
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.8] * 4

    class Near(World):
        def seconds(self, shape: TreeShape, batch: int) -> float:
            return 1e-3 * self.tokens(shape, hits) / (gain if shape.depth else 1.0)

    world = Near(menu, 0.0, 0.0, 0.0)
    policy = MostTokens(menu, world.prices((4,)))
    _, chosen = world.run(policy, hits, 1000)
    assert (chosen.count(PLAIN) < 500) == drafts


def test_where_nothing_is_worth_drafting_it_is_rarely_looked_at() -> None:
    """Few tries and few looks; a request more, or one that ends, changes that for a step and not for good."""
    menu = tree_menu(TREE)
    world = MACHINES["small machine"](menu)
    policy = MostTokens(menu, world.prices())
    hits = [0.05] * 8
    world.run(policy, hits, 200)
    looks = count_looks(policy)
    rate, chosen = world.run(policy, hits, 600)
    assert chosen.count(PLAIN) > 575 and len(looks) < 60
    assert rate > 0.99 * world.rate(PLAIN, hits)
    looks.clear()
    for turn in range(60):
        world.run(policy, hits[: 7 + turn % 2], 10)
    assert len(looks) < 110


def test_drafts_that_go_on_are_looked_at_now_and_then() -> None:
    """To look costs the host time in each step."""
    menu, hits = tree_menu(TREE), [0.9] * 4
    world = MACHINES["gpu"](menu)
    policy = MostTokens(menu, world.prices())
    world.run(policy, hits, 200)
    looks = count_looks(policy)
    _, chosen = world.run(policy, hits, 200)
    assert PLAIN not in chosen and len(looks) < 100


def count_looks(policy: MostTokens) -> list[Load]:
    """What it looks at from now on."""
    looks, look = [], policy._look

    def counted(load: Load) -> object:
        looks.append(load)
        return look(load)

    policy._look = counted
    return looks


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("batch", [1, 8])
def test_it_goes_on_drafting_within_50_steps_after_a_long_rest(batch: int, lag: int) -> None:
    menu = chain_menu(TreeShape(4, 2, 8))
    world = MACHINES["small machine"](menu)
    policy = MostTokens(menu, world.prices())
    world.run(policy, [0.05] * batch, 1000, lag)
    _, chosen = world.run(policy, [0.99] * batch, 100, lag)
    best = max(world.rate(shape, [0.99] * batch) for shape in menu)
    good = [world.rate(shape, [0.99] * batch) > 0.95 * best for shape in chosen]
    assert sum(good[50:]) > 40


def resting(rows: int = 8) -> tuple[World, MostTokens, Load]:
    """A policy that drafts nothing for these rows, and does not look again for a while."""
    menu = tree_menu(TREE)
    world = MACHINES["small machine"](menu)
    policy, load = MostTokens(menu, world.prices()), Load([MAX_CONFIDENCE] * rows)
    world.run(policy, [0.05] * rows, 300)
    while policy._kept.until < policy._steps + 20:
        shape = policy.choose(load)
        policy.record(shape, load, world.step(shape, [0.05] * rows))
    return world, policy, load


def test_new_requests_end_a_rest() -> None:
    """As many as there were, of a drafter whose confidence is always the same."""
    _, policy, load = resting()
    looks = count_looks(policy)
    for _ in range(8):
        policy.choose(load)
    assert not looks
    policy.choose(load._replace(newest=3, longer=0.0))  # right behind their prefill
    for _ in range(8):
        policy.choose(load._replace(newest=3))
    assert len(looks) >= 3


def test_a_load_tells_its_newest_request() -> None:
    rows = [
        SimpleNamespace(confidence=1, may_draft=True, slow=False, skipped=False, special=False, kv=5, admission=number)
        for number in (4, 9, 7)
    ]
    choice = ShapeChoice(FixedShape(TREE), Pace(), draws_alike=False)
    assert choice.load(rows).newest == 9 and choice.load([]).newest == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_what_is_expected_of_matches_comes(lag: int) -> None:
    """Matches begin and end between the plan of a step and its result, and the newest confidences are of the last."""
    menu, rng = match_menu(TreeShape(6, 1, 7)), random.Random(3)
    world = World(menu, 4.0, 0.001, 0.0)
    policy = MostTokens(menu, world.prices((8,)), sees_predictions=True, least=0)
    choice = ShapeChoice(policy, Pace(), draws_alike=False)
    reqs = [Req(GenerationRequest(str(row), [1], SamplingParams()), 0, 100, frozenset()) for row in range(8)]
    rows, flying = np.arange(8), deque[tuple[Plan, StepResult]]()
    matches = [[False] * 8]  # of each step
    for _ in range(1500):
        matches.append([rng.random() < (0.7 if match else 0.3) for match in matches[-1]])
    expected = found = 0.0
    for number in range(1500):
        shape, counts = choice.choose(reqs, (), False), Counter(req.confidence for req in reqs if req.confidence)
        choice.planned(number, reqs, False)
        step = world.step(shape, [0.98 if match else 0.0 for match in matches[number]])
        if number > 300 and shape.depth:
            expected += policy._gains.expected(menu.index(shape), counts)
            found += sum(int(step.count[row]) - 1 for row in rows if reqs[row].confidence)
        flying.append((Plan(number, "tree", rows, rows, shape, 9, (), (), ()), step))
        if len(flying) > lag:
            plan, result = flying.popleft()
            choice.record(plan, reqs, result)
            for req, match in zip(reqs, matches[plan.step + 1], strict=True):
                req.confidence = 5 if match else 0
    assert expected == pytest.approx(found, rel=0.03)


def test_what_is_explained_is_what_runs() -> None:
    """Not what would be chosen if it was looked at now, nor what is not worth beginning."""
    world, policy, load = resting(1)
    menu = policy.menu
    one = menu[-2]
    for _ in range(60):
        policy.record(one, load, world.step(one, [0.99]))
    best = max(menu, key=lambda shape: next(row["rate"] for row in policy.explain(load) if row["shape"] == shape))
    chosen = [row["shape"] for row in policy.explain(load) if row["chosen"]]
    assert best != PLAIN and chosen == [PLAIN] == [policy.choose(load)]
    policy.record(one, load, replace(world.step(one, [0.99]), catching_up=1.0))
    other = load._replace(newest=1)  # it will look again
    assert [row["shape"] for row in policy.explain(other) if row["chosen"]] == [PLAIN] == [policy.choose(other)]
    nothing = Load([0])
    assert [row["shape"] for row in policy.explain(nothing) if row["chosen"]] == [policy.choose(nothing)]


def test_a_price_is_learnt_where_nothing_can_be_proposed() -> None:
    world, policy, _ = resting()
    nothing, slower = Load([0] * 8), 1.5 * world.seconds(PLAIN, 8)
    priced = PricedSteps()
    for number in range(200):
        step = world.step(policy.choose(nothing), [0.0] * 8)
        plan = Plan(number, "tree", np.zeros(8, np.int64), np.zeros(8, np.int64), PLAIN, 9, (), (), ())
        policy.record(PLAIN, nothing, replace(step, seconds=slower), priced.take(plan))
    assert policy.prices.seconds(PLAIN, 8, 0) == pytest.approx(slower, rel=0.05)


def test_to_begin_costs_what_catching_up_took_before_drafts() -> None:
    """Not what it took where a row was released, or far behind; and many rows take longer than few."""
    world, policy, load = resting()
    tree, few = policy.menu[0], Load([MAX_CONFIDENCE])
    for rows, late in ((load, 0.004), (few, 0.001)):
        hits = [0.05] * len(rows.confidences)
        policy.record(tree, rows, replace(world.step(tree, hits), catching_up=late))
        policy.record(PLAIN, rows, replace(world.step(PLAIN, hits), catching_up=1e-5))
    assert (policy._entry(load), policy._entry(few)) == (0.004, 0.001)
    assert policy._entry(Load([MAX_CONFIDENCE] * 64)) == 0.001


def test_to_catch_up_costs_launches_or_positions() -> None:
    """A large draft model computes for longer than it is launched: what a short pass took is not what a long one will,
    nor what a position took in a short one."""
    world, policy, load = resting()
    tree, step = policy.menu[0], world.step(policy.menu[0], [0.05] * 8)
    for positions in (40, 8192):
        late = 0.01 + 0.2 * positions / 8192
        policy.record(tree, load._replace(positions=positions), replace(step, catching_up=late))
    assert policy._entry(load._replace(positions=60)) == pytest.approx(0.011, rel=0.1)
    for passes in (1, 4, 8):
        found = policy._entry(load._replace(passes=passes, positions=passes * 8192))
        assert found == pytest.approx(passes * 0.21, rel=0.05)


def test_what_it_costs_to_begin_may_grow() -> None:
    """The least that was seen is no bound for good: a machine may become slower."""
    world, policy, load = resting()
    step = world.step(policy.menu[0], [0.05] * 8)
    for late, times in ((0.001, 1), (0.002, 100)):
        for _ in range(times):
            policy.record(policy.menu[0], load, replace(step, catching_up=late))
    assert policy._entry(load) == 0.002


def test_a_promise_of_more_ends_a_rest() -> None:
    """Rows of a lookup that found nothing, and then something long."""
    menu = match_menu(TreeShape(11, 10, 12))
    world = World(menu, 4.0, 0.3, 0.0)
    policy = MostTokens(menu, world.prices(), sees_predictions=True, least=0)
    for _ in range(100):
        for confidence, hit in ((20, 0.99), (1, 0.02)):
            load = Load([confidence])
            policy.record(menu[0], load, world.step(menu[0], [hit]))
    for _ in range(100):
        shape = policy.choose(Load([1]))
        policy.record(shape, Load([1]), world.step(shape, [0.02]))
    assert policy.choose(Load([1])) == PLAIN and policy.choose(Load([20])) != PLAIN


def test_to_begin_costs_a_step_or_two() -> None:
    """The drafter has to catch up first: what brings hardly more is then not begun, and tried less often."""
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.05] * 4
    tries = []
    for catching_up in (0.0, 0.004):
        world = World(menu, 2.0, 0.5, 0.6)
        policy = MostTokens(menu, world.prices((4,)))
        load, before, tried = Load([MAX_CONFIDENCE] * 4), PLAIN, 0
        for _ in range(2000):
            shape = policy.choose(load)
            late = catching_up if shape.depth and before == PLAIN else 0.0
            step = world.step(shape, hits)
            policy.record(shape, load, replace(step, seconds=step.seconds + late, catching_up=late))
            before, tried = shape, tried + (shape != PLAIN)
        tries.append(tried)
        price = next(row["price_ms"] for row in policy.explain(load) if row["shape"] == menu[0])
        assert price == pytest.approx(1e3 * world.seconds(menu[0], 4), rel=0.1), "what it catches up with is no price"
    assert tries[1] < 0.7 * tries[0]


def test_drafts_that_prompts_interrupt_pay_for_each_time_that_they_begin() -> None:
    """Behind each second step comes a prefill, and a step behind it has no time for drafts: the drafter catches up for
    every step that drafts. Where nobody comes any more these are chosen again."""
    menu, hits, a_pass = (TreeShape(1, 1, 2), PLAIN), [0.7] * 16, 0.004
    world = MACHINES["gpu"](menu)
    policy = MostTokens(menu, world.prices((16,)))
    load, rates = Load([MAX_CONFIDENCE] * 16), list[float]()
    for hurry in (True, False):
        tokens = seconds = 0.0
        before = PLAIN
        for number in range(800):
            now = load._replace(longer=0.0) if hurry and number % 2 else load
            shape = policy.choose(now)
            late = a_pass if shape.depth and before == PLAIN else 0.0
            step = world.step(shape, hits)
            policy.record(shape, now, replace(step, seconds=step.seconds + late, catching_up=late))
            tokens, seconds, before = tokens + world.tokens(shape, hits), seconds + step.seconds + late, shape
        rates.append(tokens / seconds / world.rate(PLAIN, hits))
    assert rates[0] > 0.97 and rates[1] > 0.93 * world.rate(menu[0], hits) / world.rate(PLAIN, hits)


def test_behind_a_prefill_drafts_begin_only_where_there_is_time_to_catch_up() -> None:
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.9] * 16
    world = MACHINES["gpu"](menu)
    policy, load = MostTokens(menu, world.prices((16,))), Load([MAX_CONFIDENCE] * 16)
    late = replace(world.step(menu[0], hits), seconds=world.seconds(menu[0], 16) + 0.002, catching_up=0.002)
    for _ in range(40):
        policy.record(menu[0], load, late)
    room = 1.1 * world.seconds(menu[0], 16) - world.seconds(PLAIN, 16)
    assert policy.choose(load._replace(longer=room)) == PLAIN
    assert policy.choose(load._replace(longer=room + 0.002)) == menu[0]
    assert policy.choose(load._replace(longer=room)) == menu[0], "it has caught up"


@pytest.mark.parametrize("rows", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_a_drafter_that_is_far_behind_is_tried_seldom_but_tried(rows: int) -> None:
    """Each pass that it needs costs what one took: it is not drawn into drafts that bring nothing, and begins what
    brings much."""
    menu = (TreeShape(2, 1, 3), PLAIN)
    world = World(menu, 15.0, 0.02, 0.1)
    policy = MostTokens(menu, world.prices((rows,)))
    a_pass, share = 0.02, {}
    for hit in (0.02, 0.98):
        seconds = tokens = rest = 0
        for _ in range(2000):
            load = Load([MAX_CONFIDENCE] * rows, passes=1 + -(-rest * rows // 8192))
            shape = policy.choose(load)
            late = a_pass * load.passes if shape.depth and rest else 0.0
            rest = 0 if shape.depth else min(rest + 1, 512)
            step = world.step(shape, [hit] * rows)
            policy.record(shape, load, replace(step, seconds=step.seconds + late, catching_up=late))
            seconds, tokens = seconds + step.seconds + late, tokens + step.count.sum()
        share[hit] = tokens / seconds / world.rate(PLAIN, [hit] * rows)
    assert share[0.02] > 0.98 and share[0.98] > 1.2


def test_requests_that_cannot_be_drafted_for() -> None:
    menu = tree_menu(TREE)
    policy = MostTokens(menu, World(menu, 4.0, 0.01, 0.1).prices())
    assert policy.choose(Load([0, 0, 0])) == PLAIN
    # One of many: the batch would pay for it.
    world = World(menu, 4.0, 0.5, 0.6)
    policy = MostTokens(menu, world.prices())
    found = [policy.choose(Load([MAX_CONFIDENCE] + [0] * 63)) for _ in range(400)]
    assert found.count(PLAIN) >= 397, "a try could find out nothing but prices"


def test_confidences_tell_steps_apart() -> None:
    menu = match_menu(TreeShape(11, 10, 12))
    world = World(menu, 4.0, 0.3, 0.0)
    policy = MostTokens(menu, world.prices(), sees_predictions=True, least=0)
    for turn in range(300):
        good = turn % 2 == 0
        load = Load([20 if good else 3])
        shape = policy.choose(load)
        if shape.depth:
            policy.record(shape, load, world.step(shape, [0.99 if good else 0.05]))
    found: dict[int, list[TreeShape]] = {3: [], 20: []}
    for turn in range(100):
        confidence, hit = [(3, 0.05), (20, 0.99)][turn % 2]
        shape = policy.choose(Load([confidence]))
        policy.record(shape, Load([confidence]), world.step(shape, [hit]))
        found[confidence].append(shape)
    assert found[3].count(PLAIN) > 40 and found[20].count(PLAIN) == 0


def test_what_a_lookup_finds_says_nothing_of_the_model() -> None:
    """A pair whose lookup is always wrong where it has little to go by, and whose model is good."""
    both, alone = TreeShape(4, 1, 5), TreeShape(8, 1, 9, by=LOOKUP_ALONE)
    menu = (both, alone, PLAIN)
    world = World(menu, 4.0, 0.1, 0.2)
    policy = MostTokens(menu, world.prices(), sees_predictions=True, least=1)
    load = Load([3])
    for _ in range(40):
        policy.record(alone, load, world.step(alone, [0.0]))
    assert policy.choose(load) == both
    gain = {row["shape"]: row["gain"] for row in policy.explain(load)}
    assert gain[alone] < 0.05 and gain[both] > 1


def test_promises_that_are_not_kept_count_less() -> None:
    """Estimates of single nodes that are too high, as those of a lookup were on text that it does not know."""
    menu = match_menu(TREE)
    world = World(menu, 4.0, 0.02, 0.0)
    policy = MostTokens(menu, world.prices(), least=1)
    load = Load([MAX_CONFIDENCE] * 8)
    for _ in range(60):
        step = world.step(menu[0], [0.9] * 8)
        policy.record(menu[0], load, replace(step, count=np.ones(8, np.int64)))
    promised = {one["shape"]: one["gain"] for one in policy.explain(load)}
    assert promised[menu[0]] < 0.2 * world.tokens(menu[0], [0.9] * 8)


def test_a_step_after_a_prefill_is_hardly_longer_than_a_plain_one() -> None:
    menu = tree_menu(TREE)
    world = MACHINES["gpu"](menu)
    policy = MostTokens(menu, world.prices())
    world.run(policy, [0.95] * 16, 100)
    plain, free = world.seconds(PLAIN, 16), policy.choose(Load([MAX_CONFIDENCE] * 16))
    assert world.seconds(free, 16) > 1.3 * plain
    for longer in (0.0, 0.001):
        for _ in range(30):
            shape = policy.choose(Load([MAX_CONFIDENCE] * 16, 0, longer))
            assert world.seconds(shape, 16) < 1.05 * plain + longer


def test_no_part_of_a_tree_where_trees_are_verified_whole() -> None:
    menu = tree_menu(TREE)
    world = MACHINES["small machine"](menu)
    policy = MostTokens(menu, world.prices())
    load = Load([MAX_CONFIDENCE] * 4, whole=True)
    found = {policy.choose(load) for _ in range(100)}
    assert found <= {shape for shape in menu if not shape.verified}


@pytest.mark.parametrize("rows", [2, 9])
def test_what_both_drafters_made_tells_what_the_lookup_alone_would_have(rows: int) -> None:
    """Depth 1 to 4, a node of each source and of both at each depth."""
    both, alone = TreeShape(4, 4, 13), TreeShape(4, 4, 9, by=LOOKUP_ALONE)
    depth = np.array([0, *(1 + n // 3 for n in range(12))]) * np.ones((rows, 1), np.int64)
    source = np.array([0, *(1 + n % 3 for n in range(12))]) * np.ones((rows, 1), np.int64)
    mark = depth + (source << MARK_SOURCE) + (int(0.5 * MARK_ONE) << MARK_SURVIVAL)
    result = StepResult(mark, np.ones(rows), mark, mark, np.ones(rows), 0.005)
    whole, looked_up = gains_by_row(result, [both, alone])
    assert whole == pytest.approx([6.0] * rows, abs=0.01) and looked_up == pytest.approx([4.0] * rows, abs=0.01)
    policy = MostTokens((both, alone, PLAIN), Prices((both, alone, PLAIN), True), least=1)
    for _ in range(200):
        policy.record(both, Load([3] * rows), result)
    told = {one["shape"]: one["gain"] for one in policy.explain(Load([3] * rows))}
    assert told[alone] == pytest.approx(4.0 * rows, rel=0.02)


def test_menus() -> None:
    for shape in (
        TREE,
        TreeShape(3, 1, 4),
        TreeShape(4, 2, 8),
        TreeShape(1, 1, 2),
        TreeShape(2, 2, 5),
        TreeShape(6, 8, 64),
    ):
        for menu in (tree_menu(shape), chain_menu(shape), match_menu(shape), half_menu(shape)):
            assert menu[0] == shape and menu[-1] == PLAIN and len(set(menu)) == len(menu)
            for one in menu[:-1]:
                assert 1 < one.queries <= one.nodes <= max(shape.nodes, shape.topk + 1) and 0 < one.depth <= shape.depth
                assert one.nodes > one.depth and one.topk <= shape.topk


def test_a_fixed_shape_is_fixed() -> None:
    policy = FixedShape(TREE)
    assert policy.choose(Load([0, 3])) == TREE and policy.choose(Load([0, 0])) == PLAIN
    assert [row["chosen"] for row in policy.explain(Load([1]))] == [True, False]


def test_it_can_be_explained() -> None:
    menu = tree_menu(TREE)
    world = MACHINES["gpu"](menu)
    policy = MostTokens(menu, world.prices())
    world.run(policy, [0.9], 200)
    rows = policy.explain(Load([MAX_CONFIDENCE]))
    assert [row["shape"] for row in rows] == list(menu) and sum(row["chosen"] for row in rows) == 1
    best = next(row for row in rows if row["chosen"])
    assert best["rate"] == max(row["rate"] for row in rows)
    assert best["rate"] == pytest.approx(world.rate(best["shape"], [0.9]), rel=0.1)
    assert rows[-1]["gain"] == 0 and rows[-1]["price_ms"] == pytest.approx(4.012, rel=0.1)
