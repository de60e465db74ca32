"""Prices against a machine whose costs are a formula: what is read off between, beyond and without measurements, how
corrections follow the machine, and what a file of them may hold."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timed import least_seconds

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.sched.policy.cost import DOUBT, StepCost

TREE, CHAIN, SHORT = TreeShape(5, 4, 16), TreeShape(4, 1, 5), TreeShape(2, 1, 3)
MENU = (TREE, CHAIN, SHORT, PLAIN)


def true_seconds(shape: TreeShape, batch: int, context: int) -> float:
    """Of a machine in which everything adds up."""
    return 1e-3 + 2e-4 * shape.depth + 3e-5 * batch * shape.nodes + (2e-7 + 1e-8 * shape.nodes) * context


def measured(stepwise: bool, sizes=(1, 4, 16), contexts=(0, 1000, 4000), menu=MENU) -> StepCost:
    """contexts: of one row."""
    cost = StepCost(MENU, stepwise)
    for shape in menu:
        for size in sizes:
            for context in contexts:
                cost.measured(shape, size, size * context, true_seconds(shape, size, size * context))
    return cost


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=st.sampled_from(MENU), batch=st.integers(1, 64), context=st.integers(0, 50_000))
def test_a_line_is_found_between_and_beyond_sizes(shape: TreeShape, batch: int, context: int) -> None:
    assert measured(False).seconds(shape, batch, context) == pytest.approx(true_seconds(shape, batch, context))


@pytest.mark.parametrize(("batch", "size"), [(1, 1), (2, 4), (4, 4), (5, 16), (16, 16)])
def test_a_padded_batch_costs_what_its_graph_does(batch: int, size: int) -> None:
    cost = measured(True)
    for shape in MENU:
        assert cost.seconds(shape, batch, 0) == pytest.approx(true_seconds(shape, size, 0))
        longer = cost.seconds(shape, batch, 3000) - cost.seconds(shape, batch, 0)
        assert longer == pytest.approx(true_seconds(shape, batch, 3000) - true_seconds(shape, batch, 0))
    assert cost.seconds(TREE, 40, 0) == pytest.approx(true_seconds(TREE, 40, 0))


def test_nothing_is_known_of_nothing() -> None:
    cost = StepCost(MENU, False)
    assert cost.seconds(PLAIN, 1, 0) is None and not cost.complete and not cost.known(PLAIN, 1)


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_shape_without_contexts_has_the_slope_of_plain_steps(stepwise: bool) -> None:
    """And on a CPU more, for more queries: at most as if each read the keys itself."""
    cost = measured(stepwise, menu=(PLAIN,))
    cost.measured(TREE, 4, 0, 5e-3)
    slope = true_seconds(PLAIN, 4, 8000) - true_seconds(PLAIN, 4, 0)
    found = cost.seconds(TREE, 4, 8000) - 5e-3
    assert found == pytest.approx(slope) if stepwise else slope < found < TREE.nodes * slope


@pytest.mark.parametrize("first", [PLAIN, SHORT])
def test_steps_of_a_longer_context_are_measurements(first: TreeShape) -> None:
    """Where the start measured none: the first steps tell what a key costs, whatever shape they have."""
    cost = measured(False, contexts=(0,))
    for shape in (first, PLAIN if first != PLAIN else SHORT):
        for context in (7000, 7001, 7002):
            cost.record(shape, 1, context, true_seconds(shape, 1, context))
        for context in (0, 3500, 7000):
            assert cost.seconds(shape, 1, context) == pytest.approx(true_seconds(shape, 1, context), rel=0.01)
    for context in (30_000, 30_001, 30_002):  # of a size that was not measured
        cost.record(PLAIN, 3, context, true_seconds(PLAIN, 3, context))
    for batch, context in ((3, 30_000), (3, 0), (4, 0), (1, 7000)):
        assert cost.seconds(PLAIN, batch, context) == pytest.approx(true_seconds(PLAIN, batch, context), rel=0.02)


def test_a_first_long_step_that_stalls_makes_plain_steps_not_dear() -> None:
    """Who looks dear is not run, and never found to be cheap."""
    cost = measured(False, contexts=(0,))
    true = true_seconds(PLAIN, 4, 9000)
    cost.record(PLAIN, 4, 9000, 3 * true)
    assert cost.seconds(PLAIN, 4, 9000) < true
    cost.record(PLAIN, 4, 100, true_seconds(PLAIN, 4, 100))  # of other requests
    for _ in range(3):
        cost.record(PLAIN, 4, 9001, true)
    assert cost.seconds(PLAIN, 4, 9000) == pytest.approx(true, rel=0.001)


def test_short_contexts_do_not_tell_what_a_key_costs_where_long_ones_are_known() -> None:
    """A step in operation takes twice what the start measured, behind 300 tokens: that was not these tokens' doing."""
    cost = measured(stepwise=False, sizes=(1, 4))
    cost.measured(SHORT, 8, 0, true_seconds(SHORT, 8, 0))
    cost.measured(SHORT, 8, 300, 2 * true_seconds(SHORT, 8, 300))
    assert cost.seconds(SHORT, 8, 8000) == pytest.approx(true_seconds(SHORT, 8, 8000))
    alone = StepCost(MENU, stepwise=False)
    for context in (0, 300):
        alone.measured(SHORT, 8, context, true_seconds(SHORT, 8, context))
    assert alone.seconds(SHORT, 8, 8000) == pytest.approx(true_seconds(SHORT, 8, 8000))  # else they are all there is


def test_what_was_never_measured_costs_more_than_plain_and_keeps_its_place() -> None:
    cost = measured(False, menu=(PLAIN,))
    for batch in (1, 16, 64):
        plain, short, chain, tree = (cost.seconds(shape, batch, 0) for shape in (PLAIN, SHORT, CHAIN, TREE))
        assert plain < short < chain < tree
        assert tree >= true_seconds(TREE, batch, 0), "pessimistic"
    cost.measured(TREE, 4, 0, 2 * true_seconds(PLAIN, 4, 0))
    assert cost.seconds(CHAIN, 4, 0) <= cost.seconds(TREE, 4, 0), "it is not dearer than what is larger"
    cost.measured(SHORT, 4, 0, 1.9 * true_seconds(PLAIN, 4, 0))
    assert cost.seconds(CHAIN, 4, 0) >= cost.seconds(SHORT, 4, 0), "nor cheaper than what is smaller"


@pytest.mark.parametrize("batch", [2, 4, 16])
@pytest.mark.parametrize("shape", [TREE, CHAIN, SHORT])
def test_a_shape_of_one_row_costs_what_plain_steps_of_its_queries_do(shape: TreeShape, batch: int) -> None:
    """On a CPU the start measures larger batches of plain steps alone. The guess is not too low, and nearly right."""
    cost = StepCost(MENU, False)
    for size in (1, 4, 16):
        cost.measured(PLAIN, size, 0, true_seconds(PLAIN, size, 0))
    for each in MENU[:-1]:
        cost.measured(each, 1, 0, true_seconds(each, 1, 0))
    drafts, true = 2e-4 * shape.depth, true_seconds(shape, batch, 0)
    assert true * 0.999 < cost.seconds(shape, batch, 0) < true + drafts * batch * 1.001
    assert not cost.known(shape, 8 * batch) and not cost.guessed(shape, 8 * batch)


@pytest.mark.parametrize("batch", [2, 3, 8])
@pytest.mark.parametrize("shape", [TREE, CHAIN])
def test_a_shape_of_one_row_costs_what_another_tree_tells(shape: TreeShape, batch: int) -> None:
    """Where drafts paid from the first step on no plain step of more rows was ever measured, but a smaller tree was."""
    cost = StepCost(MENU, False)
    for each, sizes in ((PLAIN, (1,)), (SHORT, (1, 2)), (shape, (1,))):
        for size in sizes:
            cost.measured(each, size, 0, true_seconds(each, size, 0))
    true = true_seconds(shape, batch, 0)
    assert true * 0.999 < cost.seconds(shape, batch, 0) < true + 2e-4 * shape.depth * batch and not cost.guessed(
        shape, batch
    )


@pytest.mark.parametrize("sizes", [(1,), (1, 2)])
def test_what_a_few_first_steps_of_fewer_rows_tell_is_a_guess(sizes: tuple[int, ...]) -> None:
    """As it is of their own rows: the first step of a shape may have taken several times as long."""
    cost = measured(False, menu=(PLAIN,))
    for _ in range(DOUBT):
        assert all(cost.guessed(TREE, size) for size in (*sizes, 16))
        for size in sizes:
            cost.record(TREE, size, 0, true_seconds(TREE, size, 0))
    assert not cost.guessed(TREE, 1) and not cost.guessed(TREE, 16)


def test_plain_is_estimated_from_trees() -> None:
    cost = StepCost(MENU, False)
    cost.measured(TREE, 1, 0, 8e-3)
    assert 1e-3 < cost.seconds(PLAIN, 1, 0) < 8e-3


def test_one_size_is_no_price_for_many_requests() -> None:
    cost = StepCost(MENU, False)
    cost.measured(PLAIN, 1, 0, 1e-3)
    cost.measured(TREE, 1, 0, 2e-3)
    assert cost.seconds(TREE, 16, 0) / cost.seconds(PLAIN, 16, 0) > 2
    assert not cost.known(TREE, 16) and cost.known(TREE, 2)


def test_prices_follow_a_machine_that_became_slower() -> None:
    cost, rng = measured(False), random.Random(1)
    for _ in range(300):
        cost.record(TREE, 4, 0, 1.5 * true_seconds(TREE, 4, 0) * rng.uniform(0.9, 1.1))
    assert cost.seconds(TREE, 4, 0) == pytest.approx(1.5 * true_seconds(TREE, 4, 0), rel=0.05)
    # Others are a part of it, as long as they were not run; other numbers of requests are not.
    assert 1.1 < cost.seconds(PLAIN, 4, 0) / true_seconds(PLAIN, 4, 0) < 1.5
    assert cost.seconds(PLAIN, 16, 0) == pytest.approx(true_seconds(PLAIN, 16, 0))
    for _ in range(300):
        cost.record(PLAIN, 4, 0, true_seconds(PLAIN, 4, 0))
        cost.record(TREE, 4, 0, 1.5 * true_seconds(TREE, 4, 0))
    assert cost.seconds(PLAIN, 4, 0) == pytest.approx(true_seconds(PLAIN, 4, 0), rel=0.02)
    assert cost.seconds(TREE, 4, 0) == pytest.approx(1.5 * true_seconds(TREE, 4, 0), rel=0.02)


def test_the_first_samples_count_for_more() -> None:
    cost = measured(False)
    true = true_seconds(TREE, 1, 0)
    for _ in range(5):
        cost.record(TREE, 1, 0, 1.4 * true)
    assert cost.seconds(TREE, 1, 0) > 1.2 * true


def test_a_stall_says_little() -> None:
    cost = measured(False)
    true = true_seconds(TREE, 1, 0)
    for _ in range(100):
        cost.record(TREE, 1, 0, true)
    cost.record(TREE, 1, 0, 1000 * true)
    assert cost.seconds(TREE, 1, 0) < 1.03 * true
    before = cost.seconds(TREE, 1, 0)
    cost.record(TREE, 1, 0, 0.0)
    assert cost.seconds(TREE, 1, 0) == before


@pytest.mark.parametrize("slower", [0.5, 2.0, 3.0])
def test_one_shape_is_told_from_the_machine(slower: float) -> None:
    """Which of them became slower shows once the other one has run."""
    cost = measured(False)
    for _ in range(40):
        for _ in range(20):
            cost.record(PLAIN, 4, 0, slower * true_seconds(PLAIN, 4, 0))
        cost.record(TREE, 4, 0, true_seconds(TREE, 4, 0))
    assert cost.seconds(PLAIN, 4, 0) == pytest.approx(slower * true_seconds(PLAIN, 4, 0), rel=0.1)
    assert cost.seconds(TREE, 4, 0) == pytest.approx(true_seconds(TREE, 4, 0), rel=0.1)


@pytest.mark.parametrize("threads", [1.0, 0.5])
@pytest.mark.parametrize("by", [0.5, 1.5, 4.0, 6.0])
def test_a_shape_that_was_measured_wrong_shows_it_in_a_few_steps(by: float, threads: float) -> None:
    """Others took what they should, and still do."""
    cost, true = measured(False), {shape: true_seconds(shape, 16, 0) / threads for shape in (TREE, PLAIN)}
    cost.threads = threads
    for _ in range(10):
        cost.record(PLAIN, 16, 0, true[PLAIN])
    for _ in range(DOUBT):
        cost.record(TREE, 16, 0, by * true[TREE])
    cost.record(PLAIN, 16, 0, true[PLAIN])
    assert cost.seconds(TREE, 16, 0) == pytest.approx(by * true[TREE], rel=0.3)
    assert cost.seconds(PLAIN, 16, 0) == pytest.approx(true[PLAIN], rel=0.1)


def test_what_a_step_has_confirmed_is_not_disproved_by_stalls() -> None:
    """As many as come while another program runs; of plain steps, too."""
    cost = measured(False)
    for shape in (TREE, PLAIN):
        true = true_seconds(shape, 4, 0)
        for _ in range(50):
            cost.record(shape, 4, 0, true)
        for _ in range(2 * DOUBT):
            cost.record(shape, 4, 0, 4 * true)
        assert cost.seconds(shape, 4, 0) < 1.2 * true


def test_a_machine_that_was_faster_when_it_was_measured() -> None:
    """First steps say so of drafts, then of plain ones; drafts that run again are not believed to be dear for it."""
    cost = measured(False)
    for shape in (TREE, PLAIN):
        for _ in range(DOUBT):
            cost.record(shape, 4, 0, 3 * true_seconds(shape, 4, 0))
    for _ in range(10):
        for _ in range(10):
            cost.record(PLAIN, 4, 0, 3 * true_seconds(PLAIN, 4, 0))
        cost.record(TREE, 4, 0, 3 * true_seconds(TREE, 4, 0))
    for shape in (TREE, PLAIN):
        assert cost.seconds(shape, 4, 0) == pytest.approx(3 * true_seconds(shape, 4, 0), rel=0.15)


def test_stalls_with_a_step_between_them_say_little() -> None:
    cost, true = measured(False), true_seconds(TREE, 4, 0)
    for _ in range(20):
        for by in (4.0, 3.0, 1.0):
            cost.record(TREE, 4, 0, by * true)
    assert cost.seconds(TREE, 4, 0) < 1.5 * true


def test_a_backlog_costs_launches_or_positions() -> None:
    """A large draft model computes for longer than it is launched: what a short pass took is not what a long one will,
    nor what a position took in a short one. Many rows take longer than few."""
    cost = StepCost(MENU, False)
    assert cost.backlog(8, 1, 0) == 0
    for positions in (40, 8192):
        cost.record_backlog(8, 1, positions, 0.01 + 0.2 * positions / 8192)
    assert cost.backlog(8, 1, 60) == pytest.approx(0.011, rel=0.1)
    for passes in (1, 4, 8):
        assert cost.backlog(8, passes, passes * 8192) == pytest.approx(passes * 0.21, rel=0.05)
    cost.record_backlog(1, 1, 0, 0.001)
    assert cost.backlog(1, 1, 0) == cost.backlog(64, 1, 0) == 0.001 < cost.backlog(8, 1, 0)


def test_what_a_backlog_costs_may_grow() -> None:
    """The least that was seen is no bound for good: a machine may become slower."""
    cost = StepCost(MENU, False)
    for seconds, times in ((0.001, 1), (0.002, 100)):
        for _ in range(times):
            cost.record_backlog(8, 1, 0, seconds)
    assert cost.backlog(8, 1, 0) == 0.002


def test_a_machine_that_was_busy_when_it_was_measured() -> None:
    cost = StepCost(MENU, False)
    for shape in MENU:
        cost.measured(shape, 1, 0, 9 * true_seconds(shape, 1, 0))
    for _ in range(2000):
        for shape in MENU:
            cost.record(shape, 1, 0, true_seconds(shape, 1, 0))
    for shape in MENU:
        assert cost.seconds(shape, 1, 0) == pytest.approx(true_seconds(shape, 1, 0), rel=0.02)


def test_steps_in_operation_are_measurements_where_there_are_none() -> None:
    cost = StepCost(MENU, False)
    for seconds in (0.5, *[3e-3] * (DOUBT - 1)):  # the first one pays for what is made once
        cost.record(PLAIN, 8, 100, seconds)
    assert cost.seconds(PLAIN, 8, 100) == pytest.approx(3e-3) and cost.known(PLAIN, 8)
    cost.record(PLAIN, 8, 100, 1e-4)  # from now on it is a correction
    assert cost.seconds(PLAIN, 8, 100) > 2e-3
    assert not cost.known(PLAIN, 64)
    cost.record(PLAIN, 64, 100, 9e-3)
    assert cost.seconds(PLAIN, 64, 100) == pytest.approx(9e-3) and cost.known(PLAIN, 64)


def test_measurements_that_have_to_be_wrong_are_forgotten() -> None:
    cost = StepCost(MENU, False)
    cost.measured(TREE, 1, 0, 0.9)  # of all shapes that one, and while the machine did something else
    for _ in range(5):
        cost.record(PLAIN, 1, 0, true_seconds(PLAIN, 1, 0))
    assert cost.seconds(PLAIN, 1, 0) == pytest.approx(true_seconds(PLAIN, 1, 0))
    assert cost.seconds(TREE, 1, 0) < 3 * true_seconds(TREE, 1, 0) and not cost.known(TREE, 1)
    cost = measured(False)
    for slower in (1.0, 0.5, 3.0, 0.9, 20.0):  # as much faster no machine becomes, and slower it may be
        for _ in range(50):
            cost.record(PLAIN, 1, 0, slower * true_seconds(PLAIN, 1, 0))
    assert cost.complete


@pytest.mark.parametrize("by", [2.5, 4, 20])
def test_what_one_shape_was_measured_at_wrong_is_found_out_by_its_own_steps(by: float) -> None:
    """They are few, between others that take what they should."""
    cost = measured(False)
    right, plain = cost.seconds(TREE, 4, 0), cost.seconds(PLAIN, 4, 0)
    assert right is not None
    for size in (1, 4, 16, 64):
        cost.measured(TREE, size, 0, by * true_seconds(TREE, size, 0))
    for _ in range(60):
        for _ in range(20):
            cost.record(PLAIN, 4, 0, true_seconds(PLAIN, 4, 0))
        cost.record(TREE, 4, 0, true_seconds(TREE, 4, 0))
    assert cost.seconds(TREE, 4, 0) == pytest.approx(right, rel=0.1)
    assert cost.seconds(PLAIN, 4, 0) == pytest.approx(plain, rel=0.05)


def test_a_new_shape_is_not_corrected_for_what_it_has_seen_itself() -> None:
    cost = measured(False, menu=(PLAIN,))
    for _ in range(300):
        cost.record(PLAIN, 1, 0, 2 * true_seconds(PLAIN, 1, 0))
    cost.record(TREE, 1, 0, 5e-3)
    assert cost.seconds(TREE, 1, 0) == pytest.approx(5e-3)


def test_they_are_kept() -> None:
    cost = measured(True)
    for shape in MENU:
        for _ in range(50):
            cost.record(shape, 3, 100, 1.3 * true_seconds(shape, 4, 100))
    content = json.loads(json.dumps(cost.to_json()))
    again = StepCost.from_json(content, MENU, True)
    assert again.complete and again.to_json()["measured"] == content["measured"]
    for shape in MENU:
        for batch, context in ((1, 0), (3, 700), (16, 9000)):
            assert again.seconds(shape, batch, context) == pytest.approx(cost.seconds(shape, batch, context))
    fewer = StepCost.from_json(content, (CHAIN, PLAIN), True)
    assert fewer.complete and fewer.seconds(CHAIN, 1, 0) == cost.seconds(CHAIN, 1, 0)


def test_what_too_few_steps_have_measured_is_not_kept() -> None:
    """The next start would believe it."""
    cost = measured(False, menu=(PLAIN,))
    for count in range(DOUBT):
        again = StepCost.from_json(cost.to_json(), MENU, False)
        assert cost.guessed(TREE, 1) and again.guessed(TREE, 1) and not again.complete, count
        cost.record(TREE, 1, 0, (1 if count else 3) * true_seconds(TREE, 1, 0))
    again = StepCost.from_json(cost.to_json(), MENU, False)
    assert not again.guessed(TREE, 1) and again.seconds(TREE, 1, 0) == pytest.approx(true_seconds(TREE, 1, 0))


def test_a_guess_that_is_too_high_in_fewer_threads_disproves_nothing() -> None:
    cost = measured(False)
    kept = cost.to_json()["measured"]
    cost.threads = 0.5
    for _ in range(2 * DOUBT):
        cost.record(PLAIN, 64, 0, 0.1 * true_seconds(PLAIN, 64, 0))
    assert [point for point in cost.to_json()["measured"] if point[1] < 64] == kept


@pytest.mark.parametrize(
    "broken",
    [
        None, [], 3, {}, {"version": 0}, {"measured": 7}, {"stepwise": False}, {"corrections": [[[5, 4, 16], 1]]},
        {"measured": [[[5, 4, 16], 1, 0, -1.0]]}, {"measured": [[[5, 4, 16], 1, 0, float("nan")]]},
        {"measured": [[[5, 4, 16], 1, 0, "1"]]}, {"measured": [[[5, 4, 16], 0, 0, 1.0]]},
        {"measured": [[[5, 4, 16], 1.5, 0, 1.0]]}, {"measured": [[[5], 1, 0, 1.0]]},
        {"corrections": [[None, 1, -1.0]]}, {"corrections": [[None, -1, 1.0]]},
    ],
)  # fmt: skip
def test_what_is_no_file_of_prices_is_refused(broken: object) -> None:
    content = measured(True).to_json() | broken if isinstance(broken, dict) and broken else broken
    with pytest.raises(ValueError, match=r"expected|to_json"):
        StepCost.from_json(content, MENU, True)


@pytest.mark.timing
def test_it_is_cheap_enough_for_every_step() -> None:
    cost = measured(True, sizes=tuple(range(1, 129, 8)))

    def steps() -> None:
        for context in range(2000):
            cost.seconds(TREE, 100, context)
            cost.record(TREE, 100, context, 1e-3)

    assert least_seconds(steps, 5) / 2000 < 25e-6, "of steps that take 1 ms and more; 8 to 18 us were seen"


def test_of_two_looks_the_lesser_counts_and_they_agree_or_not() -> None:
    """Noise only ever adds; against the least of both, and the rule of a quarter."""
    random_ = random.Random(0)
    truth = {(shape, batch): 0.01 * (1 + shape.nodes / 16) * batch**0.5 for shape in MENU for batch in (1, 4)}
    for trial in range(50):
        looks, noises = [], []
        for _ in range(2):
            cost, noise = StepCost(MENU, False), {}
            for (shape, batch), seconds in truth.items():
                noise[shape, batch] = 1 + random_.random() * (0.1 if trial % 2 else 2)
                cost.measured(shape, batch, 0, seconds * noise[shape, batch])
            looks.append(cost)
            noises.append(noise)
        kept, fresh = looks
        agreed = kept.look_again(fresh)
        for shape, batch, _, seconds in kept.table.points():
            least = min(noise[shape, batch] for noise in noises)
            assert seconds == pytest.approx(truth[shape, batch] * least)
        ratios = [noises[0][step] / noises[1][step] for step in truth]
        assert agreed == all(1 / 1.25 < ratio < 1.25 for ratio in ratios), trial


def test_a_faster_look_ends_what_was_learnt_of_the_slower_one() -> None:
    """A start on a busy machine measured twice the time, and steps have shown since that half of it is right."""
    busy, quiet = StepCost(MENU, False), measured(False)
    for shape, *at, seconds in quiet.table.points():
        busy.measured(shape, *at, 2 * seconds)
    for _ in range(200):
        busy.record(CHAIN, 1, 0, true_seconds(CHAIN, 1, 0))
    assert busy.seconds(CHAIN, 1, 0) == pytest.approx(true_seconds(CHAIN, 1, 0), rel=0.1)
    assert not busy.look_again(quiet)
    for shape in MENU:
        assert busy.seconds(shape, 1, 0) == pytest.approx(true_seconds(shape, 1, 0), rel=1e-6)


def test_looks_that_lack_a_shape_do_not_agree() -> None:
    for missing in MENU:
        kept, fresh = StepCost(MENU, False), StepCost(MENU, False)
        for shape in MENU:
            kept.measured(shape, 1, 0, 0.01)
            if shape != missing:
                fresh.measured(shape, 1, 0, 0.01)
        assert not kept.look_again(fresh) and not fresh.look_again(kept)
        assert kept.complete and fresh.complete, "what the other has is taken"
        assert kept.look_again(fresh)


def test_fewer_threads_have_costs_of_their_own() -> None:
    """A machine that has something else to do: of two threads one runs, and a step takes 1.6 times as long."""
    cost = measured(False)
    for _ in range(100):
        cost.record(CHAIN, 1, 0, 1.1 * true_seconds(CHAIN, 1, 0))
    kept, usual = cost.to_json(), cost.seconds(TREE, 1, 0)
    assert usual is not None
    cost.threads = 0.5
    assert cost.seconds(TREE, 1, 0) == pytest.approx(2 * usual)  # as long as nothing is known
    for _ in range(40):
        cost.record(CHAIN, 1, 0, 1.6 * true_seconds(CHAIN, 1, 0))
    assert cost.seconds(CHAIN, 1, 0) == pytest.approx(1.6 * true_seconds(CHAIN, 1, 0), rel=0.02)
    assert cost.seconds(TREE, 1, 0) < 1.8 * true_seconds(TREE, 1, 0)  # which did not run
    for _ in range(DOUBT + 1):  # nothing here says that what was measured is wrong
        cost.record(CHAIN, 1, 0, 0.1 * true_seconds(CHAIN, 1, 0))
    cost.threads = 1.0
    assert cost.seconds(TREE, 1, 0) == usual and cost.to_json() == kept
