"""What other threads want of an engine, until its own thread takes it between two steps."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from draftwing.errors import RequestError
from draftwing.fair_deque import FairDeque
from draftwing.sched.req import Req


class InputQueue:
    """New requests, and the uids of those to end. Thread-safe.

    Whoever takes, takes a few, so that nobody's thousands stand between two steps of others: new requests of clients in
    turn, each client's in order of arrival. One that is ended before it was taken never becomes the scheduler's.

    Between `hold` and `release` those that come stand apart, and are new only then."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: FairDeque[str, Req] = FairDeque()  # by uid
        self._live: set[str] = set()  # uids of requests whose last output has not been given out
        self._ended: deque[str | Req] = deque()
        self._held: FairDeque[str, Req] | None = None  # those that stand apart
        self._woken = False
        self._coming = 0  # threads that put several

    def put(self, req: Req) -> None:
        """Raises RequestError for a uid that a live request has."""
        with self._changed:
            if req.uid in self._live:
                raise RequestError(f"uid: expected one of its own, found {req.uid!r}, which a live request has", "uid")
            self._live.add(req.uid)
            line = self._new if self._held is None else self._held
            line.put(req.request.client, req.uid, req)
            self._changed.notify()

    def hold(self) -> None:
        """Has those that come from now on stand apart."""
        with self._changed:
            self._held = self._held or FairDeque()

    def release(self) -> None:
        """Makes those new that stand apart, and lets none do so any more."""
        with self._changed:
            held, self._held = self._held, None
            while held:
                uid, req = held.pop()
                self._new.put(req.request.client, uid, req)
            self._changed.notify()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Has `wait` wait until all is there that is put meanwhile."""
        with self._changed:
            self._coming += 1
        try:
            yield
        finally:
            with self._changed:
                self._coming -= 1
                self._changed.notify()

    def end(self, uid: str) -> None:
        with self._changed:
            req = self._new.drop(uid)
            if req is None and self._held is not None:
                req = self._held.drop(uid)
            self._ended.append(uid if req is None else req)
            self._changed.notify()

    def forget(self, uids: Iterable[str]) -> None:
        """Frees the uids of requests that gave out their last output."""
        with self._changed:
            self._live.difference_update(uids)

    def wake(self) -> None:
        """Ends a `wait`, this one or the next."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until there is something to take, or for so many seconds; returns whether there is, or `wake` was
        called."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._woken or not (self._empty or self._coming), seconds)
            self._woken = False
            return found

    @property
    def empty(self) -> bool:
        with self._changed:
            return self._empty

    @property
    def new(self) -> int:
        """Returns new requests, but for those that stand apart."""
        return len(self._new)

    def __len__(self) -> int:
        """Returns all of them."""
        with self._changed:  # else `release` could come in between
            return len(self._new) + (0 if self._held is None else len(self._held))

    def take_new(self, count: int) -> list[Req]:
        with self._changed:
            return [self._new.pop()[1] for _ in range(min(count, len(self._new)))]

    def take_ended(self, count: int) -> list[str | Req]:
        """Uids of requests that may be the scheduler's, and requests that never will be."""
        with self._changed:
            return [self._ended.popleft() for _ in range(min(count, len(self._ended)))]

    @property
    def _empty(self) -> bool:
        return not self._new and not self._ended
