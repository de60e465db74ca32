"""What a server has by default; what the limits do, over real sockets, is in tests/server/test_attacks.py."""

from __future__ import annotations

import asyncio
import hashlib
import random
import tomllib
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fake_engine import FakeEngine, local
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from draftwing.errors import ConfigError
from draftwing.server.edge.connections import TRIED, LimitedConnection, ReadScheduler
from draftwing.server.uvicorn_server import make_server


def test_the_time_outs_of_a_server_are_those_of_the_docs() -> None:
    """docs/security.md names them."""
    engine = FakeEngine()
    config = make_server(local(engine), engine.tokenizer, [], 5.0, 30000).config
    connection = config.http
    assert isinstance(connection, partial) and connection.func is LimitedConnection
    assert connection.keywords["limit"] == 1024 and config.timeout_keep_alive == 75
    limits = LimitedConnection.header_seconds, LimitedConnection.body_seconds, LimitedConnection.write_seconds
    assert limits == (10, 60, 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["on_body", "data_received", "connection_lost", "send_400_response", "pause_writing"])
def test_a_uvicorn_without_what_is_overridden_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a release could switch limits off unnoticed."""
    monkeypatch.delattr(HttpToolsProtocol, name)
    engine = FakeEngine()
    with pytest.raises(ConfigError, match=rf"uvicorn \d.* has no {name}") as refused:
        make_server(local(engine), engine.tokenizer, [], 5.0, 30000)
    assert TRIED in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((HttpToolsProtocol, name) for name in ("cycle", "pipeline", "connections")),
        *((RequestResponseCycle, name) for name in ("chunked_encoding", "expected_content_length", "message_event")),
    ],
)
def test_so_is_one_without_what_is_used(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kind.__init__

    @wraps(made)
    def without(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        delattr(self, name)

    monkeypatch.setattr(kind, "__init__", without)
    engine = FakeEngine()
    with pytest.raises(ConfigError, match=name):
        make_server(local(engine), engine.tokenizer, [], 5.0, 30000)


def test_the_versions_that_were_tried_are_those_of_the_package() -> None:
    dependencies = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["dependencies"]
    assert TRIED in dependencies


class Sender(asyncio.Transport):
    """Sends as long as it is read, as a client that never waits."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.reads = True
        self.written: list[bytes] = []

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.written.append(data)

    def close(self) -> None:
        pass


def connected(app: Any) -> tuple[Sender, LimitedConnection]:
    """Returns what a connection of the application writes to, and it. On a running event loop."""
    sender, config = Sender(), uvicorn.Config(app, lifespan="off", ws="none")
    config.load()
    connection = LimitedConnection(config=config, server_state=ServerState(), app_state={}, reads=ReadScheduler())
    connection.connection_made(sender)
    return sender, connection


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_client_that_leaves_has_left_all_its_requests(count: int) -> None:
    """The one that runs hears of it, however many came after it, and these are not begun."""
    begun: list[str] = []
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        kind = "http.request"
        while kind == "http.request":
            kind = (await receive())["type"]
        heard.append(kind)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def run() -> list[bytes]:
        sender, connection = connected(app)
        connection.data_received(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % i for i in range(count)))
        for _ in range(10):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        await asyncio.wait_for(asyncio.gather(*connection.tasks), 5)
        return sender.written

    assert asyncio.run(run()) == []
    assert begun == ["/0"] and heard == ["http.disconnect"]


def test_a_connection_whose_turn_is_late_is_not_read_meanwhile() -> None:
    """Else what many of them send piles up until memory is full."""
    engine = FakeEngine()
    config = make_server(local(engine), engine.tokenizer, [], 5.0, 30000).config

    async def run() -> int:
        senders = [Sender() for _ in range(64)]
        reads, made = ReadScheduler(), []
        for sender in senders:
            made.append(LimitedConnection(config=config, server_state=ServerState(), app_state={}, reads=reads))
            made[-1].connection_made(sender)
        body = b"x" * 65_536
        for connection in made:
            connection.data_received(b"POST /generate HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\n")
        taken = 0
        for _ in range(20):  # pieces, in one turn of the event loop
            for connection, sender in zip(made, senders, strict=True):
                if sender.reads:
                    connection.data_received(body)
                    taken += len(body)
        for connection in made:
            connection.connection_lost(None)
        return taken

    taken = asyncio.run(run())
    assert taken <= 64 * 2 * 65_536


@pytest.mark.parametrize(("connections", "pipelined"), [(1, 1), (9, 1), (40, 3)])
def test_of_requests_that_come_at_once_one_begins_in_a_turn(connections: int, pipelined: int) -> None:
    """Whoever is served waits for the work of one of them, not of all; and all of them come, each connection's first
    ones before the second of any."""
    turn, begun = 0, list[tuple[int, str]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append((turn, scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def run() -> None:
        nonlocal turn
        config, reads, made = uvicorn.Config(app, lifespan="off", ws="none"), ReadScheduler(), []
        config.load()
        for _ in range(connections):
            made.append(LimitedConnection(config=config, server_state=ServerState(), app_state={}, reads=reads))
            made[-1].connection_made(Sender())
        for i, connection in enumerate(made):
            connection.data_received(b"".join(b"GET /%d/%d HTTP/1.1\r\n\r\n" % (n, i) for n in range(pipelined)))
        for turn in range(2 * connections * pipelined + 4):  # noqa: B007
            await asyncio.sleep(0)
        for connection in made:
            connection.connection_lost(None)

    asyncio.run(run())
    firsts = [turn for turn, path in begun if path.startswith("/0/")]
    assert len(begun) == connections * pipelined and len(set(firsts)) == connections


UPGRADES = [
    ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__"],  # Java's client
    ["upgrade: websocket", "connection: keep-alive, upgrade", "sec-websocket-key: eA=="],
    ["Connection: upgrade", "Upgrade: TLS/1.0, HTTP/2.0", "x: \u00fc"],
]


@pytest.mark.parametrize("cut", [1, 7, 61, 4096, 10**6])
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_a_request_that_asks_for_another_protocol_is_read_all_the_same(upgrade: list[str], cut: int) -> None:
    """With its body, in whatever pieces it comes, and so are those behind it on the connection."""
    heard: list[tuple[str, str, dict[bytes, bytes], bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        heard.append((scope["method"], scope["path"], dict(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    def request(method: str, path: str, body: bytes, *headers: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: a", *headers]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body

    long = bytes(range(256)) * 40
    sent = [
        request("POST", "/0?a=b", long, *upgrade, f"content-length: {len(long)}"),
        request("GET", "/1", b"", *upgrade),
        request("POST", "/2", b"3\r\nabc\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n", *upgrade, "transfer-encoding: chunked"),
        request("POST", "/3", b"d", "content-length: 1"),
    ]

    async def run() -> list[bytes]:
        sender, connection = connected(app)
        for one in sent:
            for begin in range(0, len(one), cut):
                while not sender.reads:
                    await asyncio.sleep(0)
                connection.data_received(one[begin : begin + cut])
            while len(heard) < sent.index(one) + 1:
                await asyncio.sleep(0)
        connection.connection_lost(None)
        return sender.written

    written = asyncio.run(asyncio.wait_for(run(), 20))
    assert b"".join(written).count(b"HTTP/1.1 200 OK") == len(sent)
    assert [one[:2] for one in heard] == [("POST", "/0"), ("GET", "/1"), ("POST", "/2"), ("POST", "/3")]
    assert [one[3] for one in heard] == [long, b"", b"abc\r\n\r\n", b"d"]
    assert all(b"upgrade" not in one[2] and one[2][b"host"] == b"a" for one in heard)


@pytest.mark.parametrize("seed", range(4))
def test_large_bodies_and_what_comes_behind_them(seed: int) -> None:
    """Of a size that was said, or in chunks, cut anywhere, with the next requests in the same pieces."""
    heard: list[tuple[str, str]] = []  # path, and digest of the body

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        heard.append((scope["path"], hashlib.sha256(body).hexdigest()))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    chance, sent, expected = random.Random(seed), b"", []
    for number in range(12):
        body = chance.randbytes(chance.choice([0, 1, 4095, 4096, 65_535, 65_537, 300_000]))
        expected.append((f"/{number}", hashlib.sha256(body).hexdigest()))
        sent += f"POST /{number} HTTP/1.1\r\nhost: a\r\n".encode()
        if body and chance.random() < 0.3:
            sent += b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        else:
            sent += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)

    async def run() -> None:
        sender, connection = connected(app)
        while sent[(begin := sum(pieces)) :]:
            while not sender.reads:
                await asyncio.sleep(0)
            pieces.append(min(chance.choice([7, 4096, 100_000, 262_144]), len(sent) - begin))
            connection.data_received(sent[begin : begin + pieces[-1]])
        while len(heard) < len(expected):
            await asyncio.sleep(0)
        connection.connection_lost(None)

    pieces: list[int] = []
    asyncio.run(asyncio.wait_for(run(), 20))
    assert heard == expected
