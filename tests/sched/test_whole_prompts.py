"""Prompts of encoders are prefilled at once."""

from __future__ import annotations

import numpy as np
import pytest

from draftwing.config.trees import PLAIN
from draftwing.core import StepResult
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.planning import whole_prompts
from draftwing.sched.policy.shape_policy import FixedShape
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig


def req(uid: str, length: int, client: str = "", priority: int = 0) -> Req:
    params = SamplingParams(max_new_tokens=1)
    request = GenerationRequest(uid, list(range(length)), params, priority, client=client)
    return Req(request, seed=0, max_total=length + 1, stop_ids=frozenset())


def test_as_many_as_there_is_room_for() -> None:
    one, two, three = req("a", 50), req("b", 9), req("c", 4)
    given = [(one, 25), (two, 9), (three, 1)]
    assert whole_prompts(given, 63) == [(one, 50), (two, 9), (three, 4)]
    assert whole_prompts(given, 55) == [(one, 50), (three, 4)]
    assert whole_prompts(given, 20) == [(one, 50)], "the first has more than there is room for"
    assert whole_prompts([], 20) == []


@pytest.mark.parametrize("chunk", [1, 30, 200])
def test_no_prompt_is_cut(chunk: int) -> None:
    config = SchedulerConfig(2000, 6, 1, chunk, radix=False, whole_prompts=True)
    sched = Scheduler(config, FixedShape(PLAIN), {PLAIN: 1})
    asked = [req(str(i), 5 + 37 * i % 90, "ab"[i % 2], i % 3) for i in range(30)]
    for one in asked:
        sched.submit(one)
    done: list[str] = []
    while (plan := sched.plan()) is not None:
        rows = len(plan.rows)
        assert plan.kind == "prefill" and all(each.final and not each.start for each in plan.chunks)
        assert rows == 1 or sum(each.length for each in plan.chunks) <= chunk
        sched.commit(plan, StepResult(
            tokens=np.full((rows, 1), 7), count=np.ones(rows, np.int64), order=np.zeros((rows, 1), np.int64),
            mark=np.zeros((rows, 1), np.int64), confidence=np.ones(rows, np.int64),
        ))  # fmt: skip
        done += [output.uid for output in sched.take_outputs()]
    assert sorted(done) == sorted(one.uid for one in asked)
