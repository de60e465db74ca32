"""Requests that wait for a row, in the order in which they get one."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from draftwing.sched.req import Req

_KEPT = 256  # clients to remember beyond those that wait


class FairQueue:
    """Higher priority first. Within a priority clients take turns, each client's requests in order of arrival, so
    that many requests of one do not stand before the one of another. Clients are told apart by the names of their API
    keys; without keys everyone is the same client.

    Each request gets the number of its turn once: one after the client's last one, or that of whoever was admitted
    last if this is later. So `Req.rank` does not change, and whoever has waited is never overtaken for ever."""

    def __init__(self) -> None:
        self._waiting: list[Req] = []
        self._turn = 0  # the latest one that was admitted
        self._last: dict[tuple[int, str], int] = {}  # the newest turn of each priority and client
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._waiting)

    def join(self, req: Req) -> None:
        """A new request."""
        client = (req.request.priority, req.request.client)
        req.turn = max(self._turn, self._last.get(client, -1) + 1)
        req.arrival = self._arrivals
        self._arrivals += 1
        self._last[client] = req.turn
        if len(self._last) > len(self._waiting) + _KEPT:  # turns that are past say little
            self._last = {one: turn for one, turn in self._last.items() if turn > self._turn}
        self.rejoin(req)

    def rejoin(self, req: Req) -> None:
        """One that was here before, to its old place."""
        bisect.insort(self._waiting, req, key=lambda r: r.rank)

    def admit(self, req: Req) -> None:
        """It has a row now."""
        self._waiting.remove(req)
        self._turn = max(self._turn, req.turn)

    def leave(self, req: Req) -> None:
        """It is not to be run any more; nothing happens if it does not wait."""
        if req in self._waiting:
            self._waiting.remove(req)

    def first(self, count: int) -> list[Req]:
        return self._waiting[:count]
