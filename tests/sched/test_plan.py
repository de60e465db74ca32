"""A plan goes to the engine's process: what arrives is what the scheduler made."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Collection
from typing import Any

import numpy as np
from toy_device import ToyDevice, span

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import DraftDeferral, Plan
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest, LogprobParams, SpecLimits, ThinkingBudget
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.planning import make_plan
from draftwing.sched.policy.shape_policy import FixedShape
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig
from draftwing.sched.state_slots import StateSizes

SHAPE = TreeShape(2, 2, 4)


class AnyToken:
    """A grammar that allows everything."""

    complete = False

    def advance(self, token: int) -> bool:
        return True

    def run(self, tokens: Collection[int]) -> int:
        return len(tokens)

    def mask(self) -> Any:
        return np.full(1, 0xFFFFFFFF, np.uint32)


ASKED = ("limits", "prediction", "logprobs", "traced", "thinking", "bad_word_ids")  # fields of a request


def everything() -> list[Req]:
    """Requests that together ask for all that a plan can say, with prompts that begin alike."""

    def req(uid: str, last: int, params: SamplingParams, **more: Any) -> Req:
        asked = {name: more.pop(name) for name in ASKED if name in more}
        request = GenerationRequest(uid, [1, 2, 3, 4, 5, last], params, **asked)
        return Req(request, seed=last, max_total=30, stop_ids=frozenset([7, 0]), **more)

    return [
        req("plain", 0, SamplingParams(temperature=0)),
        req("noisy", 1, SamplingParams(temperature=0.7, top_p=0.5, min_new_tokens=4)),
        req("edited", 2, SamplingParams(temperature=0, frequency_penalty=0.5), bad_word_ids=((1, 2), (3,)), salt=2**62),
        req("guided", 3, SamplingParams(temperature=0, grammar=Grammar("regex", ".*")), grammar=AnyToken()),
        req("limited", 4, SamplingParams(temperature=0), limits=SpecLimits(1, 1, 2), prediction=(4, 5, 6)),
        req("told", 5, SamplingParams(temperature=0), logprobs=LogprobParams(2, (1, 3), start=1), traced=True),
        req("thinking", 6, SamplingParams(temperature=0), thinking=ThinkingBudget(2, (8,), (9,), True)),
    ]


def penalised(**more: Any) -> Req:
    params = SamplingParams(temperature=0, repetition_penalty=1.1)
    return Req(GenerationRequest("penalised", [1, 2], params, **more), seed=0, max_total=9, stop_ids=frozenset([0]))


def plan_of(shape: TreeShape, *reqs: Req) -> Plan:
    return make_plan(0, "tree", shape, reqs, 9, (), (), {}, None, (), np.empty(0, np.int64))


def test_what_makes_a_step_special() -> None:
    """Limits where nothing is drafted do not; penalties alone are told from all else."""
    limited = penalised(limits=SpecLimits(0, 1, 1))
    (told,) = (req for req in everything() if req.uid == "told")
    for shape in (SHAPE, PLAIN):
        found = plan_of(shape, limited)
        assert found.special and found.penalised == (shape == PLAIN) == (not len(found.limited))
        assert plan_of(shape, penalised()).penalised and not plan_of(shape, penalised(), told).penalised
    edited, plain, alone = everything()[2], everything()[0], everything()[4]
    assert plan_of(SHAPE, plain, edited).penalised and not plan_of(SHAPE, plain).special
    assert plan_of(SHAPE, alone).special and not plan_of(PLAIN, plain).penalised


def plans() -> list[Plan]:
    policy = FixedShape(SHAPE)
    spans = {shape: span(shape) for shape in policy.menu}
    config = SchedulerConfig(
        400,
        8,
        span(SHAPE),
        16,
        initial_confidence=1,
        skips_extend=frozenset([SHAPE]),
        deferral=DraftDeferral(64, 16),
        states=StateSizes(24, 8, 4),
        mixes=lambda shape, rows: rows == 1,
    )
    sched = Scheduler(config, policy, spans)
    device = ToyDevice(8, 60, lookahead=0, tail=0, skips_extend=config.skips_extend, with_states=True)
    found = []
    adapted = penalised()
    adapted.adapter = 3
    vector = GenerationRequest(
        "vector", [7, 8], SamplingParams(max_new_tokens=0), logprobs=LogprobParams(hidden=4, shown=False)
    )
    pooled = Req(vector, seed=0, max_total=3, stop_ids=frozenset())
    for reqs in (everything(), [adapted], [pooled]):
        for req in reqs:
            sched.submit(req)
        while not sched.idle:
            plan = sched.plan()
            if plan is None:  # a mask that another thread makes is not there yet
                time.sleep(0.001)
                continue
            found += plan.parts
            device.launch(plan)
            for part in plan.parts:
                sched.commit(part, device.wait())
    return found


def test_a_plan_survives_pickling() -> None:
    made = plans()
    for plan in made:
        np.testing.assert_equal(dataclasses.asdict(pickle.loads(pickle.dumps(plan))), dataclasses.asdict(plan))
    assert {plan.kind for plan in made} == {"prefill", "tree"} and {SHAPE} <= {plan.shape for plan in made}
    # Each field has been something else than what it is by default.
    for field in dataclasses.fields(Plan):
        values = [getattr(plan, field.name) for plan in made]
        assert any(len(value) if hasattr(value, "__len__") else value for value in values), field.name
