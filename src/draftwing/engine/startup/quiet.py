"""How long this process was kept waiting for a processor while something was measured: other programs run, too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

BUSY = 0.1  # share of a measurement's time that threads waited, all together, from which on it is not believed
MAX_DELAY_RATIO = 8  # of the time that passed, one part in so many is own whatever the system reports


def delays() -> dict[str, float]:
    """Returns by thread of this process the seconds in which it could have run and others did. Empty where the system
    does not tell: it is Linux that does."""
    found: dict[str, float] = {}
    with suppress(OSError):  # another system
        for thread in os.listdir("/proc/self/task"):
            # A thread that ended; of the others what they have waited so far must not count as new.
            with (
                suppress(OSError, ValueError, IndexError),
                open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as numbers,
            ):
                found[thread] = int(numbers.read().split()[1]) / 1e9
    return found


def since(before: Mapping[str, float]) -> list[float]:
    """Returns seconds that each thread has waited since `delays` gave this."""
    return [seconds - before.get(thread, 0.0) for thread, seconds in delays().items()]


def own(seconds: float, before: Mapping[str, float]) -> float:
    """Returns what of so many seconds, which began when `delays` gave this, other programs did not take: of threads
    that work together the one that waited longest counts."""
    return max(seconds - max(since(before), default=0.0), seconds / MAX_DELAY_RATIO)
