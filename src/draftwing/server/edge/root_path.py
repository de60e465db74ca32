"""Serves under a path that a proxy publishes (`--root-path`), whether the proxy strips it from requests or not."""

from __future__ import annotations

import re

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def rooted(app: ASGIApp, root_path: str | None) -> ASGIApp:
    """Returns the application for requests with the path and without. What is inside never sees it."""
    if root_path is None:
        return app
    prefix = re.compile(re.escape(root_path).replace("/", "/+"))

    async def stripped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        found = prefix.match(scope["path"])
        rest = scope["path"][found.end() :] if found else None
        if rest == "":  # links of a page are relative to its last slash
            query = scope["query_string"].decode("latin-1")
            await RedirectResponse(f"{root_path}/{query and '?'}{query}", 307)(scope, receive, send)
            return
        if rest is not None and rest.startswith("/"):
            scope["path"] = rest  # in place: the access log reads it, too

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message["headers"])
                if headers.get("location", "").startswith("/"):
                    headers["location"] = root_path + headers["location"]
            await send(message)

        await app(scope, receive, sending)

    return stripped
