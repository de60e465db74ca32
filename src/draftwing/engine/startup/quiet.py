"""How long this process was kept waiting for a processor while something was measured: other programs run, too."""

from __future__ import annotations

import os
from collections.abc import Mapping

BUSY = 0.1  # share of a measurement's time that threads waited, all together, from which on it is not believed


def delays() -> dict[str, float]:
    """By thread of this process the seconds in which it could have run and others did. Empty where the system does not
    tell: it is Linux that does."""
    found: dict[str, float] = {}
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as numbers:
                found[thread] = int(numbers.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # a thread that ended, or another system
        pass
    return found


def since(before: Mapping[str, float]) -> list[float]:
    """Seconds that each thread has waited since `delays` gave this."""
    return [seconds - before.get(thread, 0.0) for thread, seconds in delays().items()]
