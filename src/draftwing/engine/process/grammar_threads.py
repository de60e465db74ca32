"""Threads that compile grammars for the engine's process, so that whoever reads what the server sends never does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

from draftwing.fair_deque import FairDeque

SMALL = 16_384  # characters of a grammar
Work = Callable[[Callable[[], bool]], None]


class GrammarThreads:
    """Two lanes, for small grammars and large ones. Each does one thing after the other, and clients take turns."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        """failed: called with what work raises, which it should not."""
        self._lanes = [_GrammarThread(name, failed) for name in ("draftwing-compile-small", "draftwing-compile-large")]

    def put(self, size: int, client: str, key: Hashable, work: Work) -> None:
        """Queues `work`, which is given a function that says whether it was dropped meanwhile. size: of the grammar,
        in characters.  key: to drop it by, not None; no two are the same.  Raises RuntimeError where no thread can be
        started."""
        self._lanes[size > SMALL].put(client, key, work)

    def drop(self, key: Hashable) -> bool:
        """Drops what nobody wants any more. Returns whether it had not begun, and never will; unknown keys are
        ignored."""
        return any(lane.drop(key) for lane in self._lanes)


class _GrammarThread:
    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._name, self._failed = name, failed
        self._waiting: FairDeque[Hashable, Work] = FairDeque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._now: Hashable = None  # the key of what runs
        self._dropped = False  # whether what runs was

    def put(self, client: str, key: Hashable, work: Work) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.put(client, key, work)
            self._changed.notify()

    def drop(self, key: Hashable) -> bool:
        with self._changed:
            if self._now == key:
                self._dropped = True
            return self._waiting.drop(key) is not None

    def _run(self) -> None:
        try:
            while True:
                self._next()(lambda: self._dropped)
                with self._changed:
                    self._now = None
        except BaseException as error:
            self._failed(error)

    def _next(self) -> Work:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            (self._now, work), self._dropped = self._waiting.pop(), False
            return work
