"""How fast a client is refused: who goes on all the same waits for each refusal, so that others do not feel it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.server.border.bodies import SMALL
from draftwing.server.border.keys import FREE_PATHS, client_name

A_SECOND = 50  # refusals of a client
AT_ONCE = 100  # of them that do not wait, after a time without any
MOST_SECONDS = 1.0  # that one waits
MOST_HELD = 128  # refusals beyond these, of all clients, that are held for so long before they end their connections


class RefusalPace:
    """Sends responses of status 4xx and 503 to a client, by the name of its key, no faster than so many a second.

    A refusal costs the event loop about what a token of a stream does, and whoever is refused may ask again at once, on
    as many connections as it likes. One that would wait for longer than `MOST_SECONDS` is held for these and ends its
    connection, so that who makes a new one for each request is no faster; `MOST_HELD` are held, further ones are sent
    at once. So is one of a large body, which would be held as long. What a health check says is no refusal, and neither
    is the status of a client that left. Everybody without a key is one client.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self._held = 0
        self._due: dict[str, float] = {}  # when the next refusal of a client would come, were none let through at once

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0  # bytes of the body

        async def receiving() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def paced(message: Message) -> None:
            if message["type"] == "http.response.start" and _refuses(scope["path"], message["status"]):
                seconds = self.wait(client_name())
                if seconds is None or (seconds and received > SMALL):
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                    await self._hold(received)
                elif seconds:
                    await asyncio.sleep(seconds)
            await send(message)

        if scope["type"] == "http":
            await self._app(scope, receiving, paced)
        else:
            await self._app(scope, receive, send)

    async def _hold(self, received: int) -> None:
        if received > SMALL or self._held >= MOST_HELD:
            return
        self._held += 1
        try:
            await asyncio.sleep(MOST_SECONDS)
        finally:
            self._held -= 1

    def wait(self, name: str) -> float | None:
        """Seconds until this client may be refused once more; None: it would be too long."""
        now = self._clock()
        due = max(self._due.get(name, -math.inf), now - AT_ONCE / A_SECOND)
        if due - now > MOST_SECONDS:
            return None
        self._due[name] = due + 1 / A_SECOND
        return max(due - now, 0.0)


def _refuses(path: str, status: int) -> bool:
    if status == 503:
        return path not in FREE_PATHS
    return 400 <= status < 499
