"""Renders chat templates in processes of their own, which are ended when a template takes too much."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from draftwing.child_processes import import_environment
from draftwing.errors import CheckpointError, RequestError
from draftwing.text import template_sandbox as sandbox

PATIENCE = 60.0  # seconds of the clock for one text, on a machine that is busy with other things
_MAX_BYTES = 4 * sandbox.MAX_CHARACTERS + 1


class TemplateLimit(RequestError):
    """A template took more time or memory than it may, or made too long a text."""


class _Process:
    """One process, which does one job after the other."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", sandbox.__name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=import_environment(),
                start_new_session=True,
            )
        self._conn = Connection(ours.detach())

    def ask(self, job: bytes) -> tuple[bytes, str]:
        """Asks the process. Raises EOFError or OSError when it is gone, TimeoutError after `PATIENCE`."""
        self._conn.send_bytes(job)
        if not self._conn.poll(PATIENCE):
            raise TimeoutError
        reply = self._conn.recv_bytes(_MAX_BYTES)
        return reply[:1], reply[1:].decode()

    def close(self) -> int:
        """Ends it. Returns its exit status."""
        self._conn.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.2)  # it may have been ended by its limit
        self._process.kill()
        return self._process.wait()


_idle: list[_Process] = []  # as many as ever worked at once; append and pop are atomic


@atexit.register
def _close() -> None:
    while _idle:
        _idle.pop().close()


os.register_at_fork(after_in_child=_idle.clear)  # they answer the other process


def check(source: str) -> None:
    """Raises CheckpointError for a text that is no template, or takes too long to compile."""
    try:
        kind, text = _ask(sandbox.Job(source, None))
    except TemplateLimit as error:
        raise CheckpointError(f"{error}; pass another one with --chat-template") from None
    if kind != sandbox.TEXT:
        raise CheckpointError(f"{text}; pass another one with --chat-template")


def render(source: str, variables: dict[str, Any]) -> str:
    """Returns the text of a template. Blocks; any thread may call it.

    Raises RequestError when the template refuses the variables or cannot work with them, TemplateLimit when it takes
    too much.
    """
    kind, text = _ask(sandbox.Job(source, variables))
    if kind != sandbox.TEXT:
        raise RequestError(text, "messages")
    return text


def _ask(job: sandbox.Job) -> tuple[bytes, str]:
    try:
        data = pickle.dumps(job)
    except Exception as error:  # what objects raise that cannot be copied
        raise RequestError(f"the chat template can be given plain values alone: {error}", "messages") from None
    kind, text = _answer(data)
    if kind == sandbox.LIMIT:
        raise TemplateLimit(f"the chat template {text}", "messages")
    return kind, text


def _answer(data: bytes) -> tuple[bytes, str]:
    """Returns how a pickled job ended, and its text or the error. A process that somebody else ended, as the system
    does for want of memory, says nothing of the template, so a second one is asked."""
    for last in (False, True):
        process = _idle.pop() if _idle and not last else _Process()
        try:
            answer = process.ask(data)
        except TimeoutError:
            process.close()
            return sandbox.LIMIT, f"takes longer than {PATIENCE:g} s"
        except (EOFError, OSError):
            status = process.close()
            if status == -signal.SIGPROF:
                return sandbox.LIMIT, f"takes longer than {sandbox.SECONDS:g} s of a processor"
            if last:
                return sandbox.LIMIT, f"ended its process ({_in_words(status)}), twice"
        except BaseException:
            process.close()
            raise
        else:
            _idle.append(process)
            return answer
    raise AssertionError("the second process was the last")


def _in_words(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"
