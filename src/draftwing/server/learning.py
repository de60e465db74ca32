"""Has a server draft with the head that its folder of learning names, and trains others while nothing else runs."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.config.drafters import TRAINED, training
from draftwing.config.options import Options
from draftwing.engine.process.link import EngineDead
from draftwing.errors import ConfigError, DraftwingError
from draftwing.files import write_json
from draftwing.learn.history import HeadHistory
from draftwing.learn.idle import COSTS, IdleTraining
from draftwing.learn.live import LiveAcceptance
from draftwing.machine import free_memory
from draftwing.server.telemetry.observer import AnswerRecord, Watcher

if TYPE_CHECKING:
    from draftwing.server.engine_client import AsyncEngine

logger = logging.getLogger(__name__)
SECONDS = 1.0  # between looks
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
        self._refused: tuple[int | None, ...] = ()  # a head that the engine did not take

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
        self.live.add(time.time(), drafts, steps)

    def forget(self) -> None:
        """Traffic is to be deleted: ends a run that has begun to learn it, and removes what it has made."""
        if self._training is not None:
            self._training.forget()

    # -- as a task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Looks every second, until it is cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except EngineDead:
                    pass  # another one is being started
                except (OSError, DraftwingError) as error:
                    logger.warning("learning: %s", error)
                await asyncio.sleep(SECONDS)
        finally:
            if self._training is not None:
                self._training.close()

    async def _look(self) -> None:
        if self._training is not None:
            await self._train(self._training)
        current = await asyncio.to_thread(self._history.current)
        if (current, self._engine.link) != (self.head, self._link) and current not in self._refused:
            await self._swap(current)
        elif current is not None and self._on_trial and self.live.fell:
            parent = self._history.get(current).parent
            logger.warning("learning: fewer drafts are accepted with head %d than before: swapped back", current)
            await asyncio.to_thread(self._history.use, parent)

    async def _train(self, training: IdleTraining) -> None:
        if self._engine.active:
            training.busy()
        training.look()
        if training.due() and await asyncio.to_thread(training.work_left) and not self._engine.active:
            write_json(self._folder / COSTS, (await self._engine.stats())["chain_seconds"])
            training.start(self._folder_of(self.head))

    def _folder_of(self, number: int | None) -> str:
        """Raises ConfigError where there is none."""
        if number is not None:
            return str(self._history.get(number).folder)
        folder = self._engine.info.options.speculative_draft_model_path
        if folder is None:
            raise ConfigError("there is no head on the command line")
        return folder

    async def _swap(self, number: int | None) -> None:
        link, before = self._engine.link, self.head
        if number is None and before is None:
            self._link = link  # it was started with that one
            return
        folder = self._folder_of(number)
        refused = await self._engine.swap_draft(Path(folder))
        if refused is not None:
            logger.warning("learning: head %s is not used: %s", number, refused)
            self._refused = (number,)
            return
        self.head, self.draft_model_path, self._link, self._refused = number, folder, link, ()
        if number != before:  # else it is an engine that was started anew
            self.swaps += 1
            self.live.swapped(time.time(), number)
            self._on_trial = number is not None and self._history.get(number).parent == before
        logger.info("learning: drafts come from head %s", "of the command line" if number is None else number)

    # -- for others ---------------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Returns whether a head is being trained right now."""
        return self._training is not None and self._training.active

    def numbers(self) -> dict[str, Any]:
        """Returns what metrics show."""
        return {"draft_head": {str(self.head or 0): 1}, "head_swaps": self.swaps, "training": int(self.training)}

    def facts(self) -> dict[str, Any]:
        """Returns what the page shows."""
        return {
            "head": self.head,
            "training": self.training,
            "curve": [[point.at, round(point.tokens / point.steps, 3)] for point in self.live.curve(CURVE)],
            "swaps": [[swap.at, swap.head] for swap in self.live.swaps],
        }


def arguments(options: Options) -> list[str]:
    """Returns what `draftwing train` is to be told of the model that is served, and of its head. Raises ConfigError for
    drafters whose heads are not trained."""
    spec = options.drafter_spec
    heads = (spec.parts[0] if spec.parts else spec).heads
    algorithm = next((name for name, trained in TRAINED.items() if heads and trained.heads[0] == heads[0]), None)
    if algorithm is None or training(algorithm).block:
        able = " or ".join(spec.name for name, spec in TRAINED.items() if not training(name).block)
        raise ConfigError(f"--learn-while-idle: expected --speculative-algorithm {able}, found {options.drafter}")
    if options.speculative_draft_model_path is None:
        raise ConfigError("--learn-while-idle: expected a head in a folder, --speculative-draft-model-path; found the "
                          "prediction layers of the checkpoint")  # fmt: skip
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
