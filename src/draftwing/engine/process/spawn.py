"""Processes of the engine's own: new interpreters that are told by connections, and end when these do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

KILL_SECONDS = 30.0  # a process that a driver holds may not even end by SIGKILL


def start_module(module: str, connections: int, new_session: bool) -> tuple[subprocess.Popen[bytes], list[Connection]]:
    """Starts `python -m module FD ...` with the other ends of so many connections. What it needs to import is found
    where this process found it. new_session: it does not get the terminal's Ctrl-C, and leads a process group."""
    pairs = [socket.socketpair() for _ in range(connections)]
    numbers = [theirs.fileno() for _, theirs in pairs]
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=new_session,
        )
    finally:
        for _, theirs in pairs:
            theirs.close()
    return process, [Connection(ours.detach()) for ours, _ in pairs]


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """In words, of a process that ends or has ended."""
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
