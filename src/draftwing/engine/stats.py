"""Counts what a running engine does: totals, and means over the last 40 decode steps."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from draftwing.config.drafters import NO_DRAFTER
from draftwing.config.trees import PLAIN, SOURCES
from draftwing.core import (
    FEW_MARKS,
    MARK_DEPTH,
    MARK_SOURCE,
    MARK_SOURCES,
    MARK_VERIFIED,
    Plan,
    StepResult,
    stretch_of,
    stretch_start,
)
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler

log = logging.getLogger("draftwing")
KINDS = ("prefill", "plain", "speculative")  # of steps: of prompts, of one token per row, with drafts
STAGES = ("draft", "verify", "commit")  # of a tree step: propose, the target's forward, sample and accept


@dataclass
class StepSums:
    """Sums over the steps of a while."""

    steps: int = 0  # of decoding, as all that follows but for prompts and `busy`
    rows: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    prompt: int = 0  # tokens of prompts that were computed
    cached: int = 0  # those that were not
    busy: float = 0.0  # seconds in steps, prefills included
    plain_seconds: float = 0.0
    timed_seconds: float = 0.0


class StatusLine:
    """The log's line about running requests. Sums what steps do, and logs it while they run and when they rest, at most
    every so many seconds."""

    def __init__(self, sched: Scheduler, seconds: float, mark: str = "") -> None:
        """seconds: between two lines; 0: there are none.  mark: at the end of each."""
        self._sched, self._seconds, self._mark = sched, seconds, mark
        self._logged = -math.inf
        self._began: float | None = None  # when the traffic of the moment began
        self.sums = StepSums()

    def look(self, now: float, seconds: float) -> None:
        """Looks at the load after a step of so many seconds, which `sums` has counted."""
        if self._began is None:
            self._began = now - seconds
        if now >= max(self._began, self._logged) + self._seconds:
            self._log(now)

    def rest(self, now: float) -> None:
        """Notes that there is nothing to do."""
        self._began = None
        if self.sums.busy and now >= self._logged + self._seconds:
            self._log(now)

    def _log(self, now: float) -> None:
        sched, sums = self._sched, self.sums
        self.sums, self._logged = StepSums(), now
        if not self._seconds:
            return
        parts = [f"{sums.tokens / max(sums.busy, 1e-9):.1f} tokens/s"]
        if sums.proposed:
            rate = sums.accepted / sums.proposed
            parts.append(f"acceptance length {sums.tokens / max(sums.rows, 1):.2f}, rate {rate:.2f}")
        if sums.prompt:
            parts.append(f"{sums.prompt} prompt tokens and {sums.cached} cached")
        used = 1 - sched.kv.obtainable / sched.config.slots
        log.info(
            "%d running, %d queued: %s, KV cache %.0f%% used%s",
            len(sched.running), len(sched.waiting), ", ".join(parts), 100 * used, self._mark,
        )  # fmt: skip


class StepTimes:
    """Seconds of a tree step's stages, summed over the steps that were measured.

    With CUDA, `mark` records an event that is not waited for: a measured step is added when a later one begins, if
    `arrived` says that its last event has happened.
    """

    def __init__(
        self,
        every: int = 1,
        mark: Callable[[], Any] = time.perf_counter,
        between: Callable[[Any, Any], float] = lambda begin, end: end - begin,
        arrived: Callable[[Any], bool] = lambda mark: True,
    ) -> None:
        """every: 1 measures each step, n every n-th.  mark: returns a point of time.  between: seconds between two.
        arrived: says whether a point of time is in the past."""
        self.steps = 0  # measured
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._every, self._mark, self._between, self._arrived = every, mark, between, arrived
        self._begun = 0
        self._ended: deque[list[Any]] = deque(maxlen=64)  # marks of measured steps that are not yet added
        self._marks: list[Any] = []  # of the newest measured step: its begin, and the ends of its stages

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `run(stage, ...)`, which is called for the stages of a step in turn, with measurements.

        A step that does not pass through it with all its stages is not measured.
        """

        def timed(stage: str, *args: Any, **options: Any) -> Any:
            number = STAGES.index(stage)
            if number == 0:
                self._begin()
            done = run(stage, *args, **options)
            if len(self._marks) == number + 1:
                self._marks.append(self._mark())
            return done

        return timed

    def _begin(self) -> None:
        self._begun += 1
        if (self._begun - 1) % self._every:
            if len(self._marks) <= len(STAGES):
                self._marks = []  # of an incomplete step, which this one's stages must not complete
            return
        if len(self._marks) == len(STAGES) + 1:
            self._ended.append(self._marks)
        while self._ended and self._arrived(self._ended[0][-1]):
            marks = self._ended.popleft()
            self.steps += 1
            for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False):
                self.seconds[stage] += self._between(begin, end)
        self._marks = [self._mark()]


@dataclass
class DraftCounts:
    """Totals of a drafter, or of all; the lists are indexed by depth below the root, from 0."""

    drafts: int = 0  # drafts of at least one token: one for a row and step
    proposed: int = 0  # nodes that were verified
    accepted: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def grow(self, depth: int) -> None:
        for counts in (self.proposed_at, self.accepted_at):
            counts.extend([0] * (depth - len(counts)))

    def add(self, nodes: Mapping[int, int], accepted: Iterable[int], drafts: int, deepest: int) -> None:
        """Adds a step of a shape with `deepest` levels.

        nodes: how many were verified at each depth.  accepted: depths of accepted drafts.  drafts: rows with nodes.
        """
        if not drafts:
            return
        self.grow(deepest)
        self.drafts += drafts
        for depth, count in nodes.items():
            self.proposed_at[depth - 1] += count
        for depth in accepted:
            self.accepted_at[depth - 1] += 1
        self.proposed, self.accepted = sum(self.proposed_at), sum(self.accepted_at)


class Reporter:
    """Sees every step and counts; `stats` gives the totals."""

    PLAIN_RATE = 0.1  # least weight of the newest plain step in the average of its batch size

    def __init__(
        self,
        sched: Scheduler,
        interval: int = 40,
        simulated: str = "",
        credited: Sequence[Sequence[str]] = NO_DRAFTER.credited,
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
        log_seconds: float = 0.0,
    ) -> None:
        """simulated: says what of the run is not real.  credited: see `DrafterSpec`.  times: that the executor
        fills.  log_seconds: see `StatusLine`."""
        self._sched = sched
        self._status = StatusLine(sched, log_seconds, f" (SIMULATED: {simulated})" if simulated else "")
        self._every = interval
        self._clock = clock
        self._cached = 0  # since the last prefill: an admission may come with a decode step
        self.total_tokens = self.total_rows = 0  # committed tokens and verified rows of all tree steps
        self.times = times or StepTimes()
        self.steps = dict.fromkeys(KINDS, 0)
        self.seconds = dict.fromkeys(KINDS, 0.0)  # from a step's launch, or the end of the one before, to its result
        self.host_seconds = 0.0  # between a step's result and the launch of the next one
        self.queried_tokens = self.hit_tokens = self.prefilled_tokens = 0
        self.drafted = DraftCounts()  # by whomever
        self.drafters: dict[str, DraftCounts] = {}
        self.by_stretch: dict[int, list[int]] = {}  # of answers (`stretch_of`): steps of rows, accepted drafts
        # By the stretch of the whole text that a row's newest token is in: drafts of rows, those whose first was right.
        self.by_context: dict[int, list[int]] = {}
        names = [name for names in credited for name in names]
        # By name: the sources whose nodes count.
        self._credited = {name: [i for i, names in enumerate(credited) if name in names] for name in names}
        self._usual = dict.fromkeys(name for names in credited[1:] for name in names)  # who drafts for every request
        for name in self._usual:  # so that totals are there before the first draft
            self._counts(name).grow(max(shape.depth for shape in sched.choice.policy.menu))
        self._watched: float | None = None  # when the last result was there; None after a pause
        # Plain steps and their average seconds, by bit length of the batch size.
        self._plain: dict[int, tuple[int, float]] = {}
        self.last = {"accept_length": 0.0, "accept_rate": 0.0, "gen_throughput": 0.0, "cache_hit_rate": 0.0}
        # Decode steps of a batch size that plain steps were timed for: what those would have taken, what they took.
        self.plain_seconds = self.timed_seconds = 0.0
        self.speedup: float | None = None  # over the last interval
        self._interval = StepSums()

    @property
    def plain_step(self) -> float:
        """Returns the seconds of late of a step that writes one token for one request; 0 before there was one."""
        return self._plain.get(1, (0, 0.0))[1]

    @property
    def accept_length(self) -> float:
        """Returns tokens per row and step, since the start."""
        return self.total_tokens / self.total_rows if self.total_rows else 1.0

    def stats(self) -> dict[str, Any]:
        """Returns totals since the start; `last` are means over the last finished interval."""
        sched = self._sched
        return {
            "steps": dict(self.steps),
            "step_seconds": dict(self.seconds),
            "host_seconds": self.host_seconds,
            "stage_seconds": dict(self.times.seconds),
            "staged_steps": self.times.steps,
            "queried_tokens": self.queried_tokens,
            "hit_tokens": self.hit_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "retractions": sched.retractions,
            "stale_rows": sched.results.stale,
            "drafted": asdict(self.drafted),
            "output_steps": {str(stretch_start(i)): steps for i, (steps, _) in sorted(self.by_stretch.items())},
            "output_accepted": {str(stretch_start(i)): count for i, (_, count) in sorted(self.by_stretch.items())},
            "context_drafts": {str(stretch_start(i)): drafts for i, (drafts, _) in sorted(self.by_context.items())},
            "context_first": {str(stretch_start(i)): right for i, (_, right) in sorted(self.by_context.items())},
            "drafters": {name: asdict(counts) for name, counts in list(self.drafters.items())},
            "last": dict(self.last) | ({} if sched.running else {"gen_throughput": 0.0}),
            "plain_seconds": self.plain_seconds,
            "plain_step": self.plain_step,
            "timed_seconds": self.timed_seconds,
            "speedup": self.speedup,
            "drafts_suspended": bool(sched.running) and sched.choice.suspended,
        }

    def watch(self, plan: Plan, result: StepResult) -> None:
        """Counts a plan with its result, before the result is committed."""
        now = self._clock()
        if self._watched is not None:
            self.host_seconds += max(0.0, now - self._watched - result.seconds)
        self._watched = now
        kind = "prefill" if plan.kind == "prefill" else "speculative" if plan.shape.depth else "plain"
        self.steps[kind] += 1
        self.seconds[kind] += result.seconds
        for sums in self._sums():
            sums.busy += result.seconds
        self._count_admissions(plan)
        if plan.kind == "prefill":
            self._count_prefill(plan)
        else:
            committed = self._count_tree(plan, result)
            if not plan.mixed:  # else its seconds are those of prompts, too
                self._estimate(len(plan.rows), committed, result.seconds, kind == "plain")
            self._interval.steps += 1
            if self._interval.steps >= self._every:
                self._finish_interval()
        self._status.look(now, result.seconds)

    def _sums(self) -> tuple[StepSums, StepSums]:
        """Of the interval, and of the status line."""
        return self._interval, self._status.sums

    def pause(self) -> None:
        """Notes that there is nothing to do: the time until the next result is not the host's."""
        self._watched = None
        self._status.rest(self._clock())

    # -- totals -------------------------------------------------------------------------------------------------------

    def _count_admissions(self, plan: Plan) -> None:
        for admit in plan.admits:
            self._cached += len(admit.slots)
            self._status.sums.cached += len(admit.slots)
            if len(admit.tokens) == admit.prompt_len:  # else it was retracted, and its prompt counted before
                self.queried_tokens += admit.prompt_len
                self.hit_tokens += len(admit.slots)

    def _count_tree(self, plan: Plan, result: StepResult) -> float:
        """Counts what the step gave to requests that still run; returns committed tokens per row."""
        current = {req.admission: req for req in self._sched.running}
        reqs = [current.get(number) for number in plan.admission.tolist()]
        live = [i for i, req in enumerate(reqs) if req is not None]
        if not live:
            return 0.0
        count = result.count.tolist()
        tokens = sum([count[i] for i in live])
        for i in live:
            req = reqs[i]
            assert req is not None
            found = self.by_stretch.setdefault(stretch_of(req.completion_tokens), [0, 0])
            found[0] += 1
            found[1] += count[i] - 1
        for sums in self._sums():
            sums.rows += len(live)
            sums.tokens += tokens
        self.total_rows += len(live)
        self.total_tokens += tokens
        if plan.shape != PLAIN:
            self._count_drafts(plan, result, live, reqs)
        return tokens / len(live)

    def _count_drafts(self, plan: Plan, result: StepResult, live: Sequence[int], reqs: Sequence[Req | None]) -> None:
        """reqs: of the plan's rows; those of `live` are there."""
        deepest, cells = plan.shape.depth, _cells(result, live)
        accepted = [(depth, source) for i in live for depth, source in enumerate(result.accepted_source[i], 1)]
        rows = [result.proposed_by[i] for i in live]
        for i, proposed in zip(live, rows, strict=True):
            req = reqs[i]
            if req is not None and any(proposed):
                found = self.by_context.setdefault(stretch_of(len(req.tokens)), [0, 0])
                found[0] += 1
                found[1] += bool(result.accepted_source[i])
        self._add(self.drafted, range(len(SOURCES)), cells, accepted, rows, deepest)
        for sums in self._sums():
            sums.proposed += sum(cells.values())
            sums.accepted += len(accepted)
        for name, sources in self._credited.items():
            if name in self._usual or any(row[source] for row in rows for source in sources):
                self._add(self._counts(name), sources, cells, accepted, rows, deepest)

    @staticmethod
    def _add(
        counts: DraftCounts, sources: Collection[int], cells: Mapping[tuple[int, int], int],
        accepted: Iterable[tuple[int, int]], rows: Iterable[Sequence[int]], deepest: int,
    ) -> None:  # fmt: skip
        """Adds what these sources have proposed. rows: of each, its nodes by source."""
        nodes: dict[int, int] = {}
        for (depth, source), count in cells.items():
            if source in sources:
                nodes[depth] = nodes.get(depth, 0) + count
        drafts = sum(any(row[source] for source in sources) for row in rows)
        counts.add(nodes, [depth for depth, source in accepted if source in sources], drafts, deepest)

    def _counts(self, name: str) -> DraftCounts:
        return self.drafters.setdefault(name, DraftCounts())

    def _estimate(self, rows: int, tokens: float, seconds: float, plain: bool) -> None:
        """Adds a step to the estimated speed-up: the time that plain steps would have taken for its tokens."""
        size = rows.bit_length()
        if plain:
            # The first step of a size pays for caches and allocations: it counts for nothing. Now and then a step is
            # held up: it counts for three at most.
            steps, mean = self._plain.get(size, (-1, 0.0))
            if steps == 0:
                mean = seconds
            elif steps > 0:
                weight = max(self.PLAIN_RATE, 1 / (steps + 1))
                mean += weight * (min(seconds, 3 * mean) - mean)
            self._plain[size] = steps + 1, mean
        steps, mean = self._plain.get(size, (0, 0.0))
        if steps and tokens:
            for sums in (self, self._interval):
                sums.plain_seconds += tokens * mean
                sums.timed_seconds += seconds

    # -- the last interval --------------------------------------------------------------------------------------------

    def _count_prefill(self, plan: Plan) -> None:
        length = sum(chunk.length for chunk in plan.chunks)
        self.prefilled_tokens += length
        self._status.sums.prompt += length
        self.last["cache_hit_rate"] = self._cached / (self._cached + length)
        self._cached = 0

    def _finish_interval(self) -> None:
        sums, self._interval = self._interval, StepSums()
        if not sums.rows:
            return
        self.last["accept_length"] = sums.tokens / sums.rows
        self.last["accept_rate"] = (sums.tokens - sums.rows) / sums.proposed if sums.proposed else 0.0
        self.last["gen_throughput"] = sums.tokens / max(sums.busy, 1e-9)
        self.speedup = sums.plain_seconds / sums.timed_seconds if sums.timed_seconds else None


def _cells(result: StepResult, live: Sequence[int]) -> dict[tuple[int, int], int]:
    """Counts the verified nodes of these rows by depth and source."""
    if result.mark.size <= FEW_MARKS:
        rows = result.mark.tolist()
        marks = [mark for i in live for mark in rows[i] if mark & MARK_VERIFIED and mark & MARK_DEPTH]
        found = Counter([mark & _CELL for mark in marks])
    else:
        cells, counts = np.unique(result.mark[live][result.verified[live]] & _CELL, return_counts=True)
        found = Counter(dict(zip(cells.tolist(), counts.tolist(), strict=True)))
    return {(cell & MARK_DEPTH, cell >> MARK_SOURCE): count for cell, count in found.items()}


_CELL = MARK_DEPTH | MARK_SOURCES << MARK_SOURCE  # of a mark
