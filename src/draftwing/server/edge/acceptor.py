"""How connections come in: in turns, so that a crowd that connects at once keeps nobody waiting who is served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)
BACKLOG = 2048  # connections that wait to come in
MAX_ACCEPTS = 64  # connections in a turn
TAKEN = 4  # of these, at most; the others have left
TAKEN_A_SECOND = 200  # besides, for the time since the last turn: where turns are long, one would wait behind many
ESTABLISHED = 1  # a state of Linux's `TCP_INFO`; another one: the client has sent all that it ever will
FULL_SECONDS = 0.5  # until the next one is tried where there are no descriptors
LEFT_SECONDS = 0.005  # until the next one is taken where others have left: to take one costs a millisecond


class Acceptor:
    """Takes the connections of a listening socket, on the running event loop."""

    def __init__(self, sock: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """protocol: makes one for each connection."""
        self._sock, self._protocol, self._loop = sock, protocol, asyncio.get_running_loop()
        self._entering: set[asyncio.Task[None]] = set()
        self._closed: asyncio.TimerHandle | None = None  # until it is opened again
        self._looked = self._loop.time()  # for connections
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._open()

    def close(self) -> None:
        if self._closed is not None:
            self._closed.cancel()
        self._loop.remove_reader(self._sock)

    def _open(self) -> None:
        self._loop.add_reader(self._sock, self._take)

    def _close_for(self, seconds: float) -> None:
        self._loop.remove_reader(self._sock)
        self._closed = self._loop.call_later(seconds, self._open)

    def _take(self) -> None:
        taken, left, now = 0, False, self._loop.time()
        most = TAKEN + int(min(now - self._looked, 1.0) * TAKEN_A_SECOND)
        self._looked = now
        for _ in range(MAX_ACCEPTS):
            try:
                connection, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:
                logger.error("no connection can be accepted: %s", error)
                self._close_for(FULL_SECONDS)
                return
            if _is_there(connection):
                connection.setblocking(False)
                entering = self._loop.create_task(self._enter(connection))
                self._entering.add(entering)
                entering.add_done_callback(self._entering.discard)
                taken += 1
            else:
                connection.close()
                left = True
            if taken == most or (taken and left):
                break
        if left:
            self._close_for(LEFT_SECONDS)

    async def _enter(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except BaseException:
            connection.close()
            with contextlib.suppress(OSError):  # it left
                raise


def _is_there(connection: socket.socket) -> bool:
    """Returns whether the client has not left yet; only Linux knows."""
    info = getattr(socket, "TCP_INFO", None)
    return (
        info is None
        or connection.family == socket.AF_UNIX
        or connection.getsockopt(socket.IPPROTO_TCP, info, 1)[0] == ESTABLISHED
    )
