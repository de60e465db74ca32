"""What a draft model costs where requests are too many, or prompts too long, for its drafts to be worth it: the
scheduler, the policy and one step of lag in a closed loop, on a machine whose times were measured."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from step_marks import marks_of
from test_tails import Load
from world import H200

from draftwing.core import AT_ONCE, PLAIN, Deferral, Plan, StepResult, TreeShape
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.policy import FixedShape, MostTokens, tree_menu
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler, SchedulerConfig

pytestmark = pytest.mark.slow

TREE = TreeShape(3, 1, 4)
CONFIDENCE = 16  # always the same
WAVES = 8  # requests for each that runs


class Machine(H200):
    """An 8B model, and one of 30 layers that drafts: its passes over text are launched for longer than the device
    computes, those that grow drafts are in graphs. Milliseconds."""

    ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)
    TARGET = (4.01, 4.08, 4.34, 5.07, 5.75, 7.9, 13.0, 22.0, 40.0)
    HEAD = (0.0, 1.0)
    PASS, LEVEL = 15.0, 1.4

    def seconds(self, shape: TreeShape, batch: int) -> float:
        grown = self.LEVEL * (shape.depth + 1) if shape.depth else 0.0
        return 1e-3 * (float(np.interp(batch * shape.queries, self.ROWS, self.TARGET)) + grown)


class Clients(Load):
    """So many, each with a request at a time: a prompt of `size` tokens, answered by 48 to 144. Drafts survive by
    `hit` to the power of their depth."""

    def __init__(self, drafts: bool, count: int, size: int, hit: float) -> None:
        super().__init__(False, 1.0, 0.0, 0)
        self.count, self.size, self.hit = count, size, hit
        menu = tree_menu(TREE) if drafts else (PLAIN,)
        self.world = Machine(menu)
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        policy = MostTokens(menu, self.world.prices(sizes), True, CONFIDENCE) if drafts else FixedShape(PLAIN)
        config = SchedulerConfig(
            330_000, 128, TREE.nodes, 8192, initial_confidence=CONFIDENCE if drafts else 0,
            lagging=frozenset([PLAIN] if drafts else []),
            deferral=Deferral(32_768, 8192, True) if drafts else AT_ONCE,
        )  # fmt: skip
        self.sched = Scheduler(config, policy, {shape: shape.nodes for shape in menu})
        self.rng, self.number, self.left = random.Random(1), 0, WAVES * count
        self.ended = self.written = 0
        self.full: list[tuple[float, int]] = []  # when as many had ended as run at a time, and when the last began
        for _ in range(count):
            self.ask()

    def ask(self) -> None:
        self.number, self.left = self.number + 1, self.left - 1
        length = round(96 * self.rng.uniform(0.5, 1.5))
        prompt = [10_000 * self.number + i for i in range(self.size)]
        request = GenerationRequest(str(self.number), prompt, SamplingParams(max_new_tokens=length))
        self.todo.append((self.now, Req(request, 0, self.size + length, frozenset())))
        if not self.left:
            self.full.append((self.now, self.written))

    def take(self) -> None:
        for output in self.sched.take_outputs():
            self.written += len(output.token_ids)
            if output.finish_reason is not None:
                self.ended += 1
                if self.ended == self.count:
                    self.full.append((self.now, self.written))
                if self.left:
                    self.ask()

    def step(self, plan: Plan) -> tuple[StepResult, float]:
        rows, shape = len(plan.rows), plan.shape
        passes = 0 if plan.catch_up is None else plan.catch_up.passes
        passes += -(-sum(part.length for part in plan.shown) // 8192)
        late, order = 1e-3 * self.world.PASS * passes, np.tile(np.arange(shape.nodes), (rows, 1))
        confidence = np.full(rows, CONFIDENCE)
        if plan.kind == "tree":
            reqs = [self.sched.kv.by_row[row] for row in plan.rows.tolist()]
            found = self.world.step(shape, [0.02 if req.skipped else self.hit for req in reqs])
            took, launch = found.seconds, 1e-3 * Machine.REPLAY
        else:
            final = np.asarray([int(chunk.final) for chunk in plan.chunks])
            found = StepResult(order, final, order, marks_of([range(1)] * rows), confidence)
            took, launch = self.world.prefill(sum(chunk.length for chunk in plan.chunks))
            if len(self.world.menu) > 1 and any(chunk.kept is None for chunk in plan.chunks):
                took, launch = took + 1e-3 * Machine.PASS, launch + 1e-3 * Machine.PASS
        tokens = np.ones((rows, shape.max_commit), np.int64)
        done = replace(
            found, tokens=tokens, order=order, confidence=confidence, seconds=took + late, catching_up=late
        )  # fmt: skip
        return done, launch + late


def rate(drafts: bool, count: int, size: int, hit: float) -> float:
    """-> tokens per second while all clients have a request, after the first wave"""
    clients = Clients(drafts, count, size, hit)
    clients.run()
    (begun, before), (ended, written) = clients.full
    return (written - before) / (ended - begun)


@pytest.mark.further(count=128)
@pytest.mark.parametrize(("count", "size"), [(128, 100), (16, 4000)])
def test_a_draft_model_costs_little_where_it_is_not_worth_it(count: int, size: int) -> None:
    """Nearly all of its drafts are right, and a whole crowd of short prompts that begins together is worth a pass; who
    comes after them, one by one, is not."""
    assert rate(True, count, size, 1.25) > 0.98 * rate(False, count, size, 1.25)
