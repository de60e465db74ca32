"""Hands a request to a model's server and its response to the client, piece by piece as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send

from draftwing.engine.process.link import EngineDead
from draftwing.server.http import DONE, dialect, stream_error
from draftwing.server.kept_streams import ALONE_SECONDS
from draftwing.server.kept_streams import HEADER as KEEP

# Of one connection alone, and what the client's side says for itself.
_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"expect")
)
_OWN = _HOP | {b"date", b"server"}
_CHUNK = 65536  # bytes that are read at once
_STREAMS = (b"text/event-stream", b"application/x-ndjson")
Headers = list[tuple[bytes, bytes]]


class _Response:
    """Reads what comes of the server."""

    def __init__(self, no_body: bool) -> None:
        self.headers: Headers = []
        self.pieces: list[bytes] = []
        self.begun = self.complete = False
        self._no_body = no_body
        self.parser: Any = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.begun = self.parser.get_status_code() >= 200
        self.complete = self.begun and self._no_body
        if not self.begun:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = self.begun

    def taken(self) -> bytes:
        body = b"".join(self.pieces)
        self.pieces.clear()
        return body


async def forward(
    scope: Scope, receive: Receive, send: Send, path: Path, body: bytes, how: Callable[[], Awaitable[str]]
) -> None:
    """Asks the server at `path` what `scope` asks, with this body, and sends its response. A client that goes away ends
    the connection, as it would have ended its own; where the answer is kept for it, which takes the connection for a
    reader, after `ALONE_SECONDS`. how: tells how a server ended that does.

    Raises EngineDead where the server ends before it has answered. Where it ends later a stream says so in its last
    event; another body stays incomplete, for which uvicorn ends the connection, so that clients know.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=_CHUNK)
    except OSError:
        raise EngineDead(await how()) from None
    kept = KEEP.encode() in dict(scope["headers"])
    watcher = asyncio.ensure_future(_gone(receive, ALONE_SECONDS if kept else 0))
    watcher.add_done_callback(lambda _: writer.transport.abort())
    try:
        writer.write(_head(scope, len(body)))
        writer.write(body)
        found, begun = _Response(scope["method"] == "HEAD"), False
        while not found.complete:
            data = await _read(reader)
            if not data:
                if watcher.done():
                    return
                await _broken(scope, send, found.headers if begun else None, await how())
                return
            found.parser.feed_data(data)
            if found.begun and not begun:
                begun = True
                headers = [one for one in found.headers if one[0] not in _OWN]
                status = found.parser.get_status_code()
                await send({"type": "http.response.start", "status": status, "headers": headers})
            piece = found.taken()
            if piece and not found.complete:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            elif found.complete:
                await send({"type": "http.response.body", "body": piece})
    finally:
        watcher.cancel()
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.read(_CHUNK)
    return b""


async def _gone(receive: Receive, seconds: float) -> None:
    """Returns so many seconds after the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    await asyncio.sleep(seconds)


async def _broken(scope: Scope, send: Send, headers: Headers | None, how: str) -> None:
    """headers: of the response, if it has begun."""
    error = EngineDead(how)
    if headers is None:
        raise error
    if dict(headers).get(b"content-type", b"").startswith(_STREAMS):
        text = stream_error(scope["path"], error)
        if dialect(scope["path"]) not in ("anthropic", "responses", "ollama"):
            text += DONE
        await send({"type": "http.response.body", "body": text.encode()})


def _head(scope: Scope, size: int) -> bytes:
    """Returns the request line and headers. Of the client's, those of the connection are left out."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in scope["headers"] if name not in _HOP | {b"content-length"}]
    if size or scope["method"] in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % size)
    return b"\r\n".join([*lines, b"", b""])


async def ask(path: Path, target: str, key: str | None) -> bytes:
    """Returns the body of what the server at `path` answers to GET. key: of a client. Raises EngineDead where it ends
    before."""
    pieces: list[bytes] = []

    async def send(message: Any) -> None:
        pieces.append(message.get("body", b""))

    async def how() -> str:
        return "its process ended"

    scope = {"method": "GET", "path": target, "raw_path": target.encode(), "query_string": b""}
    headers = [(b"host", b"localhost"), *([(b"authorization", b"Bearer " + key.encode())] if key else [])]
    await forward({**scope, "headers": headers}, asyncio.Event().wait, send, path, b"", how)  # type: ignore[arg-type]
    return b"".join(pieces)
