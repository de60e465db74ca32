"""Logs how long each part of a start takes, at level debug."""

from __future__ import annotations

import logging
import time

log = logging.getLogger("draftwing")


class Laps:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, what: str) -> None:
        """Logs the seconds since the call before, or since this was made."""
        before, self._last = self._last, time.monotonic()
        log.debug("start: %.2f s for %s", self._last - before, what)
