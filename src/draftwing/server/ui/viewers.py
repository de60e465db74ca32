"""Who looks at the engine, and what they are shown: one snapshot for all of them, once a second.

Nothing runs while nobody looks. Nothing is kept for a viewer: one who is slow skips snapshots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)
SECONDS = 1.0  # between two snapshots
MAX_VIEWERS = 32  # of all keys together: each makes an event a second
MAX_OF_A_KEY = 8  # viewers with one key

Snapshot = dict[str, Any]


class Viewers:
    """Belongs to the event loop."""

    def __init__(self, look: Callable[[], Awaitable[Snapshot | None]], seconds: float = SECONDS) -> None:
        """look: takes a snapshot; None ends all streams, and so does what it raises, which is logged."""
        self._look, self._seconds = look, seconds
        self._viewers: dict[object, str] = {}  # with the names of their keys
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Snapshot | None]  # the next snapshot, while there is a task

    def __len__(self) -> int:
        return len(self._viewers)

    def enter(self, client: str = "") -> object | None:
        """Returns one more viewer, who is to `leave` in any case; None where there are too many, or too many of this
        client. client: the name of its key, if it has one."""
        own = list(self._viewers.values()).count(client)
        if len(self) >= MAX_VIEWERS or (client and own >= MAX_OF_A_KEY):
            return None
        viewer = object()
        self._viewers[viewer] = client
        return viewer

    def leave(self, viewer: object) -> None:
        """Forgets a viewer; does nothing for one who has left."""
        self._viewers.pop(viewer, None)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def watch(self, viewer: object) -> AsyncIterator[Snapshot]:
        """Snapshots for one who has entered, until there are no more; then, or closed early, it has left."""
        if self._task is None:
            self._next = asyncio.get_running_loop().create_future()
            self._task = asyncio.ensure_future(self._run())
        try:
            while (snapshot := await asyncio.shield(self._next)) is not None:
                yield snapshot
        finally:
            self.leave(viewer)

    async def _run(self) -> None:
        while (snapshot := await self._taken()) is not None:
            shown, self._next = self._next, asyncio.get_running_loop().create_future()
            shown.set_result(snapshot)
            await asyncio.sleep(self._seconds)
        self._task = None  # whoever comes now begins anew
        self._next.set_result(None)

    async def _taken(self) -> Snapshot | None:
        try:
            return await self._look()
        except Exception:
            logger.exception("no more snapshots for viewers of the engine")
            return None
