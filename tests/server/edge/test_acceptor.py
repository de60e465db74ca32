"""How connections come in."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from draftwing.server.edge.acceptor import Acceptor


@pytest.mark.parametrize(("pause", "turns"), [(0.05, 8), (0.2, 4)])
async def test_who_comes_is_not_behind_all_others_for_many_long_turns(pause: float, turns: int) -> None:
    """Where each turn takes so long, sixty who came together are let in within some turns, not a few in each."""
    made: list[asyncio.Protocol] = []

    def protocol() -> asyncio.Protocol:
        made.append(asyncio.Protocol())
        return made[-1]

    with contextlib.ExitStack() as open_sockets:
        sock = open_sockets.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        acceptor = Acceptor(sock, protocol)
        for _ in range(60):
            client = open_sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(sock.getsockname())
        for _ in range(2 * turns):  # a connection that was taken is made in the next turn
            time.sleep(pause)
            await asyncio.sleep(0)
        acceptor.close()
        assert len(made) == 60
