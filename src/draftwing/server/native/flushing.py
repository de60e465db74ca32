"""Flushes the prefix cache once nothing runs: one waits for all who ask for it."""

from __future__ import annotations

import asyncio

from draftwing.server.admission_quota import QueueFull
from draftwing.server.engine_client import AsyncEngine

MAX_WAITING = 32  # who may wait at once
PAUSE_SECONDS = 0.05  # between two looks whether anything runs


class Flushing:
    """Belongs to the running event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._waiting = 0
        self._trying: asyncio.Task[bool] | None = None
        self._running: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return self._waiting

    async def flush(self, seconds: float) -> bool:
        """Returns whether the cache was flushed within so many seconds; 0: now or not. Raises QueueFull where too many
        wait, or EngineDead."""
        if await self._try():
            return True
        if not seconds:
            return False
        if len(self) >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} clients, the most there may be, wait for the cache to be flushed", own=False
            )
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._running)
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
            if not self._waiting and self._running is not None:
                self._running.cancel()
                self._running = None

    async def _try(self) -> bool:
        """Asks the engine, once for all who want to know at the same time."""
        if self._trying is None or self._trying.done():
            self._trying = asyncio.ensure_future(self._engine.flush_cache())
        return await asyncio.shield(self._trying)

    async def _run(self) -> None:
        while not await self._try():
            await asyncio.sleep(PAUSE_SECONDS)
