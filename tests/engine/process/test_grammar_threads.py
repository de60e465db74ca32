"""Grammars are compiled during all else that an engine's process does, and one client's are not before another's."""

from __future__ import annotations

import threading
from collections.abc import Callable

from draftwing.engine.process.grammar_threads import SMALL, GrammarThreads


def broken(error: BaseException) -> None:
    raise AssertionError(error)


class Blocked:
    """Threads with a large job that waits until it is let go. `done` has the keys of finished work, in order."""

    def __init__(self) -> None:
        self.lanes, self.done = GrammarThreads(broken), list[object]()
        self.hold, self._began, self._all = threading.Event(), threading.Event(), threading.Event()
        self.gone = False
        self.lanes.put(SMALL + 1, "a", "first", self._wait)
        assert self._began.wait(20)

    def _wait(self, gone: Callable[[], bool]) -> None:
        self._began.set()
        self.hold.wait(20)
        self.gone = gone()
        self.done.append("first")

    def put(self, client: str, key: str, size: int = SMALL + 1) -> None:
        self.lanes.put(size, client, key, lambda gone: self.done.append(key))

    def finish(self) -> list[object]:
        self.hold.set()
        self.lanes.put(SMALL + 1, "~", "last", lambda gone: self._all.set())
        assert self._all.wait(20)
        return self.done


def test_clients_take_turns() -> None:
    blocked = Blocked()
    for key in ("a1", "a2", "a3", "b1", "b2", "c1"):
        blocked.put(key[0], key)
    for i in range(2):
        blocked.lanes.put(SMALL + 1, "~", f"wait {i}", lambda gone: None)  # `last` comes after all others
    assert blocked.finish() == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_small_grammars_are_not_behind_large_ones() -> None:
    blocked, small = Blocked(), threading.Event()
    blocked.put("a", "large")
    blocked.lanes.put(SMALL, "a", "small", lambda gone: small.set())
    assert small.wait(20) and not blocked.done
    assert blocked.finish() == ["first", "large"]


def test_what_is_dropped_never_begins_or_is_told() -> None:
    blocked = Blocked()
    for key in ("a1", "a2", "b1"):
        blocked.put(key[0], key)
    assert blocked.lanes.drop("b1") and blocked.lanes.drop("a1")
    assert not blocked.lanes.drop("a1") and not blocked.lanes.drop("nobody") and not blocked.lanes.drop("first")
    assert blocked.finish() == ["first", "a2"]
    assert blocked.gone


class Key:
    """Counts how often keys are compared."""

    compared = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        Key.compared += 1
        return isinstance(other, Key) and self.number == other.number


def test_a_drop_does_not_look_through_all_that_waits() -> None:
    blocked = Blocked()
    for i in range(1000):
        blocked.lanes.put(SMALL + 1, "a", Key(i), lambda gone: None)
    Key.compared = 0
    assert blocked.lanes.drop(Key(999)) and blocked.lanes.drop(Key(500)) and not blocked.lanes.drop(Key(1000))
    assert Key.compared < 20
    blocked.finish()


def test_it_has_two_threads_however_much_waits() -> None:
    before = threading.active_count()
    blocked = Blocked()
    for i in range(200):
        blocked.put(f"client {i}", f"job {i}", 1 + i % 2 * SMALL)
    assert threading.active_count() <= before + 2
    assert len(blocked.finish()) > 100
