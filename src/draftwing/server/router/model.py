"""One of several models: what it does now, and what it takes."""

from __future__ import annotations

import asyncio
import math
import time

from draftwing.config.model_list import ServedModel
from draftwing.config.options import Options
from draftwing.server.router.memory import Forecast
from draftwing.server.router.process import ModelServer


class Model:
    """One of them, and what it does.

    in_flight: requests that its server has.  closing: it is stopped when it has none.  resting: has it sleep then.
    Further ones wait for either.  sleepers: how many ask for `resting`.  asleep: it has its server, and gave its
    memory back.  removed: its files are being deleted.  used: when it was loaded, or the newest request began or
    ended, seconds of `time.monotonic`.  since: when it was loaded, seconds of `time.time`.  failure: why its last
    start failed, or how its process ended.
    """

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.server: ModelServer | None = None
        self.starting: asyncio.Task[None] | None = None
        self.resting: asyncio.Task[None] | None = None
        self.waiting: list[asyncio.Future[None]] = []  # for the next start, or the one that goes on
        self.ready = self.closing = self.asleep = self.removed = False
        self.in_flight = self.sleepers = 0
        self.used, self.since = -math.inf, 0.0
        self.keep_alive = served.keep_alive
        self.timer: asyncio.TimerHandle | None = None
        self.needs = Forecast(0, 0)  # of the start; once it is loaded, `memory.measured`
        self.pool, self.resident = 0, math.inf  # as `memory.measured` has them, the least that was seen
        self.rests = 0  # bytes that it takes while it sleeps
        self.failure: str | None = None

    @property
    def state(self) -> str:
        """Returns llama.cpp's word, or that it sleeps."""
        if self.server is None:
            return "unloaded" if self.starting is None else "loading"
        if self.asleep:
            return "sleeping" if self.starting is None else "loading"
        return "loading" if not self.ready else "unloading" if self.closing or self.resting else "loaded"

    @property
    def load_timeout(self) -> float:
        """Returns the most seconds that a request waits for it, or that a start of it takes."""
        return float(self.served.arguments.get("load_timeout", Options.load_timeout))

    @property
    def waits_for(self) -> str:
        """Returns what those wait for who wait, in words."""
        if self.server is None or self.asleep:
            return "it waits for room, which models have that are answering or are started before it"
        return "it is still answering what it was asked before" if self.ready else "it is still being loaded"

    @property
    def runs(self) -> bool:
        """Returns whether it has a process, or is going to."""
        return self.server is not None or self.starting is not None

    @property
    def busy(self) -> bool:
        return self.in_flight > 0 or (self.server is not None and not self.ready)

    @property
    def takes_requests(self) -> bool:
        return self.ready and not (self.closing or self.resting or self.asleep)

    @property
    def size(self) -> int:
        """Returns the bytes that it takes at most, or while it sleeps."""
        return self.rests if self.asleep and self.rests else self.needs.all

    def expires(self) -> float:
        """Returns when it is stopped unless a request comes, seconds of `time.time`; never: infinity."""
        return time.time() + self.keep_alive + (0 if self.in_flight else self.used - time.monotonic())
