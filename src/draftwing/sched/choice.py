"""The shape of the next step, and what is learnt of shapes from steps that have ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from draftwing.core import AT_ONCE, Chunk, Deferral, Plan, StepResult, TreeShape
from draftwing.sched.pace import Pace
from draftwing.sched.policy import Load, ShapePolicy
from draftwing.sched.prices import PricedSteps
from draftwing.sched.prompts import PromptWorth
from draftwing.sched.req import Req

TELLING = 64  # positions of texts that tell a CPU, where all cost the same, what one takes
LASTING = 128  # most steps that a text is taken to go on for: most answers end before their limit


class ShapeChoice:
    """Asks the policy for what the requests of a step and the pace of others allow, and tells it of results."""

    def __init__(self, policy: ShapePolicy, pace: Pace, draws_alike: bool, deferral: Deferral = AT_ONCE) -> None:
        """draws_alike: see `SchedulerConfig`.  deferral: of prompts and texts."""
        self.policy, self._pace, self._draws_alike = policy, pace, draws_alike
        self._worth = PromptWorth(deferral.most) if deferral.from_tokens else None
        self._by_slot = deferral.by_slot
        # Positions of texts, seen at once, that tell what one takes; 0: none do.
        self._telling_positions = deferral.most if deferral.from_tokens else TELLING if deferral.by_slot else 0
        self._priced = PricedSteps()
        self._promised: dict[int, list[int]] = {}  # by number of a step in flight: see `_telling`

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

    def skip_prompts(self, admitted: Sequence[Req], running: Sequence[Req], confidence: int) -> None:
        """Decides which of those who have been admitted a drafter need not see the prompts of. running: all who are.
        confidence: of a request of which nothing is known."""
        if not admitted or self._worth is None or not self.policy.adapts:
            return
        load = Load([confidence] * len(running), _context(running))
        saving, at_best = self.policy.saving(load), self.policy.saving(load, at_best=True)
        limits = [req.max_total - len(req.tokens) for req in admitted]
        if len(running) == len(admitted):  # whoever waited before has been answered, or has gone
            self._pace.rest()
        # Where prompts wait all the time hardly anything will be drafted.
        seen = not self._pace.pressed and self._worth.are_worth(
            [req.unsent for req in admitted], limits, saving, at_best
        )
        for req in admitted:
            req.skipped = not seen

    def answered(self, req: Req) -> None:
        """A request has its whole answer."""
        if self._worth is not None:
            self._worth.ended(req.completion_tokens, req.max_total - req.prompt_len)

    def choose(
        self, ready: Sequence[Req], prefilled: Sequence[Chunk], waiting: bool, behind: tuple[int, int] = (1, 0)
    ) -> TreeShape:
        """The shape of a step of the requests `ready`. prefilled: by the plan before. waiting: whether parts of prompts
        wait for the step. behind: `Load.passes` and `Load.positions`."""
        if not self.policy.sees_predictions and all(req.request.prediction for req in ready):
            return self.policy.menu[0]
        return self.policy.choose(self.load(ready, self._pace.longer(prefilled, waiting), behind))

    def load(self, ready: Sequence[Req], longer: float = math.inf, behind: tuple[int, int] = (1, 0)) -> Load:
        """What the policy is told of a step. longer: seconds that it may take beyond those of a plain one. behind:
        `Load.passes` and `Load.positions`."""
        confidences = [req.confidence if req.may_draft and not req.slow and not req.skipped else 0 for req in ready]
        whole = any(req.special or (self._draws_alike and req.draws_specially) for req in ready)
        newest = max((req.admission for req in ready), default=0)
        lasting = 1.0
        if self._by_slot and behind[1]:
            left = sum(req.max_total - len(req.tokens) for req in ready)
            lasting = max(min(left / len(ready), LASTING), lasting)
        return Load(confidences, _context(ready), longer, whole, newest, *behind, lasting)

    def planned(self, step: int, reqs: Sequence[Req], behind_prefill: bool) -> None:
        """The tree step of this number is planned for these requests, right behind a prefill or not."""
        self._priced.planned(step, behind_prefill)
        self._promised[step] = self._telling(reqs)

    def record(self, plan: Plan, live: Sequence[Req | None], result: StepResult) -> None:
        """A step has ended. live: the request of each of its rows that still has it."""
        passes, positions = 0, 0
        if (seen := plan.catch_up) is not None:
            passes, positions = seen.passes, sum(part.length for part in seen.texts)
        if self._worth is not None:
            shown = sum(part.length for part in plan.shown)
            self._worth.record(result.seconds, result.catching_up, passes, shown)
        if plan.kind == "prefill":
            self._pace.record(plan.chunks, result.seconds - result.catching_up)
        else:
            self._pace.record_step(result.seconds)
            promised = zip(live, self._promised.pop(plan.step), strict=True)
            confidences = [0 if req is None else confidence for req, confidence in promised]
            enough = 0 < self._telling_positions <= positions  # fewer cost their launches
            known = positions if enough else 0
            context = _context(req for req in live if req is not None)
            load = Load(confidences, context, passes=max(passes, 1), positions=known)
            self.policy.record(plan.shape, load, result, self._priced.take(plan))

    def _telling(self, reqs: Sequence[Req]) -> list[int]:
        """By what confidences `record` learns from a step that is planned now: those that it is chosen by, for until
        its result comes a match may have ended. 0 of who says nothing of its shape."""
        sees = self.policy.sees_predictions
        return [0 if _tells_nothing(req) or (req.request.prediction and not sees) else req.confidence for req in reqs]


def _context(reqs: Iterable[Req]) -> int:
    """Tokens in their KV, as far as the host knows."""
    return sum(req.kv for req in reqs)


def _tells_nothing(req: Req) -> bool:
    """Whether what was accepted of its drafts says nothing of others'."""
    return req.limited or req.slow or req.skipped
