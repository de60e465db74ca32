"""Times that tell of the code and little of the machine. Tests that compare them are marked `timing`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def least_seconds(work: Callable[[], object], times: int = 3) -> float:
    """Processor time of this thread, the least of several; without the garbage collector, which walks through all that
    other tests have left."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return min(_seconds(work) for _ in range(times))
    finally:
        if collects:
            gc.enable()


def _seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun
