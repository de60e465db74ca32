"""The log lines of a running engine: one per prefill plan, one per `interval` decode steps."""

from __future__ import annotations

import logging

from draftwing.core import Plan, StepResult
from draftwing.sched.scheduler import Scheduler

log = logging.getLogger("draftwing")


class Reporter:
    def __init__(self, sched: Scheduler, interval: int = 40) -> None:
        self._sched = sched
        self._interval = interval
        self._admitted = self._cached = 0  # since the last prefill line: an admission may come with a decode step
        self.total_tokens = self.total_rows = 0  # committed tokens and verified rows of all tree steps
        self._reset()

    @property
    def accept_length(self) -> float:
        """Tokens per row and step, over the engine's life."""
        return self.total_tokens / self.total_rows if self.total_rows else 1.0

    def watch(self, plan: Plan, result: StepResult) -> None:
        """Sees every plan with its result, before the result is committed."""
        self._busy += result.seconds
        self._admitted += len(plan.admits)
        self._cached += sum(len(admit.slots) for admit in plan.admits)
        if plan.kind == "prefill":
            self._prefill(plan)
            return
        committed = int(result.count.sum())
        self._steps += 1
        self._rows += len(plan.rows)
        self._tokens += committed
        self._proposed += int(result.proposed.sum())
        self.total_rows += len(plan.rows)
        self.total_tokens += committed
        if self._steps >= self._interval:
            self._decode(len(plan.rows))
            self._reset()

    def _prefill(self, plan: Plan) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        log.info(
            "prefill batch: #new-seq %d, #new-token %d, #cached-token %d, #running-req %d, #queue-req %d",
            self._admitted,
            sum(chunk.length for chunk in plan.chunks),
            self._cached,
            len(self._sched.running),
            len(self._sched.waiting),
        )
        self._admitted = self._cached = 0

    def _decode(self, rows: int) -> None:
        sched = self._sched
        used = sched.config.slots - sched.pool.available - sched.radix.evictable
        accepted = self._tokens - self._rows
        log.info(
            "decode batch: #running-req %d, #token %d, token usage %.2f, accept len %.2f, accept rate %.2f, "
            "gen throughput %.1f token/s, #queue-req %d",
            rows,
            used,
            used / sched.config.slots,
            self._tokens / self._rows,
            accepted / self._proposed if self._proposed else 0.0,
            self._tokens / max(self._busy, 1e-9),
            len(sched.waiting),
        )

    def _reset(self) -> None:
        self._steps = self._rows = self._tokens = self._proposed = 0
        self._busy = 0.0  # seconds in steps, prefills included
