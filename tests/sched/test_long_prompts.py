"""What requests that decode feel of long prompts: the scheduler and one step of lag, on a machine without cheap tokens.

Its times are those of a CPU with two cores: a prompt's token takes a tenth of a step, and five times as long where
it attends to 4,000 others. Clients ask again as soon as they are answered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import count

import numpy as np
import pytest

from draftwing.core import PLAIN, Chunk, Plan, StepResult
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy import FixedShape
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.slow

STEP, ROW, TOKEN, KEY = 0.006, 0.002, 0.85e-3, 0.92e-6  # seconds


class Machine:
    """`small` clients with short prompts and `heavy` ones with prompts of 6,000 tokens, each with a request at a
    time. Times vary by up to `noise`."""

    def __init__(self, small: int, heavy: int, noise: float, seed: int = 0) -> None:
        config = SchedulerConfig(200_000, 32, 1, 2048, radix=False)
        self.sched = Scheduler(config, FixedShape(PLAIN), {PLAIN: 1})
        self.noise, self.rng, self.numbers = noise, random.Random(seed), count()
        self.now, self.asked, self.last = 0.0, dict[str, float](), dict[str, float]()
        self.gaps, self.first = list[float](), {"small": list[float](), "heavy": list[float]()}
        for kind in ["small"] * small + ["heavy"] * heavy:
            self.ask(kind)

    def ask(self, kind: str) -> None:
        size, tokens = (self.rng.randrange(12, 20), self.rng.randrange(40, 56)) if kind == "small" else (6000, 16)
        uid = f"{kind} {next(self.numbers)}"
        request = GenerationRequest(uid, [0] * size, SamplingParams(max_new_tokens=tokens))
        self.asked[uid] = self.now
        self.sched.submit(Req(request, 0, size + tokens, frozenset()))

    def run(self, seconds: float) -> None:
        flying: tuple[Plan, StepResult] | None = None
        while self.now < seconds:
            plan, before = self.sched.plan(), flying
            flying = None if plan is None else (plan, self.step(plan))
            if before is not None:
                self.now += before[1].seconds
                self.sched.commit(*before)
                self.take()

    def step(self, plan: Plan) -> StepResult:
        rows = len(plan.rows)
        final = np.asarray([int(chunk.final) for chunk in plan.chunks] or [1] * rows)
        took = self.prefill(plan.chunks) if plan.chunks else STEP + ROW * rows
        took *= 1 + self.noise * self.rng.random() ** 3
        zeros = np.zeros((rows, 1), np.int64)
        return StepResult(zeros + 1, final, zeros, zeros, zeros[:, 0], took)

    @staticmethod
    def prefill(chunks: Sequence[Chunk]) -> float:
        return STEP + sum(chunk.length * (TOKEN + KEY * (chunk.start + chunk.length / 2)) for chunk in chunks)

    def take(self) -> None:
        for output in self.sched.take_outputs():
            kind = output.uid.split()[0]
            if output.uid not in self.last:
                self.first[kind].append(self.now - self.asked[output.uid])
            elif kind == "small":
                self.gaps.append(self.now - self.last[output.uid])
            self.last[output.uid] = self.now
            if output.finish_reason is not None:
                self.ask(kind)


@cache
def measured(small: int, heavy: int, noise: float = 0.1) -> Machine:
    machine = Machine(small, heavy, noise)
    machine.run(80.0)
    return machine


def late(seconds: Sequence[float]) -> float:
    return float(np.quantile(seconds, 0.99))


def test_streams_go_on_as_without_long_prompts() -> None:
    assert late(measured(5, 1).gaps) < 1.25 * late(measured(5, 0).gaps)


@pytest.mark.further(heavy=1, noise=0.1)
@pytest.mark.further(noise=3.0)
@pytest.mark.parametrize("noise", [0.1, 3.0])
@pytest.mark.parametrize("heavy", [1, 4])
def test_who_sends_long_prompts_is_no_more_than_one_client(heavy: int, noise: float) -> None:
    """Each is one more request in a step. Where times vary it is also one more time to vary: with a prefill after each
    step there are twice as many of them in a gap."""
    alone, beside, others = measured(5, 0, noise), measured(5, heavy, noise), measured(5 + heavy, 0, noise)
    assert late(beside.gaps) < 1.25 * late(others.gaps)
    assert np.median(beside.first["small"]) < 8 * np.median(alone.first["small"])


def test_long_prompts_come_to_an_end() -> None:
    alone = Machine.prefill([Chunk(0, 0, 6000, True)])
    assert max(measured(5, 1).first["heavy"]) < 3 * alone
    assert min(measured(5, 4).first["heavy"]) < 3 * alone  # the first one does not wait for all


def test_a_short_prompt_does_not_wait_for_large_parts_of_long_ones() -> None:
    """Nobody decodes when it comes."""
    assert np.median(measured(1, 4).first["small"]) < 1.0
