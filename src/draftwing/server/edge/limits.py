"""How much of a request's body is taken, for each request and for all of them together, and how fast a client is
refused: who goes on all the same waits for each answer, so that others do not feel it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.machine import give_back
from draftwing.server.edge.keys import FREE_PATHS, client_name

ALL_BODIES = 64  # largest bodies that may be held at once; they are held until their responses end
GOLDEN = 0.618  # of a span of time: so much later, modulo 1, is the next of many that would else end together
LINGER_SECONDS = 1.0  # at most, and half of that at least, for a client that is refused while it sends to read why
MAX_UNREAD = 2**18  # bytes of a body that are taken, and dropped, when its request has been answered
CHUNK_COST = 1024  # of these, for each chunk
SMALL = 2**16  # bytes of a body that is taken however much is held: who fills the rest keeps nobody from asking
LARGE = 2**20  # bytes of a body or a response that leaves a multiple of it behind
# Bytes of a client's large bodies, of all its connections together. Taking a gigabyte takes about a second of the event
# loop, and a client may send on many at once. After a time without any the first so many wait for nothing: that is a
# picture or two, of which a sleep for each part of 64 KiB would take 200 ms.
LARGE_A_SECOND, LARGE_AT_ONCE = 2**27, 2**24
LEAST_PAUSE = 0.005  # seconds: shorter ones are added up
# Least time between two times at which memory is given back for that: it takes milliseconds of all threads, and a
# client may send many. What is left then goes back within a minute, see `keep_tidy`.
GIVE_BACK_SECONDS = 1.0
_CLOSE = {"connection": "close"}
_HERE = "draftwing.body"  # in a request's scope


class BodyLimit:
    """Raises HTTPException in whoever reads a body that is too large (413), or one too many (503).

    The refusal is sent while the body still comes, and the connection is closed a moment later: a client that only
    writes would see a broken connection instead of the reason.
    """

    def __init__(self, app: ASGIApp, max_size: int, streamed: Mapping[str, int] | None = None) -> None:
        """max_size: bytes of one body.  streamed: the same of paths to which bodies are posted that are not held."""
        self._app, self._max_size, self._streamed = app, max_size, streamed or {}
        self.held = 0  # bytes of the bodies of all requests that are being answered
        self._gave_back = -math.inf  # when, monotonic seconds
        self._spread = 0.0  # of times to linger, from 0 to 1
        self._due: dict[str, float] = {}  # when a client's next part of a large body may come, the same

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        streamed = self._streamed.get(scope.get("path", "")) if scope["method"] == "POST" else None
        held = streamed is None
        max_size = self._max_size if streamed is None else streamed
        scope[_HERE] = body = _Body(self, max_size, scope, receive, send, held)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            self.held -= body.size if held else 0
            now = time.monotonic()
            if max(body.size, body.sent) >= LARGE and now - self._gave_back >= GIVE_BACK_SECONDS:
                self._gave_back = now
                await asyncio.to_thread(give_back)

    def linger(self) -> float:
        """Returns seconds for a client that is refused while it sends; those that are refused together end apart."""
        self._spread = (self._spread + GOLDEN) % 1
        return LINGER_SECONDS * (1 - self._spread / 2)

    async def pace(self, size: int) -> None:
        """Waits as long as a part of a large body is to take of its client's `LARGE_A_SECOND`."""
        client, now = client_name(), time.monotonic()
        spared = now - LARGE_AT_ONCE / LARGE_A_SECOND
        self._due[client] = due = max(self._due.get(client, spared), spared) + size / LARGE_A_SECOND
        if due - now >= LEAST_PAUSE:
            await asyncio.sleep(due - now)


def count_as_body(scope: Scope, size: int) -> None:
    """Counts bytes that a request makes the server hold, as if they had come with it. Raises HTTPException (503) where
    those of all requests are too many."""
    body: _Body = scope[_HERE]
    body.count(size)


class _Body:
    """The body of one request."""

    def __init__(
        self, limit: BodyLimit, max_size: int, scope: Scope, receive: Receive, send: Send, held: bool = True
    ) -> None:
        self.size = 0
        self.sent = 0  # bytes of the response
        self._limit, self._max_size, self._receive, self._send = limit, max_size, receive, send
        self._held = held
        stated = dict(scope["headers"]).get(b"content-length", b"")
        self._stated = int(stated) if stated.isdigit() else 0
        self._refused = self._ended = False

    async def receive(self) -> Message:
        if self._stated > self._max_size:
            self._too_large()
        message = await self._receive()
        if message["type"] == "http.request":
            self._ended = not message.get("more_body", False)
            self.count(len(message.get("body", b"")), self._max_size)
            if self._held and self.size > LARGE:
                await self._limit.pace(len(message.get("body", b"")))
        return message

    def count(self, size: int, max_size: int | None = None) -> None:
        """Counts a part of a body. max_size: that the body may have, if it is one."""
        self.size += size
        self._limit.held += size if self._held else 0
        if max_size is not None and self.size > max_size:
            self._too_large()
        if self._held and self.size > SMALL and self._limit.held > ALL_BODIES * self._max_size:
            self._refused = True
            why = "the bodies of all requests together are too large; try again later"
            raise HTTPException(503, why, _CLOSE | {"retry-after": "1"})

    def _too_large(self) -> None:
        self._refused = True
        option = " (--max-body-size)" if self._held else ""
        raise HTTPException(413, f"the body is larger than {self._max_size} bytes{option}", _CLOSE)

    async def send(self, message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and self._refused and not self._ended:
            await self._send({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b""}
        self.sent += len(message.get("body", b""))
        await self._send(message)

    async def _linger(self) -> None:
        """Waits until the client has sent all, or for some time; what comes beyond `MAX_UNREAD` is not read."""
        left = MAX_UNREAD
        seconds = self._limit.linger()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while left > 0:
                    message = await self._receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
                    left -= max(len(message.get("body", b"")), CHUNK_COST)
                await asyncio.sleep(seconds)


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
        self._spread = 0.0  # of what is held longer, from 0 to 1

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
                self._spread = (self._spread + GOLDEN) % 1
                await self._sleep(max_seconds * (1 + self._spread))
            finally:
                self._held -= 1
        return True


def _refuses(path: str, status: int) -> bool:
    if status == 503:
        return path not in FREE_PATHS
    return 400 <= status < 499
