"""How many answers may wait for their first token: of one client, and of all."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from draftwing.errors import DraftwingError
from draftwing.requests.request import GenerationRequest

RETRY_SECONDS = 1
ABANDONED_SECONDS = 10.0  # for which an answer that was asked for and left counts among those of its key


class QueueFull(DraftwingError):
    """Too many answers wait (HTTP 429 where they are the client's own, else 503)."""

    def __init__(self, message: str, own: bool, when: str = "when some have begun") -> None:
        super().__init__(f"{message}; try again {when}")
        self.own = own


class AdmissionQuota:
    """Answers from when they are asked for until the engine gives a token or their end; a request whose answers are not
    made yet is one. Those whose client left count until the engine has let go of them, and for some time among those of
    its key, so that nobody can ask and leave faster than the server follows."""

    def __init__(self, max_answers: int, max_per_key: int, clock: Callable[[], float] = time.monotonic) -> None:
        """max_answers: of all clients.  max_per_key: of one with a key; without keys all are one client."""
        self._max_answers, self._max_per_key = max_answers, max_per_key
        self._clients: dict[str, str] = {}  # by uid
        self._counts: Counter[str] = Counter()
        self._made = 0
        self._abandoned: deque[tuple[float, str, int]] = deque()  # until when so many count for a client
        self._clock = clock

    def __len__(self) -> int:
        return len(self._clients)

    @contextmanager
    def reserve(self, client: str, count: int) -> Iterator[None]:
        """Counts so many while they are made, which takes a while. Raises QueueFull where they would be too many."""
        self.check(client, count)
        self._made += count
        self._counts[client] += count
        try:
            yield
        finally:
            self._made -= count
            self._less(client, count)

    def check(self, client: str, count: int, held: int = 0) -> None:
        """Raises QueueFull where so many more would be too many. held: places that are given back for them."""
        while self._abandoned and self._abandoned[0][0] <= self._clock():
            _, name, past = self._abandoned.popleft()
            self._less(name, past)
        if client and (there := self._counts[client] - held) + count > self._max_per_key:
            limit = f"of at most {self._max_per_key} (--max-queued-requests-per-key)"
            raise QueueFull(f"{there} answers of this key wait, {limit}: there is no room for {count} more", own=True)
        if (there := len(self) + self._made - held) + count > self._max_answers:
            limit = f"of at most {self._max_answers} (--max-queued-requests)"
            raise QueueFull(f"{there} answers wait, {limit}: there is no room for {count} more", own=False)

    def add(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self._clients[request.uid] = request.client
            self._counts[request.client] += 1

    def started(self, uid: str) -> None:
        """Ends the wait of an answer; does nothing for one that did not wait."""
        client = self._clients.pop(uid, None)
        if client is not None:
            self._less(client, 1)

    def abandoned(self, uids: Iterable[str]) -> None:
        """Keeps counting answers that their client, one for all, has left."""
        clients = [self._clients[uid] for uid in uids if uid in self._clients]
        if clients:
            self._abandoned.append((self._clock() + ABANDONED_SECONDS, clients[0], len(clients)))
            self._counts[clients[0]] += len(clients)

    def clear(self) -> None:
        for uid in list(self._clients):
            self.started(uid)

    def _less(self, client: str, count: int) -> None:
        self._counts[client] -= count
        if not self._counts[client]:
            del self._counts[client]
