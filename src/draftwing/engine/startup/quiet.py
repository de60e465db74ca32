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


def own_delay() -> float:
    """Returns the seconds in which the calling thread could have run and others did, 0 where the system does not tell.

    What it waited between two calls it waited between them. Another thread's wait is told when it ends, and most of it
    may lie before: what is kept waiting for something else would make a step look as if it took nothing.
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as numbers:
            return int(numbers.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # another system
        return 0.0


def own(seconds: float, before: float) -> float:
    """Returns what of so many seconds, which began when `own_delay` gave this, other programs did not take from the
    calling thread."""
    return max(seconds - (own_delay() - before), seconds / MAX_DELAY_RATIO)
