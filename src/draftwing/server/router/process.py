"""The process of one model: a server of its own, at a path that only this user may open."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from draftwing.engine.process.link import EngineDead
from draftwing.engine.process.spawn import Failed, how_it_ended, start_module
from draftwing.errors import GenerationError

CHILD = "draftwing.server.router.child"
SLEEP, WAKE_UP = "sleep", "wake up"  # what is said to it, see `child.Obeying`
GONE = object()  # in place of a message
_SOCKETS, _LOCK = "draftwing-models-", "lock"
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
        self._answers = deque[asyncio.Future[str | None]]()
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

    async def sleep(self) -> None:
        """Has its engine give memory back when it has answered what it was sent. Raises GenerationError where that is
        refused, or EngineDead."""
        await self._do(SLEEP)

    async def wake_up(self) -> None:
        """Has its engine be awake. Raises as `sleep`."""
        await self._do(WAKE_UP)

    async def _do(self, what: str) -> None:
        answer: asyncio.Future[str | None] = self._loop.create_future()
        self._answers.append(answer)
        try:
            self._connection.send(what)
        except OSError:
            self._answers.remove(answer)
            raise EngineDead("its process ended") from None
        if (refused := await asyncio.shield(answer)) is not None:
            raise GenerationError(refused)

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
            message = GONE
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
        if not self._first.done():
            self._first.set_result(message)
        elif message is not GONE and self._answers:
            self._answers.popleft().set_result(message)
        if message is GONE:
            while self._answers:
                self._answers.popleft().set_exception(EngineDead("its process ended"))
            self._gone.set()
            if not self._stopping:
                self._ended()


def socket_folder() -> tuple[Path, BinaryIO]:
    """Returns a folder that only this user may enter, and its lock, which the system ends with this process: by that
    the folders of those that were killed are known, and removed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_SOCKETS}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:  # or another user's, or in use
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_SOCKETS))
    held = (folder / "new").open("wb")
    fcntl.flock(held, fcntl.LOCK_EX)
    (folder / "new").rename(folder / _LOCK)  # now others see it, when it is locked
    return folder, held
