"""The shape of the next step, and what is learnt of shapes from steps that have ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from draftwing.core import Chunk, Plan, StepResult, TreeShape
from draftwing.sched.pace import Pace
from draftwing.sched.policy import Load, ShapePolicy
from draftwing.sched.prices import PricedSteps
from draftwing.sched.req import Req


class ShapeChoice:
    """Asks the policy for what the requests of a step and the pace of others allow, and tells it of results."""

    def __init__(self, policy: ShapePolicy, pace: Pace, draws_alike: bool) -> None:
        """draws_alike: see `SchedulerConfig`."""
        self.policy, self._pace, self._draws_alike = policy, pace, draws_alike
        self._priced = PricedSteps()

    @contextmanager
    def replaced(self, policy: ShapePolicy) -> Iterator[None]:
        """Asks another policy for a while, of the same menu or parts of it: for measurements."""
        before = self.policy
        assert set(policy.menu) <= set(before.menu)
        self.policy = policy
        try:
            yield
        finally:
            self.policy = before

    @property
    def skips_prompts(self) -> bool:
        """Whether a drafter need not see prompts, because of which hardly anything will be drafted: they decide."""
        return self.policy.adapts and self._pace.pressed

    def choose(self, ready: Sequence[Req], prefilled: Sequence[Chunk], waiting: bool, passes: int = 1) -> TreeShape:
        """The shape of a step of the requests `ready`. prefilled: by the plan before. waiting: whether parts of prompts
        wait for the step. passes: as of `Load`."""
        if not self.policy.sees_predictions and all(req.request.prediction for req in ready):
            return self.policy.menu[0]
        return self.policy.choose(self.load(ready, self._pace.longer(prefilled, waiting), passes))

    def load(self, ready: Sequence[Req], longer: float = math.inf, passes: int = 1) -> Load:
        """What the policy is told of a step. longer: seconds that it may take beyond those of a plain one. passes: as
        of `Load`."""
        confidences = [req.confidence if req.may_draft and not req.slow and not req.skipped else 0 for req in ready]
        whole = any(req.special or (self._draws_alike and req.draws_specially) for req in ready)
        newest = max((req.admission for req in ready), default=0)
        return Load(confidences, _context(ready), longer, whole, newest, passes)

    def planned(self, step: int, behind_prefill: bool) -> None:
        """The tree step of this number is planned, right behind a prefill or not."""
        self._priced.planned(step, behind_prefill)

    def record(self, plan: Plan, live: Sequence[Req | None], result: StepResult) -> None:
        """A step has ended. live: the request of each of its rows that still has it."""
        if plan.kind == "prefill":
            self._pace.record(plan.chunks, result.seconds - result.catching_up)
        else:
            self._pace.record_step(result.seconds)
            load = self._load_before(live)._replace(passes=1 if plan.catch_up is None else plan.catch_up.passes)
            self.policy.record(plan.shape, load, result, self._priced.take(plan))

    def _load_before(self, live: Sequence[Req | None]) -> Load:
        """What `record` is told of a step's rows: nothing of those that say nothing of its shape."""
        sees = self.policy.sees_predictions
        confidences = [
            0 if req is None or _tells_nothing(req) or (req.request.prediction and not sees) else req.confidence
            for req in live
        ]
        return Load(confidences, _context(req for req in live if req is not None))


def _context(reqs: Iterable[Req]) -> int:
    """Tokens in their KV, as far as the host knows."""
    return sum(req.kv for req in reqs)


def _tells_nothing(req: Req) -> bool:
    """Whether what was accepted of its drafts says nothing of others'."""
    return req.limited or req.slow or req.skipped
