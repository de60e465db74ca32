"""What the policy chooses, on machines and texts that are made up: expected tokens per second are known here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from cells import BASELINE, CELLS, worse
from worlds import MACHINES, TREE, World

from draftwing.config.trees import LOOKUP_ALONE, MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.core import MARK_ONE, MARK_SOURCE, MARK_SURVIVAL, StepResult
from draftwing.sched.policy.acceptance import drafts_by_row
from draftwing.sched.policy.cost import HOLD, StepCost
from draftwing.sched.policy.shape_policy import MARGIN, MAX_QUERIES, Beside, FixedShape, StepContext, TreePolicy
from draftwing.spec.drafter import chain_menu, match_menu, tree_menu

STORED = json.loads(BASELINE.read_text(encoding="utf-8"))["figures"]["now"]
SOON = re.compile("steady / (gpu / 4 x 0.95|small machine / 4 x 0.5)|not|lookup / two|drafts are i|drafter.* 1 x 0.98")
# Other sizes of what another cell shows.
FURTHER = re.compile(
    r"steady .* / (1|16|64) x 0\.(05|5)|steady / (gpu|drafts .*) / (16|64)|steady / drafts .*(0\.5| / 1 x)|"
    r"steady .* / (1|64) x 0\.95|never pays / loads|never pays / one|lookup / (bad|rare)|machine becomes 2 x f|"
    r"stretches .*(0\.1|trees 0\.5)|text becomes .* / (gpu / 8|small machine / 1)|1 request, then 64 / gpu|"
    r"64 requests, then 1|measured (2.5 x|5.0 x)|drafter far behind / 64 x 0\.98|key's price / 200"
)
# Loads of a whole scheduler are compared by `benchmarks/sim/run.py`.
SERVED = re.compile(
    "open loop|burst|beside|prompts wait|closed loop|draft model|crowd|longest gap|with .* long prompts|host|waves"
)
LOADS = [
    pytest.param(
        cell,
        marks=[*[pytest.mark.slow] * (not SOON.match(cell)), *[pytest.mark.exhaustive] * bool(FURTHER.match(cell))],
    )
    for cell in CELLS
    if not SERVED.match(cell)
]


@pytest.mark.parametrize("cell", LOADS)
def test_a_simulated_load(cell: str) -> None:
    """Never slower than no drafts, near the best shape, quick to follow a change, and no worse than what is stored."""
    for name, figure in CELLS[cell]().items():
        assert figure <= 80 if name in ("steps", "most") else figure > 0.975, name
        assert not worse(name, figure, STORED[cell][name]), name


@pytest.mark.further(later=64, node_seconds=[0.0, 2e-4])
@pytest.mark.parametrize("later", [8, 64])
@pytest.mark.parametrize("node_seconds", [0.0, 2e-5, 2e-4, 5e-3])
def test_time_beside_prompts_is_worth_what_later_steps_bring(node_seconds: float, later: int) -> None:
    """What drafts bring in a forward with parts of prompts, less what so many rows would bring in the same time when
    the prompts are read; each node more takes as long as a token of a prompt. Of shapes that can be there. later: rows
    that decode then."""
    batch, hits = 8, [0.8] * 8
    world = MACHINES["gpu"](tree_menu(TREE))
    policy = TreePolicy(world.menu, world.cost())
    world.run(policy, hits, 300)
    possible = [shape for shape in world.menu if later * shape.queries <= MAX_QUERIES]
    most = max(world.rate(shape, [0.8] * later) for shape in possible)

    def net(shape: TreeShape) -> float:
        more = world.seconds(shape, batch) - world.seconds(PLAIN, batch)
        return world.tokens(shape, hits) - most * (more + node_seconds * batch * (shape.queries - 1))

    for limit in (1024, 4 * batch, batch):
        fit = [shape for shape in world.menu if batch * shape.queries <= limit]
        beside = Beside(node_seconds, lambda shape, rows, fit=fit: rows * shape.queries if shape in fit else 0, later)
        decision = policy.decide(StepContext([MAX_CONFIDENCE] * batch, beside=beside))
        chosen, best = world.menu[decision.best], max(fit, key=net)
        assert chosen in fit and net(chosen) > net(best) - 0.04 * world.tokens(best, hits)


@pytest.mark.parametrize("drafted", [0.0098, 0.01, 0.0101])
def test_drafts_that_take_less_than_plain_steps_beside_prompts(drafted: float) -> None:
    """Where many wait plain steps are worth little, and what was measured as shorter is no less than that."""
    chain = TreeShape(3, 1, 4)
    cost = StepCost((chain, PLAIN), True)
    policy, beside = TreePolicy((chain, PLAIN), cost), Beside(0.0, lambda shape, rows: rows * shape.queries, 64)
    context = StepContext([MAX_CONFIDENCE], beside=beside)
    assert policy.decide(context).options == {}, "nothing is known"
    for shape, batch, seconds in ((PLAIN, 1, 0.01), (PLAIN, 64, 0.012), (chain, 1, drafted), (chain, 64, 0.02)):
        cost.measured(shape, batch, 0, seconds)
    decision = policy.decide(context)
    assert decision.best == 0 and all(0 < option.seconds < math.inf for option in decision.options.values())
    later = max(option.rate for option in policy.decide(StepContext([MAX_CONFIDENCE] * 64)).options.values())
    assert decision.options[1].rate == pytest.approx(later)


@pytest.mark.further(batch=4)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_the_first_answer_is_hardly_slower(batch: int) -> None:
    """A CPU on which a query costs a quarter of a step, and drafts that are wrong."""
    menu, hits = chain_menu(TreeShape(4, 2, 8)), [0.02] * batch
    world = World(menu, 3.2, 1.0, 0.4)
    rate, _ = world.run(TreePolicy(menu, world.cost()), hits, 64)
    assert rate > 0.97 * world.rate(PLAIN, hits)


@pytest.mark.slower(batch=4)
@pytest.mark.further(batch=4, sizes=[(1,)])
@pytest.mark.further(batch=16, sizes=[(1, 4)])
@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("hit", [0.02, 0.6])
@pytest.mark.parametrize("sizes", [(1,), (1, 4)])
def test_what_was_measured_of_few_rows_is_not_tried_at_once(batch: int, hit: float, sizes: tuple[int, ...]) -> None:
    """The start of a CPU has no time for trees of more rows: what plain steps of more rows take says what they cost, or
    two sizes of their own. sizes: that were measured of the two smallest trees; of others one row."""
    menu, hits = chain_menu(TreeShape(4, 2, 8)), [hit] * batch
    world = World(menu, 3.2, 1.0, 0.4)
    cost = StepCost(menu, False)
    for shape in menu:
        for size in (1, 4, 16) if shape == PLAIN else sizes if shape in menu[-3:] else (1,):
            cost.measured(shape, size, 0, world.seconds(shape, size))
    policy = TreePolicy(menu, cost)
    first, _ = world.run(policy, hits, 64)
    then, _ = world.run(policy, hits, 200)
    assert min(first, then) > 0.985 * world.rate(PLAIN, hits)


class Unmeasured(World):
    """A step takes 0.1 s, so a start had no time for any. Of each shape the first ones take twice as long: they make
    what the others run on."""

    def __init__(self, first: int, threads: float, seed: int) -> None:
        """first: so many steps.  threads: that run, as a share."""
        super().__init__(chain_menu(TreeShape(3, 1, 4)), 100.0, 6.0, 8.0, seed)
        self.first, self.threads, self.ran = first, threads, dict[TreeShape, int]()

    def step(self, shape: TreeShape, hits: Sequence[float], noise: float = 0.1) -> StepResult:
        ran = self.ran[shape] = self.ran.get(shape, 0) + 1
        found, times = super().step(shape, hits, noise), self.rng.lognormvariate(0, 0.05) / self.threads
        return replace(found, seconds=found.seconds * times * (2 if ran <= self.first else 1), threads=self.threads)


@pytest.mark.slower(hit=0.4)
@pytest.mark.further(hit=0.65)
@pytest.mark.parametrize("hit", [0.4, 0.65, 0.9])
@pytest.mark.further(first=2)
@pytest.mark.parametrize(("first", "threads"), [(0, 1.0), (1, 1.0), (2, 1.0), (1, 0.5)])
def test_large_models_find_the_best_shape_in_their_first_steps(hit: float, first: int, threads: float) -> None:
    for seed in range(4):
        world = Unmeasured(first, threads, seed)
        rate, _ = world.run(TreePolicy(world.menu, StepCost(world.menu, False)), [hit], 80)
        assert rate > 0.93 * max(world.rate(shape, [hit]) for shape in world.menu)


@pytest.mark.slower(hit=0.4)
@pytest.mark.further(before=[[(1, 3)]])
@pytest.mark.further(hit=0.65)
@pytest.mark.parametrize("hit", [0.4, 0.65, 0.9])
@pytest.mark.parametrize("before", [[(1, 3)], [(1, 5)], [(3, 4), (4, 4)]])
def test_too_few_steps_of_a_smaller_batch_are_not_believed(hit: float, before: list[tuple[int, int]]) -> None:
    """before: rows and steps, until one row more comes and stays."""
    for seed in range(4):
        world = Unmeasured(1, 1.0, seed)
        policy = TreePolicy(world.menu, StepCost(world.menu, False))
        for rows, steps in before:
            world.run(policy, [hit] * rows, steps)
        hits = [hit] * (before[-1][0] + 1)
        rate, _ = world.run(policy, hits, 80)
        assert rate > 0.92 * max(world.rate(shape, hits) for shape in world.menu)


@pytest.mark.slower(hit=0.4)
@pytest.mark.further(hit=0.65)
@pytest.mark.parametrize("hit", [0.4, 0.65, 0.9])
@pytest.mark.further(slower=2.5)
@pytest.mark.parametrize("slower", [1.5, 2.5, 4.0])
def test_a_machine_that_is_slower_than_at_the_start(slower: float, hit: float) -> None:
    """Drafts show it first, then plain steps: it is the machine, which makes no drafts dearer that have shown it."""
    menu = chain_menu(TreeShape(3, 1, 4))
    for seed in range(4):
        world = World(menu, 100.0 * slower, 6.0 * slower, 8.0 * slower, seed)
        policy = TreePolicy(menu, World(menu, 100.0, 6.0, 8.0).cost())
        rate, _ = world.run(policy, [hit], 120)
        assert rate > 0.95 * max(world.rate(shape, [hit]) for shape in menu)


@pytest.mark.parametrize("hit", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("share", [0.25, 0.4, 0.55, 1.0])
def test_what_plain_steps_that_take_longer_say_of_drafts(share: float, hit: float) -> None:
    """A start on a busy machine found this share of what plain steps take; 1: and of all others a third, for now the
    machine is slower. Whether it is shows a try, not hundreds of steps later."""
    menu = chain_menu(TreeShape(4, 2, 8))
    world = World(menu, 2.6, 0.35, 0.3)
    cost = world.cost((1,))
    for shape in menu:
        cost.measured(shape, 1, 0, world.seconds(shape, 1) * (1 / 3 if share == 1 else share if shape == PLAIN else 1))
    rate, _ = world.run(TreePolicy(menu, cost), [hit], 120)
    assert rate > 0.9 * max(world.rate(shape, [hit]) for shape in menu)


@pytest.mark.parametrize("hit", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("dearer", [1.5, 2.0, 3.0])
def test_drafts_that_a_disturbed_start_found_too_dear(dearer: float, hit: float) -> None:
    """Plain steps are as they were measured, so that nothing but a try tells."""
    menu = chain_menu(TreeShape(4, 2, 8))
    world = World(menu, 2.6, 0.35, 0.3)
    cost = world.cost((1,))
    for shape in menu[:-1]:
        cost.measured(shape, 1, 0, dearer * world.seconds(shape, 1))
    cost.doubt_smallest()
    rate, _ = world.run(TreePolicy(menu, cost), [hit], 120)
    assert rate > 0.9 * max(world.rate(shape, [hit]) for shape in menu)


@pytest.mark.parametrize("slower", [1.5, 3.0])
def test_drafts_that_do_not_pay_on_a_slower_machine_are_hardly_tried(slower: float) -> None:
    menu, hits = chain_menu(TreeShape(4, 2, 8)), [0.02]
    world = World(menu, 3.2 * slower, 1.0 * slower, 0.4 * slower)
    rate, _ = world.run(TreePolicy(menu, World(menu, 3.2, 1.0, 0.4).cost((1,))), hits, 64)
    assert rate > 0.96 * world.rate(PLAIN, hits)


def test_what_no_drafts_cost_is_found_out() -> None:
    """Although drafting is chosen, because a guess from what levels cost here says that they cost much more."""
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.95] * 2
    world = World(menu, 2.0, 0.01, 4.0)
    cost = StepCost(menu, False)
    cost.measured(menu[0], 2, 0, world.seconds(menu[0], 2))
    guess = cost.seconds(PLAIN, 2, 0)
    assert guess is not None and guess > 1.8 * world.seconds(PLAIN, 2)
    assert world.rate(menu[0], hits) > MARGIN * 2 / guess
    policy = TreePolicy(menu, cost)
    world.run(policy, hits, 200)
    _, chosen = world.run(policy, hits, 200)
    assert chosen.count(PLAIN) > 190


@pytest.mark.parametrize(("gain", "drafts"), [(1.02, False), (1.06, True)])
def test_what_drafting_gains_less_than_the_host_loses(gain: float, drafts: bool) -> None:
    """Drafts that are better by 2% are not worth the work of choosing them."""
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.8] * 4

    class Near(World):
        def seconds(self, shape: TreeShape, batch: int) -> float:
            return 1e-3 * self.tokens(shape, hits) / (gain if shape.depth else 1.0)

    world = Near(menu, 0.0, 0.0, 0.0)
    policy = TreePolicy(menu, world.cost((4,)))
    _, chosen = world.run(policy, hits, 1000)
    assert (chosen.count(PLAIN) < 500) == drafts


@pytest.mark.further(batch=1, lag=0)
@pytest.mark.further(batch=8, lag=1)
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("batch", [1, 8])
def test_it_goes_on_drafting_within_50_steps_after_a_long_rest(batch: int, lag: int) -> None:
    menu = chain_menu(TreeShape(4, 2, 8))
    world = MACHINES["small machine"](menu)
    policy = TreePolicy(menu, world.cost())
    world.run(policy, [0.05] * batch, 1000, lag)
    _, chosen = world.run(policy, [0.99] * batch, 100, lag)
    best = max(world.rate(shape, [0.99] * batch) for shape in menu)
    good = [world.rate(shape, [0.99] * batch) > 0.95 * best for shape in chosen]
    assert sum(good[50:]) > 40


@pytest.mark.further(hit=0.3, reading=5.6)
@pytest.mark.further(hit=0.6, reading=20.0)
@pytest.mark.further(hit=0.8, reading=5.6)
@pytest.mark.parametrize("hit", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("reading", [5.6, 20.0])  # ms, of 2,000 and 7,000 keys
def test_a_context_that_was_not_measured(hit: float, reading: float) -> None:
    """Each query more costs 0.7 of what the first reads: drafts that pay with short contexts do not with long ones."""
    menu, hits = chain_menu(TreeShape(4, 2, 8)), [hit]
    world, longer = World(menu, 3.2, 1.0, 0.3), World(menu, 3.2 + 0.3 * reading, 1.0 + 0.7 * reading, 0.3)
    policy, load = TreePolicy(menu, world.cost()), StepContext([MAX_CONFIDENCE], round(350 * reading))
    rates = list[float]()
    world.run(policy, hits, 100)
    for _ in range(3):
        tokens = seconds = 0.0
        for _ in range(64):
            shape = policy.choose(load)
            policy.record(shape, load, longer.step(shape, hits))
            tokens, seconds = tokens + longer.tokens(shape, hits), seconds + longer.seconds(shape, 1)
        rates.append(tokens / seconds / longer.rate(PLAIN, hits))
    assert rates[0] > 0.9 and min(rates[1:]) > 0.98


@pytest.mark.slower(hit=0.6)
@pytest.mark.parametrize("hit", [0.6, 0.75])
def test_plain_steps_behind_prefills_hide_no_wrong_price(hit: float) -> None:
    """One request after the other, each of 30 steps. Drafts become slower, as those that are sampled are, and with them
    alone to go by the machine seems to: plain steps run behind each prefill, where what they take is no price."""
    menu, load = chain_menu(TreeShape(4, 2, 8)), StepContext([MAX_CONFIDENCE])
    world, slow = World(menu, 3.4, 0.8, 0.2), World(menu, 3.4, 0.8, 0.2)
    slow.seconds = lambda shape, batch: world.seconds(shape, batch) * (1.4 if shape.depth else 1.0)  # type: ignore[method-assign]
    policy, rates = TreePolicy(menu, world.cost()), list[float]()
    for machine, steps in ((world, 600), (slow, 300), (slow, 300)):
        tokens = seconds = 0.0
        for number in range(steps):
            behind = number % 30 == 0
            context = load._replace(latency_slack=0.0) if behind else load
            shape = policy.choose(context)
            step = machine.step(shape, [hit])
            policy.record(shape, context, replace(step, seconds=1.12 * step.seconds) if behind else step, not behind)
            tokens, seconds = tokens + machine.tokens(shape, [hit]), seconds + machine.seconds(shape, 1)
        rates.append(tokens / seconds / machine.rate(PLAIN, [hit]))
    assert rates[0] > 1.1 and rates[1] > 0.95 and rates[2] > 0.98


def test_a_promise_of_more_ends_a_rest() -> None:
    """Rows of a lookup that found nothing, and then something long."""
    menu = match_menu(TreeShape(11, 10, 12))
    world = World(menu, 4.0, 0.3, 0.0)
    policy = TreePolicy(menu, world.cost(), sees_predictions=True, base=0)
    for _ in range(100):
        for confidence, hit in ((20, 0.99), (1, 0.02)):
            load = StepContext([confidence])
            policy.record(menu[0], load, world.step(menu[0], [hit]))
    for _ in range(100):
        shape = policy.choose(StepContext([1]))
        policy.record(shape, StepContext([1]), world.step(shape, [0.02]))
    best = [menu[policy.decide(StepContext([confidence])).best] for confidence in (1, 20)]
    assert best[0] == PLAIN != best[1]


def test_to_begin_costs_a_step_or_two() -> None:
    """The drafter has to catch up first: what brings hardly more is then not begun, and tried less often."""
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.05] * 4
    tries = []
    for catching_up in (0.0, 0.004):
        world = World(menu, 2.0, 0.5, 0.6)
        policy = TreePolicy(menu, world.cost((4,)))
        load, before, tried = StepContext([MAX_CONFIDENCE] * 4), PLAIN, 0
        for _ in range(1200):
            shape = policy.choose(load)
            late = catching_up if shape.depth and before == PLAIN else 0.0
            step = world.step(shape, hits)
            policy.record(shape, load, replace(step, seconds=step.seconds + late, catching_up=late))
            before, tried = shape, tried + (shape != PLAIN)
        tries.append(tried)
        price = policy.cost.seconds(menu[0], 4, 0)
        assert price == pytest.approx(world.seconds(menu[0], 4), rel=0.1), "what it catches up with is no price"
    assert tries[1] < 0.7 * tries[0]


def test_behind_a_prefill_drafts_begin_only_where_there_is_time_to_catch_up() -> None:
    menu, hits = (TreeShape(1, 1, 2), PLAIN), [0.9] * 16
    world = MACHINES["gpu"](menu)
    policy, load = TreePolicy(menu, world.cost((16,))), StepContext([MAX_CONFIDENCE] * 16)
    late = replace(world.step(menu[0], hits), seconds=world.seconds(menu[0], 16) + 0.002, catching_up=0.002)
    for _ in range(40):
        policy.record(menu[0], load, late)
    room = 1.1 * world.seconds(menu[0], 16) - world.seconds(PLAIN, 16)
    assert policy.choose(load._replace(latency_slack=room)) == PLAIN
    assert policy.choose(load._replace(latency_slack=room + 0.002)) == menu[0]
    assert policy.choose(load._replace(latency_slack=room)) == menu[0], "it has caught up"


def test_requests_that_cannot_be_drafted_for() -> None:
    menu = tree_menu(TREE)
    policy = TreePolicy(menu, World(menu, 4.0, 0.01, 0.1).cost())
    assert policy.choose(StepContext([0, 0, 0])) == PLAIN
    # One of many: the batch would pay for it.
    world = World(menu, 4.0, 0.5, 0.6)
    policy = TreePolicy(menu, world.cost())
    found = [policy.choose(StepContext([MAX_CONFIDENCE] + [0] * 63)) for _ in range(400)]
    assert found.count(PLAIN) >= 397, "a try could find out nothing but prices"


def test_what_a_lookup_finds_says_nothing_of_the_model() -> None:
    """A pair whose lookup is always wrong where it has little to go by, and whose model is good."""
    both, alone = TreeShape(4, 1, 5), TreeShape(8, 1, 9, proposer=LOOKUP_ALONE)
    menu = (both, alone, PLAIN)
    world = World(menu, 4.0, 0.1, 0.2)
    policy = TreePolicy(menu, world.cost(), sees_predictions=True, base=1)
    load = StepContext([3])
    guess = {row["shape"]: row["gain"] for row in policy.explain(load)}
    for _ in range(40):
        policy.record(alone, load, world.step(alone, [0.0]))
    assert menu[policy.decide(load).best] == both
    gain = {row["shape"]: row["gain"] for row in policy.explain(load)}
    assert gain[alone] < 0.05 and gain[both] == guess[both] > 0.5


def test_promises_that_are_not_kept_count_less() -> None:
    """Estimates of single nodes that are too high, as those of a lookup were on text that it does not know."""
    menu = match_menu(TREE)
    world = World(menu, 4.0, 0.02, 0.0)
    policy = TreePolicy(menu, world.cost(), base=1)
    load = StepContext([MAX_CONFIDENCE] * 8)
    for _ in range(60):
        step = world.step(menu[0], [0.9] * 8)
        policy.record(menu[0], load, replace(step, count=np.ones(8, np.int64)))
    promised = {one["shape"]: one["gain"] for one in policy.explain(load)}
    assert promised[menu[0]] < 0.2 * world.tokens(menu[0], [0.9] * 8)


def test_a_step_after_a_prefill_is_hardly_longer_than_a_plain_one() -> None:
    menu = tree_menu(TREE)
    world = MACHINES["gpu"](menu)
    policy = TreePolicy(menu, world.cost())
    world.run(policy, [0.95] * 16, 100)
    plain, free = world.seconds(PLAIN, 16), policy.choose(StepContext([MAX_CONFIDENCE] * 16))
    assert world.seconds(free, 16) > 1.3 * plain
    for longer in (0.0, 0.001):
        for _ in range(30):
            shape = policy.choose(StepContext([MAX_CONFIDENCE] * 16, 0, longer))
            assert world.seconds(shape, 16) < 1.05 * plain + longer


def test_no_part_of_a_tree_where_trees_are_verified_whole() -> None:
    menu = tree_menu(TREE)
    world = MACHINES["small machine"](menu)
    policy = TreePolicy(menu, world.cost())
    load = StepContext([MAX_CONFIDENCE] * 4, full_trees_only=True)
    assert any(shape.verified for shape in menu)
    for row in policy.explain(load):
        assert (row["rate"] is None) == (row["shape"].verified > 0)


@pytest.mark.parametrize("rows", [2, 9])
def test_what_both_drafters_made_tells_what_the_lookup_alone_would_have(rows: int) -> None:
    """Depth 1 to 4, a node of a head, of a lookup and of both at each depth."""
    both, alone = TreeShape(4, 4, 13), TreeShape(4, 4, 9, proposer=LOOKUP_ALONE)
    depth = np.array([0, *(1 + n // 3 for n in range(12))]) * np.ones((rows, 1), np.int64)
    source = np.array([0, *(1, 2, 3, 5, 6, 7) * 2]) * np.ones((rows, 1), np.int64)
    mark = depth + (source << MARK_SOURCE) + (int(0.5 * MARK_ONE) << MARK_SURVIVAL)
    result = StepResult(mark, np.ones(rows), mark, mark, np.ones(rows), 0.005)
    whole, looked_up = drafts_by_row(result, [both, alone])
    assert whole == pytest.approx([6.0] * rows, abs=0.01) and looked_up == pytest.approx([4.0] * rows, abs=0.01)
    policy = TreePolicy((both, alone, PLAIN), StepCost((both, alone, PLAIN), True), base=1)
    for _ in range(200):
        policy.record(both, StepContext([3] * rows), result)
    reported = {one["shape"]: one["gain"] for one in policy.explain(StepContext([3] * rows))}
    assert reported[alone] == pytest.approx(4.0 * rows, rel=0.02)


def settled(machine: str, hit: float, rows: int = 8) -> tuple[World, TreePolicy, StepContext]:
    """A policy that has seen such text for long."""
    world = MACHINES[machine](tree_menu(TREE))
    policy = TreePolicy(world.menu, world.cost())
    world.run(policy, [hit] * rows, 300)
    return world, policy, StepContext([MAX_CONFIDENCE] * rows)


@pytest.mark.slower(machine="gpu")
@pytest.mark.parametrize(("machine", "hit"), [("gpu", 0.9), ("small machine", 0.05)])
def test_a_choice_is_kept_for_some_steps(machine: str, hit: float) -> None:
    """To look costs the host time. Other rows, and a new request, end it."""
    world, policy, context = settled(machine, hit)
    looks, decide = list[StepContext](), policy.decide
    policy.decide = lambda one: looks.append(one) or decide(one)  # type: ignore[method-assign, func-returns-value]
    world.run(policy, [hit] * 8, 40 * HOLD)
    assert 40 <= len(looks) < 60
    for other in (context._replace(last_admission=1), context._replace(confidences=[MAX_CONFIDENCE] * 7)):
        looks.clear()
        policy.choose(context)
        policy.choose(other)
        assert other in looks


@pytest.mark.slower(machine="gpu")
@pytest.mark.further(hit=0.9)
@pytest.mark.parametrize(("machine", "hit"), [("gpu", 0.9), ("gpu", 0.5), ("small machine", 0.05)])
def test_what_is_explained_is_what_runs(machine: str, hit: float) -> None:
    """Whatever it is for: tries, slack, choices that are kept."""
    world, policy, context = settled(machine, hit)
    tries = 0
    for step in range(400):
        now = context._replace(latency_slack=[float("inf"), 0.0, 0.002][step % 3], last_admission=step // 9)
        rows = policy.explain(now)
        shape = policy.choose(now)
        (chosen,) = (row for row in rows if row["chosen"])
        assert chosen["shape"] == shape and not chosen["late"]
        tries += chosen["tried"]
        for row in rows:
            if row["late"]:
                assert 1e-3 * (row["price_ms"] - rows[-1]["price_ms"]) > now.latency_slack
        policy.record(shape, now, world.step(shape, [hit] * 8))
    assert tries > 0
    nothing = policy.explain(StepContext([0], latency_slack=0.0))
    assert [row["shape"] for row in nothing if row["chosen"]] == [PLAIN] and not any(row["late"] for row in nothing)


def test_who_asks_changes_nothing() -> None:
    _, policy, context = settled("gpu", 0.5)
    before = deepcopy(vars(policy))
    for _ in range(3):
        policy.explain(context), policy.decide(context), policy.saving(context), policy.seconds(8, 100)
    after = vars(policy)
    for name in before.keys() - {"cost", "_acceptance", "_by_adapter"}:
        assert before[name] == after[name], name
    for part in ("cost", "_acceptance"):
        known, now = vars(before[part]), vars(after[part])
        assert all(known[name] == now[name] for name in known.keys() - {"table"})


@pytest.mark.parametrize("slower", [1.4, 2.0, pytest.param(3.0, marks=pytest.mark.exhaustive)])
def test_an_adapter_has_its_own_acceptance_and_price(slower: float) -> None:
    """A head knows nothing of one adapter, and as much of another as of the model; steps with them are slower."""
    world = MACHINES["gpu"](tree_menu(TREE))
    policy, rows = TreePolicy(world.menu, world.cost()), 4
    hits = {"": 0.9, "far": 0.02, "near": 0.9}
    wide = [MAX_CONFIDENCE] * rows
    for turn in range(600):
        name = list(hits)[turn % 3]
        context = StepContext(wide, adapters=[name] * rows if name else ())
        shape = policy.choose(context)
        result = world.step(shape, [hits[name]] * rows)
        policy.record(shape, context, replace(result, seconds=result.seconds * (slower if name else 1)))
    best = {name: max(world.menu, key=lambda shape: world.rate(shape, [hit] * rows)) for name, hit in hits.items()}
    assert best["far"] == PLAIN != best["near"] == best[""]
    for name, hit in hits.items():
        decision = policy.decide(StepContext(wide, adapters=[name] * rows if name else ()))
        assert world.rate(world.menu[decision.best], [hit] * rows) > 0.96 * world.rate(best[name], [hit] * rows), name
        seconds = decision.options[decision.best].seconds / world.seconds(world.menu[decision.best], rows)
        assert 0.93 < seconds / (slower if name else 1) < 1.1, name
    far, near = (policy.decide(StepContext(wide, adapters=[name] * rows)).options[0].tokens for name in ("far", "near"))
    mixed = policy.decide(StepContext(wide, adapters=["far", "far", "near", "near"])).options[0].tokens
    assert far < mixed < near and abs(mixed - (far + near) / 2) < 0.2
    policy.forget()
    assert policy.decide(StepContext(wide, adapters=["far"] * rows)).best != len(world.menu) - 1


def test_exploring_has_one_budget() -> None:
    """What options and prompts may lose together."""
    world, policy, context = settled("small machine", 0.05)
    lost = seconds = 0.0
    for step in range(3000):
        shape = policy.choose(context)
        policy.record(shape, context, world.step(shape, [0.05] * 8))
        took = world.seconds(shape, 8)
        seconds += took
        lost += took - world.tokens(shape, [0.05] * 8) / 8 * world.seconds(PLAIN, 8)
        if step % 10 == 0 and policy.spend(0.005):
            lost += 0.005
    assert 0.004 * seconds < lost < 0.012 * seconds


@pytest.mark.slow
def test_a_prompt_that_costs_much_is_saved_up_for() -> None:
    world, policy, context = settled("small machine", 0.05)
    policy.cost = world.cost()
    tried = 0
    for _ in range(6_000):
        policy.record(PLAIN, context, world.step(PLAIN, [0.05] * 8))
        tried += policy.spend(0.1)
    assert tried >= 2


def test_a_fixed_shape_is_fixed() -> None:
    policy = FixedShape(TREE)
    assert policy.choose(StepContext([0, 3])) == TREE and policy.choose(StepContext([0, 0])) == PLAIN
    assert [row["chosen"] for row in policy.explain(StepContext([1]))] == [True, False]


def test_it_can_be_explained() -> None:
    menu = tree_menu(TREE)
    world = MACHINES["gpu"](menu)
    policy = TreePolicy(menu, world.cost())
    world.run(policy, [0.9], 200)
    rows = policy.explain(StepContext([MAX_CONFIDENCE]))
    assert [row["shape"] for row in rows] == list(menu) and sum(row["chosen"] for row in rows) == 1
    best = next(row for row in rows if row["chosen"])
    assert best["rate"] == max(row["rate"] for row in rows)
    assert best["rate"] == pytest.approx(world.rate(best["shape"], [0.9]), rel=0.1)
    assert rows[-1]["gain"] == 0 and rows[-1]["price_ms"] == pytest.approx(4.012, rel=0.1)
