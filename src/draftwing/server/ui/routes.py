"""The page at `/`: its files, and the data that it reads besides the API that every client has.

The files hold no data and need no key; what they read does. They are served from memory: no path of a request ever
reaches the file system.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.server.chat import Chats
from draftwing.server.edge.keys import client_name
from draftwing.server.http import EventStream, error_response, event
from draftwing.server.learning import Learning
from draftwing.server.service import Service
from draftwing.server.ui.snapshot import Snapshots, facts
from draftwing.server.ui.viewers import MAX_OF_A_KEY, MAX_VIEWERS, Viewers

ASSETS = "/ui/assets/"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but what this server sends, no script or style inside of a page, nobody's frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered by 304
    "vary": "accept-encoding",
}


class Asset:
    """A file of the page."""

    def __init__(self, body: bytes, kind: str) -> None:
        self.body, self.type = body, kind
        self.etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    @cached_property
    def zipped(self) -> bytes:
        """Returns the body for those who accept gzip; compressed when it is first asked for."""
        return gzip.compress(self.body, mtime=0)


def is_file(path: str) -> bool:
    """Returns whether a path is of the page's files, which need no key."""
    return path == "/" or path.startswith(ASSETS)


def load_assets() -> dict[str, Asset]:
    """Returns the page's files by their path below `assets`."""
    folder = Path(__file__).with_name("assets")
    served = [file for file in folder.rglob("*") if file.suffix in _TYPES]
    return {file.relative_to(folder).as_posix(): Asset(file.read_bytes(), _TYPES[file.suffix]) for file in served}


def add_ui_routes(app: FastAPI, service: Service, chats: Chats, learning: Learning | None = None) -> None:
    assets = load_assets()

    def send(request: Request, asset: Asset) -> Response:
        headers = {**_HEADERS, "etag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(asset.body, media_type=asset.type, headers=headers)
        return Response(asset.zipped, media_type=asset.type, headers={**headers, "content-encoding": "gzip"})

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return send(request, assets[_INDEX])

    @app.get(ASSETS + "{name:path}", include_in_schema=False)
    async def asset(request: Request, name: str) -> Response:
        found = assets.get(name)
        return send(request, found) if found is not None else error_response(request, 404, "there is no such file")

    @app.get("/ui/info")
    async def info() -> dict[str, Any]:
        return facts(service, chats.knows_effort)

    viewers = Viewers(Snapshots(service, learning).take)

    @app.get("/ui/engine")
    async def engine(request: Request) -> Response:
        """Server-sent events, one a second, for as long as the client reads; docs/page.md has their fields."""
        viewer = viewers.enter(client_name())
        if viewer is None:
            limit = f"{MAX_VIEWERS} clients may look at the engine at once, {MAX_OF_A_KEY} with one key"
            return error_response(request, 503, f"{limit}; close a page that does")

        async def events() -> AsyncIterator[str]:
            async for snapshot in viewers.watch(viewer):
                yield event(snapshot)

        return EventStream(request.url.path, events(), lambda: viewers.leave(viewer))
