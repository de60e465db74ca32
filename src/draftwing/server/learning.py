"""What a server does for `--learn`: keeps finished exchanges in a folder, drafts with the head that it names, and
trains others while nothing else runs."""

from __future__ import annotations

import asyncio
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
from draftwing.learn.history import HeadHistory, HeadRecord
from draftwing.learn.idle import COSTS, IdleTraining
from draftwing.learn.live import LiveAcceptance
from draftwing.learn.traffic import ANONYMOUS, Exchange, TrafficLimits, TrafficStore
from draftwing.machine import free_memory
from draftwing.server.telemetry.observer import AnswerRecord, Watcher

if TYPE_CHECKING:
    from draftwing.server.engine_client import AsyncEngine

logger = logging.getLogger(__name__)
FOLLOW_SECONDS = 1.0  # between looks at which head is to be served
SILENT_SECONDS = 600.0  # in which the same fault is told once
MEMORY_SHARE = 0.5  # of the memory that is free when the server is ready, which training may take
CURVE = 120  # points of the page's
_OF_MODEL = ("model", "revision", "tokenizer_path", "chat_template", "device", "dtype", "context_length")


class Learning(Watcher):
    """Follows `DIR/heads/current`. Belongs to the event loop, on which `run` is a task."""

    def __init__(self, engine: AsyncEngine, folder: Path, training: IdleTraining | None = None) -> None:
        self._engine, self._folder, self._training = engine, folder, training
        self.live = LiveAcceptance()
        self.swaps = 0
        self.head: int | None = None  # that drafts, None: the command line's
        self.draft_model_path = engine.info.options.speculative_draft_model_path  # of that head
        self._history = HeadHistory(folder / "heads")
        self._link: Any = None  # of the engine that has this head
        self._on_trial = False  # whether it took the place of the head that it was trained from
        self._before: int | None = None  # the head whose place it took
        self._refused: tuple[int | None, ...] = ()  # heads that the engine did not take
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
        drafts, steps = (answer.meta.get(name, 0) for name in ("spec_num_correct_drafts", "spec_verify_ct"))
        self.live.add(time.time(), drafts, steps, answer.request.client)

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
        if self._training is not None:
            await self._train(self._training)
        current = await asyncio.to_thread(self._history.current)
        wanted = self.head if current in self._refused else current
        if (wanted, self._engine.link) != (self.head, self._link):
            await self._swap(wanted)
        elif self._on_trial and self.live.fell:
            logger.warning("learning: fewer drafts are accepted with head %s than before", self.head)
            await asyncio.to_thread(self._use_before, current)

    def _use_before(self, current: int | None) -> None:
        """Has the head served in place of `current` that was there before, the command line's where that is gone or not
        taken any more."""
        for number in (self._before, None):
            if number not in self._refused:
                try:
                    self._history.use_instead(number, current)
                    return
                except ConfigError as error:
                    logger.warning("learning: %s", error)
        logger.warning("learning: there is no head to go back to")
        self._on_trial = False

    async def _train(self, training: IdleTraining) -> None:
        if self._engine.active:
            training.busy()
        training.look()
        await asyncio.to_thread(training.tidy)
        if training.due() and await asyncio.to_thread(training.work_left):
            costs = (await self._engine.stats())["chain_seconds"]
            await asyncio.to_thread(write_json, self._folder / COSTS, costs)
            head = await asyncio.to_thread(self._folder_of, self.head)  # which may read a model's files
            if not self._stops and not self._engine.active:
                training.start(head)

    def _folder_of(self, number: int | None) -> str:
        """Raises ConfigError where there is none."""
        if number is not None:
            return str(self._history.get(number).folder)
        options = self._engine.info.options
        folder = options.speculative_draft_model_path or _own_layers(options)
        if folder is None:
            raise ConfigError("there is no head on the command line")
        return folder

    async def _swap(self, number: int | None) -> None:
        link, before = self._engine.link, self.head
        if number is None and before is None:
            self._link = link  # it was started with that one
            return
        record = None if number is None else self._history.get(number)
        refused = await self._engine.swap_draft(None if record is None else record.folder)
        if refused is not None:
            logger.warning("learning: head %s is not used: %s", number, refused)
            self._refused = (*self._refused, number)
            if number == before:  # an engine that was started anew does not take it any more
                self._is_served(None, link)
            return
        self._is_served(record, link)
        if number != before:  # else it is an engine that was started anew
            self.swaps, self._refused = self.swaps + 1, ()
            self.live.swapped(time.time(), number, self._on_trial and self.live.fell)
            self._on_trial, self._before = record is not None and record.parent == before, before
        logger.info("learning: drafts come from head %s", "of the command line" if number is None else number)

    def _is_served(self, record: HeadRecord | None, link: Any) -> None:
        first = self._engine.info.options.speculative_draft_model_path
        self.head, self.draft_model_path = (None, first) if record is None else (record.number, str(record.folder))
        self._link = link

    # -- for others ---------------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Returns whether a head is being trained right now."""
        return self._training is not None and self._training.active

    def numbers(self) -> dict[str, Any]:
        """Returns what metrics show; names of clients only to whoever has a key."""
        public = self._engine.info.options.public_endpoints in ("metrics", "all")
        clients = {} if public else {"client_length": self.live.by_client()}
        head = {str(self.head or 0): 1}
        return {"draft_head": head, "head_swaps": self.swaps, "training": int(self.training), **clients}

    def facts(self) -> dict[str, Any]:
        """Returns what the page shows."""
        return {
            "head": self.head,
            "training": self.training,
            "curve": [[point.at, round(point.tokens / point.steps, 3)] for point in self.live.curve(CURVE)],
            "swaps": [[swap.at, swap.head] for swap in self.live.swaps],
            "clients": {client: round(length, 3) for client, length in self.live.by_client().items()},
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
    """Keeps what requests asked and were answered, unless they opt out (`GenerationRequest.learnable`)."""

    wants_tokens = True

    def __init__(self, store: TrafficStore, heads: HeadHistory) -> None:
        """Raises ConfigError where another process writes to the store."""
        self._store, self._heads = store, heads
        store.open()
        self._queue: queue.Queue[Exchange | Callable[[], None] | None] = queue.Queue(QUEUED)
        self._put = self._taken = 0  # tokens that came into the queue, and left it
        self._deleted: dict[str, float] = {}  # monotonic seconds, by client: what came before is not kept any more
        self._complained = -_COMPLAINT_SECONDS
        self._thread = threading.Thread(target=self._work, name="draftwing-traffic", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, options: Options, vocabulary: str) -> Collector:
        """Opens the folder of `--learn` and says what is kept there. vocabulary: a hash of the tokenizer."""
        folder = Path(options.learn or "").expanduser()
        store = TrafficStore(folder, TrafficLimits(options.learn_size, options.learn_age * 86400), vocabulary)
        collector = cls(store, HeadHistory(folder / "heads"))
        logger.info(
            "learning: token ids of prompts and answers are kept in %s, at most %.0f MiB of the last %g days; "
            'a request with "learn": false is not', folder, options.learn_size / 2**20, options.learn_age,
        )  # fmt: skip
        return collector

    def finished(self, answer: AnswerRecord) -> None:
        request = answer.request
        if not request.learnable or answer.reason not in COMPLETE:
            return
        client = request.client or ANONYMOUS
        if client in self._deleted and answer.arrived <= self._deleted[client]:
            return
        exchange = Exchange(
            time.time(), client, request.cache_salt, request.prompt_ids, answer.token_ids,
            request.params.temperature,
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
