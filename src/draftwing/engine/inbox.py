"""What other threads want of an engine, until its own thread takes it between two steps."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable

from draftwing.errors import RequestError
from draftwing.sched.req import Req


class Inbox:
    """New requests, and the uids of those to end. Thread-safe.

    Whoever takes, takes a few, so that nobody's thousands stand between two steps of others: new requests of clients in
    turn, each client's in order of arrival. One that is ended before it was taken never becomes the scheduler's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: OrderedDict[str, OrderedDict[str, Req]] = OrderedDict()  # by client and uid; none is empty
        self._clients: dict[str, str] = {}  # by uid of a new request
        self._live: set[str] = set()  # uids of requests whose last output has not been given out
        self._ended: deque[str | Req] = deque()
        self._woken = False

    def put(self, req: Req) -> None:
        """Raises RequestError for a uid that a live request has."""
        with self._changed:
            if req.uid in self._live:
                raise RequestError(f"uid: expected one of its own, found {req.uid!r}, which a live request has", "uid")
            self._live.add(req.uid)
            self._clients[req.uid] = req.request.client
            self._new.setdefault(req.request.client, OrderedDict())[req.uid] = req
            self._changed.notify()

    def end(self, uid: str) -> None:
        with self._changed:
            client = self._clients.pop(uid, None)
            self._ended.append(uid if client is None else self._pop(client, uid))
            self._changed.notify()

    def forget(self, uids: Iterable[str]) -> None:
        """These requests gave out their last output: their uids are free."""
        with self._changed:
            self._live.difference_update(uids)

    def wake(self) -> None:
        """Ends a `wait`, this one or the next."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def wait(self) -> None:
        """Until there is something to take."""
        with self._changed:
            self._changed.wait_for(lambda: self._woken or not self._empty)
            self._woken = False

    @property
    def empty(self) -> bool:
        with self._changed:
            return self._empty

    @property
    def new(self) -> int:
        """New requests."""
        return len(self._clients)

    def take_new(self, most: int) -> list[Req]:
        found: list[Req] = []
        with self._changed:
            while self._new and len(found) < most:
                client = next(iter(self._new))
                req = self._pop(client, next(iter(self._new[client])))
                del self._clients[req.uid]
                if client in self._new:
                    self._new.move_to_end(client)
                found.append(req)
        return found

    def take_ended(self, most: int) -> list[str | Req]:
        """Uids of requests that may be the scheduler's, and requests that never will be."""
        with self._changed:
            return [self._ended.popleft() for _ in range(min(most, len(self._ended)))]

    @property
    def _empty(self) -> bool:
        return not self._new and not self._ended

    def _pop(self, client: str, uid: str) -> Req:
        line = self._new[client]
        req = line.pop(uid)
        if not line:
            del self._new[client]
        return req
