"""The log's line about running requests: one a while, none without traffic."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from draftwing.sched.scheduler import Scheduler

log = logging.getLogger("draftwing")


@dataclass
class _Sums:
    """Sums over all steps since the last line."""

    prompt: int = 0  # tokens that were computed
    cached: int = 0  # tokens of prompts that were not
    tokens: int = 0  # that were generated
    rows: int = 0  # of decode steps
    proposed: int = 0
    accepted: int = 0
    seconds: float = 0.0  # in steps


class StatusLine:
    """Sums what steps do, and logs it while they run and when they rest, at most every so many seconds."""

    def __init__(self, sched: Scheduler, seconds: float, mark: str = "") -> None:
        """seconds: between two lines; 0: there are none.  mark: at the end of each."""
        self._sched, self._seconds, self._mark = sched, seconds, mark
        self._logged = -math.inf
        self._began: float | None = None  # when the traffic of the moment began
        self.sums = _Sums()

    def look(self, now: float, seconds: float) -> None:
        """After a step of so many seconds, which `sums` has counted."""
        self.sums.seconds += seconds
        if self._began is None:
            self._began = now - seconds
        if now >= max(self._began, self._logged) + self._seconds:
            self._log(now)

    def rest(self, now: float) -> None:
        """There is nothing to do."""
        self._began = None
        if self.sums.seconds and now >= self._logged + self._seconds:
            self._log(now)

    def _log(self, now: float) -> None:
        sched, sums = self._sched, self.sums
        self.sums, self._logged = _Sums(), now
        if not self._seconds:
            return
        parts = [f"{sums.tokens / max(sums.seconds, 1e-9):.1f} tokens/s"]
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
