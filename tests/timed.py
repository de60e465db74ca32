"""Times that tell of the code and little of the machine. Tests that compare them are marked `timing`."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")


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


def succeeds(work: Callable[[], bool], times: int = 1, disturbed: int = 2) -> bool:
    """Whether `work` succeeds in one of `times` turns. Up to `disturbed` failures do not count beside which other
    programs took more than a tenth of a processor; the next turn waits for these to end, for half a minute at most."""
    while times:
        before, begun = seconds_of_others(), time.monotonic()
        if work():
            return True
        if disturbed and seconds_of_others() - before > 0.1 * (time.monotonic() - begun):
            disturbed -= 1
            _wait_for_others()
        else:
            times -= 1
    return False


def seconds_of_others() -> float:
    """Processor time that this process and its children that have ended did not take, and that was not idle: of other
    programs, and of other machines that share its processors. 0 where no file says it."""
    if not STAT.is_file():
        return 0.0
    user, nice, system, _, _, irq, soft, steal = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _wait_for_others() -> None:
    for _ in range(60):
        before = seconds_of_others()
        time.sleep(0.5)
        if seconds_of_others() - before < 0.05:
            return
