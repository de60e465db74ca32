"""How long requests wait for their next token when others come at any time: the scheduler, the policy and one step of
lag, on a machine whose times were measured, with and without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from step_marks import marks_of
from world import H200

from draftwing.core import MAX_CONFIDENCE, PLAIN, Plan, StepResult, TreeShape
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy import FixedShape, MostTokens, tree_menu
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.slow

TREE = TreeShape(4, 4, 16)
MIX = (60, 600, 200, 250, 500)  # tokens of prompts
HIT = 0.8  # of an expected draft


class Load:
    """Requests that come at random, `rate` a second, for `seconds`; answers of so many `tokens`."""

    def __init__(self, drafts: bool, rate: float, seconds: float, tokens: int, mix: Sequence[int] = MIX) -> None:
        menu = tree_menu(TREE) if drafts else (PLAIN,)
        self.world = H200(menu)
        policy = MostTokens(menu, self.world.prices((1, 4, 16, 64, 128))) if drafts else FixedShape(PLAIN)
        spans = {shape: shape.nodes for shape in menu}
        config = SchedulerConfig(200_000, 128, max(spans.values()), 8192, initial_confidence=MAX_CONFIDENCE)
        self.sched = Scheduler(config, policy, spans)
        rng, at, self.todo = random.Random(1), 0.0, list[tuple[float, Req]]()
        for number in range(round(rate * seconds)):
            size = mix[number % len(mix)]
            params = SamplingParams(max_new_tokens=tokens)
            request = GenerationRequest(str(number), [10_000 * (number + 1) + i for i in range(size)], params)
            self.todo.append((at, Req(request, 0, size + tokens, frozenset())))
            at += rng.expovariate(rate)
        self.now, self.last, self.gaps = 0.0, dict[str, float](), list[float]()
        self.begun, self.paces = dict[str, float](), list[float]()

    def run(self) -> None:
        flying: tuple[Plan, StepResult, float] | None = None
        free = 0.0  # when the device will have nothing to do
        self.todo.reverse()
        while self.todo or not self.sched.idle or flying:
            while self.todo and self.todo[-1][0] <= self.now:
                self.sched.submit(self.todo.pop()[1])
            plan, before = self.sched.plan(), flying
            flying = None
            if plan is not None:
                result, launch = self.step(plan)
                begin, self.now = max(free, self.now), self.now + launch
                free = max(begin + result.seconds, self.now)
                flying = plan, replace(result, seconds=free - begin), free
            if before is not None:
                self.now = max(self.now, before[2])
                self.sched.commit(*before[:2])
                self.take()
            elif plan is None:
                self.now = self.todo[-1][0]

    def step(self, plan: Plan) -> tuple[StepResult, float]:
        """-> its result, and the seconds that the host launches it"""
        rows, shape = len(plan.rows), plan.shape
        order = np.tile(np.arange(shape.nodes), (rows, 1))
        if plan.kind == "tree":
            found = self.world.step(shape, [HIT] * rows)
            done = replace(found, tokens=np.ones((rows, shape.max_commit), np.int64), order=order)
            return done, 1e-3 * self.world.REPLAY
        final = np.asarray([int(chunk.final) for chunk in plan.chunks])
        took, launch = self.world.prefill(sum(chunk.length for chunk in plan.chunks))
        confidence, mark = np.full(rows, MAX_CONFIDENCE), marks_of([range(shape.nodes)] * rows)
        return StepResult(np.ones((rows, 1), np.int64), final, order, mark, confidence, took), launch

    def take(self) -> None:
        for output in self.sched.take_outputs():
            if output.uid in self.last:
                self.gaps.append(self.now - self.last[output.uid])
            self.begun.setdefault(output.uid, self.now)
            self.last[output.uid] = self.now
            if output.finish_reason is not None:
                tokens = output.meta["completion_tokens"]
                self.paces.append((self.now - self.begun[output.uid]) / (tokens - 1))


def measured(drafts: bool, rate: float, mix: Sequence[int] = MIX) -> tuple[float, float, float]:
    """-> milliseconds: 99th percentile of gaps, median and 99th percentile of the time of a token"""
    load = Load(drafts, rate, 4.0, 128, mix)
    load.run()
    paces, gaps = np.asarray(load.paces), np.asarray(load.gaps)
    return tuple(1e3 * float(np.quantile(*one)) for one in ((gaps, 0.99), (paces, 0.5), (paces, 0.99)))  # type: ignore[return-value]


@pytest.mark.further(rate=[12, 45])
@pytest.mark.parametrize(("rate", "mix"), [(12, MIX), (30, MIX), (45, MIX), (60, (100,))])
def test_gaps_are_not_longer_than_without_drafts(rate: float, mix: Sequence[int]) -> None:
    plain, drafted = measured(False, rate, mix), measured(True, rate, mix)
    assert drafted[0] < 1.1 * plain[0]
    assert drafted[1] < 0.85 * plain[1] and drafted[2] < 0.95 * plain[2]
