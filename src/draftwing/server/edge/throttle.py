"""How fast a client is refused, and how fast whoever has no key is answered: who goes on all the same waits for each
answer, so that others do not feel it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.server.edge.body_limit import SMALL
from draftwing.server.edge.keys import FREE_PATHS, client_name

A_SECOND = 50  # refusals of a client
NO_DEFERRAL = 100  # of them that do not wait, after a time without any
MAX_SECONDS = 1.0  # that one waits
MAX_HELD = 128  # refusals beyond these, of all clients, that are held for so long before they end their connections
FREE_A_SECOND, FREE_AT_ONCE, FREE_SECONDS = 500, 50, 0.2  # the same of what needs no key, of all clients together


class Throttle:
    """When a client may be answered once more."""

    def __init__(self, a_second: float, at_once: float, max_seconds: float, clock: Callable[[], float]) -> None:
        """at_once: answers that do not wait, after a time without any.  max_seconds: seconds that one waits."""
        self._every, self._spared, self._max_seconds, self._clock = 1 / a_second, at_once / a_second, max_seconds, clock
        self._due: dict[str, float] = {}  # when the next answer to a client would come, were none let through at once

    def wait(self, name: str) -> float | None:
        """Takes the client's next turn and returns seconds until then; None, and takes none: it would be too long."""
        now = self._clock()
        due = max(self._due.get(name, -math.inf), now - self._spared)
        if due - now > self._max_seconds:
            return None
        self._due[name] = due + self._every
        return max(due - now, 0.0)


class ResponseThrottle:
    """Sends responses of status 4xx and 503 to a client, by the name of its key, no faster than so many a second, and
    begins requests that need no key, of all clients together, no faster than so many.

    A refusal costs the event loop about what a token of a stream does, and whoever is refused may ask again at once, on
    as many connections as it likes. One that would wait for longer than `MAX_SECONDS` is held for these and ends its
    connection, so that who makes a new one for each request is no faster; `MAX_HELD` are held, further ones are sent
    at once. So is one of a large body, which would be held as long. What a health check says is no refusal, and neither
    is the status of a client that left. Everybody without a key is one client.

    What needs no key waits before it is begun, each for a time of its own: else requests that came together would be
    worked on together, a millisecond each, and streams would wait behind all of them.
    """

    def __init__(
        self,
        app: ASGIApp,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[str], bool] = FREE_PATHS.__contains__,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """free: whether a path needs no key in any case.  sleep: returns after so many seconds."""
        self._app, self._free, self._sleep = app, free, sleep
        self._refusals = Throttle(A_SECOND, NO_DEFERRAL, MAX_SECONDS, clock)
        self._others = Throttle(FREE_A_SECOND, FREE_AT_ONCE, FREE_SECONDS, clock)
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0  # bytes of the body
        closes = False

        async def receiving() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def paced(message: Message) -> None:
            if message["type"] == "http.response.start":
                ends = closes
                if not free and _refuses(scope["path"], message["status"]):
                    ends = await self._wait(self._refusals.wait(client_name()), MAX_SECONDS, received > SMALL)
                if ends:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        free = scope["method"] == "OPTIONS" or self._free(scope["path"])
        if free:
            closes = await self._wait(self._others.wait(""), FREE_SECONDS, False)
        await self._app(scope, receiving, paced)

    async def _wait(self, seconds: float | None, max_seconds: float, large: bool) -> bool:
        """Waits until a request may go on, and returns whether its connection ends.

        seconds: as `Throttle.wait`.  max_seconds: to hold one that would wait longer.  large: it does not wait.
        """
        if seconds is not None and not (seconds and large):
            if seconds:
                await self._sleep(seconds)
            return False
        if not large and self._held < MAX_HELD:
            self._held += 1
            try:
                await self._sleep(max_seconds)
            finally:
                self._held -= 1
        return True


def _refuses(path: str, status: int) -> bool:
    if status == 503:
        return path not in FREE_PATHS
    return 400 <= status < 499
