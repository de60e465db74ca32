"""The process of one model: a server of its own, at a path that only this user may open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftwing.engine.process.link import EngineDead
from draftwing.engine.process.spawn import Failed, how_it_ended, start_module

CHILD = "draftwing.server.router.child"
STOP_SECONDS = 15.0  # for a server without requests to end; then it is killed


class ModelServer:
    """Belongs to the running event loop. When the front's process ends, in whatever way, the system kills this one."""

    def __init__(
        self, arguments: Mapping[str, Any], path: Path, ended: Callable[[], None], module: str = CHILD
    ) -> None:
        """Starts it. arguments: by `Options.from_kwargs`.  path: that it listens on.  ended: is called when it has
        ended, and not by `stop`."""
        self.path, self._ended = path, ended
        self.process, (self._connection,) = start_module(module, 1, new_session=True)
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[Any] = self._loop.create_future()
        self._gone = asyncio.Event()
        self._stopping = False
        with contextlib.suppress(OSError):  # one that is gone already is noticed in a moment
            self._connection.send((dict(arguments), str(path)))
        self._loop.add_reader(self._connection.fileno(), self._heard)

    async def ready(self) -> int:
        """Returns when requests are taken: `child.host_pool`. Raises ConfigError, CheckpointError or EngineDead."""
        first = await asyncio.shield(self._first)
        if isinstance(first, Failed):
            raise first.error(EngineDead)
        if isinstance(first, int):
            return first
        raise EngineDead(f"its process ended before it was ready: {await asyncio.to_thread(self.how_it_ended)}")

    def how_it_ended(self) -> str:
        """Returns in words how the process has ended; blocks for a moment."""
        return how_it_ended(self.process)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends it; requests that it has get an error after its time to drain."""
        self._stopping = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), seconds)
        self.kill()
        await self._gone.wait()
        await asyncio.to_thread(self.process.wait)
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def reload(self) -> None:
        """Has it read its keys again."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Ends the process, and so those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def _heard(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            message = None
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
        if not self._first.done():
            self._first.set_result(message)
        if message is None:
            self._gone.set()
            if not self._stopping:
                self._ended()
