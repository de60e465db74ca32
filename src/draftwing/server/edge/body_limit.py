"""How much of a request's body is taken: counted while it comes, for each request and for all of them together."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.process_memory import give_back

ALL_BODIES = 64  # largest bodies that may be held at once; they are held until their responses end
LINGER_SECONDS = 1.0  # for a client that is refused while it sends to read why
MAX_UNREAD = 2**18  # bytes of a body that are taken, and dropped, when its request has been answered
CHUNK_COST = 1024  # of these, for each chunk
SMALL = 2**16  # bytes of a body that is taken however much is held: who fills the rest keeps nobody from asking
LARGE = 2**20  # bytes of a body or a response that leaves a multiple of it behind
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

    def __init__(self, app: ASGIApp, max_size: int) -> None:
        """max_size: bytes of one body."""
        self._app, self._max_size = app, max_size
        self.held = 0  # bytes of the bodies of all requests that are being answered
        self._gave_back = -math.inf  # when, monotonic seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[_HERE] = body = _Body(self, self._max_size, scope, receive, send)
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            self.held -= body.size
            now = time.monotonic()
            if max(body.size, body.sent) >= LARGE and now - self._gave_back >= GIVE_BACK_SECONDS:
                self._gave_back = now
                await asyncio.to_thread(give_back)


def count_as_body(scope: Scope, size: int) -> None:
    """Counts bytes that a request makes the server hold, as if they had come with it. Raises HTTPException (503) where
    those of all requests are too many."""
    body: _Body = scope[_HERE]
    body.count(size)


class _Body:
    """The body of one request."""

    def __init__(self, limit: BodyLimit, max_size: int, scope: Scope, receive: Receive, send: Send) -> None:
        self.size = 0
        self.sent = 0  # bytes of the response
        self._limit, self._max_size, self._receive, self._send = limit, max_size, receive, send
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
        return message

    def count(self, size: int, max_size: int | None = None) -> None:
        """Counts a part of a body. max_size: that the body may have, if it is one."""
        self.size += size
        self._limit.held += size
        if max_size is not None and self.size > max_size:
            self._too_large()
        if self.size > SMALL and self._limit.held > ALL_BODIES * self._max_size:
            self._refused = True
            why = "the bodies of all requests together are too large; try again later"
            raise HTTPException(503, why, _CLOSE | {"retry-after": "1"})

    def _too_large(self) -> None:
        self._refused = True
        raise HTTPException(413, f"the body is larger than {self._max_size} bytes (--max-body-size)", _CLOSE)

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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while left > 0:
                    message = await self._receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
                    left -= max(len(message.get("body", b"")), CHUNK_COST)
                await asyncio.sleep(LINGER_SECONDS)
