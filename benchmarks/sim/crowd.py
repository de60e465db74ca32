"""Waves of short prompts without drafts, with the measured times of three models on one GPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from served import Served, request

from draftwing.config.trees import PLAIN
from draftwing.core import Plan, StepResult
from draftwing.sched.policy.shape_policy import FixedShape
from draftwing.sched.scheduler import Scheduler, SchedulerConfig


class Times(NamedTuple):
    """Milliseconds of plain steps by rows, and of prefills by tokens."""

    steps: tuple[tuple[float, ...], tuple[float, ...]]
    prefills: tuple[tuple[float, ...], tuple[float, ...]]

    def of(self, plan: Plan) -> float:
        tokens = sum(chunk.length for chunk in plan.chunks)
        return float(np.interp(tokens, *self.prefills) if tokens else np.interp(len(plan.rows), *self.steps))


TIMES = {
    "dense 8B": Times(((1, 16, 64, 128), (4.0, 4.3, 5.2, 6.5)), ((1, 128, 512, 2048, 8192), (4.2, 6.5, 13, 45, 178))),
    "gpt-oss": Times(
        ((1, 4, 8, 16, 32, 64, 128), (1.57, 2.62, 3.23, 4.2, 4.8, 5.42, 7.5)),
        ((1, 16, 128, 256, 512, 1024, 2048, 8192), (2.0, 4.3, 7.45, 11.2, 17.9, 27.5, 46, 160)),
    ),
    "Qwen3-MoE fp8": Times(
        ((1, 4, 8, 16, 32, 64, 128), (2.05, 3.72, 5.03, 6.9, 9.1, 10.2, 12.1)),
        ((1, 16, 128, 256, 512, 1024, 2048, 8192), (2.5, 7, 12.1, 21, 25.5, 37.8, 62, 215)),
    ),
}


class Crowd(Served):
    """Requests without drafts whose prompts are short and come together. All have answers of the same length."""

    PROMPT, ANSWER, WAVE = 100, 256, 64

    def __init__(self, times: Times) -> None:
        super().__init__()
        config = SchedulerConfig(100_000, 128, 1, 8192, radix=False)
        self.sched, self.times, self.number = Scheduler(config, FixedShape(PLAIN), {PLAIN: 1}), times, 0
        self.gaps_of: dict[str, list[float]] = {}

    def ask(self, client: str, answer: int = ANSWER) -> None:
        self.number += 1
        self.sched.submit(request(f"{client} {self.number}", [0] * self.PROMPT, answer, client))

    def run_slowly(self, until: float = float("inf")) -> None:
        """As `run`, with a host that takes no time."""
        flying: tuple[Plan, StepResult] | None = getattr(self, "_flying", None)
        while self.now < until:
            plan, before = self.sched.plan(), flying
            if plan is None and before is None:
                break
            flying = None if plan is None else (plan, self.step(plan)[0])
            if before is not None:
                self.now += before[1].seconds
                self.sched.commit(*before)
                for output in self.sched.take_outputs():
                    if output.uid in self.last:
                        self.gaps_of.setdefault(output.uid.split()[0], []).append(self.now - self.last[output.uid])
                    self.last[output.uid] = self.now
        self._flying = flying

    def step(self, plan: Plan) -> tuple[StepResult, float]:
        rows = len(plan.rows)
        final = np.asarray([int(chunk.final) for chunk in plan.chunks] or [1] * rows)
        zeros = np.zeros((rows, 1), np.int64)
        return StepResult(zeros + 1, final, zeros, zeros, zeros[:, 0], self.times.of(plan) / 1e3), 0.0


def wave(times: Times) -> tuple[float, float]:
    """Returns the speed of the third wave over that of all prompts first, and its longest gap in seconds."""
    crowd, began = Crowd(times), 0.0
    for _ in range(3):
        crowd.now, began = crowd.now + 1, crowd.now + 1
        crowd.gaps_of.clear()
        for part in range(8):  # they come within 24 ms
            for _ in range(Crowd.WAVE // 8):
                crowd.ask("one")
            crowd.run_slowly(began + 0.003 * (part + 1))
        crowd.run_slowly()
    prompts = float(np.interp(Crowd.WAVE * Crowd.PROMPT, *times.prefills))
    ideal = 1e-3 * (prompts + Crowd.ANSWER * float(np.interp(Crowd.WAVE, *times.steps)))
    return ideal / (crowd.now - began), max(crowd.gaps_of["one"])


def gap_with_a_crowd(times: Times) -> float:
    """Returns the longest gap of one client's few answers with another's crowd, in seconds."""
    crowd = Crowd(times)
    for _ in range(2):
        for _ in range(4):
            crowd.ask("few")
        crowd.run_slowly(crowd.now + 0.1)
        crowd.gaps_of.clear()
        for _ in range(Crowd.WAVE):
            crowd.ask("many", 16)
        crowd.run_slowly()
    return max(crowd.gaps_of["few"])
