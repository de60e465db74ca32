"""Waiting for models to change, with work that is given up when it is not wanted any more, and starts in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from draftwing.engine.process.link import EngineDead

T = TypeVar("T")


class Changes:
    """Tells who waits that a request has come or gone, or that a model was started or stopped. Belongs to the running
    event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)

    async def next(self) -> None:
        """Returns when something has changed."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(change)
        try:
            await change
        finally:
            self._waiting.discard(change)

    async def do(self, work: Coroutine[Any, Any, None], wanted: Callable[[], bool]) -> bool:
        """Returns whether some work was done; it is cancelled when it is not wanted any more."""

        async def unwanted() -> None:
            while wanted():
                await self.next()

        task, watcher = asyncio.create_task(work), asyncio.create_task(unwanted())
        try:
            await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (task, watcher):
                one.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)
        if task.cancelled():
            return False
        task.result()
        return True


async def in_time(seconds: float, start: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a start. Raises EngineDead for one that takes longer, or has a TimeoutError of its own."""
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await start
    except TimeoutError as error:
        own = f"TimeoutError: {str(error) or 'of something that it waited for'}"
        why = f"it was not ready within {seconds:g} s (--load-timeout)" if timeout.expired() else own
        raise EngineDead(why) from error
