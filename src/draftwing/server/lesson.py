"""One head that learns, the model's or that of an adapter: the one that is named serves, unless it serves worse."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwing.errors import ConfigError
from draftwing.learn.history import HeadHistory, HeadRecord
from draftwing.learn.live import LiveAcceptance

if TYPE_CHECKING:
    from draftwing.server.engine_client import AsyncEngine

logger = logging.getLogger(__name__)


class Lesson:
    """Follows which of the heads is named. Belongs to the event loop."""

    def __init__(self, engine: AsyncEngine, history: HeadHistory, adapter: str = "") -> None:
        """adapter: digest of the one whose own head it is, "": it is the model's."""
        self._engine, self._history, self._adapter = engine, history, adapter
        self._whose = f" for the adapter {adapter}" if adapter else ""
        self.live = LiveAcceptance()
        self.swaps = 0
        self.head: int | None = None  # that drafts, None: the command line's, or that of the adapter's files
        self.folder: Path | None = None  # of that head
        self._link: Any = None  # of the engine that has this head
        self._on_trial = False  # whether it took the place of the head that it was trained from
        self._before: int | None = None  # the head whose place it took
        self._refused: tuple[int | None, ...] = ()  # heads that the engine did not take

    def finished(self, meta: Mapping[str, Any], client: str) -> None:
        """Notes a request that has ended. meta: what its output says of it."""
        drafts, steps = (meta.get(name, 0) for name in ("spec_num_correct_drafts", "spec_verify_ct"))
        self.live.add(time.time(), drafts, steps, client)

    async def look(self, current: int | None) -> None:
        """Swaps the head that is named now. Raises what the history does, and EngineDead."""
        wanted = self.head if current in self._refused else current
        if (wanted, self._engine.link) != (self.head, self._link):
            await self._swap(wanted)
        elif self._on_trial and self.live.fell:
            logger.warning("learning: fewer drafts are accepted with head %s than before%s", self.head, self._whose)
            await asyncio.to_thread(self._use_before, current)

    async def end(self) -> None:
        """Lets the engine forget what was learnt."""
        if self.head is not None:
            await self._engine.swap_draft(None, self._adapter)

    def _use_before(self, current: int | None) -> None:
        """Has the head served in place of `current` that was there before, the command line's where that is gone or not
        taken any more."""
        for number in (self._before, None):
            if number not in self._refused:
                try:
                    self._history.use_instead(number, current, self._adapter)
                    return
                except ConfigError as error:
                    logger.warning("learning: %s", error)
        logger.warning("learning: there is no head to go back to")
        self._on_trial = False

    async def _swap(self, number: int | None) -> None:
        link, before = self._engine.link, self.head
        if number is None and before is None:
            self._link = link  # it was started with that one
            return
        record = None if number is None else self._history.get(number)
        refused = await self._engine.swap_draft(None if record is None else record.folder, self._adapter)
        if refused is not None:
            logger.warning("learning: head %s is not used%s: %s", number, self._whose, refused)
            self._refused = (*self._refused, number)
            if number == before:  # an engine that was started anew does not take it any more
                self._is_served(None, link)
            return
        self._is_served(record, link)
        if number != before:  # else it is an engine that was started anew
            self.swaps, self._refused = self.swaps + 1, ()
            self.live.swapped(time.time(), number, self._on_trial and self.live.fell)
            self._on_trial, self._before = record is not None and record.parent == before, before
        first = "that came with it" if self._adapter else "of the command line"
        logger.info("learning: drafts%s come from head %s", self._whose, first if number is None else number)

    def _is_served(self, record: HeadRecord | None, link: Any) -> None:
        self.head, self.folder = (None, None) if record is None else (record.number, record.folder)
        self._link = link
