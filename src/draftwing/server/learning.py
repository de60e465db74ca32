"""Has a server draft with the head that its folder of learning names, and trains others while nothing else runs."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.config.drafters import OWN_LAYERS, TRAINED
from draftwing.config.options import Options
from draftwing.engine.process.link import EngineDead
from draftwing.errors import ConfigError, DraftwingError
from draftwing.files import write_json
from draftwing.learn.history import HeadHistory, HeadRecord
from draftwing.learn.idle import COSTS, IdleTraining
from draftwing.learn.live import LiveAcceptance
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
        "--num-threads",
        "1",
        "--max-running-requests",
        "4",
        "--max-total-tokens",
        "8192",
    ]
    for name in _OF_MODEL:
        value = getattr(options, name)
        if value is not None and value != getattr(Options, name):
            words += ["--" + name.replace("_", "-"), str(value)]
    return words
