"""Requests that wait for a row, and in which order they get one."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, KeysView
from itertools import chain

from draftwing.sched.req import Req

# Requests of a client that may be looked at in vain, each time rows are given: some may have to wait for another's
# prefill. As many get a row where somebody decodes, for a row takes the host about 0.05 ms.
MAX_CANDIDATES = 32
_MAX_IDLE_CLIENTS = 256  # clients to remember beyond those that wait


def _rank(req: Req) -> tuple[int, int, int]:
    return req.rank


def _place(line: list[Req], req: Req) -> int:
    return bisect.bisect_left(line, req.rank, key=_rank)


def _waits(line: list[Req], req: Req) -> bool:
    at = _place(line, req)
    return at < len(line) and line[at] is req


class FairQueue:
    """Higher priority first. Within a priority clients take turns, each client's requests in order of arrival, so
    that many requests of one do not stand before the one of another. Clients are told apart by the names of their API
    keys; without keys everyone is the same client.

    Each request gets the number of its turn once: one after the client's last one, or that of whoever was admitted
    last if this is later. So `Req.rank` does not change, and whoever has waited is never overtaken for ever.

    A client's requests are one list, sorted by rank, and so are the first ones of all clients. Places are found by
    bisection, so coming and going cost O(log n), and moving pointers: 2 us among 8,192. Who is not in turn is not
    looked at: this runs before every step, and thousands of clients may wait.

    It is no `FairDeque`: turns here are numbers that a request keeps, so that it can come back to its place, priorities
    come before them, and who is next depends on the rows that clients hold."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Req]] = {}  # by client; none is empty
        self._heads: list[Req] = []  # the first of each line, sorted by rank
        self._size = 0
        self._turn = 0  # the latest one that was admitted
        self._last: dict[tuple[int, str], int] = {}  # the newest turn of each priority and client
        self._arrivals = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Req]:
        """Iterates in no order; from any thread."""
        return chain.from_iterable(list(self._lines.values()))

    @property
    def clients(self) -> KeysView[str]:
        return self._lines.keys()

    def join(self, req: Req) -> None:
        """Takes a new request."""
        client = (req.request.priority, req.request.client)
        req.turn = max(self._turn, self._last.get(client, -1) + 1)
        req.arrival = self._arrivals
        self._arrivals += 1
        self._last[client] = req.turn
        if len(self._last) > self._size + _MAX_IDLE_CLIENTS:  # turns that are past say little
            self._last = {one: turn for one, turn in self._last.items() if turn > self._turn}
        self.requeue(req)

    def requeue(self, req: Req) -> None:
        """Puts one that was here before to its old place."""
        line = self._lines.setdefault(req.request.client, [])
        at = _place(line, req)
        if at == 0:
            if line:
                del self._heads[_place(self._heads, line[0])]
            bisect.insort(self._heads, req, key=_rank)
        line.insert(at, req)
        self._size += 1

    def admit(self, req: Req) -> None:
        """Removes a request that has a row now."""
        self._remove(req)
        self._turn = max(self._turn, req.turn)

    def leave(self, req: Req) -> None:
        """Removes a request that never waits again: its turn, if it was its client's last one, is the next one's."""
        self._remove(req)
        priority, client = key = (req.request.priority, req.request.client)
        if self._last.get(key) == req.turn:
            line = self._lines.get(client, [])
            after = bisect.bisect_left(line, (1 - priority, -1, -1), key=_rank)  # the first of a lower priority
            before = line[after - 1] if after and line[after - 1].request.priority == priority else None
            self._last[key] = max(self._turn, 0 if before is None else before.turn)

    def _remove(self, req: Req) -> None:
        line = self._lines[req.request.client]
        at = _place(line, req)
        assert line[at] is req
        del line[at]
        self._size -= 1
        if at:
            return
        del self._heads[_place(self._heads, req)]
        if line:
            bisect.insort(self._heads, line[0], key=_rank)
        else:
            del self._lines[req.request.client]

    def fair_order(self, served: Callable[[str], bool], further: bool = False) -> Iterator[Req]:
        """Returns those who wait, in the order of getting rows; of each client the first `MAX_CANDIDATES`. Who is
        taken may be admitted meanwhile, and others may come back.

        served: whether a client has its share of the rows. Then it comes after those of its priority who have less.
        further: whether there is one more for each that is admitted meanwhile."""
        ready: list[tuple[int, bool, int, int, Req, Iterator[Req]]] = []
        heads = self._heads.copy()  # of those from `at` on nobody has been looked at

        def put(line: Iterator[Req]) -> None:
            for req in line:
                priority, turn, arrival = req.rank
                heapq.heappush(ready, (priority, served(req.request.client), turn, arrival, req, line))
                return

        at = 0
        while ready or at < len(heads):
            while at < len(heads):
                priority, turn, arrival = heads[at].rank
                if ready and ready[0][:4] < (priority, False, turn, arrival):
                    break
                put(self._candidates(heads[at], further))
                at += 1
            *_, req, line_after = heapq.heappop(ready)
            yield req
            put(line_after)

    def _candidates(self, head: Req, further: bool) -> Iterator[Req]:
        """Yields those of a client from `head` on, before which one that came back may be, as `fair_order` does."""
        client, last, left = head.request.client, None, MAX_CANDIDATES
        while left > 0:
            line = self._lines.get(client, [])
            first = _place(line, head) if last is None else _place(line, last) + _waits(line, last)
            some = line[first : first + left]
            yield from some
            if not some or not further:
                return
            last, line = some[-1], self._lines.get(client, [])
            left -= sum(_waits(line, req) for req in some)


class RowShares:
    """Rows by client, while some wait: nobody takes or keeps more than its share while another has less than its own.
    Shares are equal: the rows, divided by the clients that run or wait, and one at least."""

    def __init__(self, rows: int, running: Iterable[Req], waiting: FairQueue) -> None:
        self._held = Counter(req.request.client for req in running)
        clients = len(waiting.clients) + sum(client not in waiting.clients for client in self._held)
        self._each = max(rows // clients, 1)

    def served(self, client: str) -> bool:
        """Returns whether it has its share."""
        return self._held[client] >= self._each

    def give(self, req: Req) -> None:
        self._held[req.request.client] += 1

    def take(self, req: Req) -> None:
        self._held[req.request.client] -= 1

    def preemption_victim(self, running: Iterable[Req], req: Req) -> Req | None:
        """Returns who runs and has to make room for `req`, if anybody: the newest request of the client that has most,
        of those beyond their share. Not for who has its share already, and not those of a higher priority."""
        if self.served(req.request.client):
            return None
        beyond = (
            one
            for one in running
            if self._held[one.request.client] > self._each and one.request.priority <= req.request.priority
        )
        return max(beyond, key=lambda one: (self._held[one.request.client], one.rank), default=None)
