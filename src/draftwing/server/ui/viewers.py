"""Who looks at the engine, and what they are shown: one snapshot for all of them, once a second.

Nothing runs while nobody looks. A viewer holds at most one snapshot that it has not read yet, so one who is slow skips
some and never makes the server wait or keep more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)
SECONDS = 1.0  # between two snapshots
MAX_VIEWERS = 32
MAX_OF_A_KEY = 8  # viewers with one key

Snapshot = dict[str, Any]


class Viewer:
    """One who looks: the newest snapshot that it has not read. client: the name of its key, if it has one."""

    def __init__(self, client: str) -> None:
        self.client = client
        self._newest: Snapshot | None = None
        self._woken = asyncio.Event()

    def show(self, snapshot: Snapshot | None) -> None:
        """Replaces what was not read. None: nothing comes any more."""
        self._newest = snapshot
        self._woken.set()

    async def next(self) -> Snapshot | None:
        """Waits for a snapshot."""
        await self._woken.wait()
        self._woken.clear()
        return self._newest


class Viewers:
    """Belongs to the event loop."""

    def __init__(self, look: Callable[[], Awaitable[Snapshot | None]], seconds: float = SECONDS) -> None:
        """look: takes a snapshot; None ends all streams, and so does what it raises, which is logged."""
        self._look, self._seconds = look, seconds
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._viewers)

    def enter(self, client: str = "") -> Viewer | None:
        """One more, who is to `leave` in any case; None where there are too many, or too many of this client."""
        own = sum(viewer.client == client for viewer in self._viewers)
        if len(self) >= MAX_VIEWERS or (client and own >= MAX_OF_A_KEY):
            return None
        viewer = Viewer(client)
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Forgets a viewer; does nothing for one who has left."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def watch(self, viewer: Viewer) -> AsyncIterator[Snapshot]:
        """Snapshots for one who has entered, until there are no more; then, or closed early, it has left."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        try:
            while (snapshot := await viewer.next()) is not None:
                yield snapshot
        finally:
            self.leave(viewer)

    async def _run(self) -> None:
        while (snapshot := await self._taken()) is not None:
            for viewer in self._viewers:
                viewer.show(snapshot)
            await asyncio.sleep(self._seconds)
        self._task = None  # whoever comes now begins anew
        for viewer in self._viewers:
            viewer.show(None)

    async def _taken(self) -> Snapshot | None:
        try:
            return await self._look()
        except Exception:
            logger.exception("no more snapshots for viewers of the engine")
            return None
