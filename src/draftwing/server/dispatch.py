"""What is done in small parts, so that nobody waits for all of it: `DispatchQueue` sends requests to the engine's
process, `Wakeups` has streams of results go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from draftwing.fair_deque import FairDeque
from draftwing.requests.request import GenerationRequest

# Streams that go on in a turn of the event loop: about 2 ms of it. Beside 500 that nobody reads 4, 8, 16 and 32 let
# /health answer within 70 to 105 ms.
WAKES = 16
MAX_REQUESTS = 64  # requests in one message: no thread of either process is busy with it for long
PAUSE_SECONDS = 0.02  # between messages of a client: the engine's thread shares an interpreter with who reads them


class Wakeups:
    """Has streams go on that have outputs, a few in a turn of the event loop: whoever comes or sends meanwhile is never
    behind all of them, and outputs of those that wait are joined. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, None] = {}  # in the order in which they came
        self._left = WAKES  # of this turn
        self._next: asyncio.Handle | None = None

    def set(self, event: asyncio.Event) -> None:
        """Sets the event, now or in a later turn."""
        if not event.is_set():
            self._waiting[event] = None
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._left:
            event = next(iter(self._waiting))
            del self._waiting[event]
            event.set()
            self._left -= 1
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._next, self._left = None, WAKES
        if self._waiting:
            self._go_on()


class DispatchQueue:
    """Sends a client's requests in their order, the first part at once. Belongs to the running event loop."""

    def __init__(self, send: Callable[[list[GenerationRequest]], None]) -> None:
        self._send = send
        self._unsent: FairDeque[str, GenerationRequest] = FairDeque()  # by uid
        self._pauses: dict[str, asyncio.TimerHandle] = {}  # by client; one goes on where all is dropped meanwhile

    def put(self, requests: Sequence[GenerationRequest]) -> None:
        """Takes requests of one client."""
        client = requests[0].client
        for request in requests:
            self._unsent.put(client, request.uid, request)
        if client not in self._pauses:
            self._next(client)

    def drop(self, uids: Iterable[str]) -> list[str]:
        """Drops requests that were not sent yet, and returns which those are."""
        return [uid for uid in uids if self._unsent.drop(uid) is not None]

    def clear(self) -> None:
        self._unsent.clear()
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()

    def _next(self, client: str) -> None:
        self._pauses.pop(client, None)
        part: list[GenerationRequest] = []
        while client in self._unsent.clients and len(part) < MAX_REQUESTS:
            part.append(self._unsent.pop(client)[1])
        if not part:
            return  # all were dropped
        self._send(part)
        if client in self._unsent.clients:
            self._pauses[client] = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._next, client)
