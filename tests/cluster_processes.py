"""Processes of a cluster on this machine, for the tests in `cluster/`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx

START_SECONDS = 240.0  # of a cluster with its models, on a machine that does something else too


def until(condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    """Waits; what cannot connect yet is false."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


@contextlib.contextmanager
def running(command: Sequence[str], environ: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; at the end all of that session is gone, and so is what it left behind."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def module(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", name, *words]
