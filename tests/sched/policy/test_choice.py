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

from draftwing.core import PLAIN, Chunk, Plan, StepResult, TreeShape
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy.choice import ShapeChoice
from draftwing.sched.policy.cost import RECENT
from draftwing.sched.policy.menus import match_menu
from draftwing.sched.policy.prefill_budget import PrefillBudget
from draftwing.sched.policy.shape_policy import FixedShape, StepContext
from draftwing.sched.policy.tree_policy import TreePolicy
from draftwing.sched.req import Req


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
        SimpleNamespace(confidence=1, may_draft=True, slow=False, skipped=False, special=False, kv=5, admission=number)
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
