"""Flushes the prefix cache once nothing runs: one waits for all who ask for it."""

from __future__ import annotations

import asyncio
import contextlib

from draftwing.engine.process.link import EngineDead
from draftwing.server.admission_quota import QueueFull
from draftwing.server.engine_client import AsyncEngine

MAX_WAITING = 32  # who may wait at once
PAUSE_SECONDS = 0.05  # between two looks whether anything runs


class Flushing:
    """Belongs to the running event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._waiting: set[asyncio.Future[bool]] = set()
        self._trying: asyncio.Task[bool] | None = None
        self._running: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def flush(self, seconds: float) -> bool:
        """Whether the cache was flushed within so many seconds; 0: now or not. Raises QueueFull where too many wait,
        or EngineDead."""
        if await self._try():
            return True
        if not seconds:
            return False
        if len(self) >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} clients, the most there may be, wait for the cache to be flushed", own=False
            )
        flushed = asyncio.get_running_loop().create_future()
        self._waiting.add(flushed)
        self._running = self._running or asyncio.ensure_future(self._run())
        try:
            async with asyncio.timeout(seconds):
                return await flushed
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(flushed)
            if not self._waiting and self._running is not None:
                self._running.cancel()
                self._running = None

    async def _try(self) -> bool:
        """Asks the engine, once for all who want to know at the same time."""
        if self._trying is None or self._trying.done():
            self._trying = asyncio.ensure_future(self._engine.flush_cache())
        return await asyncio.shield(self._trying)

    async def _run(self) -> None:
        error: EngineDead | None = None
        try:
            while not await self._try():
                await asyncio.sleep(PAUSE_SECONDS)
        except EngineDead as dead:
            error = dead
        self._running = None
        for flushed in self._waiting:
            with contextlib.suppress(asyncio.InvalidStateError):  # its time is up, or it leaves
                flushed.set_result(True) if error is None else flushed.set_exception(error)
