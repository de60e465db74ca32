"""The shape of the next step of these requests, what is learnt of shapes from steps that have ended, and whether a
draft model sees a prompt: it does if its drafts of the answer save more time than that takes.

A pass of a model over a prompt takes a GPU milliseconds of launches, whatever the prompt's size. A short answer does
not bring that back, nor does any where nothing is drafted. What is not known is found out by drafting, and what was
found out may change, so exploring pays for prompts that do not seem worth it, too (`ShapePolicy.spend`)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import MAX_BACKLOG, NO_DEFERRAL, Chunk, DraftDeferral, Plan, StepResult
from draftwing.sched.policy.cost import OUTDATED, RECENT
from draftwing.sched.policy.prefill_budget import PrefillBudget
from draftwing.sched.policy.shape_policy import Beside, ShapePolicy, StepContext
from draftwing.sched.req import Req

Mixes = Callable[[TreeShape, int], int]  # see `SchedulerConfig`


class DraftPrefill:
    def __init__(self, max_chunk: int) -> None:
        """max_chunk: positions of a pass."""
        self._max_chunk = max(max_chunk, 1)
        self._passes: deque[float] = deque(maxlen=RECENT)  # seconds
        # By about the limit: tokens of answers. Long ones are asked for along with short ones.
        self._answers: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT))

    def record(self, seconds: float, passes: int, shown: int) -> None:
        """Learns what passes took: so many over text, and those over so many positions of prompts."""
        passes += -(-shown // self._max_chunk)
        if seconds > 0 and passes:
            self._passes.append(seconds / passes)

    def ended(self, tokens: int, limit: int) -> None:
        """Learns how long an answer is that could have `limit` tokens."""
        self._answers[limit.bit_length()].append(tokens)

    def should_prefill(
        self,
        prompts: Sequence[tuple[int, bool]],
        limits: Sequence[int],
        saving: float | None,
        at_best: float | None,
        spend: Callable[[float], bool],
    ) -> bool:
        """Decides whether prompts that are prefilled together are seen: the ends of all take one pass. prompts: tokens
        of each that are not cached, and whether it comes in parts, which are seen before its end. limits: tokens of
        their answers at most.  saving: seconds that drafts save for each of these, None where that is not known.
        at_best: the same if all drafts were right; where not even that brings back what prompts cost, there is nothing
        to find out. spend: takes what it loses out of what exploring may cost."""
        if saving is None or not self._passes or not self._answers:
            return True
        a_pass, parts = median(self._passes), [-(-size // self._max_chunk) for size, in_parts in prompts if in_parts]
        cost, answers = (1 + sum(parts)) * a_pass, sum(map(self._usual, limits))
        if at_best is not None and cost > answers * max(at_best, saving):
            return False
        return cost <= answers * saving or spend(cost - answers * saving)

    def _usual(self, limit: int) -> float:
        """Returns tokens of an answer that can have so many; all of these where nothing is known of such a limit."""
        answers = self._answers.get(limit.bit_length())
        return min(fmean(answers), limit) if answers else limit


class ShapeChoice:
    """Asks the policy for what the requests of a step and the prefills of others allow, and passes it results."""

    def __init__(
        self, policy: ShapePolicy, prefills: PrefillBudget, draws_alike: bool, deferral: DraftDeferral = NO_DEFERRAL,
        edits_by_row: bool = False,
    ) -> None:  # fmt: skip
        """draws_alike, edits_by_row: see `SchedulerConfig`.  deferral: of prompts and texts."""
        self.policy, self._prefills, self._draws_alike = policy, prefills, draws_alike
        self._edits_by_row = edits_by_row
        self._draft_prefill = DraftPrefill(deferral.most) if deferral.from_tokens else None
        self._by_slot = deferral.by_slot
        # Positions of texts, seen at once, that show what one takes; 0: none do. A CPU takes the same for each.
        self._timed_positions = deferral.most if deferral.from_tokens else MAX_BACKLOG if deferral.by_slot else 0
        # By number of a step in flight: see `_observable`; whether it is right behind a prefill; adapters.
        self._planned: dict[int, tuple[list[int], bool, Sequence[str]]] = {}
        self._since_cost = 0  # steps since the last whose seconds were its cost

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
    def suspended(self) -> bool:
        """Returns whether nothing is drafted that takes time, because prompts wait at every step."""
        return self.policy.adapts and len(self.policy.menu) > 1 and self._prefills.crowded_out

    def skip_prompts(self, admitted: Sequence[Req], running: Sequence[Req], confidence: int) -> None:
        """Decides which of those who have been admitted a drafter need not see the prompts of. running: all who are.
        confidence: of a request of which nothing is known."""
        if admitted and len(running) == len(admitted):  # whoever waited before has been answered, or has gone
            self._prefills.rest()
        if not admitted or self._draft_prefill is None or not self.policy.adapts:
            return
        context = StepContext([confidence] * len(running), _kv_tokens(running), adapters=_adapters(running))
        # Where prompts wait all the time hardly anything will be drafted.
        seen = not self._prefills.crowded_out and self._draft_prefill.should_prefill(
            [(req.unsent, self._prefills.in_parts(req.unsent)) for req in admitted],
            [req.max_total - len(req.tokens) for req in admitted],
            self.policy.saving(context),
            self.policy.saving(context, at_best=True),
            self.policy.spend,
        )
        for req in admitted:
            req.skipped = not seen

    def answered(self, req: Req) -> None:
        """Learns from a request that has its whole answer."""
        if self._draft_prefill is not None:
            self._draft_prefill.ended(req.completion_tokens, req.max_total - req.prompt_len)

    def choose(
        self, ready: Sequence[Req], prefilled: Sequence[Chunk], waiting: bool, backlog: tuple[int, int] = (1, 0),
        mixes: Mixes | None = None, rows: int = 0,
    ) -> TreeShape:  # fmt: skip
        """Decides on the shape of a step of the requests `ready`. prefilled: by the plan before. waiting: whether parts
        of prompts wait for the step. backlog: passes and positions, as of `StepContext`. mixes: as of
        `SchedulerConfig`, where parts of prompts will be in its forward. rows: as of `Beside`."""
        self._prefills.plan_step(prefilled, waiting and mixes is None, mixes is not None)
        if self._is_given(ready):
            return self.policy.menu[0]
        return self.policy.choose(self.context(ready, prefilled, backlog, mixes, rows))

    def spared(self, shape: TreeShape, reqs: Sequence[Req], nodes: int) -> float:
        """Returns the seconds that parts of prompts beside a step have more than where they take turns with plain ones,
        for gaps as long as there: the weights are read once, and drafts and all nodes take time. nodes: in the
        forward."""
        rows, kv_tokens = len(reqs), _kv_tokens(reqs)
        drafts = self._rest(shape, rows, kv_tokens) - self._rest(PLAIN, rows, kv_tokens)
        return self._reading - max(drafts, 0.0) - nodes * self._prefills.token_seconds(0)

    def seconds(self, plan: Plan, reqs: Sequence[Req]) -> float:
        """Returns what the device will take for a plan, without what a drafter sees of prompts and texts; 0 where that
        is unknown. reqs: those of its rows that still have them."""
        if plan.kind == "prefill":
            return self._prefills.seconds(plan.chunks)
        rows, kv_tokens = len(plan.rows), _kv_tokens(reqs)
        if plan.mixed_prefill is None:
            return self.policy.seconds(rows, kv_tokens, plan.shape) or 0.0
        nodes = plan.nodes * self._prefills.token_seconds(0)
        return self._prefills.seconds(plan.mixed_prefill.chunks) + nodes + self._rest(plan.shape, rows, kv_tokens)

    @property
    def _reading(self) -> float:
        """Returns seconds in which a step reads all weights."""
        return self.policy.seconds(1, 0, PLAIN) or self._prefills.start

    def _rest(self, shape: TreeShape, rows: int, kv_tokens: int) -> float:
        """Returns the seconds that a step takes for everything else."""
        return max((self.policy.seconds(rows, kv_tokens, shape) or 0.0) - self._reading, 0.0)

    def explain(self, ready: Sequence[Req], context: StepContext) -> list[dict[str, Any]]:
        """Returns for each option what `choose` would decide by, now, as `ShapePolicy.explain`; nothing where nobody is
        ready. context: of `ready`."""
        entries = self.policy.explain(context) if ready else []
        if not self._is_given(ready):
            return entries
        return [entry | {"chosen": i == 0, "tried": False, "late": False} for i, entry in enumerate(entries)]

    def _is_given(self, ready: Sequence[Req]) -> bool:
        """Returns whether the largest shape runs in any case: all outputs are predicted, and no confidence tells how
        well."""
        return not self.policy.sees_predictions and all(req.request.prediction for req in ready)

    def context(
        self, ready: Sequence[Req], prefilled: Sequence[Chunk] = (), backlog: tuple[int, int] = (1, 0),
        mixes: Mixes | None = None, rows: int = 0,
    ) -> StepContext:  # fmt: skip
        """Returns what the policy gets for a step. prefilled, backlog, mixes, rows: as of `choose`."""
        confidences = [req.confidence if req.may_draft and not req.slow and not req.skipped else 0 for req in ready]
        whole = any(req.special or (self._draws_alike and req.draws_specially) for req in ready)
        newest = max((req.admission for req in ready), default=0)
        remaining = 1.0
        if self._by_slot and backlog[1]:  # most answers end before their limit
            left = sum(req.max_total - len(req.tokens) for req in ready)
            remaining = max(min(left / len(ready), OUTDATED), remaining)
        slack = self._prefills.latency_slack(prefilled, mixes is not None)
        beside = None if mixes is None else Beside(self._prefills.token_seconds(0), mixes, rows)
        kv_tokens, adapters = _kv_tokens(ready), _adapters(ready)
        return StepContext(confidences, kv_tokens, slack, whole, newest, *backlog, remaining, beside, adapters)

    def planned(self, step: int, reqs: Sequence[Req], after_prefill: bool) -> None:
        """Notes that the tree step of this number is planned for these requests, right behind a prefill or not."""
        self._planned[step] = self._observable(reqs), after_prefill, _adapters(reqs)

    def record(self, plan: Plan, live: Sequence[Req | None], result: StepResult) -> None:
        """Learns from a step that has ended. live: the request of each of its rows that still has it."""
        passes, positions = 0, 0
        if (draft_extend := plan.catch_up) is not None:
            passes, positions = draft_extend.passes, sum(part.length for part in draft_extend.texts)
        if self._draft_prefill is not None:
            draft_prefill_tokens = sum(chunk.length for part in plan.parts for chunk in part.shown)
            self._draft_prefill.record(result.catching_up, passes, draft_prefill_tokens)
        if plan.kind == "prefill":
            if not plan.mixed:
                self._prefills.record(plan.chunks, result.seconds - result.catching_up)
            return
        kv_tokens = _kv_tokens(req for req in live if req is not None)
        if plan.mixed_prefill is None:
            self._prefills.record_step(result.seconds)
        elif not (result.provisional and self._prefills.token_seconds(0)):
            rest = self._rest(plan.shape, len(plan.rows), kv_tokens)  # drafts, and the rows' own attention
            seconds = result.seconds - result.catching_up - rest
            self._prefills.record(plan.mixed_prefill.chunks, seconds, plan.nodes)
        confidences, after_prefill, adapters = self._planned.pop(plan.step)
        confidences = [0 if req is None else one for req, one in zip(live, confidences, strict=True)]
        counted = positions if 0 < self._timed_positions <= positions else 0  # fewer cost their launches
        context = StepContext(
            confidences, kv_tokens, backlog_passes=max(passes, 1), backlog_positions=counted, adapters=adapters
        )
        # A step behind a prefill takes longer on a CPU, whose caches it finds full of other things; these are mostly
        # plain ones, which would look slower than others, compared with drafts.
        usual = not plan.special or (plan.penalised and self._edits_by_row and not plan.shape.verified)
        is_cost = usual and not plan.mixed and (not after_prefill or self._since_cost > RECENT)
        self._since_cost = 0 if is_cost else self._since_cost + 1
        self.policy.record(plan.shape, context, result, is_cost)

    def _observable(self, reqs: Sequence[Req]) -> list[int]:
        """By what confidences `record` learns from a step that is planned now: those that it is chosen by, for until
        its result comes a match may have ended. 0 of who says nothing of its shape."""
        sees = self.policy.sees_predictions
        return [0 if _tells_nothing(req) or (req.request.prediction and not sees) else req.confidence for req in reqs]


def _kv_tokens(reqs: Iterable[Req]) -> int:
    """Returns tokens in their KV, as far as the host knows."""
    return sum(req.kv for req in reqs)


def _adapters(reqs: Sequence[Req]) -> Sequence[str]:
    """Returns what is known of their drafts by: adapters, with heads of their own; nothing where none has one."""
    return [req.drafts_as or req.request.adapter_digest for req in reqs] if any(req.adapter for req in reqs) else ()


def _tells_nothing(req: Req) -> bool:
    """Returns whether what was accepted of its drafts says nothing of others'."""
    return req.limited or req.slow or req.skipped
