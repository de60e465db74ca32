"""Chooses which tree a step drafts, and how much of it is verified. `ShapePolicy` is what a policy is asked, and what
it answers; `FixedShape` does not choose; `TreePolicy` takes the option that gives the most tokens per second.

`TreePolicy` serves all drafters. What an option brings is learnt from the trees that were drafted (`Acceptance`), what
it costs is known from measurements (`StepCost`). Plain decoding is an option like any other, and is chosen before
anything is drafted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from statistics import median
from typing import Any, NamedTuple, Protocol

from draftwing.config.trees import LOOKUP_ALONE, MAX_CONFIDENCE, PLAIN, TreeShape
from draftwing.core import StepResult
from draftwing.sched.policy.acceptance import Acceptance, AdapterAcceptance, max_drafts
from draftwing.sched.policy.cost import DOUBT, HOLD, RECENT, StepCost

EXPLORE = 0.01  # share of the time that may be lost by trying options to learn from them
MARGIN = 1.02  # factor by which drafts have to be better: the host does more for them, which no step's seconds show
MAX_QUERIES = 1024  # nodes that a step may verify; more never pay, and a try would hold up everybody


class Beside(NamedTuple):
    """Parts of prompts that will be in the same forward as a step: the device is busy with them, so that every node
    takes time of its own. That time is the prompts', and what it is worth is what steps bring once they are read."""

    node_seconds: float  # of each query, a row's newest token or a draft
    nodes: Callable[[TreeShape, int], int]  # queries that so many such trees have in it; 0: they cannot be in it
    rows: int  # that will decode when all prompts are read


class StepContext(NamedTuple):
    """What a step is for.

    confidences: of each row, the drafter's; 0 where nothing can be proposed.  kv_tokens: in the KV of all rows.
    latency_slack: seconds that the step may take beyond one without drafts, because of what these rows waited for.
    full_trees_only: trees are verified whole, as those of rows are that ask for more than drafts and sampling.
    last_admission: the newest admission's number among the rows; larger than before where a request is new.
    backlog_passes: passes of the drafter over what it has not seen of these rows, before it can draft.
    backlog_positions: in all of these passes but one; of a step that has ended, 0 where they are too few to show what
    one takes.  remaining_steps: steps that drafts go on for once the backlog is seen; what is seen of a text stays so.
    beside: what shares its forward.  adapters: of each row what drafts with its adapter, and its head, are known by, ""
    where it has none; empty: no row has any.
    """

    confidences: Sequence[int]
    kv_tokens: int = 0
    latency_slack: float = math.inf
    full_trees_only: bool = False
    last_admission: int = 0
    backlog_passes: int = 1
    backlog_positions: int = 0
    remaining_steps: float = 1.0
    beside: Beside | None = None
    adapters: Sequence[str] = ()


class ShapePolicy(Protocol):
    """menu: all shapes, the largest first.

    sees_predictions: whether a confidence says what a predicted output is worth. If not, it gets the largest shape.
    adapts: whether it drafts where that pays, and not otherwise.
    """

    adapts: bool
    menu: tuple[TreeShape, ...]
    sees_predictions: bool

    def choose(self, context: StepContext) -> TreeShape:
        """Decides on the shape of the next step, which is then planned."""
        ...

    def record(self, shape: TreeShape, context: StepContext, result: StepResult, is_cost: bool = True) -> None:
        """Learns what a step of `shape` gave. context: what was known of its rows; confidence 0 where a row says
        nothing. is_cost: whether its seconds are what such a step costs."""
        ...

    def forget(self) -> None:
        """Forgets, as another head drafts from now on, how much of its drafts was accepted. What steps cost stays."""
        return

    def saving(self, context: StepContext, at_best: bool = False) -> float | None:
        """Returns the seconds that drafts save for each token of such rows, all together; None where it is unknown.
        at_best: if all of them were right."""
        return None

    def spend(self, seconds: float) -> bool:
        """Takes so many seconds out of what exploring may cost, or returns False and saves up for them."""
        return False

    def seconds(self, rows: int, kv_tokens: int, shape: TreeShape | None = None) -> float | None:
        """Returns about what a step of so many rows takes; None where it is unknown. shape: None for the usual one."""
        return None

    def learnt(self) -> dict[str, Any]:
        """Returns how much of drafts was accepted, in numbers and lists, for a policy of the next engine."""
        return {}

    def recall(self, learnt: Mapping[str, Any]) -> None:
        """Begins with what a policy before has `learnt`, if that is of use."""
        return

    def explain(self, context: StepContext) -> list[dict[str, Any]]:
        """Returns for each option what `choose` would decide by, now: `shape`, `price_ms`, `gain` (expected accepted
        drafts of the batch), `rate` (expected tokens per second), whether it is `chosen`, whether it is only `tried`,
        and whether it is `late`: longer than the latency slack allows. With parts of prompts beside it a plain step's
        price is the time in which later steps bring as many tokens, see `Beside`; drafts add what they take."""
        ...


class FixedShape(ShapePolicy):
    """Chooses always the same shape; plain decoding when no row has anything to propose."""

    sees_predictions, adapts = True, False

    def __init__(self, shape: TreeShape) -> None:
        self.menu: tuple[TreeShape, ...] = (shape,) if shape == PLAIN else (shape, PLAIN)
        self.cost = StepCost(self.menu, stepwise=False)

    def choose(self, context: StepContext) -> TreeShape:
        return self.menu[0] if any(context.confidences) else PLAIN

    def record(self, shape: TreeShape, context: StepContext, result: StepResult, is_cost: bool = True) -> None:
        self.cost.threads = result.threads
        if is_cost:
            self.cost.record(shape, len(context.confidences), context.kv_tokens, result.seconds)

    def seconds(self, rows: int, kv_tokens: int, shape: TreeShape | None = None) -> float | None:
        return self.cost.seconds(shape or self.menu[0], rows, kv_tokens)

    def explain(self, context: StepContext) -> list[dict[str, Any]]:
        chosen = self.choose(context)
        return [{"shape": shape, "price_ms": None, "gain": None, "rate": None, "chosen": shape == chosen,
                 "tried": False, "late": False} for shape in self.menu]  # fmt: skip


class Option(NamedTuple):
    """What is expected of an option that is possible."""

    tokens: float
    seconds: float  # with the share of what it costs to begin
    entry: float  # seconds that beginning costs in this step beyond that share
    rate: float  # tokens per second


class Decision(NamedTuple):
    """chosen: number of the option that runs. best: of the one that is expected to give the most.  loss: seconds that
    are expected to be lost, where it is tried.  wanted: the same of a try that is not within what has been saved."""

    chosen: int
    best: int
    options: dict[int, Option]
    loss: float = 0.0
    wanted: float = 0.0


class Held(NamedTuple):
    """A choice that is kept before step `until`, for rows like these."""

    chosen: int
    until: int
    context: StepContext


class TreePolicy(ShapePolicy):
    """Chooses the option with the most expected tokens per second: (rows + expected accepted drafts) / seconds.

    An option that might be better than the best is tried now and then: one of which nothing was heard for `HOLD` steps
    might have all its drafts right, and one that did not run for `RECENT` steps might take a third of its cost. The
    loss that is expected of tries is at most `EXPLORE` of the time. A quarter of that each option has for itself, in
    equal parts, so that what is expensive is tried at last; the rest is for whichever looks best.
    """

    adapts = True

    def __init__(
        self, menu: Sequence[TreeShape], cost: StepCost, sees_predictions: bool = False, base: int = MAX_CONFIDENCE
    ) -> None:
        """sees_predictions: as in `ShapePolicy`; whether confidences tell steps apart. base: as of `Acceptance`."""
        self.menu, self.cost, self.sees_predictions = tuple(menu), cost, sees_predictions
        self._plain = len(self.menu) - 1
        self._acceptance, self._base = Acceptance(self.menu, base), base
        self._by_adapter = AdapterAcceptance(self._acceptance)
        self._adapted_cost: StepCost | None = None  # of steps with adapters
        self._slower: list[float] = []  # how many times as long the first of these took as others
        self._step = 0  # steps with candidates so far
        self._ran: dict[tuple[int, int], int] = {}  # the step in which an option last ran, by `batch.bit_length()`
        self._saved = 0.0  # seconds that tries may lose
        self._wanted = 0.0  # seconds that a try or a prompt which was refused would have lost
        self._held = Held(self._plain, 0, StepContext(()))
        self._best = self._plain  # of the newest look
        self._confirm: int | None = None  # an option that brought more than expected when it was tried
        self._late = 0.0  # share of late steps that had no time for drafts

    # -- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, context: StepContext) -> TreeShape:
        chosen = self._plain
        if any(context.confidences):
            held = self._holding(context)
            chosen = self._look(context) if held is None else held
            self._step += 1
        late = context.latency_slack < math.inf and not self._uses_model(chosen)
        self._late += (late - self._late) / RECENT
        return self.menu[chosen]

    def _look(self, context: StepContext) -> int:
        """Decides anew, and notes what follows from that."""
        decision, newest = self.decide(context), max(context.last_admission, self._held.context.last_admission)
        tried = decision.loss > 0 or decision.chosen != decision.best
        again = not decision.options or tried or context.latency_slack < math.inf
        until = self._step + (1 if again else HOLD)
        self._held = Held(decision.chosen, until, context._replace(last_admission=newest))
        self._best, self._wanted = decision.best, max(self._wanted, decision.wanted)
        if tried:
            self._pay(decision.loss)
        if not decision.wanted or self._confirm in (decision.best, decision.chosen):
            self._confirm = None  # else it waits until its loss is saved up
        bucket = len(context.confidences).bit_length()
        for index in decision.options:
            self._ran.setdefault((index, bucket), self._step)
        # Right behind a prefill plain steps run for want of time, and show nothing of what they cost elsewhere.
        if context.latency_slack == math.inf or decision.chosen != self._plain:
            self._ran[decision.chosen, bucket] = self._step
        return decision.chosen

    def _holding(self, context: StepContext) -> int | None:
        """Returns the last choice, if it is good for this step, too. Where nothing is drafted for these rows nothing is
        for rows that promise less."""
        chosen, until, before = self._held
        confidences = before.confidences
        same = len(context.confidences) == len(confidences) and context.full_trees_only is before.full_trees_only
        same &= (context.beside is None) is (before.beside is None) and context.adapters == before.adapters
        if self._step >= until or not same or context.last_admission > before.last_admission:
            return None
        if context.confidences == confidences:
            return chosen if chosen == self._plain or context.latency_slack == math.inf else None
        less = sum(context.confidences) <= sum(confidences) and max(context.confidences) <= max(confidences)
        return chosen if chosen == self._plain and less else None

    def decide(self, context: StepContext) -> Decision:
        """Returns what a look at all options comes to; changes nothing."""
        if not any(context.confidences):
            return Decision(self._plain, self._plain, {})
        options = self._options(context)
        if not options:
            return Decision(0, 0, {})
        plain = self._plain
        if context.beside is None or plain not in options:
            best = max(options, key=lambda i: options[i].rate)
        else:  # of those that bring more than the prompts' time is worth, the one that brings most beyond that
            worth = options[plain].rate
            best = max(options, key=lambda i: options[i].tokens - worth * options[i].seconds)
        if plain in options and options[best].rate < MARGIN * options[plain].rate:
            best = plain
        return self._with_try(context, Decision(best, best, options))

    def _options(self, context: StepContext, at_best: bool = False) -> dict[int, Option]:
        """Returns options that are possible. at_best: if all drafts were right."""
        batch, found, beside = len(context.confidences), dict[int, Option](), context.beside
        rows, cost = self._by_adapter.rows(context.confidences, context.adapters), self._cost(context)
        plain = cost.seconds(PLAIN, batch, context.kv_tokens) or math.inf
        # What the plain step takes is the prompts' time; its tokens are worth as much as later ones take.
        later = 0.0 if beside is None else self._later_rate(context, beside.rows)
        worth = min(plain, batch / later) if later else plain
        entry = 0.0
        if not self._uses_model(self._held.chosen):  # else the drafter has seen all before
            entry = self.cost.backlog(batch, context.backlog_passes, context.backlog_positions)
        share = 1 / max(min(1 / max(self._late, 1e-9) - 1, 2 * HOLD), context.remaining_steps, 1.0)
        for i, shape in enumerate(self.menu):
            seconds, brings, begin = plain, float(batch), 0.0
            if shape.depth:
                if batch * shape.queries > MAX_QUERIES or (shape.verified and context.full_trees_only):
                    continue
                nodes = 0 if beside is None else beside.nodes(shape, batch)
                if beside is not None and not nodes:
                    continue
                seconds = cost.seconds(shape, batch, context.kv_tokens) or math.inf
                if beside is not None:
                    seconds += beside.node_seconds * max(nodes - batch, 0)
                begin = entry if self._uses_model(i) else 0.0
                if seconds + begin > plain + context.latency_slack:
                    continue
                best = max_drafts(shape)
                brings += sum(best * of.total() if at_best else known.expected(i, of) for known, of in rows)
            if seconds < math.inf:
                seconds += begin * share
                if beside is not None:  # what is measured as less than plain steps take no more than these
                    seconds = worth + max(seconds - plain, 0.0)
                found[i] = Option(brings, seconds, begin * (1 - share), brings / seconds)
        return found

    def _later_rate(self, context: StepContext, rows: int) -> float:
        """Returns the most tokens per second of so many rows as these, at least of these, in steps of their own; 0 as
        long as nothing is known."""
        batch = len(context.confidences)
        each = [i % batch for i in range(max(rows, batch))]
        later = StepContext(
            [context.confidences[i] for i in each], context.kv_tokens * len(each) // batch,
            full_trees_only=context.full_trees_only,
            adapters=[context.adapters[i] for i in each] if context.adapters else (),
        )  # fmt: skip
        return max((option.rate for option in self._options(later).values()), default=0.0)

    def _with_try(self, context: StepContext, decision: Decision) -> Decision:
        """Returns the decision, with a try in place of the best option where one might be better and its loss is saved
        up."""
        batch, seen = len(context.confidences), self._by_adapter.rows(context.confidences, context.adapters)
        rows, bucket = batch - context.confidences.count(0), batch.bit_length()
        best = decision.options[decision.best]
        share = 0.25 * EXPLORE * best.seconds / max(len(self._ran), 1)  # for each step that an option did not run

        def expected_loss(index: int, option: Option, idle: int, confirms: bool) -> float | None:
            """Returns seconds that a try is expected to lose; None where nothing promises that it is better. Its cost
            may be another one by now, and it may have all drafts right."""
            seconds = option.seconds / max(idle / RECENT, 1.0)
            guessed = confirms or self._cost(context).guessed(self.menu[index], batch)
            if guessed:
                seconds = min(seconds, option.seconds / DOUBT)
            if batch + max_drafts(self.menu[index]) * rows <= best.rate * seconds:
                return None
            promises = confirms or option.tokens > best.rate * seconds
            if not promises and (
                index == self._plain or self._step - min(known.last_observed(index, of) for known, of in seen) < HOLD
            ):
                return None
            return max((seconds if guessed else option.seconds) + option.entry - option.tokens / best.rate, 0.0)

        min_loss, wanted = math.inf, 0.0
        confirm = self._confirm if self._confirm in decision.options else None
        for i in decision.options if confirm is None else (confirm,):
            idle = self._step - self._ran.get((i, bucket), self._step - HOLD)
            if i == decision.best or (confirm is None and idle < HOLD):
                continue  # what came of its last try may not be known yet
            loss = expected_loss(i, decision.options[i], idle, i == confirm)
            if loss is None:
                continue
            if loss > max(self._saved, share * idle):
                wanted = min(wanted or loss, loss)
            elif loss < min_loss:
                min_loss = loss
                decision = Decision(i, decision.best, decision.options, loss)
        return decision._replace(wanted=wanted) if wanted else decision

    def _uses_model(self, index: int) -> bool:
        """Returns whether a drafter with a model sees the steps of an option."""
        return self.menu[index].depth > 0 and self.menu[index].proposer != LOOKUP_ALONE

    # -- the budget for exploring -------------------------------------------------------------------------------------

    def spend(self, seconds: float) -> bool:
        if seconds > self._saved:
            self._wanted = max(self._wanted, seconds)
            return False
        self._pay(seconds)
        return True

    def _pay(self, seconds: float) -> None:
        self._saved = max(self._saved - seconds, 0.0)
        if seconds >= self._wanted:
            self._wanted = 0.0

    # -- learning -----------------------------------------------------------------------------------------------------

    def record(self, shape: TreeShape, context: StepContext, result: StepResult, is_cost: bool = True) -> None:
        index, batch = self.menu.index(shape), len(context.confidences)
        if result.catching_up and self._uses_model(index):  # others are of rows that are released, or far behind
            self.cost.record_backlog(batch, context.backlog_passes, context.backlog_positions, result.catching_up)
        seconds = result.seconds - result.catching_up
        for cost in (self.cost, self._adapted_cost or self.cost):
            cost.threads = result.threads
        self._saved = min(self._saved + 0.75 * EXPLORE * seconds, max(2 * HOLD * seconds, self._wanted))
        tried = index != self._best and any(context.confidences)
        before, tokens = self._rate(index, context) if tried else (0.0, 0.0)
        if is_cost:
            self._record_cost(shape, context, seconds)
        if shape.depth and any(context.confidences):
            alone = tried and self._best == self._plain
            self._by_adapter.observe(index, context.confidences, context.adapters, result, self._step, alone)
        if tried and max(self._rate(index, context)[0], tokens / max(DOUBT * seconds, 1e-9)) > MARGIN * before:
            self._confirm, self._held = index, self._held._replace(until=0)

    def _record_cost(self, shape: TreeShape, context: StepContext, seconds: float) -> None:
        """Learns what steps cost. The first ones with adapters say how much slower all are: else a shape that ran for
        long would be thought to cost more by itself."""
        batch, kv_tokens = len(context.confidences), context.kv_tokens
        if any(context.adapters) and self._adapted_cost is None:
            expected = self.cost.seconds(shape, batch, kv_tokens)
            if expected and seconds > 0 and not self.cost.guessed(shape, batch):
                self._slower.append(seconds / expected)
                if len(self._slower) == DOUBT:
                    self._adapted_cost = self.cost.times(median(self._slower))
                return
            self._adapted_cost = deepcopy(self.cost)
        self._cost(context).record(shape, batch, kv_tokens, seconds)

    def _rate(self, index: int, context: StepContext) -> tuple[float, float]:
        """Returns expected tokens per second of an option, and tokens."""
        batch, shape, tokens = len(context.confidences), self.menu[index], float(len(context.confidences))
        seconds = self._cost(context).seconds(shape, batch, context.kv_tokens) or math.inf
        if shape.depth:
            rows = self._by_adapter.rows(context.confidences, context.adapters)
            tokens += sum(known.expected(index, of) for known, of in rows)
        return tokens / seconds, tokens

    def _cost(self, context: StepContext) -> StepCost:
        """Returns what such steps cost: those with adapters at first what others do."""
        return self._adapted_cost if self._adapted_cost is not None and any(context.adapters) else self.cost

    def forget(self) -> None:
        self._acceptance, self._confirm = Acceptance(self.menu, self._base), None
        self._by_adapter = AdapterAcceptance(self._acceptance)
        self._held = self._held._replace(until=0)

    # -- for others ---------------------------------------------------------------------------------------------------

    def saving(self, context: StepContext, at_best: bool = False) -> float | None:
        options = self._options(context, at_best)
        if self._plain not in options or not self._acceptance.known:
            return None
        best = max(option.rate for option in options.values())
        return (1 - self._late) * (1 / options[self._plain].rate - 1 / best)

    def seconds(self, rows: int, kv_tokens: int, shape: TreeShape | None = None) -> float | None:
        return self.cost.seconds(shape or PLAIN, rows, kv_tokens)

    def learnt(self) -> dict[str, Any]:
        return self._acceptance.learnt()

    def recall(self, learnt: Mapping[str, Any]) -> None:
        self._acceptance.recall(learnt)

    def explain(self, context: StepContext) -> list[dict[str, Any]]:
        decision, held = self.decide(context), self._holding(context) if any(context.confidences) else None
        chosen = decision.chosen if held is None else held
        free = self._options(context._replace(latency_slack=math.inf))
        late = free.keys() - decision.options.keys() if decision.options else set[int]()
        return [
            {
                "shape": shape,
                "price_ms": 1000 * free[i].seconds if i in free else None,
                "gain": free[i].tokens - len(context.confidences) if i in free else None,
                "rate": free[i].rate if i in free else None,
                "chosen": i == chosen,
                "tried": i == chosen != (self._best if held is not None else decision.best),
                "late": i in late,
            }
            for i, shape in enumerate(self.menu)
        ]
