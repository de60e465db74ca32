"""What a process of our own is started with, and what it does first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def import_environment() -> dict[str, str]:
    """Returns the environment of a process that finds what it imports where this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def end_with_parent(parent: int) -> None:
    """Has the system kill this process when the thread ends that has started it. Ends it at once where its parent is
    not `parent` any more, a process id."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
