"""Clients of HTTP/1.0, which has no chunks: what has no length ends with its connection."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_CHUNKED = b"transfer-encoding"


def send_plainly(cycle: RequestResponseCycle) -> None:
    """Has the response to such a client be sent as it is. uvicorn, which closes the connection behind it, would send
    chunks; other clients' responses stay as they are."""
    if cycle.scope["http_version"] != "1.0":
        return
    send, unmeasured = cycle.send, False

    async def plain(message: Any) -> None:
        nonlocal unmeasured
        if message["type"] == "http.response.start":
            headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != _CHUNKED]
            message = {**message, "headers": headers}
            unmeasured = all(name.lower() != b"content-length" for name, _ in headers)
            if unmeasured:
                cycle.chunked_encoding = False
        elif unmeasured:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = plain  # type: ignore[method-assign]
