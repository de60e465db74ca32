"""`python -m draftwing.learn.low_priority PARENT MEMORY WORD...`: runs a command of draftwing with what others leave
of the processors, as `IdleTraining` starts it. PARENT: the process whose end ends this one.  MEMORY: bytes."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
from contextlib import suppress

from draftwing.machine import end_with_parent, lacks_memory

LEAST = 400 * 10**6  # bytes: loading torch takes 200 to 400 MB; with less, libraries may end the process without a word


def main(argv: list[str]) -> None:
    parent, memory = int(argv[1]), int(argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is its parent's matter
    end_with_parent(parent)
    os.nice(19)
    with suppress(OSError, AttributeError):  # not allowed everywhere; nice is
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if memory != resource.RLIM_INFINITY and memory < LEAST:
        sys.exit(_too_little(memory))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    sys.argv = ["draftwing", *argv[3:]]
    try:
        runpy.run_module("draftwing", run_name="__main__")
    except Exception as error:
        if not lacks_memory(error):
            raise
        sys.exit(_too_little(memory))


def _too_little(memory: int) -> str:
    if memory == resource.RLIM_INFINITY:
        return "learning: training needs more memory than there is"
    return (
        f"learning: training needs more than the {memory / 1e6:,.0f} MB that it may take, half of the memory that was "
        "free when the server was ready"
    )


if __name__ == "__main__":
    main(sys.argv)
