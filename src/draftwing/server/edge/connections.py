"""Connections of clients that are not trusted: how slow, large and many they may be. (`acceptor` takes them.)"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import resource
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from draftwing.errors import ConfigError
from draftwing.server.edge.limits import A_SECOND, CHUNK_COST, MAX_HELD, MAX_SECONDS, MAX_UNREAD, NO_DEFERRAL, Throttle
from draftwing.server.edge.old_clients import send_plainly
from draftwing.server.edge.upgrades import PlainParser

logger = logging.getLogger(__name__)
HEADER_SECONDS = 10.0  # from the first byte of a request, or from the connection, to the end of its headers
BODY_SECONDS = 60.0  # from there to the end of its body
WRITE_SECONDS = 60.0  # for a client to read something of what waits for it
MAX_BYTES = 65_536  # in a row that are no body: headers, their like after a body, decorations of chunks
MAX_HEADERS = 128
MAX_PIPELINED = 16
MAX_CHUNKS = 1024  # of a body, besides one for each `CHUNK_BYTES` of it: each costs as much as a kilobyte in one piece
CHUNK_BYTES = 64
PIECE = 4096  # bytes that are read of a connection before it is another one's turn
BODY_PIECE = 65_536  # the same of a body whose size was said: it is one part, that costs little more than its copy
MOST_DIGITS = 18  # of such a size
TURN_SECONDS = 0.001  # for what connections have sent, in one turn of the event loop
SPARE_DESCRIPTORS = 256  # for files, the engine and what else a server opens


def allow_descriptors(connections: int) -> None:
    """Lets this process open so many connections, where the system's hard limit permits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_DESCRIPTORS
    if resource.RLIM_INFINITY != soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class Flow(FlowControl):
    """uvicorn's, and a reason of ours not to read, which it does not know of."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        """resumed: is called when uvicorn's reason is none any more."""
        super().__init__(transport)
        self._resumed = resumed
        self.held = False

    def pause_reading(self) -> None:
        self._change(True, self.held)

    def resume_reading(self) -> None:
        if self.read_paused:
            self._change(False, self.held)
            self._resumed()

    def hold(self, held: bool) -> None:
        self._change(self.read_paused, held)

    def _change(self, paused: bool, held: bool) -> None:
        before, after = self.read_paused or self.held, paused or held
        self.read_paused, self.held = paused, held
        if before != after and not self._transport.is_closing():
            (self._transport.pause_reading if after else self._transport.resume_reading)()


class ReadScheduler:
    """Reads what all connections of a server send: for `TURN_SECONDS` in one turn of the event loop, and at most one
    request, whose work comes in the next turn; the rest in the next ones, a piece of each connection in turn. So who
    is served is never behind many who send much, nor behind many requests that come at once."""

    def __init__(self) -> None:
        self.refusals = Throttle(A_SECOND, NO_DEFERRAL, MAX_SECONDS, time.monotonic)
        self.held = 0  # connections that are refused, in a moment
        self._left = TURN_SECONDS
        self._waiting: dict[LimitedConnection, None] = {}  # that have sent something, whose turn is next first
        self._next: asyncio.Handle | None = None

    def put(self, connection: LimitedConnection) -> None:
        """Takes a connection that has sent something, or may be read again."""
        self._waiting.setdefault(connection)
        if self._next is None:
            self._next = connection.loop.call_soon(self._turn, connection.loop)
            self._go_on()  # mostly nobody waits
        elif len(self._waiting) == 1:
            self._go_on()

    def begun(self) -> None:
        """Is told that a request has begun: nothing more is read in this turn."""
        self._left = 0.0

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left, self._next = TURN_SECONDS, None
        self._go_on()
        if self._waiting:
            self._next = loop.call_soon(self._turn, loop)

    def _go_on(self) -> None:
        while self._waiting and self._left > 0:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            begun = time.perf_counter()
            if connection.read():
                self._waiting[connection] = None  # behind all others
            self._left -= time.perf_counter() - begun


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's protocol with what it leaves out: time-outs for requests that do not come and responses that are not
    read, and limits of what is no body or nobody's. Idle connections are uvicorn's (`timeout_keep_alive`).

    When there are too many connections, the one that has waited for a request for longest makes room.
    """

    header_seconds, body_seconds, write_seconds = HEADER_SECONDS, BODY_SECONDS, WRITE_SECONDS
    flow: Flow
    parser: PlainParser

    def __init__(self, *args: Any, limit: int = 1024, reads: ReadScheduler | None = None, **kwargs: Any) -> None:
        """limit: connections of the server.  reads: of all of them; the rest is uvicorn's."""
        super().__init__(*args, **kwargs)
        self.parser = PlainParser(self)
        self._limit = limit
        self._reads = reads or ReadScheduler()
        self._cycles: deque[Any] = deque()  # requests that are not answered yet, the one that runs first
        self._coming = self._in_body = False  # whether a request, or its body, has begun and not ended
        self._no_body = 0  # bytes since the last ones of a body
        self._chunks = self._body = 0  # of the request: chunks, and bytes of its body
        self._unread = 0  # of these, those that came after the answer
        self._left = 0  # bytes of the body that are still to come, where its size was said
        self._sent = memoryview(b"")  # what has come and was not read
        self._wrong = ""  # why it is refused, in words
        self._refused = False
        self._waiting_since = time.monotonic()
        self._reading: asyncio.TimerHandle | None = None  # runs while a request is awaited
        self._writing: asyncio.TimerHandle | None = None  # runs while the client does not read
        self._ending: asyncio.TimerHandle | None = None  # runs while it is held before it is refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = Flow(self.transport, self._resumed)
        self._await(self.header_seconds)
        if len(self.connections) > self._limit:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        self._let_go()
        self.pipeline.clear()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn notifies the last one that came, which need not be the one that runs
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._sent = memoryview(bytes(self._sent) + data if self._sent else data)
        self._reads.put(self)
        if self._sent and not self._refused and not self.transport.is_closing():
            self.flow.hold(True)  # it may be long until its turn: no more comes before

    def _resumed(self) -> None:
        if self._sent:
            self._reads.put(self)

    def read(self) -> bool:
        """Reads a piece of what the client has sent. Whether it can go on: there is more, and uvicorn takes it."""
        if not self._refused and not self.transport.is_closing() and not self.flow.read_paused:
            size = max(PIECE, min(BODY_PIECE, self._left))
            piece, self._sent = self._sent[:size], self._sent[size:]
            self._read(piece)
        if self._refused or self.transport.is_closing():
            self._sent = memoryview(b"")
            return False
        self.flow.hold(bool(self._sent))
        return bool(self._sent) and not self.flow.read_paused

    def _read(self, data: memoryview) -> None:
        self._no_body += len(data)
        if self._reading is None and not self._coming:
            self._await(self.header_seconds)
        super().data_received(data)  # type: ignore[arg-type]
        if self._no_body > MAX_BYTES and not self.transport.is_closing():
            self._refuse(431)
        elif self._unread > MAX_UNREAD and not self.transport.is_closing():
            self._refuse(413)

    def send_400_response(self, msg: str) -> None:
        """Ends what cannot be read as a request; the name is uvicorn's."""
        self._refuse(400, self._wrong or msg)

    # -- what the parser finds ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fail(f"more than {MAX_PIPELINED} requests do not wait for their responses")
        self._coming, self._in_body, self._no_body = True, False, 0
        self._chunks = self._body = self._unread = self._left = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            self._fail(f"more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.sets_aside(self.url, self.headers):
            return
        self._no_body = 0
        self._await(self.body_seconds)
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._cycles.append(self.cycle)
            self._reads.begun()
            send_plainly(self.cycle)  # before its task runs
        self._in_body = True
        size = dict(self.headers).get(b"content-length", b"")
        self._left = int(size) if size.isdigit() and len(size) <= MOST_DIGITS else 0

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MAX_CHUNKS + self._body // CHUNK_BYTES:
            self._fail(f"more than {MAX_CHUNKS} chunks have fewer than {CHUNK_BYTES} bytes on average")

    def on_body(self, body: bytes) -> None:
        self._no_body = 0
        self._body += len(body)
        self._left -= min(len(body), self._left)
        if self.cycle.response_complete:
            self._unread += len(body) + (CHUNK_COST if self._chunks else 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.aside:
            return
        self._coming = self._in_body = False
        self._no_body = 0
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._waiting_since = time.monotonic()
        self._cycles.popleft()
        super().on_response_complete()

    def _fail(self, wrong: str) -> None:
        """Ends what the parser does. wrong: the message for the client."""
        self._wrong = wrong
        raise ValueError(wrong)

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
        # By us, for an earlier request or because nobody takes the body yet.
        if self.flow.read_paused or self.flow.held:
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
        if len(there) > self._limit:  # at least this connection itself has no request
            min((one for one in there if one._idle), key=lambda one: one._waiting_since)._end(503, "")

    # -- refusals -----------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, why: str = "") -> None:
        """Ends the connection, later where a client is refused often (`ResponseThrottle`); reads nothing till then."""
        self._refused = True
        self._stop_waiting()
        seconds = self._reads.refusals.wait("")
        if seconds == 0 or self._reads.held >= MAX_HELD:
            self._end(status, why)
            return
        self.flow.hold(True)
        self._reads.held += 1
        self._ending = self.loop.call_later(seconds or MAX_SECONDS, self._end, status, why)

    def _end(self, status: int, why: str) -> None:
        self._refused = True
        self._let_go()
        answered = self.cycle is not None and self.cycle.response_started
        if not (self.pipeline or (answered and (self._in_body or not self._idle))):  # else another response has begun
            text = why.encode()
            kind = b"content-type: text/plain; charset=utf-8\r\n" if text else b""
            length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(text)
            self.transport.write(STATUS_LINE[status] + kind + length + text)
        self.transport.close()

    def _let_go(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
            self._reads.held -= 1


def check_uvicorn(config: uvicorn.Config) -> None:
    """Raises ConfigError where the uvicorn that is installed has not what `LimitedConnection` overrides or uses: its
    limits would not hold, nor would clients of HTTP/1.0 be served."""
    connection = LimitedConnection(config=config, server_state=ServerState(), app_state={}, _loop=object())
    found = {name: getattr(HttpToolsProtocol, name, None) for name in _OVERRIDDEN}
    missing = [name for name, one in found.items() if one is getattr(asyncio.Protocol, name, None)]
    missing += [name for name in ("pause_reading", "resume_reading") if not hasattr(FlowControl, name)]
    missing += [name for name in _USED if not hasattr(connection, name)]
    kind: Any = RequestResponseCycle  # of a request; what it is given is only kept
    cycle = kind(**dict.fromkeys(inspect.signature(kind).parameters))
    missing += [name for name in _USED_OF_REQUESTS if not hasattr(cycle, name)]
    if missing:
        raise ConfigError(
            f"uvicorn {uvicorn.__version__} has no {', '.join(missing)} in its connections, by which the server limits "
            f"what clients send; install one that this version of draftwing was tried with: pip install '{TRIED}'"
        )


TRIED = "uvicorn>=0.30,<0.55"  # as in pyproject.toml
_OVERRIDDEN = (
    "connection_made", "connection_lost", "data_received", "send_400_response", "on_message_begin", "on_header",
    "on_headers_complete", "on_body", "on_message_complete", "on_response_complete", "pause_writing", "resume_writing",
)  # fmt: skip
_USED_OF_REQUESTS = (
    "chunked_encoding", "disconnected", "expected_content_length", "message_event", "response_complete",
    "response_started", "scope", "send",
)  # fmt: skip
_USED = ("connections", "cycle", "flow", "headers", "loop", "parser", "pipeline", "transport")
