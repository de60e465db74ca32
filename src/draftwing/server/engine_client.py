"""Between asyncio and the engine's process: each HTTP request has a `Stream` of results, of which one who is slow to
read gets fewer and longer pieces."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from draftwing.config.adapters import AdapterCard
from draftwing.core import Output
from draftwing.engine.admission import EngineInfo
from draftwing.engine.process.link import Abort, Ask, Compile, Drop, EngineDead, EngineLink, Listener, Reply
from draftwing.engine.provenance import Digests
from draftwing.errors import DraftwingError, NotFound, RequestError
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest
from draftwing.server.dispatch import DispatchQueue, Wakeups
from draftwing.server.quotas import AdmissionQuota, LogprobQuota, LogprobQuotaFull, count_logprobs
from draftwing.server.supervision import CrashHistory, Watchdog
from draftwing.server.telemetry.observer import Observer

MAX_TRACED = 64  # newest steps of a request that are kept for a client that is slow to read


class Stream:
    """Outputs of requests that were submitted together, in the order in which they come.

    Iterate until all of them are finished, and `close()` in any case: what is unfinished then is aborted.
    requests: all of them.  open: the unfinished ones by uid.
    """

    def __init__(self, owner: AsyncEngine, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        self.open = {request.uid: request for request in requests}
        self._owner = owner
        self._news: dict[str, Output] = {}
        self._error: EngineDead | LogprobQuotaFull | None = None
        self._client, self._held = requests[0].client, 0  # log probabilities
        self._woken = asyncio.Event()

    def put(self, output: Output) -> None:
        """Adds to what has not been taken yet, so that a slow client gets fewer and longer pieces, not a backlog."""
        if self._error is not None or output.uid not in self.open:
            return
        count = count_logprobs(output, self.open[output.uid])
        self._held += count
        try:
            self._owner.logprob_quota.add(self._client, count, self._held)
        except LogprobQuotaFull as error:
            self.fail(error)
            return
        earlier = self._news.get(output.uid)
        if earlier is not None:  # its lists go on: to copy them each time would take longer and longer
            earlier.token_ids.extend(output.token_ids)
            earlier.logprobs.extend(output.logprobs)
            output = dataclasses.replace(
                output,
                token_ids=earlier.token_ids,
                logprobs=earlier.logprobs,
                prompt_logprobs=earlier.prompt_logprobs or output.prompt_logprobs,  # they come once
                trace=[*earlier.trace, *output.trace][-MAX_TRACED:],
            )
        self._news[output.uid] = output
        self._owner.wakeups.set(self._woken)

    def fail(self, error: EngineDead | LogprobQuotaFull) -> None:
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
        self._owner.logprob_quota.give_back(self._client, self._held)
        self._held = 0
        for uid in self.open:
            self._owner.forget(uid)
        if self.open:
            self._owner.quota.abandoned(self.open)
            self._owner.abort_all(self.open)
        self.open.clear()


logger = logging.getLogger(__name__)
STATS_SECONDS = 0.5  # how long the engine's numbers are waited for, then those of before have to do


class AsyncEngine:
    """The engine's process and its supervision; belongs to the event loop that called `start`.

    Every method is called on that loop. `spawn` makes a link to a new process: it is called again when the process
    dies or hangs, and what waited for the old one fails. After too many deaths in a short time there is no engine and
    will be none: `lost` is called.

    draining: set it when no new requests come; from then on a dead engine is not replaced.
    """

    def __init__(self, info: EngineInfo, link: EngineLink, spawn: Callable[[], EngineLink]) -> None:
        """link: of a process that is ready, whose facts are `info`."""
        self.info = info
        self.error: EngineDead | None = None
        self.link, self._spawn = link, spawn  # the link of today; another one after a restart
        self._crashes = CrashHistory()
        self._dispatch = DispatchQueue(lambda requests: self.link.send(requests))
        self.wakeups = Wakeups()
        self._streams: dict[str, Stream] = {}  # by uid of an unfinished request
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._compiles: dict[int, Grammar] = {}  # by number of what the engine compiles or will, whoever still waits
        self._numbers = itertools.count()
        self._known: tuple[float, dict[str, Any]] | None = None  # when this engine last gave its numbers, and these
        self._heard = False  # whether a message has come since the watchdog last looked
        self.draining = False
        self.observer = Observer()
        options = info.options
        self.quota = AdmissionQuota(options.max_queued_requests, options.max_queued_requests_per_key)
        self.logprob_quota = LogprobQuota()
        self.digests = Digests()
        self.adapters = {card.name: card for card in info.adapters}  # that requests may have
        self.news = asyncio.Event()  # is set when the engine has given tokens to anybody, or is gone
        self.lost: Callable[[], None] = lambda: None
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        return self._loop is not None and self.error is None and not self._stopping.is_set()

    @property
    def active(self) -> int:
        """Returns requests that are running or waiting."""
        return len(self._streams)

    def answers_others(self, client: str) -> bool:
        """Returns whether requests of any other client are running or waiting."""
        return any(stream.requests[0].client != client for stream in self._streams.values())

    def kill(self) -> None:
        """Ends the process at once."""
        self.link.process.kill()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listen(self.link)

    async def stop(self, grace: float = 5.0) -> None:
        """Ends the process, killing it after `grace` seconds; requests that still wait fail."""
        self._stopping.set()
        if self._watching is not None:
            self._watching.cancel()
        if self._restarting is not None:
            self.link.process.kill()  # ends the wait for it
            await self._restarting
        await asyncio.to_thread(self.link.close, grace)
        self._fail(EngineDead("the server is shutting down"))

    def submit(self, requests: Sequence[GenerationRequest]) -> Stream:
        """Hands requests to the engine, all or none. Their uids are unique for ever, their names need not be.

        Raises RequestError when one can never run or has stopped engines before, EngineDead when the engine is gone.
        """
        self._check()
        self._crashes.check(requests)
        admitted = [self.info.admit(request) for request in requests]
        stream = Stream(self, admitted)
        self._streams |= dict.fromkeys(stream.open, stream)
        self.quota.add(admitted)
        self._dispatch.put(admitted)
        return stream

    def abort(self, name: str | None) -> None:
        """Aborts the requests of this name, or all of them for None; unknown names are ignored. Whoever waits for
        them gets an Output with finish reason "abort"."""
        self.abort_all(
            uid for uid, stream in self._streams.items() if name is None or name == (stream.open[uid].name or uid)
        )

    def abort_all(self, uids: Iterable[str]) -> None:
        every = list(uids)
        dropped = self._dispatch.drop(every)
        self._pass_on([Output(uid, [], {"type": "abort", "message": "aborted"}) for uid in dropped])
        sent = set(every).difference(dropped)
        if sent:
            # The newest first: else those that wait get the rows of those that end, to end a step later.
            self.link.send(Abort(tuple(uid for uid in reversed(every) if uid in sent)))

    def end_all(self, message: str) -> None:
        """Ends all requests without waiting for the engine, as aborted, and refuses new ones: the server ends."""
        self.error = self.error or EngineDead(message)
        self._pass_on([Output(uid, [], {"type": "abort", "message": message}) for uid in self._streams])

    async def flush_cache(self) -> bool:
        """Forgets cached prefixes; False when requests are running or waiting. Raises GenerationError where what is on
        the disk cannot be removed, or EngineDead."""
        self._check()
        return not self._streams and bool(await self._ask("flush_cache"))

    async def sleep(self) -> None:
        """Has the engine give memory back when what it was sent so far has ended; a request that comes later waits for
        that and wakes it up. Raises GenerationError where the host has no room, or EngineDead."""
        await self._ask("sleep")

    async def wake_up(self) -> None:
        """Has the engine be awake. Raises GenerationError where others have taken its memory, or EngineDead."""
        await self._ask("wake_up")

    async def swap_draft(self, folder: Path | None, adapter: str = "") -> str | None:
        """Has the engine draft with the head in this folder, None for the one that it began with, and wakes it up for
        that, but not for an adapter's. Returns None, or in words why that is refused. adapter: as of
        `Engine.swap_draft`."""
        try:
            if not adapter:
                await self.wake_up()
            await self._ask("swap_draft", folder, adapter)
        except EngineDead:
            raise
        except DraftwingError as error:
            return str(error)
        return None

    async def load_adapter(self, name: str, path: Path, replace: bool) -> AdapterCard:
        """Has the engine load an adapter under a name. Raises RequestError where it is refused, or EngineDead."""
        try:
            card: AdapterCard = await self._ask("load_adapter", name, path, replace)
        except EngineDead:
            raise
        except DraftwingError as error:
            raise RequestError(str(error), "lora_path") from None
        self.adapters[name] = card
        return card

    async def unload_adapter(self, name: str) -> None:
        """Lets no further request have an adapter; those that have it go on. Raises NotFound, or EngineDead."""
        self._check()
        self.adapters.pop(name, None)  # at once: no request that comes meanwhile has it
        try:
            await self._ask("unload_adapter", name)
        except NotFound as error:
            raise NotFound(str(error), "lora_name") from None
        self.adapters.pop(name, None)  # a load that was asked for before has ended meanwhile

    async def _load_adapters_again(self) -> None:
        """Has a new engine, which began with those of the command line, serve what the one before did. One whose files
        are gone is left out."""
        theirs = {card.name: card.digest for card in self.info.adapters}
        there = {card.name for card in self.adapters.values() if theirs.get(card.name) == card.digest}
        for name in theirs.keys() - there:  # before any request comes: they would answer in place of others
            self.link.send(Ask(next(self._numbers), "unload_adapter", (name,)))
        try:
            for card in [card for name, card in self.adapters.items() if name not in there]:
                if self.adapters.get(card.name) is card:  # else it was unloaded or replaced meanwhile
                    await self._load_again(card)
        except EngineDead:
            return  # the next engine is asked for all of them

    async def _load_again(self, card: AdapterCard) -> None:
        try:
            found = await self.load_adapter(card.name, Path(card.path), True)
        except RequestError as error:
            self.adapters.pop(card.name, None)
            logger.error("the adapter %r is not loaded again: %s", card.name, error)
            return
        if found.digest != card.digest:
            logger.warning("the adapter %r is another one now: its files have changed", card.name)

    async def forget_client(self, client: str) -> int:
        """Forgets what drafts for a client are looked up in, and what of it is on the disk. Returns how many answers
        were there. Raises GenerationError where that fails, or EngineDead."""
        answers: int = await self._ask("forget_client", client)
        return answers

    async def act_on_slot(self, action: str, client: str, slot: int, filename: str) -> tuple[int, int]:
        """Saves, restores or erases a client's slot. Returns tokens and bytes. Raises RequestError, GenerationError
        where the disk fails, or EngineDead."""
        done: tuple[int, int] = await self._ask("act_on_slot", action, client, slot, filename)
        return done

    async def compile(self, grammar: Grammar, text: str, param: str | None, client: str) -> None:
        """Has a grammar compiled, so that requests which have it begin at once; clients take turns. Raises RequestError
        as `GrammarCompiler.compile` and for one that has stopped engines before, GenerationError where the engine
        failed at it, or EngineDead. text: what a `Translator` has made of it."""
        self._check()
        self._crashes.check(grammar, param)
        question = Compile(next(self._numbers), grammar, text, param, client)
        self._compiles[question.number] = grammar
        try:
            await self._reply(question)
        except asyncio.CancelledError:
            self.link.send(Drop(question.number))
            raise

    async def stats(self) -> dict[str, Any]:
        """Returns `Engine.stats` and `age`: seconds since the engine gave them. An engine that is slow to answer is not
        waited for: then they are those of before."""
        self._check()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATS_SECONDS):
                await self._learn()
        if self._known is None:
            raise EngineDead("the engine does not answer")
        at, stats = self._known
        return stats | {"age": time.monotonic() - at}

    async def _learn(self) -> None:
        stats = await self._reply(Ask(next(self._numbers), "stats"))
        self._known = time.monotonic(), stats

    def forget(self, uid: str) -> None:
        self._streams.pop(uid, None)

    async def _ask(self, method: str, *args: Any) -> Any:
        """Calls a method of the engine. Raises its errors, or EngineDead."""
        self._check()
        return await self._reply(Ask(next(self._numbers), method, args))

    async def _reply(self, question: Ask | Compile) -> Any:
        future = self._questions[question.number] = asyncio.get_running_loop().create_future()
        try:
            self.link.send(question)
            return await future
        finally:
            del self._questions[question.number]

    def _check(self) -> None:
        if self.error is not None:
            raise self.error
        if not self.healthy:
            raise EngineDead("the engine is not running")

    def _listen(self, link: EngineLink) -> None:
        link.listen(
            Listener(
                outputs=lambda outputs: self._post(self._deliver, link, outputs),
                reply=lambda reply: self._post(self._answer, reply),
                died=lambda cause: self._post(self._died, link, cause),
            )
        )
        self._known = None
        self._watching = asyncio.ensure_future(self._watch(link))

    async def _watch(self, link: EngineLink) -> None:
        """Ends an engine that hangs."""
        watchdog = Watchdog(self.info.options.watchdog_timeout)
        question: asyncio.Future[None] | None = None
        while True:
            if question is None or question.done():
                question = asyncio.ensure_future(self._learn())
                question.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may die meanwhile
            self._heard = False
            await asyncio.sleep(watchdog.every)
            reason = watchdog.look(self._heard, self._known[1].get("progress") if self._known else None)
            if reason is not None:
                logger.error("the engine hangs: %s. Its process is killed", reason)
                link.process.kill()
                self._died(link, f"it hung: {reason}")
                return

    def _post(self, fn: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(fn, *args)

    def _deliver(self, link: EngineLink, outputs: list[Output]) -> None:
        if link is not self.link or self.error is not None:
            return  # last words of an engine that was given up
        self._heard = True
        self._pass_on(outputs)

    def _pass_on(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if output.token_ids:
                self.news.set()
            if output.token_ids or output.finish_reason is not None:
                self.quota.started(output.uid)
            self.observer.output(output)
            stream = self._streams.get(output.uid)
            if stream is not None:
                stream.put(output)

    def _answer(self, reply: Reply) -> None:
        self._heard = True
        self._compiles.pop(reply.number, None)
        future = self._questions.get(reply.number)
        if future is not None and not future.done():
            if reply.error is None:
                future.set_result(reply.value)
            else:
                future.set_exception(reply.error)

    def _died(self, link: EngineLink, cause: str) -> None:
        if self._stopping.is_set() or link is not self.link or self.error is not None:
            return
        if self._watching is not None:
            self._watching.cancel()
        logger.error("the engine's process ended: %s", cause)
        if self.draining:
            self._fail(EngineDead(f"the engine stopped: {cause}; the server is shutting down"))
            return
        self._suspect()
        delay = self._crashes.back_off(time.monotonic())
        if delay is None:
            self._give_up(cause)
        else:
            self._fail(EngineDead(f"the engine stopped: {cause}; it is being restarted"))
            self._restarting = asyncio.ensure_future(self._restart(delay))

    def _suspect(self) -> None:
        """What was alone in the engine that died: a grammar that it compiled, where there is any, else requests."""
        streams = {id(stream): stream for stream in self._streams.values()}
        if self._compiles:
            grammars = set(self._compiles.values())
            if len(grammars) == 1:
                self._crashes.suspect(grammars.pop())
        elif len(streams) == 1:
            (stream,) = streams.values()
            if stream.requests[0].name:  # clients' requests have one, health checks do not
                self._crashes.suspect(stream.requests)

    def _give_up(self, cause: str) -> None:
        logger.error("the engine stopped too often and is not restarted again: the server ends")
        self._fail(EngineDead(f"the engine stopped too often: {cause}; it is not restarted, the server ends"))
        self.lost()

    async def _restart(self, delay: float | None) -> None:
        """delay: seconds before a new engine is started. One that cannot be is another death."""
        cause = ""
        try:
            while delay is not None:
                await asyncio.to_thread(self.link.close, 0)
                logger.error("the engine is restarted in %g s", delay)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._stopping.wait()
                if self._stopping.is_set() or self.draining:
                    return
                try:
                    self.link = self._spawn()
                    self.info = await asyncio.to_thread(self.link.wait_ready)
                    break
                except Exception as error:
                    cause = str(error)
                    logger.error("the engine could not be restarted: %s", cause)
                    delay = self._crashes.back_off(time.monotonic())
        finally:
            self._restarting = None
        if delay is None:
            self._give_up(cause)
        elif not self._stopping.is_set():
            self.error = None
            self._listen(self.link)
            logger.info("the engine is ready again")
            await self._load_adapters_again()

    def _fail(self, error: EngineDead) -> None:
        self.error = error
        self._dispatch.clear()
        self.observer.lost()
        self.quota.clear()
        self.news.set()
        self._compiles.clear()
        for stream in set(self._streams.values()):
            stream.fail(error)
        for future in self._questions.values():
            if not future.done():
                future.set_exception(error)
