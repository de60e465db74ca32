"""`--processes=N`: N copies of pytest's process run the tests, a file at a time, and it reports what they found. To
import everything and to list the tests takes 10 s, and is done once, before. `--beside=COMMAND`: runs meanwhile, has
to end with 0. Tests that measure time come last, in pytest's own process, when nothing else runs."""

from __future__ import annotations

import os
import subprocess
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO

import pytest
import torch
from _pytest.runner import runtestprotocol

BESIDE = pytest.StashKey[tuple[subprocess.Popen[bytes], IO[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="how many processes run tests; 0: only this one")
    parser.addoption("--beside", help="a command that is run beside the tests, and has to end with 0")


def pytest_sessionstart(session: pytest.Session) -> None:
    if command := session.config.option.beside:
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        started = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        session.config.stash[BESIDE] = started, output


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option, alone = session.config.option, session.items
    if option.collectonly or session.testsfailed:
        return None
    if option.processes and not torch.cuda.is_available():  # a process that has asked for a GPU cannot be copied
        alone = [item for item in alone if item.get_closest_marker("timing")]
        Copies(session, [item for item in session.items if not item.get_closest_marker("timing")]).run(option.processes)
    if BESIDE in session.config.stash:
        session.config.stash[BESIDE][0].wait()
    for item, following in zip(alone, [*alone[1:], None], strict=False):
        if session.shouldfail or session.shouldstop:
            break
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if BESIDE in session.config.stash and session.config.stash[BESIDE][0].wait() and not exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if BESIDE in config.stash:
        process, output = config.stash[BESIDE]
        terminalreporter.section(f"{config.option.beside} ended with {process.wait()}")
        output.seek(0)
        terminalreporter.write(output.read())


class Copies:
    """The processes, and what each of them has to do."""

    def __init__(self, session: pytest.Session, items: Sequence[pytest.Item]) -> None:
        self.session = session
        self.items = items
        self.files = deque(list(indices) for _, indices in groupby(range(len(items)), lambda i: items[i].path))
        self.given: dict[Connection, deque[int]] = {}  # to each process, and not yet done
        self.pids: dict[Connection, int] = {}

    def run(self, count: int) -> None:
        # Processes have folders of their own in this one.
        self.session.config._tmp_path_factory.getbasetemp()
        try:
            for _ in range(min(count, len(self.files))):
                self.start()
            while self.pids and not self.session.shouldfail:
                for pipe in wait(list(self.pids), 10):
                    self.hear(pipe)
                # What a process has started may keep its end of the pipe open.
                for pipe in [pipe for pipe, pid in self.pids.items() if not pipe.poll() and has_ended(pid)]:
                    self.ended(pipe)
        finally:
            for pipe in self.pids:
                pipe.close()  # ends its process after the present test
            for pid in self.pids.values():
                os.waitpid(pid, 0)

    def start(self) -> None:
        here, there = Pipe()
        pid = os.fork()
        if pid == 0:
            for pipe in (here, *self.pids):
                pipe.close()
            work(self.session, self.items, there)
        there.close()
        self.pids[here], self.given[here] = pid, deque()

    def hear(self, pipe: Connection) -> None:
        hook = self.session.config.hook
        try:
            what, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            what = "end"
        if what == "end":
            self.ended(pipe)
        elif what == "more":
            file = self.files.popleft() if self.files else []
            self.given[pipe] += file
            pipe.send(file)
        elif what == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=value)
        else:
            item = self.items[self.given[pipe].popleft()]
            for data in value:
                report = hook.pytest_report_from_serializable(config=self.session.config, data=data)
                item.ihook.pytest_runtest_logreport(report=report)

    def ended(self, pipe: Connection) -> None:
        """A process has ended, or died in a test: then another one goes on behind that test."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pids.pop(pipe), 0)[1])
        left = self.given.pop(pipe)
        pipe.close()
        if left:
            item = self.items[left.popleft()]
            why = f"the process that ran it ended with {status}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            item.ihook.pytest_runtest_logreport(report=report)
            if left:
                self.files.appendleft(list(left))
            if self.files:
                self.start()


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def work(session: pytest.Session, items: Sequence[pytest.Item], pipe: Connection) -> None:
    """Runs what it is given until there is no more, or the other end of the pipe is closed. Does not return."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()  # into a file of its own
    session.config.pluginmanager.register(Reporter(pipe))
    try:
        try:
            run_given(session, items, pipe)
        finally:
            session._setupstate.teardown_exact(None)  # of what ran last, where it is not the last
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        os._exit(1)
    except BaseException:
        capture.stop_global_capturing()
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_given(session: pytest.Session, items: Sequence[pytest.Item], pipe: Connection) -> None:
    todo: deque[int] = deque()
    item = None
    while not pipe.poll():
        if not todo:
            pipe.send(("more", None))
            todo += pipe.recv()
        following = items[todo.popleft()] if todo else None  # what this test leaves set up is for that one
        if item is not None:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if following is None:
            return
        item = following


class Reporter:
    """What pytest would print of tests goes through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        to_data = item.config.hook.pytest_report_to_serializable
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        self.pipe.send(("reports", [to_data(config=item.config, report=report) for report in reports]))
        return True

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if when == "runtest":  # those of before are told to each plugin, too
            told = warning_message
            copy = warnings.WarningMessage(str(told.message), told.category, told.filename, told.lineno)
            self.pipe.send(("warning", dict(warning_message=copy, when=when, nodeid=nodeid, location=None)))
