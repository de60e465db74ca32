"""How a running engine does: totals, and log lines, one per prefill plan and one per `interval` decode steps."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftwing.core import PLAIN, IntArray, Plan, StepResult
from draftwing.sched.req import Req
from draftwing.sched.scheduler import Scheduler

log = logging.getLogger("draftwing")

KINDS = ("prefill", "plain", "speculative")  # of steps: of prompts, of one token per row, with drafts
STAGES = ("draft", "verify", "settle")  # of a tree step: propose, the target's forward, sample and accept


class StepTimes:
    """Seconds of a tree step's stages, summed over the steps that were measured.

    With CUDA, `mark` records an event, and nobody waits for it: a measured step is added when a later one begins and
    `arrived` says of its last event that it has come to pass.
    """

    def __init__(
        self,
        every: int = 1,
        mark: Callable[[], Any] = time.perf_counter,
        between: Callable[[Any, Any], float] = lambda begin, end: end - begin,
        arrived: Callable[[Any], bool] = lambda mark: True,
    ) -> None:
        """every: one step of how many is measured.  mark: a point of time.  between: two of them, in seconds.
        arrived: whether a point of time is in the past."""
        self.steps = 0  # measured
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._every, self._mark, self._between, self._arrived = every, mark, between, arrived
        self._begun = 0
        self._ended: deque[list[Any]] = deque(maxlen=64)  # marks of measured steps that are not yet added
        self._marks: list[Any] = []  # of the newest measured step: its begin, and the ends of its stages

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run(stage, ...)`, called for the stages of a step in turn, with measurements. A step of which some stage
        runs in another way is not measured."""

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
                self._marks = []  # of a step that went another way: the stages of this one are not to complete it
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
    """Totals of one drafter; the lists are indexed by depth below the root, from 0."""

    drafts: int = 0  # drafts of at least one token: one for a row and step
    proposed: int = 0  # live nodes
    accepted: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def grow(self, depth: int) -> None:
        for counts in (self.proposed_at, self.accepted_at):
            counts.extend([0] * (depth - len(counts)))

    def add(self, depth: IntArray, accepted: IntArray, deepest: int) -> int:
        """A step of a shape with so many levels: depth [B, N] of the nodes, 0 for those that were not proposed;
        accepted [B] drafts. Returns how many nodes were proposed."""
        drafts = np.count_nonzero(depth.max(axis=1))
        if not drafts:
            return 0
        self.grow(deepest)
        at_depth = np.bincount(depth.ravel(), minlength=deepest + 1).tolist()
        ended = np.bincount(accepted, minlength=deepest + 1).tolist()  # rows that accepted 0, 1, ...
        reached = 0
        for level in range(deepest, 0, -1):
            reached += ended[level]
            self.proposed_at[level - 1] += at_depth[level]
            self.accepted_at[level - 1] += reached
            self.accepted += reached
        proposed: int = sum(at_depth[1:])
        self.drafts += int(drafts)
        self.proposed += proposed
        return proposed


class Reporter:
    PLAIN_RATE = 0.1  # least weight of the newest plain step in the average of its batch size

    def __init__(
        self,
        sched: Scheduler,
        interval: int = 40,
        simulated: str = "",
        drafter: str = "none",
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """simulated: what of the run is not real, in words.  drafter: the algorithm, "none" without one.  times: that
        the executor fills."""
        self._sched = sched
        self._mark = f" (SIMULATED: {simulated})" if simulated else ""
        self._interval = interval
        self._clock = clock
        self._admitted = self._cached = 0  # since the last prefill line: an admission may come with a decode step
        self.total_tokens = self.total_rows = 0  # committed tokens and verified rows of all tree steps
        self.times = times or StepTimes()
        self.steps = dict.fromkeys(KINDS, 0)
        self.seconds = dict.fromkeys(KINDS, 0.0)  # from a step's launch, or the end of the one before, to its result
        self.host_seconds = 0.0  # between a step's result and the launch of the next one
        self.queried_tokens = self.hit_tokens = self.prefilled_tokens = 0
        self.drafters: dict[str, DraftCounts] = {}
        self._drafter = drafter
        if drafter != "none":  # so that its totals are there before its first draft
            self._counts(drafter).grow(max(shape.depth for shape in sched.policy.menu))
        self._watched: float | None = None  # when the last result was there; None after a pause
        # Plain steps and their average seconds, by bit length of the batch size. The first step of a size is left out:
        # it pays for caches and allocations.
        self._plain: dict[int, tuple[int, float]] = {}
        self._met: set[int] = set()
        self.last = {"accept_length": 0.0, "accept_rate": 0.0, "gen_throughput": 0.0, "cache_hit_rate": 0.0}
        # Decode steps of a batch size that plain steps were timed for: what those would have taken, what they took.
        self.plain_seconds = self.timed_seconds = 0.0
        self.speedup: float | None = None  # over the last interval
        self._reset()

    @property
    def accept_length(self) -> float:
        """Tokens per row and step, over the engine's life."""
        return self.total_tokens / self.total_rows if self.total_rows else 1.0

    def stats(self) -> dict[str, Any]:
        """Totals over the engine's life; `last` are means over the last finished interval, as in the log lines."""
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
            "stale_rows": sched.stale_results,
            "drafters": {
                name: {
                    "drafts": counts.drafts,
                    "proposed": counts.proposed,
                    "accepted": counts.accepted,
                    "proposed_at": list(counts.proposed_at),
                    "accepted_at": list(counts.accepted_at),
                }
                for name, counts in list(self.drafters.items())
            },
            "last": dict(self.last) | ({} if sched.running else {"gen_throughput": 0.0}),
            "plain_seconds": self.plain_seconds,
            "timed_seconds": self.timed_seconds,
            "speedup": self.speedup,
        }

    def watch(self, plan: Plan, result: StepResult) -> None:
        """Sees every plan with its result, before the result is committed."""
        now = self._clock()
        if self._watched is not None:
            self.host_seconds += max(0.0, now - self._watched - result.seconds)
        self._watched = now
        kind = "prefill" if plan.kind == "prefill" else "speculative" if plan.shape.depth else "plain"
        self.steps[kind] += 1
        self.seconds[kind] += result.seconds
        self._busy += result.seconds
        self._admissions(plan)
        if plan.kind == "prefill":
            self._prefill(plan)
            return
        committed = self._tree(plan, result)
        self._estimate(len(plan.rows), committed, result.seconds, kind == "plain")
        self._steps += 1
        if self._steps >= self._interval:
            self._decode(len(plan.rows))
            self._reset()

    def pause(self) -> None:
        """There is nothing to do: the time until the next result is not the host's."""
        self._watched = None

    def plain_step(self, rows: int, seconds: float) -> None:
        """What a step without drafts takes for a batch of `rows`: measured in passing, or at start."""
        size = rows.bit_length()
        steps, mean = self._plain.get(size, (0, seconds))
        weight = max(self.PLAIN_RATE, 1 / (steps + 1))
        # Now and then a step is held up: that is not to count in full.
        self._plain[size] = steps + 1, mean + weight * (min(seconds, 3 * mean) - mean)

    # -- totals -------------------------------------------------------------------------------------------------------

    def _admissions(self, plan: Plan) -> None:
        for admit in plan.admits:
            self._admitted += 1
            self._cached += len(admit.slots)
            if len(admit.tokens) == admit.prompt_len:  # else it was retracted, and its prompt counted before
                self.queried_tokens += admit.prompt_len
                self.hit_tokens += len(admit.slots)

    def _tree(self, plan: Plan, result: StepResult) -> float:
        """Counts what the step gave to requests that still run; returns committed tokens per row."""
        current = {req.admission: req for req in self._sched.running}
        reqs = [current.get(number) for number in plan.admission.tolist()]
        live = [i for i, req in enumerate(reqs) if req is not None]
        if not live:
            return 0.0
        count = result.count.tolist()
        committed = sum(count[i] for i in live)
        self._rows += len(live)
        self._tokens += committed
        self.total_rows += len(live)
        self.total_tokens += committed
        if plan.shape != PLAIN:
            for name, rows in self._by_drafter(reqs, live).items():
                at = rows if len(rows) < len(reqs) else slice(None)
                depth, accepted = result.depth[at], result.count[at] - 1
                self._proposed += self._counts(name).add(depth, accepted, plan.shape.depth)
        return committed / len(live)

    def _by_drafter(self, reqs: list[Req | None], live: list[int]) -> dict[str, list[int]]:
        """The rows that each drafted for. With a prediction only the device knows whether it was used."""
        predicted = "prediction" if self._drafter == "none" else f"{self._drafter}+prediction"
        groups: dict[str, list[int]] = {}
        for i in live:
            req = reqs[i]
            assert req is not None
            groups.setdefault(predicted if req.prediction else self._drafter, []).append(i)
        return groups

    def _counts(self, name: str) -> DraftCounts:
        if name not in self.drafters:
            self.drafters[name] = DraftCounts()
        return self.drafters[name]

    def _estimate(self, rows: int, tokens: float, seconds: float, plain: bool) -> None:
        """Adds a step to the estimated speed-up: the time that plain steps would have taken for its tokens."""
        size = rows.bit_length()
        if plain and size in self._met:
            self.plain_step(rows, seconds)
        elif plain:
            self._met.add(size)
        if size in self._plain and tokens:
            self.plain_seconds += tokens * self._plain[size][1]
            self.timed_seconds += seconds

    # -- log lines ----------------------------------------------------------------------------------------------------

    def _prefill(self, plan: Plan) -> None:
        length = sum(chunk.length for chunk in plan.chunks)
        self.prefilled_tokens += length
        self.last["cache_hit_rate"] = self._cached / (self._cached + length)
        if log.isEnabledFor(logging.INFO):
            log.info(
                "prefill batch: #new-seq %d, #new-token %d, #cached-token %d, #running-req %d, #queue-req %d",
                self._admitted,
                length,
                self._cached,
                len(self._sched.running),
                len(self._sched.waiting),
            )
        self._admitted = self._cached = 0

    def _decode(self, rows: int) -> None:
        sched = self._sched
        if not self._rows:
            return
        used = sched.config.slots - sched.pool.available - sched.radix.evictable
        accepted = self._tokens - self._rows
        self.last["accept_length"] = self._tokens / self._rows
        self.last["accept_rate"] = accepted / self._proposed if self._proposed else 0.0
        self.last["gen_throughput"] = self._tokens / max(self._busy, 1e-9)
        plain, timed = self.plain_seconds - self._plain_before, self.timed_seconds - self._timed_before
        self.speedup = plain / timed if timed else None
        log.info(
            "decode batch: #running-req %d, #token %d, token usage %.2f, accept len %.2f, accept rate %.2f, "
            "gen throughput %.1f token/s, #queue-req %d%s",
            rows,
            used,
            used / sched.config.slots,
            self.last["accept_length"],
            self.last["accept_rate"],
            self.last["gen_throughput"],
            len(sched.waiting),
            self._mark,
        )

    def _reset(self) -> None:
        self._steps = self._rows = self._tokens = self._proposed = 0
        self._busy = 0.0  # seconds in steps, prefills included
        self._plain_before, self._timed_before = self.plain_seconds, self.timed_seconds
