"""Tells, for the load of the moment, what drafts cost, what they bring, and what is chosen."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from draftwing.sched.explain import report
from draftwing.sched.scheduler import Scheduler

log = logging.getLogger("draftwing")

LOG_SECONDS, REPORT_SECONDS = 10.0, 0.5  # between two lines, and two reports


class Explainer:
    """Looks at a running engine now and then, in the engine's own thread.

    now: the newest report; None before the first.  busiest: the newest of those with the most requests.
    """

    def __init__(self, sched: Scheduler, logs: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """logs: whether there is a line in the log."""
        self._sched, self._logs, self._clock = sched, logs, clock
        self._reported = self._logged = -math.inf
        self.now: dict[str, Any] | None = None
        self.busiest: dict[str, Any] | None = None

    def look(self) -> None:
        """To be called after every step."""
        at = self._clock()
        if at < self._reported + REPORT_SECONDS:
            return
        context, entries = self._sched.explain()
        requests = len(context.confidences)
        if not requests:
            return
        self._reported = at
        self.now = report(entries, requests, context.kv_tokens, self._sched.choice.suspended)
        if self.busiest is None or requests >= self.busiest["requests"]:
            self.busiest = self.now
        if self._logs and at >= self._logged + LOG_SECONDS:
            self._logged = at
            log.info("drafts: %s", self.now["summary"])

    def forget(self) -> None:
        """Another load begins."""
        self.busiest, self._reported = None, -math.inf

    def rest(self) -> None:
        """There is nothing to do."""
        self.now = report([], 0, 0)
