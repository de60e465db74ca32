"""Keeps finished exchanges in the folder of `--learn`: the event loop puts them into a queue, a thread writes them."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from draftwing.config.options import Options
from draftwing.errors import DraftwingError
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import ANONYMOUS, Exchange, TrafficLimits, TrafficStore
from draftwing.server.telemetry.observer import AnswerRecord, Watcher

logger = logging.getLogger(__name__)
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
    """Keeps what requests asked and were answered, unless they opt out (`GenerationRequest.learn`)."""

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
        if not request.learn or answer.reason not in COMPLETE:
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
