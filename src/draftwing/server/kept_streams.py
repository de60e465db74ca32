"""Streams that go on when their client leaves, and may be read again: of requests with `x-draftwing-keep: ID`."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response, StreamingResponse

from draftwing.errors import RequestError
from draftwing.requests.refusals import show
from draftwing.server.edge.keys import client_name
from draftwing.server.http import dialect, encode, error_response, json_response
from draftwing.server.quotas import QueueFull

HEADER = "x-draftwing-keep"
PATH = "/ui/answers"
MAX_BYTES = 64 << 20  # of the events of all streams: an answer of 10,000 tokens with its trace has some 4 MB
MAX_STREAMS = 256
MAX_OF_A_KEY = 64  # streams with one key
SECONDS = 3600.0  # since a stream ended
ALONE_SECONDS = 600.0  # that one runs while nobody reads it
LOOK_SECONDS = 10.0  # between two looks for those that are too old
_ID = re.compile(r"[\w-]{16,64}", re.ASCII)
_END = b"\n\n"  # of an event
Events = AsyncGenerator[str, None]
Key = tuple[str, str]  # of a stream: its client, and its id


class KeptStream:
    """The events of an answer, from when it begins. Belongs to the event loop."""

    def __init__(
        self, events: Events, close: Callable[[], None], clock: Callable[[], float], grew: Callable[[int], None]
    ) -> None:
        """close: is called when there are no more events.  grew: by how many bytes, each time."""
        self._clock, self._grew, self._held = clock, grew, list[bytes]()
        self.first = 0  # number of the first event that is held
        self.size = 0  # bytes that are held
        self.readers = 0
        self.since = clock()  # it ended, or nobody reads it
        self._news = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(events))
        self._task.add_done_callback(lambda _: self._end(close))

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def _run(self, events: Events) -> None:
        async with aclosing(events):
            async for text in events:
                new = [one + _END for one in text.encode().split(_END)[:-1]]
                self._held += new
                self.size += (size := sum(map(len, new)))
                self._tell()
                self._grew(size)

    def _end(self, close: Callable[[], None]) -> None:
        close()
        self.since = self._clock()
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def read(self, after: int = 0) -> AsyncIterator[bytes]:
        """Yields the events behind the first `after`, until it ends; nothing further to who is too slow."""
        self.readers += 1
        try:
            while after >= self.first:
                news, found = self._news, self._held[after - self.first :]
                after += len(found)
                if found:
                    yield b"".join(found)
                elif self.ended:
                    return
                else:
                    await news.wait()
        finally:
            self.readers -= 1
            self.since = self.since if self.ended else self._clock()

    def forget_half(self) -> int:
        """Holds the older half of the events no longer. Returns their bytes."""
        count = (len(self._held) + 1) // 2
        size = sum(map(len, self._held[:count]))
        self.size -= size
        self.first += count
        del self._held[:count]
        return size

    def cancel(self) -> None:
        """Ends it, and the answer with it."""
        self._task.cancel()


class KeptStreams:
    """Those of all clients, who are told apart by the names of their keys. Belongs to the event loop."""

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_streams: int = MAX_STREAMS,
        max_of_a_key: int = MAX_OF_A_KEY,
        seconds: float = SECONDS,
        alone_seconds: float = ALONE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._max_streams, self._max_of_a_key = max_bytes, max_streams, max_of_a_key
        self._clock = clock
        self._seconds, self._alone_seconds = seconds, alone_seconds
        self._streams: dict[Key, KeptStream] = {}
        self._stopped: dict[Key, None] = {}  # before they began: who asks and stops at once
        self._timer: asyncio.TimerHandle | None = None
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._streams)

    def begin(self, client: str, id: str, events: Events, close: Callable[[], None]) -> KeptStream:
        """Keeps a stream. Raises RequestError for an id that it cannot have, and QueueFull where there is no room."""
        if not _ID.fullmatch(id):
            raise RequestError(f"{HEADER} must have 16 to 64 letters, digits, - and _; found {show(id)}", HEADER)
        if (client, id) in self._streams:
            raise RequestError(f"{HEADER}: an answer is kept as {show(id)} already", HEADER)
        if (client, id) in self._stopped:
            raise RequestError(f"{HEADER}: {show(id)} was stopped before it began", HEADER)
        self._make_room(client)
        found = self._streams[client, id] = KeptStream(events, close, self._clock, self._grew)
        self._watch()
        return found

    def _make_room(self, client: str) -> None:
        """Has a place for one more: of its key, if that has no further one, or of all."""
        own = [key for key in self._streams if key[0] == client]
        full = bool(client) and len(own) >= self._max_of_a_key
        if not full and len(self) < self._max_streams:
            return
        oldest = self._oldest(own if full else self._streams)
        if oldest is None:
            most = f"{len(own)} answers of this key" if full else f"{len(self)} answers"
            raise QueueFull(f"{HEADER}: {most} are written and kept, the most there may be", full, "when one has ended")
        self._forget(oldest)

    def get(self, client: str, id: str) -> KeptStream | None:
        return self._streams.get((client, id))

    def delete(self, client: str, id: str) -> bool:
        """Ends a stream and forgets it. Returns whether there was one; where there was none, it will not begin."""
        if (client, id) in self._streams:
            self._forget((client, id)).cancel()
            return True
        if _ID.fullmatch(id):
            self._stopped[client, id] = None
            while len(self._stopped) > self._max_streams:
                del self._stopped[next(iter(self._stopped))]
        return False

    def _forget(self, key: Key) -> KeptStream:
        stream = self._streams.pop(key)
        self.bytes -= stream.size
        return stream

    def _oldest(self, keys: Iterable[Key]) -> Key | None:
        """Returns the one of these that ended first; None: none has."""
        ended = [key for key in keys if self._streams[key].ended]
        return min(ended, key=lambda key: self._streams[key].since, default=None)

    def _grew(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self._max_bytes:  # once those have read it who wait for it
            asyncio.get_running_loop().call_soon(self._shrink)

    def _shrink(self) -> None:
        """Gives memory back until there is not too much: of the client who has most, the stream that ended first, else
        the begin of the largest."""
        while self.bytes > self._max_bytes:
            sizes = Counter[str]()
            for (client, _), stream in self._streams.items():
                sizes[client] += stream.size
            [(most, _)] = sizes.most_common(1)
            own = [key for key in self._streams if key[0] == most]
            if (oldest := self._oldest(own)) is not None:
                self._forget(oldest)
            else:
                self.bytes -= max((self._streams[key] for key in own), key=lambda one: one.size).forget_half()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    def look(self) -> None:
        """Forgets what is too old, and ends what nobody has read for long."""
        self._timer, now = None, self._clock()
        for key, stream in list(self._streams.items()):
            if stream.ended and now - stream.since >= self._seconds:
                self._forget(key)
            elif not stream.ended and not stream.readers and now - stream.since >= self._alone_seconds:
                stream.cancel()
        if self._streams:
            self._watch()


def kept(request: Request, events: Events, close: Callable[[], None]) -> Response | None:
    """Returns a response with these events, which go on without its client; None where it does not ask for that.
    close: is called when they have ended. Raises as `KeptStreams.begin`."""
    id = request.headers.get(HEADER)
    if id is None:
        return None
    if dialect(request.url.path) == "ollama":
        raise RequestError(f"{HEADER}: answers of Ollama's routes are lines, not events, and are not kept", HEADER)
    streams: KeptStreams = request.app.state.kept_streams
    return _response(streams.begin(client_name(), id, events, close), 0)


def _response(stream: KeptStream, after: int) -> Response:
    return StreamingResponse(stream.read(after), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def add_kept_streams(app: FastAPI) -> None:
    streams = app.state.kept_streams = KeptStreams()

    @app.get(PATH + "/{id}")
    async def read(request: Request, id: str, after: Annotated[int, Query(ge=0)] = 0) -> Response:
        """Server-sent events of an answer that was asked for with `x-draftwing-keep`, behind the first `after`."""
        found = streams.get(client_name(), id)
        if found is None:
            return error_response(request, 404, f"no answer is kept as {show(id)}: for an hour, in memory")
        if after < found.first:
            return error_response(request, 404, f"the first {found.first} events are not kept any longer")
        return _response(found, after)

    @app.delete(PATH + "/{id}")
    async def delete(request: Request, id: str) -> Response:
        """Ends such an answer, and forgets it; one that is still on its way does not begin."""
        return json_response(encode({"deleted": streams.delete(client_name(), id)}))
