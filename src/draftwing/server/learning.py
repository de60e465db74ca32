"""What a server does for `--learn`: keeps finished exchanges in a folder, drafts with the head that it names, and
trains others while nothing else runs."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwing.config.drafters import OWN_LAYERS, TRAINED
from draftwing.config.options import Options
from draftwing.engine.process.link import EngineDead
from draftwing.errors import ConfigError, DraftwingError
from draftwing.files import write_json
from draftwing.learn.history import HeadHistory
from draftwing.learn.idle import COSTS, IdleTraining
from draftwing.learn.traffic import ANONYMOUS, Exchange, TrafficLimits, TrafficStore
from draftwing.machine import free_memory
from draftwing.models.adapters.files import folder_of
from draftwing.requests.request import GenerationRequest
from draftwing.server.lesson import Lesson
from draftwing.server.telemetry.observer import AnswerRecord, Watcher

if TYPE_CHECKING:
    from draftwing.server.engine_client import AsyncEngine

logger = logging.getLogger(__name__)
FOLLOW_SECONDS = 1.0  # between looks at which head is to be served
SILENT_SECONDS = 600.0  # in which the same fault is told once
MEMORY_SHARE = 0.5  # of the memory that is free when the server is ready, which training may take
CURVE = 120  # points of the page's
NEW = "none"  # for `--init-factors`
_OF_MODEL = ("model", "revision", "tokenizer_path", "chat_template", "device", "dtype", "context_length")


class Learning(Watcher):
    """Follows which heads of `DIR/heads` are named: the model's, and those of adapters that are loaded. Belongs to the
    event loop, on which `run` is a task."""

    def __init__(self, engine: AsyncEngine, folder: Path, training: IdleTraining | None = None) -> None:
        self._engine, self._folder, self._training = engine, folder, training
        self._history = HeadHistory(folder / "heads")
        self.model = Lesson(engine, self._history)
        self._lessons = {"": self.model}  # by digest of the adapter
        self._swaps = 0  # of lessons that have ended
        self._stops = 0  # reasons for which no process may start

    @classmethod
    def of(cls, engine: AsyncEngine) -> Learning:
        """For a server of options with `learn`. Raises ConfigError."""
        options = engine.info.options
        folder = Path(options.learn or "").expanduser()
        training = None
        if options.learn_while_idle:
            free = free_memory()
            memory = resource.RLIM_INFINITY if free is None else int(MEMORY_SHARE * free)
            training = IdleTraining(folder, arguments(options), memory)
        return cls(engine, folder, training)

    # -- as a watcher -------------------------------------------------------------------------------------------------

    def began(self, answer: AnswerRecord) -> None:
        if self._training is not None:
            self._training.busy()

    def finished(self, answer: AnswerRecord) -> None:
        whose = self.taught(answer.request)
        if whose in self._lessons:
            self._lessons[whose].finished(answer.meta, answer.request.client)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While traffic is deleted, with what was made of it: nothing learns it."""
        self._stops += 1
        try:
            if self._training is not None:
                self._training.close()
            yield
        finally:
            self._stops -= 1

    def taught(self, request: GenerationRequest) -> str | None:
        """Returns whose head can learn from what a request is answered: the digest of an adapter, "": the model's;
        None: nobody's, for several adapters or a scale, or where heads of adapters have no slots."""
        if not request.adapters:
            return ""
        card = self._engine.adapters.get(request.adapters[0][0])
        same = card is not None and card.digest == request.adapter_digest  # else it was replaced meanwhile
        return request.adapter_digest if same and self._engine.info.head_rank else None

    # -- as a task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Looks every second, until it is cancelled."""
        said, until = "", 0.0
        try:
            while True:
                try:
                    await self._look()
                except EngineDead:
                    pass  # another one is being started
                except (OSError, DraftwingError) as error:
                    if str(error) != said or time.monotonic() >= until:
                        said, until = str(error), time.monotonic() + SILENT_SECONDS
                        logger.warning("learning: %s", said)
                await asyncio.sleep(FOLLOW_SECONDS)
        finally:
            if self._training is not None:
                self._training.close()

    async def _look(self) -> None:
        await self._follow_adapters()
        if self._training is not None:
            await self._train(self._training)
        named = await asyncio.to_thread(lambda: {one: self._history.current(one) for one in list(self._lessons)})
        failed: Exception | None = None
        for one, current in named.items():
            try:
                await self._lessons[one].look(current)
            except EngineDead:
                raise
            except (OSError, DraftwingError) as error:
                failed = failed or error  # the others go on
        if failed is not None:
            raise failed

    async def _follow_adapters(self) -> None:
        """Begins the lessons of adapters that were loaded, and ends those of others."""
        cards = self._engine.adapters.values() if self._engine.info.head_rank else ()
        served = {card.digest for card in cards}
        for gone in self._lessons.keys() - served - {""}:
            lesson, training = self._lessons.pop(gone), self._training
            self._swaps += lesson.swaps
            if training is not None and training.whose == gone:
                await asyncio.to_thread(training.drop)
            await lesson.end()
        for new in served - self._lessons.keys():
            self._lessons[new] = Lesson(self._engine, self._history, new)

    async def _train(self, training: IdleTraining) -> None:
        if self._engine.active:
            training.busy()
        training.look()
        await asyncio.to_thread(training.tidy)
        if not training.due():
            return
        whose = await asyncio.to_thread(training.left)
        if whose is not None and whose not in self._lessons:
            await asyncio.to_thread(training.drop)
            whose = None
        if whose is None:
            whose = await asyncio.to_thread(training.next, [*self._lessons])
        if whose is not None:
            costs = (await self._engine.stats())["chain_seconds"]
            await asyncio.to_thread(write_json, self._folder / COSTS, costs)
            first = await asyncio.to_thread(self._first, whose)  # which may read a model's files
            if not self._stops and not self._engine.active and whose in self._lessons:
                training.start(whose, first)

    def _first(self, whose: str) -> list[str]:
        """Returns what a run is to begin with. Raises ConfigError where there is nothing."""
        words = ["--init-head", self._folder_of_model()]
        card = next((card for card in self._engine.adapters.values() if whose and card.digest == whose), None)
        if card is not None:
            own = self._lessons[whose].folder or folder_of(Path(card.path))
            given = json.dumps({"name": card.name, "path": card.path})
            words += ["--adapter", given, "--head-rank", str(self._engine.info.head_rank)]
            words += ["--init-factors", str(own) if own.is_dir() else NEW]
        return words

    def _folder_of_model(self) -> str:
        """Raises ConfigError where there is none."""
        if self.model.folder is not None:
            return str(self.model.folder)
        options = self._engine.info.options
        folder = options.speculative_draft_model_path or _own_layers(options)
        if folder is None:
            raise ConfigError("there is no head on the command line")
        return folder

    # -- for others ---------------------------------------------------------------------------------------------------

    @property
    def draft_model_path(self) -> str | None:
        """Returns the folder of the model's head that drafts now: of the command line, or what was swapped in."""
        first = self._engine.info.options.speculative_draft_model_path
        return first if self.model.folder is None else str(self.model.folder)

    @property
    def training(self) -> bool:
        """Returns whether a head is being trained right now."""
        return self._training is not None and self._training.active

    def _adapters(self) -> dict[str, Lesson]:
        """Returns the lessons of adapters by their names."""
        cards = self._engine.adapters.items()
        return {name: self._lessons[card.digest] for name, card in cards if card.digest in self._lessons}

    def numbers(self) -> dict[str, Any]:
        """Returns what metrics show; names of clients and adapters only to whoever has a key."""
        swaps = self._swaps + sum(lesson.swaps for lesson in self._lessons.values())
        found = {"draft_head": {str(self.model.head or 0): 1}, "head_swaps": swaps, "training": int(self.training)}
        if self._engine.info.options.public_endpoints in ("metrics", "all"):
            return found
        own = {(name, str(lesson.head or 0)): 1 for name, lesson in self._adapters().items()}
        return {**found, **({"adapter_head": own} if own else {}), "client_length": self.model.live.by_client()}

    def facts(self) -> dict[str, Any]:
        """Returns what the page shows."""
        live = self.model.live
        return {
            "head": self.model.head,
            "training": self.training,
            "curve": [[point.at, round(point.tokens / point.steps, 3)] for point in live.curve(CURVE)],
            "swaps": [[swap.at, swap.head] for swap in live.swaps],
            "clients": {client: round(length, 3) for client, length in live.by_client().items()},
            "adapters": [[name, lesson.head, lesson.live.newest] for name, lesson in self._adapters().items()],
        }


def _own_layers(options: Options) -> str | None:
    """As `own_layers.layers_to_learn`, which needs torch: a server whose drafts do not learn has no use for it."""
    from draftwing.models.heads.own_layers import layers_to_learn

    return layers_to_learn(options)


def arguments(options: Options) -> list[str]:
    """Returns what `draftwing train` is to be told of the model that is served, and of its head. Raises ConfigError for
    drafters whose heads, and prediction layers, are not trained."""
    spec = options.drafter_spec
    heads = (spec.parts[0] if spec.parts else spec).heads
    path = options.speculative_draft_model_path
    if OWN_LAYERS in heads and (path is None or path.endswith(".gguf")):  # which EAGLE drafts with, too
        _own_layers(options)  # refuses those that are not trained
        heads = (OWN_LAYERS,)
    algorithm = next((name for name, trained in TRAINED.items() if heads and trained.heads[0] == heads[0]), None)
    if algorithm is None:
        able = " or ".join(spec.name for spec in TRAINED.values())
        raise ConfigError(f"--learn-while-idle: expected --speculative-algorithm {able}, found {options.drafter}")
    words = [
        "--algorithm",
        algorithm,
        *["--num-threads", "1", "--max-running-requests", "4", "--max-total-tokens", "8192"],
    ]
    for name in _OF_MODEL:
        value = getattr(options, name)
        if value is not None and value != getattr(Options, name):
            words += ["--" + name.replace("_", "-"), str(value)]
    return words


COMPLETE = ("stop", "length")  # reasons of answers that are kept
QUEUED = 1024  # exchanges that wait for the disk; further ones are left out
QUEUED_TOKENS = 4_000_000  # that wait at most, but for one exchange: some 150 MB
DELETED = 1024  # clients of whom answers that were asked for before are still looked out for
SYNC_SECONDS = 5.0  # what a crash of the machine loses at most
SWEEP_SECONDS = 3600.0  # between looks for what is too old, or a hundredth of the age where that is less
_COMPLAINT_SECONDS = 60.0  # between lines of the log about a disk that does not take it


class Deleted(NamedTuple):
    """What went of a client. heads: numbers of those that were trained with it, and are still there."""

    exchanges: int
    heads: list[int]


class Collector(Watcher):
    """Keeps what requests asked and were answered, unless they opt out or have images."""

    wants_tokens = True

    def __init__(
        self, store: TrafficStore, heads: HeadHistory, taught: Callable[[GenerationRequest], str | None]
    ) -> None:
        """taught: as of `Learning`. Raises ConfigError where another process writes to the store."""
        self._store, self._heads, self._taught = store, heads, taught
        store.open()
        self._queue: queue.Queue[Exchange | Callable[[], None] | None] = queue.Queue(QUEUED)
        self._put = self._taken = 0  # tokens that came into the queue, and left it
        self._deleted: dict[str, float] = {}  # monotonic seconds, by client: what came before is not kept any more
        self._complained = -_COMPLAINT_SECONDS
        self._thread = threading.Thread(target=self._work, name="draftwing-traffic", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, options: Options, vocabulary: str, taught: Callable[[GenerationRequest], str | None]) -> Collector:
        """Opens the folder of `--learn` and says what is kept there. vocabulary: a hash of the tokenizer."""
        folder = Path(options.learn or "").expanduser()
        store = TrafficStore(folder, TrafficLimits(options.learn_size, options.learn_age * 86400), vocabulary)
        collector = cls(store, HeadHistory(folder / "heads"), taught)
        logger.info(
            "learning: token ids of prompts and answers are kept in %s, at most %.0f MiB of the last %g days; "
            'a request with "learn": false is not', folder, options.learn_size / 2**20, options.learn_age,
        )  # fmt: skip
        return collector

    def finished(self, answer: AnswerRecord) -> None:
        request, adapter = answer.request, self._taught(answer.request)
        if not request.learn or request.images or adapter is None or answer.reason not in COMPLETE:
            return
        client = request.client or ANONYMOUS
        if client in self._deleted and answer.arrived <= self._deleted[client]:
            return
        exchange = Exchange(
            time.time(), client, request.cache_salt, request.prompt_ids, answer.token_ids,
            request.params.temperature, adapter,
        )  # fmt: skip
        try:
            if self._put - self._taken > QUEUED_TOKENS:
                raise queue.Full
            self._queue.put_nowait(exchange)
            self._put += _tokens(exchange)
        except queue.Full:
            self._complain("the disk does not keep up")

    async def delete(self, client: str) -> Deleted:
        """Removes all that is kept of a client, what is on its way to the disk included, and of answers that are not
        finished yet. client: the name of a key, or "anonymous"."""
        self._deleted.pop(client, None)
        self._deleted[client] = time.monotonic()
        if len(self._deleted) > DELETED:
            del self._deleted[next(iter(self._deleted))]
        done: Future[Deleted] = Future()

        def work() -> None:
            try:
                done.set_result(Deleted(self._store.delete(client), [*self._heads.mark_deleted(client)]))
            except Exception as error:  # whoever waits is told
                done.set_exception(error)

        await asyncio.to_thread(self._queue.put, work)  # which may be full
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        self._attempt(self._store.load)
        every = min(SWEEP_SECONDS, self._store.limits.seconds / 100)
        synced = swept = time.monotonic()
        running = True
        while running:
            with suppress(queue.Empty):
                task = self._queue.get(timeout=min(SYNC_SECONDS, every))
                running = task is not None
                if isinstance(task, Exchange):
                    self._attempt(partial(self._store.add, task))
                    self._taken += _tokens(task)
                elif task is not None:
                    task()
            now = time.monotonic()
            if now - synced >= SYNC_SECONDS:
                self._attempt(self._store.sync)
                synced = now
            if now - swept >= every:
                self._attempt(self._store.sweep)
                swept = now
        self._attempt(self._store.close)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (OSError, DraftwingError) as error:
            self._complain(str(error))

    def _complain(self, why: str) -> None:
        now = time.monotonic()
        if now - self._complained >= _COMPLAINT_SECONDS:
            self._complained = now
            logger.warning("learning: some traffic is not kept: %s", why)


def _tokens(exchange: Exchange) -> int:
    return len(exchange.prompt) + len(exchange.answer)
