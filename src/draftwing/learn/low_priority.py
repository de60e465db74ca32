"""`python -m draftwing.learn.low_priority PARENT MEMORY WORD...`: runs a command of draftwing with what others leave
of the processors, as `IdleTraining` starts it. PARENT: the process whose end ends this one.  MEMORY: bytes."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
from contextlib import suppress

from draftwing.machine import end_with_parent

LEAST = 400 * 10**6  # bytes: loading torch takes 200 to 400 MB; with less, libraries may end the process without a word
# In messages of Python, torch, the dynamic loader and the system, which have no class of their own for it.
_NO_MEMORY = (
    "start new thread", "start a thread", "annot allocate memory", "an't allocate memory", "not enough memory",
    "failed to map segment", "annot map zero-fill pages", "bad_alloc",
    "without setting an exception", "error return without exception set",
)  # fmt: skip


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


def lacks_memory(error: BaseException | None) -> bool:
    """Returns whether an error, or one that led to it, is of memory, or of a thread's, that there was no room for."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main(sys.argv)
