"""Which models run: started at the first request that names one, stopped after a time without any, or when another one
needs the memory.

A request in flight keeps its model. Who needs room gets that of the model whose last request is longest ago; where all
have requests, that model takes no further ones (they wait for its next start) and ends when it has answered. Whoever
waits for room gets it in the order in which they came, so that no model waits for ever behind busy ones.

On a GPU one that makes room sleeps instead, where the host has room for its weights: its process stays, and its next
request wakes it up. Its time without requests goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from draftwing.config.devices import on_host
from draftwing.config.model_list import ServedModel
from draftwing.config.options import Options
from draftwing.engine.process.link import EngineDead
from draftwing.errors import DraftwingError, GenerationError, NotFound, listed
from draftwing.machine import free_memory
from draftwing.server.quotas import QueueFull
from draftwing.server.router.changes import Changes, in_time
from draftwing.server.router.memory import Forecast, forecast, gigabytes, measured, taken, weight_bytes
from draftwing.server.router.model import Model
from draftwing.server.router.process import ModelServer, socket_folder

logger = logging.getLogger(__name__)
Further = Callable[[Sequence[ServedModel]], list[ServedModel]]
Start = Callable[[Mapping[str, Any], Path, Callable[[], None]], ModelServer]


class NoRoom(EngineDead):
    """A model that does not fit, whatever else is stopped (HTTP 503)."""


class Models:
    """Belongs to the running event loop."""

    def __init__(
        self, listed: Sequence[ServedModel], *, further: Further | None = None,
        most: int | None = None, budget: float | None = None, start: Start = ModelServer,
        forecast: Callable[[ServedModel], Forecast] = forecast, taken: Callable[[int], int] = taken,
        weights: Callable[[ServedModel], int] = weight_bytes,
    ) -> None:  # fmt: skip
        """further: finds more of them, which come and go.  most: models at once.  budget: bytes that they may
        take; None: what is free."""
        self.every = [Model(one) for one in listed]
        self._listed = list(self.every)
        self._further, self._start, self._forecast = further, start, forecast
        self._most, self._budget, self._taken, self._weights = most, budget, taken, weights
        self._room = asyncio.Lock()  # of who makes room
        self._changes = Changes()
        self._sockets, self._lock = socket_folder()
        self._started = 0
        self.ending = False
        self.look()

    def look(self) -> None:
        """Finds models that have come; those that are gone and do not run are left out."""
        if self._further is None:
            return
        before = {model.served.name: model for model in self.every if model not in self._listed}
        found = []
        for one in self._further([model.served for model in self._listed]):
            model = before.pop(one.name, None) or Model(one)
            if not model.runs:
                model.served = one  # its files may be others than before
            found.append(model)
        self.every = [*self._listed, *found, *(model for model in before.values() if model.runs)]

    def find(self, name: str) -> Model:
        """Returns the model of a name, with `:latest` behind it, too, as Ollama's clients write it. Raises NotFound."""
        for again in (False, True):
            for asked in (name, name.removesuffix(":latest")):
                for model in self.every:
                    if asked in model.served.asked:
                        return model
            if not again:
                self.look()
        known = listed([repr(model.served.name) for model in self.every]) or "none"
        raise NotFound(f"the model {name[:200]!r} does not exist; this server has {known}", "model", "model_not_found")

    @property
    def loaded(self) -> list[Model]:
        return [model for model in self.every if model.ready]

    @asynccontextmanager
    async def use(self, model: Model) -> AsyncIterator[ModelServer]:
        """The model's server, started if need be; the request keeps it until the block ends. Raises DraftwingError for
        one that does not start, QueueFull where that takes longer than a request waits."""
        await self._enter(model)
        try:
            server = model.server
            if server is None:  # it has died since
                raise EngineDead(f"the model {model.served.name!r} stopped: {model.failure}")
            yield server
        finally:
            self._leave(model)

    async def load(self, model: Model) -> None:
        """Returns when it is loaded. Raises DraftwingError where it does not start."""
        async with self.use(model):
            pass

    async def unload(self, model: Model) -> bool:
        """Stops a model when it has answered what it was asked; whether it was loaded. One who is cancelled before that
        takes it back."""
        if model.server is None:
            return False
        server = model.server
        model.closing = True
        try:
            while model.busy and model.server is server:
                await self._changes.next()
                if model.server is server:
                    model.closing = True  # another one may have taken it back
        except asyncio.CancelledError:
            if model.server is server:
                model.closing = False
                self._expire(model)
                self._changes.tell()
            raise
        await asyncio.shield(self._stop(model, server))
        return True

    async def sleep(self, model: Model) -> bool:
        """Has a model give its memory back when it has answered what it was asked; whether it sleeps then. It goes on
        if all who ask for that are cancelled before. Raises GenerationError where the host has no room for what it has
        on a GPU, or EngineDead."""
        if model.server is None or model.closing or model.asleep:
            return model.asleep
        if model.resting is None:
            model.resting = asyncio.create_task(self._rest(model, model.server))
            model.resting.add_done_callback(lambda task: task.cancelled() or task.exception())  # of who has left
        model.sleepers += 1
        try:
            await asyncio.shield(model.resting)  # who leaves cannot take back what the engine was told
        finally:
            model.sleepers -= 1
            self._changes.tell()
        return model.asleep

    async def _rest(self, model: Model, server: ModelServer) -> None:
        try:
            while model.busy and model.server is server and model.sleepers:
                await self._changes.next()
            if model.server is server and not model.closing and model.sleepers:
                await server.sleep()
                model.asleep = model.server is server
        finally:
            if model.server is server:
                model.resting = None
                self._expire(model)
                self._changes.tell()
        if model.asleep:
            logger.info("model %s sleeps", model.served.name)

    async def wake_up(self, model: Model) -> bool:
        """Wakes a model up; whether it slept. Raises DraftwingError where it is not awake then."""
        if not model.asleep:
            return False
        await self.load(model)
        return True

    def is_listed(self, model: Model) -> bool:
        """Returns whether it is one of those that do not come and go."""
        return model in self._listed

    async def remove(self, model: Model, delete: Coroutine[Any, Any, None]) -> None:
        """Has the files of a model deleted when it has answered what it was asked, and takes nothing more for it
        meanwhile. Raises NotFound where that is being done, and what `delete` raises."""
        if model.removed:
            delete.close()
            raise NotFound(f"the model {model.served.name!r} is being deleted", "model", "model_not_found")
        model.removed = True
        try:
            while model.starting is not None:  # for who has come before
                await self._changes.next()
            await self.unload(model)
            await delete
        finally:
            delete.close()
            model.removed = False
            self.look()

    async def _enter(self, model: Model) -> None:
        if self.ending:
            raise EngineDead("the server is shutting down")
        if model.removed:
            raise NotFound(f"the model {model.served.name!r} is being deleted", "model", "model_not_found")
        if model.takes_requests:
            self._begin(model)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        model.waiting.append(turn)
        if model.starting is None:
            model.starting = asyncio.create_task(self._run(model))
        try:
            await asyncio.wait({turn}, timeout=model.load_timeout)
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:
                self._leave(model)  # it was its turn, and nobody is there
            raise
        finally:
            if turn in model.waiting:
                model.waiting.remove(turn)
                self._changes.tell()  # there may be nobody left for whom it is started
        if not turn.done():
            waited = f"the model {model.served.name!r} was not loaded within {model.load_timeout:g} s (--load-timeout)"
            raise QueueFull(f"{waited}: {model.waits_for}", own=False, when="later")
        turn.result()

    def _begin(self, model: Model) -> None:
        model.in_flight += 1
        model.used = time.monotonic()
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None

    def _leave(self, model: Model) -> None:
        model.in_flight -= 1
        model.used = time.monotonic()
        self._expire(model)
        self._changes.tell()

    def _expire(self, model: Model) -> None:
        """Has a model without requests stopped when its time is over."""
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        if _waits(model) and model.keep_alive < math.inf:
            loop = asyncio.get_running_loop()
            left = model.keep_alive + model.used - time.monotonic()
            model.timer = loop.call_later(max(left, 0), lambda: loop.create_task(self._expired(model)))

    async def _expired(self, model: Model) -> None:
        if _waits(model):
            logger.info("model %s is stopped: no request for %g s", model.served.name, model.keep_alive)
            await self.unload(model)

    # -- starts and stops ----------------------------------------------------------------------------------------------

    async def _run(self, model: Model) -> None:
        """Starts a model, or wakes it up, and lets in who waits, or tells them why not."""
        try:
            server = await self._begun(model)
            if server is not None:
                await self._load(model, server)
        except BaseException as error:
            await self._failed(model, error)
            if not isinstance(error, DraftwingError | asyncio.CancelledError):
                raise
            return
        model.starting = None
        while model.waiting:
            self._begin(model)
            model.waiting.pop(0).set_result(None)
        self._expire(model)
        self._changes.tell()

    async def _begun(self, model: Model) -> ModelServer | None:
        """Returns the server that is started when there is room; None where the model is awake, or nobody waits for it
        any more. Between that and what `_run` does nothing is awaited: else somebody could come."""
        while True:
            async with self._room:
                if model.takes_requests or not model.waiting:
                    return None
                if model.server is None or model.asleep:
                    if not await self._changes.do(self._make_room(model), lambda: bool(model.waiting)):
                        continue
                    awake = await self._wake(model)
                    return None if awake or not model.waiting else self._spawn(model)
            await self._changes.next()  # its last one ends, or falls asleep: others need not wait for that

    async def _load(self, model: Model, server: ModelServer) -> None:
        model.pool = await in_time(model.load_timeout, server.ready())
        if model.server is not server:
            raise EngineDead(f"its process ended: {model.failure}")
        model.ready, model.failure, model.since = True, None, time.time()
        model.used = time.monotonic()  # whoever it was loaded for may have left, and come again
        model.keep_alive = model.served.keep_alive
        model.resident = math.inf
        logger.info("model %s is loaded", model.served.name)

    async def _wake(self, model: Model) -> bool:
        """Has a model awake that sleeps. Returns whether it is; one that cannot be is stopped."""
        server = model.server
        if server is None:
            return False
        try:
            await in_time(model.load_timeout, server.wake_up())
        except (GenerationError, EngineDead) as error:
            logger.warning("model %s is started anew: %s", model.served.name, error)
            await self._stop(model, server)
            return False
        model.asleep = False
        logger.info("model %s is awake", model.served.name)
        return model.server is server

    async def _failed(self, model: Model, error: BaseException) -> None:
        """Tells those who wait for a start why there is none."""
        known = error if isinstance(error, DraftwingError) else None
        model.failure = str(known or "the server is shutting down")
        if known is not None:
            logger.error("model %s was not started: %s", model.served.name, known)
        kind = NoRoom if isinstance(error, NoRoom) else EngineDead
        model.starting = None  # who comes from now on waits for another start
        while model.waiting:
            why = f"the model {model.served.name!r} was not started: {model.failure}"
            model.waiting.pop(0).set_exception(kind(why))
        if model.server is not None:
            await self._stop(model, model.server)
        self._changes.tell()

    def _spawn(self, model: Model) -> ModelServer:
        self._started += 1
        logger.info("model %s is started: %s are forecast", model.served.name, model.needs)
        server: ModelServer

        def ended() -> None:
            if model.server is server:
                how = server.how_it_ended()
                model.failure = how
                if model.ready:
                    logger.error("model %s stopped: %s; its next request starts it again", model.served.name, how)
                self._clear(model)

        server = model.server = self._start(model.served.arguments, self._sockets / f"{self._started}.sock", ended)
        return server

    async def _stop(self, model: Model, server: ModelServer) -> None:
        if model.server is server:
            model.closing = True
            await server.stop()
        if model.server is server:  # or somebody else has stopped it, too
            self._clear(model)

    def _clear(self, model: Model) -> None:
        model.server = None
        model.ready = model.closing = model.asleep = False
        model.resting = None
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        self._changes.tell()

    async def _make_room(self, model: Model) -> None:
        """Stops other models until there is room for one, or has them sleep. Raises NoRoom, and stops none, where there
        never would be."""
        if model.server is None:
            model.needs = await asyncio.to_thread(self._forecast, model.served)
        need, device = model.needs, model.served.arguments.get("device", Options.device)
        most = self._most or (math.inf if on_host(device) else 1)
        while True:
            others = [one for one in self.every if one.server is not None and one is not model]
            left, total = await self._measure(model, others)
            if need.all > total:
                of = "may be taken (--models-memory)" if self._budget is not None else "can be free"
                raise NoRoom(
                    f"it needs about {need}, and {gigabytes(max(total, 0))} {of}: take a smaller model, or lower its "
                    "max_total_tokens or mem_fraction_static"
                )
            others = [one for one in others if one.server is not None]
            awake = [one for one in others if not one.asleep]
            if need.all <= left and len(awake) < most:
                return
            some = others if need.all > left else awake
            victim = min([one for one in some if not one.busy] or some, key=lambda one: one.used, default=None)
            if victim is not None:
                logger.info("model %s makes room for %s", victim.served.name, model.served.name)
                await self._send_away(victim, [one for one in others if one.asleep], left - need.all)

    async def _send_away(self, model: Model, asleep: Sequence[Model], room: float) -> None:
        """Has a model on a GPU sleep. As long as the host has no room for its weights others that sleep are stopped,
        first the one whose last request is longest ago; where that is not enough this one is. room: bytes of the
        host's."""
        if not model.asleep and not on_host(model.served.arguments.get("device", Options.device)):
            needed = await asyncio.to_thread(self._weights, model.served)
            if needed > room and asleep:
                await self.unload(min(asleep, key=lambda one: one.used))
                return  # it is looked at again what is free
            if needed <= room:
                try:
                    if await self.sleep(model):
                        return
                except (GenerationError, EngineDead) as error:
                    logger.warning("model %s is stopped, for it cannot sleep: %s", model.served.name, error)
        await self.unload(model)

    async def _measure(self, model: Model, others: Sequence[Model]) -> tuple[float, float]:
        """Returns bytes that are there for a model: that nobody has taken or is going to take, and all without these
        others. What it takes itself while it sleeps is among them."""
        now = await self._taken_by([*others, model])
        own = now.pop(model, 0)
        sizes = {one: max(one.size, size) for one, size in now.items()}
        if self._budget is not None:
            return self._budget - sum(sizes.values()), self._budget
        free = free_memory()
        if free is None:
            return math.inf, math.inf
        return own + free + sum(now.values()) - sum(sizes.values()), own + free + sum(now.values())

    async def _taken_by(self, models: Iterable[Model]) -> dict[Model, int]:
        """Returns the bytes that each of these takes now, as far as it runs; in place of the forecast of one that is
        loaded stands from now on what it takes at most."""
        pids = {model: model.server.process.pid for model in models if model.server is not None}
        now = await asyncio.to_thread(lambda: {model: self._taken(pid) for model, pid in pids.items()})
        for model, size in now.items():
            if model.asleep:
                model.rests = size
            elif model.ready and size:
                model.resident = min(model.resident, size)  # the least: at first an engine takes more for a moment
                model.needs = measured(model.needs.weights, model.pool, int(model.resident))
        return now

    async def refresh(self) -> None:
        """Measures what loaded models take."""
        await self._taken_by(self.loaded)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stops all of them."""
        self.ending = True
        starts = [model.starting for model in self.every if model.starting is not None]
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        running = [(model, model.server) for model in self.every if model.server is not None]
        await asyncio.gather(*(self._stop(*one) for one in running))
        shutil.rmtree(self._sockets, ignore_errors=True)
        self._lock.close()

    def kill(self) -> None:
        for model in self.every:
            if model.server is not None:
                model.server.kill()


def _waits(model: Model) -> bool:
    """Returns whether it has no requests, and is not about to change."""
    return (model.takes_requests or model.asleep) and not model.in_flight and model.starting is None
