"""What a front hands on: of a server that answers before it has read what it was sent."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from draftwing.server.edge.acceptor import Acceptor
from draftwing.server.edge.connections import LimitedConnection, ReadScheduler
from draftwing.server.router.proxy import forward


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    """Answers as a path that is not served does, whatever the body is."""
    headers = [(b"content-length", b"4"), (b"x-path", scope["raw_path"])]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": b"none"})


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Where such a server listens, in a thread of its own."""
    path, loop = tmp_path / "socket", asyncio.new_event_loop()
    config = uvicorn.Config(refuses, lifespan="off", ws="none")
    config.load()
    state, reads = ServerState(), ReadScheduler()

    def connection() -> LimitedConnection:
        return LimitedConnection(config=config, server_state=state, app_state={}, reads=reads, _loop=loop)

    async def listen(sock: socket.socket) -> Acceptor:
        return Acceptor(sock, connection)

    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        acceptor = loop.run_until_complete(listen(sock))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        yield path
        loop.call_soon_threadsafe(acceptor.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("pause", [0.0, 0.01])
@pytest.mark.parametrize("size", [0, 1, 5_000, 200_000, 3_000_000])
def test_an_answer_that_comes_before_the_body_was_read_is_handed_on(
    path: Path, size: int, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pause: seconds behind each part that the front sends, in which the server may answer and end the connection."""
    write = asyncio.StreamWriter.write

    def slowly(self: asyncio.StreamWriter, data: Any) -> None:
        write(self, data)
        time.sleep(pause)

    monkeypatch.setattr(asyncio.StreamWriter, "write", slowly)

    async def ask(number: int) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def how() -> str:
            return "its connection broke"

        scope = {"method": "POST", "path": "/no", "raw_path": b"/no/%d" % number, "query_string": b""}
        scope["headers"] = [(b"host", b"localhost")]
        await forward(scope, asyncio.Event().wait, send, path, bytes(size), how)  # type: ignore[arg-type]
        return sent

    async def run() -> list[list[Any]]:
        return [await ask(number) for number in range(8)]

    for number, sent in enumerate(asyncio.run(asyncio.wait_for(run(), 60))):
        assert sent[0]["status"] == 404 and (b"x-path", b"/no/%d" % number) in sent[0]["headers"]
        assert b"".join(message.get("body", b"") for message in sent[1:]) == b"none"
