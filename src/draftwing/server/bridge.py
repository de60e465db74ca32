"""Between asyncio and the engine: one thread turns the engine's loop, each HTTP request has a stream of results."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftwing.core import Output
from draftwing.errors import DraftwingError

if TYPE_CHECKING:
    from draftwing.core import GenRequest
    from draftwing.engine.engine import Engine

logger = logging.getLogger(__name__)


class EngineDead(DraftwingError):
    """The engine's loop ended by an exception; nothing can be generated any more (HTTP 503)."""


class Stream:
    """Outputs of requests that were submitted together, in the order in which they come.

    Iterate until all of them are finished, and `close()` in any case: what is unfinished then is aborted.
    names: uid -> the id by which the client can abort it.
    """

    def __init__(self, owner: AsyncEngine, names: Mapping[str, str]) -> None:
        self.names = names
        self.open = set(names)
        self._owner = owner
        self._news: dict[str, Output] = {}
        self._error: EngineDead | None = None
        self._woken = asyncio.Event()

    def put(self, output: Output) -> None:
        """Adds to what has not been taken yet, so that a slow client gets fewer and longer pieces, not a backlog."""
        earlier = self._news.get(output.uid)
        if earlier is not None:
            output = dataclasses.replace(output, token_ids=[*earlier.token_ids, *output.token_ids])
        self._news[output.uid] = output
        self._woken.set()

    def fail(self, error: EngineDead) -> None:
        self._error = error
        self._woken.set()

    async def __aiter__(self) -> AsyncIterator[Output]:
        while self.open:
            await self._woken.wait()
            self._woken.clear()
            news, self._news = self._news, {}
            for output in news.values():
                if output.finish_reason is not None:
                    self.open.discard(output.uid)
                    self._owner.forget(output.uid)
                yield output
            if self._error is not None and self.open:
                raise self._error

    def close(self) -> None:
        for uid in self.open:
            self._owner.forget(uid)
            self._owner.engine.abort(uid)
        self.open.clear()


class AsyncEngine:
    """Runs `engine.step` in a thread of its own and belongs to the event loop that called `start`.

    Every method is called on that loop.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: EngineDead | None = None
        self._streams: dict[str, Stream] = {}  # by uid of an unfinished request
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="draftwing-engine", daemon=True)

    @property
    def healthy(self) -> bool:
        return self.error is None and not self._stopping and self._thread.is_alive()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; requests that still wait fail. The engine itself is closed by whoever made it."""
        self._stopping = True
        self.engine.wake()
        await asyncio.to_thread(self._thread.join)
        self._fail(EngineDead("the server is shutting down"))

    def submit(self, requests: Sequence[GenRequest], names: Sequence[str]) -> Stream:
        """Hands requests to the engine, all or none. Their uids are unique for ever, `names` need not be.

        Raises RequestError when one can never run, EngineDead when the engine is gone.
        """
        self._check()
        stream = Stream(self, dict(zip([r.uid for r in requests], names, strict=True)))
        self._streams |= dict.fromkeys(stream.open, stream)
        try:
            for request in requests:
                self.engine.submit(request)
        except BaseException:
            stream.close()
            raise
        return stream

    async def generate(self, request: GenRequest) -> AsyncIterator[Output]:
        """Outputs of one request; it is aborted when the iteration ends early."""
        stream = self.submit([request], [request.uid])
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def abort(self, name: str | None) -> None:
        """Aborts the requests of this name, or all of them for None; unknown names are ignored. Whoever waits for
        them gets an Output with finish reason "abort"."""
        for uid, stream in list(self._streams.items()):
            if name is None or name == stream.names[uid]:
                self.engine.abort(uid)

    async def flush_cache(self) -> bool:
        """Forgets cached prefixes; False when requests are running or waiting."""
        self._check()
        # Not on the event loop: it may wait for the step that just began.
        return self.engine.idle() and await asyncio.to_thread(self.engine.flush_cache)

    def forget(self, uid: str) -> None:
        self._streams.pop(uid, None)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if not self.healthy:
            raise EngineDead("the engine is not running")

    def _run(self) -> None:
        try:
            while not self._stopping:
                outputs = self.engine.step(block=True)
                if outputs:
                    self._post(self._deliver, outputs)
        except BaseException as exc:
            logger.exception("the engine stopped by an exception; no request can be served any more")
            self._post(self._fail, EngineDead(f"the engine stopped: {type(exc).__name__}: {exc}"))

    def _post(self, fn: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(fn, *args)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.uid)
            if stream is not None:
                stream.put(output)

    def _fail(self, error: EngineDead) -> None:
        self.error = error
        for stream in set(self._streams.values()):
            stream.fail(error)
