"""What the policy gets for requests, and which steps' seconds are a cost."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds import TREE, World

from draftwing.config.trees import MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.core import Chunk, DraftDeferral, Plan, StepResult
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.choice import DraftPrefill, ShapeChoice
from draftwing.sched.policy.cost import RECENT
from draftwing.sched.policy.prefill_budget import PrefillBudget
from draftwing.sched.policy.shape_policy import FixedShape, StepContext, TreePolicy
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig
from draftwing.spec.drafter import match_menu


def requests(count: int, **more: Any) -> list[Req]:
    asked = [GenerationRequest(str(row), [1], SamplingParams(), **more) for row in range(count)]
    return [Req(one, 0, 100, frozenset()) for one in asked]


class Watched(FixedShape):
    """Notes what it is asked and given."""

    adapts = True

    def __init__(self, sees_predictions: bool = True) -> None:
        super().__init__(TREE)
        self.sees_predictions = sees_predictions
        self.asked: list[StepContext] = []
        self.is_cost: list[bool] = []
        self.learnt: list[list[int]] = []  # confidences

    def choose(self, context: StepContext) -> TreeShape:
        self.asked.append(context)
        return PLAIN

    def record(self, shape: TreeShape, context: StepContext, result: StepResult, is_cost: bool = True) -> None:
        self.is_cost.append(is_cost)
        self.learnt.append(list(context.confidences))


def tree_step(number: int, rows: int = 2, guided: int = 0) -> Plan:
    none = np.zeros(rows, np.int64)
    return Plan(number, "tree", none, none, PLAIN, 100, (), (), (), guided=np.arange(guided, dtype=np.int64))


def test_a_context_tells_the_newest_request() -> None:
    rows = [
        SimpleNamespace(
            confidence=1, may_draft=True, slow=False, skipped=False, special=False, kv=5, admission=number, adapter=0
        )
        for number in (4, 9, 7)
    ]
    choice = ShapeChoice(Watched(), PrefillBudget(), draws_alike=False)
    assert choice.context(rows).last_admission == 9 and choice.context([]).last_admission == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("predicted", [False, True])
def test_prompts_that_wait_are_noted_whatever_is_asked_for(predicted: bool) -> None:
    """Requests with a predicted output get the largest shape of a drafter that cannot see them, and others' gaps count
    all the same."""
    policy, prefills = Watched(sees_predictions=False), PrefillBudget()
    choice = ShapeChoice(policy, prefills, draws_alike=False)
    reqs = requests(2, prediction=[1, 2, 3] if predicted else [])
    for _ in range(RECENT):
        assert choice.choose(reqs, [Chunk(0, 0, 100, True)], True) == (TREE if predicted else PLAIN)
    assert prefills.crowded_out and choice.suspended and len(policy.asked) == (0 if predicted else RECENT)
    context = choice.context(reqs)
    assert context.latency_slack == 0 == choice.context(reqs, [Chunk(0, 0, 9, True)]).latency_slack
    (chosen,) = (entry for entry in choice.explain(reqs, context) if entry["chosen"])
    assert chosen["shape"] == (TREE if predicted else PLAIN), "what is explained is what runs"
    choice.skip_prompts(reqs, reqs, 0)
    assert not choice.suspended, "whoever waited is gone"


def test_which_steps_are_a_price() -> None:
    """Not one behind a prefill, as long as others are; nor one with a row of its own wants."""
    policy, reqs = Watched(), requests(2)
    choice, number = ShapeChoice(policy, PrefillBudget(), draws_alike=False), 0

    def is_cost(behind: bool, guided: int = 0) -> bool:
        nonlocal number
        number += 1
        choice.planned(number, reqs, behind)
        empty = np.zeros((2, 1), np.int64)
        choice.record(
            tree_step(number, 2, guided), reqs, StepResult(empty, empty[:, 0] + 1, empty, empty, empty[:, 0], 0.01)
        )
        return policy.is_cost[-1]

    assert [is_cost(behind) for behind in (False, True, False)] == [True, False, True] and not is_cost(False, guided=1)
    found = [is_cost(True) for _ in range(6 * RECENT)]
    assert 3 <= sum(found) <= 7, "where all steps are behind prefills some are taken"


@pytest.mark.parametrize("by_row", [False, True])
def test_a_step_with_penalties_is_a_price_where_they_cost_nothing(by_row: bool) -> None:
    policy, reqs = Watched(), requests(2)
    choice = ShapeChoice(policy, PrefillBudget(), draws_alike=False, edits_by_row=by_row)
    empty, edited = np.zeros((2, 1), np.int64), np.arange(1)
    result = StepResult(empty, empty[:, 0] + 1, empty, empty, empty[:, 0], 0.01)
    for number, penalised in enumerate((True, False)):
        choice.planned(number, reqs, False)
        plan = replace(tree_step(number), edited=edited, penalised=penalised)
        assert plan.special
        choice.record(plan, reqs, result)
    assert policy.is_cost == [by_row, False]


@pytest.mark.parametrize("sees", [False, True])
def test_rows_that_say_nothing_of_their_shape_are_not_learnt_from(sees: bool) -> None:
    """Nor are those that are released when the result comes; the others by what they promised when it was planned."""
    policy = Watched(sees)
    choice, reqs = ShapeChoice(policy, PrefillBudget(), draws_alike=False), requests(5)
    for req in reqs:
        req.confidence = 7
    reqs[1].limited = reqs[2].skipped = True
    reqs[3] = requests(1, prediction=[1, 2, 3])[0]
    reqs[3].confidence = 7
    choice.planned(0, reqs, False)
    reqs[0].confidence = 1
    empty = np.zeros((5, 1), np.int64)
    result = StepResult(empty, empty[:, 0] + 1, empty, empty, empty[:, 0], 0.01)
    choice.record(tree_step(0, 5), [*reqs[:4], None], result)
    assert policy.learnt == [[7, 0, 0, 7 if sees else 0, 0]]


@pytest.mark.slow
@pytest.mark.further(lag=0)
@pytest.mark.parametrize("lag", [0, 1])
def test_what_is_expected_of_matches_comes(lag: int) -> None:
    """Matches begin and end between the plan of a step and its result, and the newest confidences are of the last."""
    menu, rng = match_menu(TreeShape(6, 1, 7)), random.Random(3)
    world = World(menu, 4.0, 0.001, 0.0)
    policy = TreePolicy(menu, world.cost((8,)), sees_predictions=True, base=0)
    choice, reqs = ShapeChoice(policy, PrefillBudget(), draws_alike=False), requests(8)
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
            expected += policy._acceptance.expected(menu.index(shape), counts)
            found += sum(int(step.count[row]) - 1 for row in rows if reqs[row].confidence)
        flying.append((Plan(number, "tree", rows, rows, shape, 9, (), (), ()), step))
        if len(flying) > lag:
            plan, result = flying.popleft()
            choice.record(plan, reqs, result)
            for req, match in zip(reqs, matches[plan.step + 1], strict=True):
                req.confidence = 5 if match else 0
    assert expected == pytest.approx(found, rel=0.03)


def test_a_price_is_learnt_where_nothing_can_be_proposed() -> None:
    menu = match_menu(TreeShape(6, 1, 7))
    world, reqs = World(menu, 4.0, 0.1, 0.0), requests(8)
    policy = TreePolicy(menu, world.cost(), sees_predictions=True, base=0)
    choice, slower = ShapeChoice(policy, PrefillBudget(), draws_alike=False), 1.5 * world.seconds(PLAIN, 8)
    for number in range(200):
        assert choice.choose(reqs, (), False) == PLAIN
        choice.planned(number, reqs, False)
        choice.record(tree_step(number, 8), reqs, replace(world.step(PLAIN, [0.0] * 8), seconds=slower))
    assert policy.cost.seconds(PLAIN, 8, 0) == pytest.approx(slower, rel=0.05)


SMALL_TREE = TreeShape(3, 1, 4)
A_PASS = 0.02


class Budget:
    """What exploring may cost: so many seconds, and no more."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def spend(self, seconds: float) -> bool:
        if seconds > self.seconds:
            return False
        self.seconds -= seconds
        return True


def known(answer: int = 128) -> DraftPrefill:
    worth = DraftPrefill(8192)
    worth.record(2 * A_PASS, 1, 8000)
    worth.ended(answer, 1000)
    worth.ended(answer, 64)
    return worth


def seen(
    worth: DraftPrefill, tokens: list[int], limits: list[int], saving: float | None, best: float | None = None,
    budget: Budget | None = None,
) -> bool:  # fmt: skip
    prompts = [(length, length > 1024) for length in tokens]
    return worth.should_prefill(prompts, limits, saving, best, (budget or Budget()).spend)


def test_what_is_not_known_is_found_out() -> None:
    worth = DraftPrefill(8192)
    assert seen(worth, [7500], [128], 0.0), "what a pass takes"
    worth.record(A_PASS, 1, 0)
    assert seen(worth, [7500], [128], 0.0), "how long answers are"
    worth.ended(128, 128)
    assert seen(worth, [7500], [128], None), "what drafts save"
    assert not seen(worth, [7500], [128], 0.0)


@pytest.mark.parametrize(("tokens", "passes"), [(7500, 2), (100, 1), (20_000, 4)])
def test_an_answer_brings_back_what_the_prompt_took(tokens: int, passes: int) -> None:
    least = passes * A_PASS / 128  # seconds that a token has to save
    assert seen(known(), [tokens], [1000], 1.01 * least) and not seen(known(), [tokens], [1000], 0.99 * least)
    assert not seen(known(), [tokens], [64], 1.9 * least), "a limited answer is no longer"
    assert seen(known(64), [tokens], [1000], 2.1 * least) and not seen(known(64), [tokens], [1000], 1.9 * least)


def test_prompts_that_are_prefilled_together_share_a_pass() -> None:
    saving = A_PASS / 800
    assert seen(known(), [100] * 8, [1000] * 8, saving) and not seen(known(), [100], [1000], saving)
    assert not seen(known(), [7500] * 8, [1000] * 8, saving), "of a long one its end alone"


def test_exploring_pays_for_what_does_not_seem_worth_it() -> None:
    worth, budget = known(), Budget(10.5 * A_PASS)
    assert sum(seen(worth, [100], [1000], 0.0, None, budget) for _ in range(100)) == 10
    assert budget.seconds == pytest.approx(0.5 * A_PASS)
    assert seen(worth, [100], [1000], 1.01 * A_PASS / 128, None, budget) and budget.seconds > 0.4 * A_PASS


def test_nothing_is_found_out_where_not_even_the_best_drafts_would_bring_it_back() -> None:
    for best, tried in ((A_PASS / 130, False), (A_PASS / 126, True)):
        assert seen(known(), [100], [1000], 0.0, best, Budget(1.0)) is tried
    assert seen(known(), [100] * 8, [1000] * 8, A_PASS / 800, A_PASS / 130), "together they share a pass"


def test_long_answers_beside_many_short_ones_are_known_for_long() -> None:
    worth = known()
    for _ in range(16):
        worth.ended(5, 8)
    saving = A_PASS / 100
    assert not seen(worth, [100], [8], saving)
    assert seen(worth, [100], [4000], saving), "nothing is known of such a limit"
    worth.ended(5, 4000)
    assert not seen(worth, [100], [4000], saving)
    worth.ended(3000, 4000)
    assert seen(worth, [100], [4000], saving) and not seen(worth, [100], [8], saving)


@pytest.mark.parametrize("hit", [0.02, 0.9])
def test_a_policy_tells_what_drafts_save(hit: float) -> None:
    world = World((SMALL_TREE, PLAIN), 4.0, 0.02, 0.1)
    policy = TreePolicy(world.menu, world.cost((4,)))
    hits, load = [hit] * 4, StepContext([MAX_CONFIDENCE] * 4)
    assert policy.saving(load) is None, "nothing has run"
    world.run(policy, hits, 300)
    expected = 1 / world.rate(PLAIN, hits) - 1 / max(world.rate(shape, hits) for shape in world.menu)
    assert policy.saving(load) == pytest.approx(expected, abs=0.1e-3), "0 where nothing is worth drafting"
    best = 1 / world.rate(PLAIN, hits) - world.seconds(SMALL_TREE, 4) / 16
    assert policy.saving(load, at_best=True) == pytest.approx(best, abs=0.1e-3)


def test_drafts_save_nothing_in_steps_that_have_no_time_for_them() -> None:
    world = World((SMALL_TREE, PLAIN), 4.0, 0.02, 0.1)
    policy = TreePolicy(world.menu, world.cost((4,)))
    world.run(policy, [0.9] * 4, 100)
    load = StepContext([MAX_CONFIDENCE] * 4)
    before = policy.saving(load)
    for number in range(200):
        policy.choose(load._replace(latency_slack=0.0 if number % 4 else float("inf")))
    after = policy.saving(load)
    assert before is not None and after is not None and 0.15 * before < after < 0.4 * before


class Saving(FixedShape):
    adapts = True
    worth: float | None = 0.0

    def saving(self, context: StepContext, at_best: bool = False) -> float | None:
        assert context.confidences == [7] * 2
        return self.worth


@pytest.mark.parametrize("from_tokens", [True, False])
def test_who_is_admitted_may_not_be_seen(from_tokens: bool) -> None:
    policy = Saving(SMALL_TREE)
    config = SchedulerConfig(
        4000,
        2,
        4,
        512,
        initial_confidence=7,
        skips_extend=frozenset([PLAIN]),
        deferral=DraftDeferral(100, 50, from_tokens),
    )
    sched = Scheduler(config, policy, {shape: shape.nodes for shape in policy.menu})
    if from_tokens:
        sched.choice._draft_prefill = known()
    for worth in (0.0, 1.0):
        policy.worth = worth
        reqs = [
            Req(GenerationRequest(f"{i} {worth}", [i] * 30, SamplingParams(max_new_tokens=9)), 0, 39, frozenset())
            for i in range(2)
        ]
        for req in reqs:
            sched.submit(req)
        plan = sched.plan()
        assert plan is not None and [chunk.kept is not None for chunk in plan.chunks] == [from_tokens and not worth] * 2
        for req in reqs:
            sched.abort(req.uid)


def test_who_comes_when_nobody_runs_is_seen() -> None:
    """Prompts waited all the time until everything was aborted: nothing has run since that would tell of an end."""
    policy = Saving(SMALL_TREE)
    config = SchedulerConfig(
        4000, 3, 4, 512, initial_confidence=7, skips_extend=frozenset([PLAIN]), deferral=DraftDeferral(100, 50, True)
    )
    sched = Scheduler(config, policy, {shape: shape.nodes for shape in policy.menu})
    policy.worth = None
    for _ in range(RECENT):
        sched._prefills.plan_step([Chunk(0, 0, 100, False)], waiting=True)
    assert sched._prefills.crowded_out
    reqs = [
        Req(GenerationRequest(str(i), [i] * 30, SamplingParams(max_new_tokens=9)), 0, 39, frozenset()) for i in range(2)
    ]
    for req in reqs:
        sched.submit(req)
    sched.plan()
    assert [req.skipped for req in reqs] == [False] * 2
