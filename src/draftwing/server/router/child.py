"""What `ModelServer` starts: a server of one model, that of `draftwing serve`, at a path in place of a port."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from draftwing.config.options import Options
from draftwing.engine.process.spawn import Failed, joined
from draftwing.errors import DraftwingError
from draftwing.log import configure_logging
from draftwing.server.router.process import SLEEP

if TYPE_CHECKING:
    from draftwing.engine.admission import EngineInfo
    from draftwing.server.engine_client import AsyncEngine


def host_pool(info: EngineInfo) -> int:
    """Returns what it sends once requests are taken (`Failed` in its place): the bytes of the host's that the KV cache
    takes when all of it has been used. Those of `--hicache-size` beneath a GPU's are taken by then."""
    options = info.options
    return 0 if info.stored["on_device"] else info.pool_bytes * options.tp_size + int(options.hicache_size * 1e9)


class Obeying:
    """Has the engine sleep and wake up as the front says: `SLEEP` or `WAKE_UP`, to each of which an answer goes back
    when that is done, None or in words why it is not. The pipe needs no key. Belongs to the running event loop."""

    def __init__(self, connection: Connection, engine: AsyncEngine) -> None:
        self._connection, self._engine = connection, engine
        self._loop = asyncio.get_running_loop()
        self._tasks = set[asyncio.Task[None]]()
        self._loop.add_reader(connection.fileno(), self._heard)

    def _heard(self) -> None:
        try:
            asked = self._connection.recv()
        except (EOFError, OSError):  # the front has gone, and the system ends this process
            self._loop.remove_reader(self._connection.fileno())
            return
        task = self._loop.create_task(self._do(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, asked: str) -> None:
        refused = None
        try:
            await (self._engine.sleep() if asked == SLEEP else self._engine.wake_up())
        except DraftwingError as error:
            refused = str(error)
        self._connection.send(refused)


def main() -> int:
    (connection,) = joined(sys.argv)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which it is stopped; the server has a handler of its own
    arguments, path = connection.recv()
    configure_logging(arguments.get("log_level", "info"), arguments.get("log_format", "text"))
    try:
        from draftwing.server.run import serve

        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)

            def ready(engine: AsyncEngine) -> None:
                connection.send(host_pool(engine.info))
                Obeying(connection, engine)

            serve(Options.from_kwargs(**arguments).resolve(), sock, ready)
    except DraftwingError as error:
        connection.send(Failed.of(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
