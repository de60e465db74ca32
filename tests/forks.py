"""Runs tests in several processes that are forked when everything is imported and collected, which takes 15 s each.

Each takes one file after the other, in their order, and keeps what is made once for a session. Not where a GPU is
used: CUDA survives no fork.
"""

from __future__ import annotations

import atexit
import os
import struct
import sys
from collections.abc import Iterator
from itertools import chain, groupby, pairwise
from multiprocessing import Pipe, connection
from typing import Any

import pytest

INDEX = struct.Struct("H")  # of a file, in a pipe from which all processes read


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="processes that are forked to run the tests in")


class Sender:
    """What a process has to report goes to the one that it was forked from."""

    def __init__(self, config: pytest.Config, to: connection.Connection) -> None:
        self.config, self.to = config, to

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.to.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.to.send((nodeid, location))


def run(session: pytest.Session, files: list[list[pytest.Item]], queue: int, to: connection.Connection) -> None:
    plugins = session.config.pluginmanager
    capture = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()  # into a file whose position all processes share
    capture.start_global_capturing()
    plugins.unregister(name="terminalreporter")
    plugins.register(Sender(session.config, to))

    def items() -> Iterator[pytest.Item]:
        while index := os.read(queue, INDEX.size):
            yield from files[INDEX.unpack(index)[0]]

    for item, following in pairwise(chain(items(), [None])):
        to.send(item.nodeid)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    to.send(None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.forks or option.collectonly or (session.testsfailed and not option.continue_on_collection_errors):
        return None
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    queue, fill = os.pipe()
    os.write(fill, b"".join(map(INDEX.pack, range(len(files)))))
    os.close(fill)
    sys.stdout.flush()
    running: dict[connection.Connection, int] = {}
    for _ in range(option.forks):
        reader, writer = Pipe(duplex=False)
        if pid := os.fork():
            running[reader] = pid
            writer.close()
            continue
        status = 1
        try:
            for other in running:
                other.close()
            run(session, files, queue, writer)
            status = 0
        finally:
            atexit._run_exitfuncs()
            os._exit(status)
    try:
        follow(session, running)
    finally:
        for pid in running.values():
            os.kill(pid, 15)
    return True


def follow(session: pytest.Session, running: dict[connection.Connection, int]) -> None:
    """Reports what the processes report, until all have ended."""
    hook, now = session.config.hook, dict[connection.Connection, Any]()
    while running:
        for reader in connection.wait(list(running)):
            assert isinstance(reader, connection.Connection)
            try:
                news = reader.recv()
            except EOFError:
                status = os.waitpid(running.pop(reader), 0)[1]
                news = None
                if now.get(reader, "its first test") is not None:
                    session.shouldfail = f"a process ended in {now.get(reader)}: {os.waitstatus_to_exitcode(status)}"
            if isinstance(news, dict):
                report = hook.pytest_report_from_serializable(config=session.config, data=news)
                hook.pytest_runtest_logreport(report=report)
            elif isinstance(news, tuple):
                hook.pytest_runtest_logfinish(nodeid=news[0], location=news[1])
            else:
                now[reader] = news
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
