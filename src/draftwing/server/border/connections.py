"""A connection of a client that is not trusted: how slow, how large and how many it may be."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEADER_SECONDS = 10.0  # from the first byte of a request, or from the connection, to the end of its headers
BODY_SECONDS = 60.0  # from there to the end of its body
WRITE_SECONDS = 60.0  # for a client to read something of what waits for it
MOST_BYTES = 65_536  # in a row that are no body: headers, their like after a body, decorations of chunks
MOST_HEADERS = 128
MOST_PIPELINED = 16
SPARE_DESCRIPTORS = 256  # for files, the engine and what else a server opens


def allow_descriptors(connections: int) -> None:
    """Lets this process open so many connections, where the system's hard limit permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_DESCRIPTORS
    if resource.RLIM_INFINITY != soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol with what it leaves out: time-outs for requests that do not come and responses that are not
    read, and limits of what is no body. Idle connections are uvicorn's (`timeout_keep_alive`).

    When there are too many connections, the one that has waited for a request for longest makes room.
    """

    header_seconds, body_seconds, write_seconds = HEADER_SECONDS, BODY_SECONDS, WRITE_SECONDS

    def __init__(self, *args: Any, most: int = 1024, **kwargs: Any) -> None:
        """most: connections of the server; the rest is uvicorn's."""
        super().__init__(*args, **kwargs)
        self._most = most
        self._coming = False  # whether a request has begun and not ended
        self._no_body = 0  # bytes since the last ones of a body
        self._waiting_since = time.monotonic()
        self._reading: asyncio.TimerHandle | None = None  # runs while a request is awaited
        self._writing: asyncio.TimerHandle | None = None  # runs while the client does not read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await(self.header_seconds)
        if len(self.connections) > self._most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._no_body += len(data)
        if self._reading is None and not self._coming:
            self._await(self.header_seconds)
        super().data_received(data)
        if self._no_body > MOST_BYTES and not self.transport.is_closing():
            self._refuse(431)

    # -- what the parser finds ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError("too many requests that do not wait for their responses")
        self._coming, self._no_body = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MOST_HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._no_body = 0
        self._await(self.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._no_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._coming, self._no_body = False, 0
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._waiting_since = time.monotonic()
        super().on_response_complete()

    # -- time ---------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        super().resume_writing()

    def _await(self, seconds: float) -> None:
        self._stop_waiting()
        self._reading = self.loop.call_later(seconds, self._late)

    def _stop_waiting(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _late(self) -> None:
        self._reading = None
        if self.flow.read_paused:  # by us, for an earlier request or because nobody takes the body yet
            self._await(self.body_seconds)
        else:
            self._refuse(408)

    # -- number -------------------------------------------------------------------------------------------------------

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        found = [one for one in self.connections if isinstance(one, LimitedConnection)]
        there = [one for one in found if not one.transport.is_closing()]
        if len(there) > self._most:  # at least this connection itself has no request
            min((one for one in there if one._idle), key=lambda one: one._waiting_since)._refuse(503)

    def _refuse(self, status: int) -> None:
        if self._idle:  # else a response may have begun
            self.transport.write(STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
