"""A model's server that needs no model: it answers with what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

PIECES = [b"data: 1\n\n", b"data: 2\n\n"]


class SocketServer:
    """Answers with what it was asked, and a header of ignored fields as `x-ignored` says; `/stream` in pieces, each
    when `go` is set; `/dies` and `/breaks` not at all, or in part."""

    every: ClassVar[list[SocketServer]] = []

    def __init__(self, arguments: Mapping[str, Any], path: Path, ended: Callable[[], None]) -> None:
        self.name, self.path, self.ended = arguments["model"], path, ended
        self.process = SimpleNamespace(pid=os.getpid())
        self.go, self.left = asyncio.Event(), asyncio.Event()
        self.requests, self.asleep = 0, False
        SocketServer.every.append(self)

    async def ready(self) -> int:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return 0

    async def sleep(self) -> None:
        self.asleep = True

    async def wake_up(self) -> None:
        self.asleep = False

    async def stop(self) -> None:
        self._server.close()
        await asyncio.sleep(0)

    def how_it_ended(self) -> str:
        return "killed by a test"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, target, _ = head[0].split(" ")
        self.requests += 1
        if target.startswith("/dies"):
            writer.close()
            return
        if target.startswith("/breaks"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\ncontent-type: application/json\r\n\r\n{")
            writer.close()
            return
        if "stream" in target:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                for piece in PIECES:
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    going = asyncio.ensure_future(self.go.wait())
                    done, _ = await asyncio.wait(
                        {going, gone := asyncio.ensure_future(reader.read(1))}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if gone in done:
                        self.left.set()
                        return
                    gone.cancel()
                    await asyncio.gather(gone, return_exceptions=True)
                if target.startswith("/v1/whole"):
                    writer.write(b"0\r\n\r\n")
                writer.close()
            return
        if target in ("/v1/models", "/api/ps"):
            card = {"id": self.name, "name": self.name, "context_length": 9, "size_vram": 0}
            card["seen"] = headers.get("authorization")
            listed = json.dumps({"data": [card], "models": [card]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(listed), listed))
            writer.close()
            return
        said = {"name": self.name, "method": method, "target": target, "headers": headers, "body": body.decode()}
        answer = json.dumps(said).encode()
        ignored = f"draftwing-ignored: {headers['x-ignored']}\r\n".encode() if "x-ignored" in headers else b""
        writer.write(
            b"HTTP/1.1 201 Created\r\ncontent-type: application/json\r\nx-own: 7\r\n%scontent-length: %d\r\n\r\n"
            % (ignored, len(answer))
        )
        if method != "HEAD":
            writer.write(answer)
        writer.close()
