"""Processes that do what others may have written in bad faith, templates and pictures: with limits of time and memory,
by which the system ends them. Both sides: `Sandbox` asks, `serve` answers."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from draftwing.machine import import_environment
from draftwing.pipes import receive

PATIENCE = 60.0  # seconds of the clock for one job, on a machine that is busy with other things
# How an answer begins; what was made, or the error, follows.
DONE, REFUSED, LIMIT = b"t", b"r", b"l"


class _Process:
    """One process, which does one job after the other."""

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=import_environment(),
                start_new_session=True,
            )
        self._conn = Connection(ours.detach())

    def ask(self, job: bytes, most: int) -> tuple[bytes, memoryview]:
        """Asks the process. Raises EOFError or OSError when it is gone, TimeoutError after `PATIENCE`."""
        self._conn.send_bytes(job)
        if not self._conn.poll(PATIENCE):
            raise TimeoutError
        reply = receive(self._conn, most)
        return bytes(reply[:1]), reply[1:]

    def close(self) -> int:
        """Ends it. Returns its exit status."""
        self._conn.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.2)  # it may have been ended by its limit
        self._process.kill()
        return self._process.wait()


class Sandbox:
    """Processes of one module, as many as ever worked at once. Any thread may ask."""

    def __init__(self, module: str, seconds: float, most: int) -> None:
        """module: calls `serve`.  seconds: of a processor that it gives a job.  most: bytes of an answer."""
        self._module, self._seconds, self._most = module, seconds, most
        self._idle: list[_Process] = []  # append and pop are atomic
        atexit.register(self._close)
        os.register_at_fork(after_in_child=self._idle.clear)  # they answer the other process

    def ask(self, job: bytes) -> tuple[bytes, memoryview]:
        """Returns how a job ended, and what was made or the error. Blocks. A process that somebody else ended, as the
        system does for want of memory, says nothing of the job, so a second one is asked."""
        for last in (False, True):
            process = self._idle.pop() if self._idle and not last else _Process(self._module)
            try:
                answer = process.ask(job, self._most)
            except TimeoutError:
                process.close()
                return LIMIT, memoryview(f"takes longer than {PATIENCE:g} s".encode())
            except (EOFError, OSError):
                status = process.close()
                if status == -signal.SIGPROF:
                    return LIMIT, memoryview(f"takes longer than {self._seconds:g} s of a processor".encode())
                if last:
                    return LIMIT, memoryview(f"ended its process ({_in_words(status)}), twice".encode())
            except BaseException:
                process.close()
                raise
            else:
                self._idle.append(process)
                return answer
        raise AssertionError("the second process was the last")

    def _close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _in_words(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def serve(
    conn: Connection, answer: Callable[[memoryview], tuple[bytes, Sequence[bytes]]], seconds: float, memory: int
) -> None:
    """Answers jobs until the other side is gone, each within so many seconds of a processor, and with so many bytes of
    address space. answer: returns how the job ended, and what was made, which is joined."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is doing
    with contextlib.suppress(ValueError, OSError):  # a lower limit is there already
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = receive(conn)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            kind, made = answer(job)
            signal.setitimer(signal.ITIMER_PROF, 0)
            conn.send_bytes(b"".join((kind, *made)))
