"""Processes of an engine end with their parent, in whatever way that ends, and whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHILD = """
import os, time
from draftwing.engine.process.spawn import joined
import sys
(conn,) = joined(sys.argv)
conn.send(os.getpid())
time.sleep(600)
"""
PARENT = """
import os, sys, threading, time
from draftwing.engine.process.spawn import start_module

def start():
    process, (conn,) = start_module("child", 1, new_session={session})
    print(conn.recv(), flush=True)

{how}
time.sleep(600)
"""


def state(pid: int) -> str:
    """As the system names it; empty where there is no such process, or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "")
    except OSError:
        return ""


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def family(folder: Path, session: bool, how: str) -> tuple[subprocess.Popen[str], int]:
    (folder / "child.py").write_text(CHILD)
    (folder / "parent.py").write_text(PARENT.format(session=session, how=how))
    parent = subprocess.Popen(
        [sys.executable, "parent.py"], cwd=folder, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.further(session=False, by=signal.SIGTERM)
@pytest.mark.further(session=False, stopped=False)
@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_ends_with_its_parent_though_it_be_stopped(
    tmp_path: Path, session: bool, stopped: bool, by: signal.Signals
) -> None:
    parent, child = family(tmp_path, session, "start()")
    try:
        if stopped:
            os.kill(child, signal.SIGSTOP)
            assert until(lambda: state(child) == "T")
        os.kill(child, 0)
        parent.send_signal(by)
        assert until(lambda: not state(child))
    finally:
        parent.kill()
        parent.wait()


def test_it_does_not_end_with_a_thread_that_has_started_it(tmp_path: Path) -> None:
    how = "thread = threading.Thread(target=start); thread.start(); thread.join(); print('ended', flush=True)"
    parent, child = family(tmp_path, True, how)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "ended\n"
        time.sleep(0.3)
        assert state(child)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(child, ignored)
        time.sleep(0.2)
        assert state(child)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.wait()
