"""`python -m draftwing.learn.low_priority PARENT MEMORY WORD...`: runs a command of draftwing with what others leave
of the processors, as `IdleTraining` starts it. PARENT: the process whose end ends this one.  MEMORY: bytes."""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, memory = int(argv[1]), int(argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is its parent's matter
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.nice(19)
    with suppress(OSError, AttributeError):  # not allowed everywhere; nice is
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    sys.argv = ["draftwing", *argv[3:]]
    runpy.run_module("draftwing", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv)
