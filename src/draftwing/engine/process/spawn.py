"""Processes of the engine's own: new interpreters that get their work by connections, and end when these do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from draftwing.errors import CheckpointError, ConfigError, DraftwingError
from draftwing.machine import end_with_parent, import_environment

KILL_SECONDS = 30.0  # a process that a driver holds may not even end by SIGKILL


class Failed(NamedTuple):
    """Why a process of the engine's ends. kind: "config", "checkpoint", "own" for other errors of draftwing's own, or
    "bug"."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        kinds: dict[type[BaseException], str] = {ConfigError: "config", CheckpointError: "checkpoint"}
        kind = kinds.get(type(error), "own" if isinstance(error, DraftwingError) else "bug")
        return cls(kind, str(error) if kind != "bug" else f"{type(error).__name__}: {error}")

    def error(self, other: type[DraftwingError], prefix: str = "") -> DraftwingError:
        """Returns what is to be raised of it. other: the type of what is neither of a config nor of a checkpoint, of
        which `prefix` says who says it."""
        kinds: dict[str, type[DraftwingError]] = {"config": ConfigError, "checkpoint": CheckpointError}
        return kinds.get(self.kind, other)(self.message if self.kind in kinds else prefix + self.message)


def start_module(module: str, connections: int, new_session: bool) -> tuple[subprocess.Popen[bytes], list[Connection]]:
    """Starts `python -m module` with the other ends of so many connections, see `joined`. What it needs to import is
    found where this process found it. new_session: it does not get the terminal's Ctrl-C, and leads a process group."""
    pairs = [socket.socketpair() for _ in range(connections)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    # The system's signal comes when the thread ends that has started the process; the main one ends last.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, numbers), str(parent)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            env=import_environment(),
            start_new_session=new_session,
        )
    finally:
        for _, theirs in pairs:
            theirs.close()
    return process, [Connection(ours.detach()) for ours, _ in pairs]


def joined(argv: Sequence[str]) -> list[Connection]:
    """Returns the connections of a process that `start_module` has started, by its arguments. From now on the process
    is killed when its parent ends, however that ends: one that is stopped would not read that its connections have."""
    *numbers, parent = map(int, argv[1:])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # the parent, which may get them too, decides when this process ends
    if parent:
        end_with_parent(parent)
    return [Connection(number) for number in numbers]


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Says in words how a process ends or has ended."""
    try:
        code = process.wait(5)
    except subprocess.TimeoutExpired:
        return "its connection broke"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def end_all(processes: Sequence[subprocess.Popen[bytes]], grace: float) -> list[int]:
    """Waits so many seconds for them together, then kills; returns the ids of those that do not even end then."""
    stuck, until = [], time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
    for process in processes:
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            stuck.append(process.pid)
    return stuck
