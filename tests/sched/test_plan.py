"""A plan goes to the engine's process: what arrives is what the scheduler made."""

from __future__ import annotations

import dataclasses
import pickle
import time
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from toy_device import ToyDevice, span

from draftwing.core import DraftDeferral, Plan, TreeShape
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest, LogprobParams, SpecLimits, ThinkingBudget
from draftwing.requests.sampling_params import SamplingParams
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


ASKED = ("limits", "prediction", "logprobs", "traced", "thinking")  # fields of a request


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


def plans() -> list[Plan]:
    policy = FixedShape(SHAPE)
    spans = {shape: span(shape) for shape in policy.menu}
    config = SchedulerConfig(
        400,
        8,
        span(SHAPE),
        16,
        initial_confidence=1,
        lagging=frozenset([SHAPE]),
        deferral=DraftDeferral(64, 16),
        states=StateSizes(24, 8, 4),
    )
    sched = Scheduler(config, policy, spans)
    device = ToyDevice(8, 60, lookahead=0, tail=0, lagging=config.lagging, with_states=True)
    for req in everything():
        sched.submit(req)
    found = []
    while not sched.idle:
        plan = sched.plan()
        if plan is None:  # a mask that another thread makes is not there yet
            time.sleep(0.001)
            continue
        found.append(plan)
        device.launch(plan)
        sched.commit(plan, device.wait())
    return found


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def test_a_plan_survives_pickling() -> None:
    made = plans()
    for plan in made:
        assert_same(plan, pickle.loads(pickle.dumps(plan)))
    assert {plan.kind for plan in made} == {"prefill", "tree"} and {SHAPE} <= {plan.shape for plan in made}
    # Each field has been something else than what it is by default.
    for field in dataclasses.fields(Plan):
        values = [getattr(plan, field.name) for plan in made]
        assert any(len(value) if hasattr(value, "__len__") else value for value in values), field.name


def test_the_comparison_sees_a_difference() -> None:
    plan = next(plan for plan in plans() if len(plan.noisy))
    for other in (plan.noisy.astype(np.int32), plan.noisy + 1, plan.noisy[:0]):
        with pytest.raises(AssertionError):
            assert_same(plan, dataclasses.replace(plan, noisy=other))
