"""Between asyncio and the engine's process: each HTTP request has a stream of results."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from draftwing.core import Output
from draftwing.engine.admission import EngineInfo
from draftwing.engine.process.link import Abort, Ask, EngineDead, EngineLink, Listener, Reply
from draftwing.requests.request import GenerationRequest
from draftwing.server.telemetry.observer import Observer

logger = logging.getLogger(__name__)
RESTARTS = 1
MOST_TRACED = 64  # newest steps of a request that are kept for a client that is slow to read


class Stream:
    """Outputs of requests that were submitted together, in the order in which they come.

    Iterate until all of them are finished, and `close()` in any case: what is unfinished then is aborted.
    open: the unfinished ones by uid.
    """

    def __init__(self, owner: AsyncEngine, requests: Sequence[GenerationRequest]) -> None:
        self.open = {request.uid: request for request in requests}
        self._owner = owner
        self._news: dict[str, Output] = {}
        self._error: EngineDead | None = None
        self._woken = asyncio.Event()

    def put(self, output: Output) -> None:
        """Adds to what has not been taken yet, so that a slow client gets fewer and longer pieces, not a backlog."""
        earlier = self._news.get(output.uid)
        if earlier is not None:
            output = dataclasses.replace(
                output,
                token_ids=[*earlier.token_ids, *output.token_ids],
                logprobs=[*earlier.logprobs, *output.logprobs],
                prompt_logprobs=[*earlier.prompt_logprobs, *output.prompt_logprobs],
                trace=[*earlier.trace, *output.trace][-MOST_TRACED:],
            )
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
                    self.open.pop(output.uid, None)
                    self._owner.forget(output.uid)
                yield output
            if self._error is not None and self.open:
                raise self._error

    def close(self) -> None:
        for uid in self.open:
            self._owner.forget(uid)
            self._owner.abort_one(uid)
        self.open.clear()


class AsyncEngine:
    """The engine's process and its supervision; belongs to the event loop that called `start`.

    Every method is called on that loop. `spawn` makes a link to a new process: it is called again when the process
    dies, once, and what waited for the old one fails. When there is no engine and will be none, `lost` is called.

    draining: set it when no new requests come; from then on a dead engine is not replaced.
    """

    def __init__(self, info: EngineInfo, link: EngineLink, spawn: Callable[[], EngineLink]) -> None:
        """link: of a process that is ready, whose facts are `info`."""
        self.info = info
        self.error: EngineDead | None = None
        self.link, self._spawn = link, spawn  # the link of today; another one after a restart
        self._restarts = 0
        self._streams: dict[str, Stream] = {}  # by uid of an unfinished request
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self.draining = False
        self.observer = Observer()
        self.lost: Callable[[], None] = lambda: None
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restarting: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self._loop is not None and self.error is None and not self._stopping

    @property
    def active(self) -> int:
        """Requests that are running or waiting."""
        return len(self._streams)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listen(self.link)

    async def stop(self, grace: float = 5.0) -> None:
        """Ends the process, killing it after `grace` seconds; requests that still wait fail."""
        self._stopping = True
        if self._restarting is not None:
            self.link.process.kill()  # ends the wait for it
            await self._restarting
        await asyncio.to_thread(self.link.close, grace)
        self._fail(EngineDead("the server is shutting down"))

    def submit(self, requests: Sequence[GenerationRequest]) -> Stream:
        """Hands requests to the engine, all or none. Their uids are unique for ever, their names need not be.

        Raises RequestError when one can never run, EngineDead when the engine is gone.
        """
        self._check()
        admitted = [self.info.admit(request) for request in requests]
        stream = Stream(self, admitted)
        self._streams |= dict.fromkeys(stream.open, stream)
        self.link.send(admitted)
        return stream

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        """Outputs of one request; it is aborted when the iteration ends early."""
        stream = self.submit([request])
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def abort(self, name: str | None) -> None:
        """Aborts the requests of this name, or all of them for None; unknown names are ignored. Whoever waits for
        them gets an Output with finish reason "abort"."""
        for uid, stream in list(self._streams.items()):
            if name is None or name == (stream.open[uid].name or uid):
                self.abort_one(uid)

    def abort_one(self, uid: str) -> None:
        self.link.send(Abort(uid))

    async def flush_cache(self) -> bool:
        """Forgets cached prefixes; False when requests are running or waiting."""
        self._check()
        return not self._streams and await self._ask("flush_cache")

    async def stats(self) -> dict[str, Any]:
        """As `Engine.stats`."""
        self._check()
        return await self._ask("stats")

    def forget(self, uid: str) -> None:
        self._streams.pop(uid, None)

    async def _ask(self, what: str) -> Any:
        number = next(self._numbers)
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self.link.send(Ask(number, what))
            return await future
        finally:
            del self._questions[number]

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if not self.healthy:
            raise EngineDead("the engine is not running")

    def _listen(self, link: EngineLink) -> None:
        link.listen(
            Listener(
                outputs=lambda outputs: self._post(self._deliver, outputs),
                reply=lambda reply: self._post(self._answer, reply),
                died=lambda cause: self._post(self._died, link, cause),
            )
        )

    def _post(self, fn: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(fn, *args)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.observer.output(output)
            stream = self._streams.get(output.uid)
            if stream is not None:
                stream.put(output)

    def _answer(self, reply: Reply) -> None:
        future = self._questions.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply.value)

    def _died(self, link: EngineLink, cause: str) -> None:
        if self._stopping or link is not self.link:
            return
        logger.error("the engine's process ended: %s", cause)
        if self.draining:
            self._fail(EngineDead(f"the engine stopped: {cause}; the server is shutting down"))
        elif self._restarts < RESTARTS:
            self._fail(EngineDead(f"the engine stopped: {cause}; it is being restarted"))
            self._restarts += 1
            self._restarting = asyncio.ensure_future(self._restart(cause))
        else:
            logger.error("the engine was restarted before and is not restarted again: the server ends")
            self._fail(EngineDead(f"the engine stopped again: {cause}; it is not restarted, the server ends"))
            self.lost()

    async def _restart(self, cause: str) -> None:
        logger.error("restarting the engine; it is not restarted a second time")
        try:
            await asyncio.to_thread(self.link.close, 0)
            if self._stopping:
                return
            self.link = self._spawn()
            self.info = await asyncio.to_thread(self.link.wait_ready)
        except Exception as error:
            if not self._stopping:
                logger.error("the engine could not be restarted, the server ends: %s", error)
                self.error = EngineDead(f"the engine stopped: {cause}; it could not be restarted: {error}")
                self.lost()
            return
        finally:
            self._restarting = None
        if not self._stopping:
            self._listen(self.link)
            self.error = None
            logger.info("the engine is ready again")

    def _fail(self, error: EngineDead) -> None:
        self.error = error
        self.observer.lost()
        for stream in set(self._streams.values()):
            stream.fail(error)
        for future in self._questions.values():
            if not future.done():
                future.set_exception(error)
