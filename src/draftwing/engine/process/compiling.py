"""Threads that compile grammars for the engine's process, so that whoever reads what the server sends never does."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

SMALL = 16_384  # characters of a grammar


class _Job(NamedTuple):
    key: object
    work: Callable[[Callable[[], bool]], None]


class CompileLanes:
    """Two lanes, for small grammars and large ones. Each does one thing after the other, and clients take turns."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        """failed: is told of what work raises, which it should not."""
        self._lanes = [_Lane(name, failed) for name in ("draftwing-compile-small", "draftwing-compile-large")]

    def put(self, size: int, client: str, key: object, work: Callable[[Callable[[], bool]], None]) -> None:
        """Queues `work`, which is given a function that says whether it was dropped meanwhile. size: of the grammar,
        in characters.  key: to drop it by."""
        self._lanes[size > SMALL].put(client, _Job(key, work))

    def drop(self, key: object) -> bool:
        """Nobody wants it any more. Whether it had not begun, and never will; unknown keys are ignored."""
        return any(lane.drop(key) for lane in self._lanes)


class _Lane:
    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._name, self._failed = name, failed
        self._clients: OrderedDict[str, deque[_Job]] = OrderedDict()  # whose turn is next first; none is empty
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._now: _Job | None = None
        self._dropped = False  # what runs now

    def put(self, client: str, job: _Job) -> None:
        with self._changed:
            self._clients.setdefault(client, deque()).append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def drop(self, key: object) -> bool:
        with self._changed:
            if self._now is not None and self._now.key == key:
                self._dropped = True
            for client, jobs in self._clients.items():
                for job in jobs:
                    if job.key == key:
                        jobs.remove(job)
                        if not jobs:
                            del self._clients[client]
                        return True
        return False

    def _run(self) -> None:
        try:
            while True:
                job = self._next()
                job.work(lambda: self._dropped)
                with self._changed:
                    self._now = None
        except BaseException as error:
            self._failed(error)

    def _next(self) -> _Job:
        with self._changed:
            self._changed.wait_for(lambda: self._clients)
            client, jobs = self._clients.popitem(last=False)
            self._now, self._dropped = jobs.popleft(), False
            if jobs:
                self._clients[client] = jobs  # behind all others
            return self._now
