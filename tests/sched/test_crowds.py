"""Many requests at once on a GPU: the scheduler and one step of lag, on times that were measured on an H200."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from draftwing.core import PLAIN, Plan, StepResult
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.pace import CROWD
from draftwing.sched.policy import FixedShape
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.slow
WAVE, PROMPT, ANSWER = 64, 100, 256


class Times(NamedTuple):
    """Milliseconds of plain steps by rows, and of prefills by tokens."""

    steps: tuple[tuple[float, ...], tuple[float, ...]]
    prefills: tuple[tuple[float, ...], tuple[float, ...]]

    def of(self, plan: Plan) -> float:
        tokens = sum(chunk.length for chunk in plan.chunks)
        return float(np.interp(tokens, *self.prefills) if tokens else np.interp(len(plan.rows), *self.steps))


DENSE = Times(((1, 16, 64, 128), (4.0, 4.3, 5.2, 6.5)), ((1, 128, 512, 2048, 8192), (4.2, 6.5, 13, 45, 178)))
GPT_OSS = Times(
    ((1, 4, 8, 16, 32, 64, 128), (1.57, 2.62, 3.23, 4.2, 4.8, 5.42, 7.5)),
    ((1, 16, 128, 256, 512, 1024, 2048, 8192), (2.0, 4.3, 7.45, 11.2, 17.9, 27.5, 46, 160)),
)
QWEN_FP8 = Times(
    ((1, 4, 8, 16, 32, 64, 128), (2.05, 3.72, 5.03, 6.9, 9.1, 10.2, 12.1)),
    ((1, 16, 128, 256, 512, 1024, 2048, 8192), (2.5, 7, 12.1, 21, 25.5, 37.8, 62, 215)),
)
ALL = pytest.mark.parametrize("times", [DENSE, GPT_OSS, QWEN_FP8], ids=["dense 8B", "gpt-oss", "Qwen3-MoE fp8"])


class Machine:
    def __init__(self, times: Times) -> None:
        config = SchedulerConfig(100_000, 128, 1, 8192, radix=False)
        self.sched, self.times = Scheduler(config, FixedShape(PLAIN), {PLAIN: 1}), times
        self.now, self.count = 0.0, 0
        self.flying: tuple[Plan, StepResult] | None = None
        self.last, self.gaps = dict[str, float](), dict[str, list[float]]()

    def ask(self, client: str, answer: int = ANSWER) -> None:
        self.count += 1
        params = SamplingParams(max_new_tokens=answer)
        request = GenerationRequest(f"{client} {self.count}", [0] * PROMPT, params, client=client)
        self.sched.submit(Req(request, 0, PROMPT + answer, frozenset()))

    def run(self, until: float = float("inf")) -> None:
        """Until nothing is left to do, or until then."""
        while self.now < until:
            plan, before = self.sched.plan(), self.flying
            if plan is None and before is None:
                return
            self.flying = None if plan is None else (plan, self._step(plan))
            if before is not None:
                self.now += before[1].seconds
                self.sched.commit(*before)
                self._take()

    def _step(self, plan: Plan) -> StepResult:
        rows = len(plan.rows)
        final = np.asarray([int(chunk.final) for chunk in plan.chunks] or [1] * rows)
        zeros = np.zeros((rows, 1), np.int64)
        return StepResult(zeros + 1, final, zeros, zeros, zeros[:, 0], self.times.of(plan) / 1e3)

    def _take(self) -> None:
        for output in self.sched.take_outputs():
            if output.uid in self.last:
                self.gaps.setdefault(output.uid.split()[0], []).append(self.now - self.last[output.uid])
            self.last[output.uid] = self.now


@cache
def wave(times: Times) -> tuple[float, Machine]:
    """-> tokens per second of the third wave: prefills and steps are learnt in the first ones"""
    machine, began = Machine(times), 0.0
    for _ in range(3):
        machine.now, began = machine.now + 1, machine.now + 1
        machine.gaps.clear()
        for part in range(8):  # they come within 24 ms
            for _ in range(WAVE // 8):
                machine.ask("one")
            machine.run(began + 0.003 * (part + 1))
        machine.run()
    return WAVE * ANSWER / (machine.now - began), machine


@ALL
def test_a_wave_is_nearly_as_fast_as_all_prompts_first(times: Times) -> None:
    """Where the shortest prefill takes as long as three steps, parts of three steps cost a tenth."""
    prompts = float(np.interp(WAVE * PROMPT, *times.prefills))
    steps = ANSWER * float(np.interp(WAVE, *times.steps))
    speed, _ = wave(times)
    assert speed > 0.95 * WAVE * ANSWER / (prompts + steps) * 1e3


@ALL
def test_nobody_waits_long_for_a_crowd(times: Times) -> None:
    _, machine = wave(times)
    assert max(machine.gaps["one"]) < CROWD + 0.02  # and what the shortest prefill and a step take


@ALL
def test_a_crowd_of_one_client_makes_no_longer_gaps_for_others(times: Times) -> None:
    machine = Machine(times)
    for _ in range(2):
        for _ in range(4):
            machine.ask("few")
        machine.run(machine.now + 0.1)
        machine.gaps.clear()
        for _ in range(WAVE):
            machine.ask("many", 16)
        machine.run()
    assert max(machine.gaps["few"]) < 0.9 * CROWD
