"""Paths of requests: what is taken off them, and what is wrong with one that is not served, in a sentence: the route of
another server, a base address with too much in it, a slip. `UNSERVED` makes the answers, a page (docs/routes.md) and
the tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.requests.refusals import suggestion

_MAX_SHOWN = 200  # characters of a path
_MAX_PARTS = 16  # of a path that is looked at
_SLASHES: Final = re.compile("//+")


class Refusal(NamedTuple):
    """meant: the path that the client means, which tells its dialect.  allow: methods that are served there."""

    status: int
    message: str
    meant: str
    allow: tuple[str, ...]


class CleanPaths:
    """Takes repeated slashes, and one at the end, as if they were not there: clients put a base address before a path,
    and few follow a redirect of what they POST. Has to be outside of all that looks at a path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and ("//" in scope["path"] or scope["path"].endswith("/")):
            scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
        await self._app(scope, receive, send)


class Routes:
    """Those of the application."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = [route for route in routes if isinstance(route, Route)]

    def refusal(self, method: str, path: str) -> Refusal:
        """Returns why a request was not taken, and what to ask instead."""
        asked, methods = f"{method} {path[:_MAX_SHOWN]}", self._methods(path)
        row = unserved(path)
        if row is not None:
            return Refusal(404, f"{asked} is not served ({row.whose}): {row.instead}", path, ())
        if methods:
            return Refusal(405, f"{asked}: the method must be {' or '.join(methods)}", path, methods)
        for prefix, rest in _split(path):
            if methods := self._methods(rest):
                there = f"{method if method in methods else ' or '.join(methods)} {rest} is there"
                return Refusal(404, f"{asked}: {_address(prefix, rest)}; {there}", rest, ())
        if hint := suggestion(path.lower(), [route.path for route in self._routes]):
            return Refusal(404, f"{asked} is not served{hint}", path, ())
        for prefix, rest in _split(path):
            if row := unserved(rest):
                there = f"{rest} is not served ({row.whose}): {row.instead}"
                return Refusal(404, f"{asked}: {_address(prefix, rest)}; {there}", rest, ())
        return Refusal(404, f"{asked} is not served; /openapi.json lists what there is", path, ())

    def _methods(self, path: str) -> tuple[str, ...]:
        """Returns those that a path is served with, HEAD left out."""
        found = {method for route in self._routes if route.path_regex.match(path) for method in route.methods or ()} - {
            "HEAD"
        }
        return tuple(sorted(found, key=lambda one: (one != "POST", one)))


def _split(path: str) -> Iterator[tuple[str, str]]:
    """Yields a path in two, the longest end first."""
    parts = path.split("/")[:_MAX_PARTS]
    for i in range(2, len(parts)):
        yield "/".join(parts[:i]), "/" + "/".join(parts[i:])


def _address(prefix: str, rest: str) -> str:
    if prefix.endswith("/v1") and rest.startswith("/v1/"):
        return "the base address ends in /v1 already, which is part of this path too"
    return f"the base address has {prefix[:_MAX_SHOWN]} too much"


class Unserved(NamedTuple):
    """Routes of another server that this one does not have; a row of `unserved.txt`, which says how it is written."""

    whose: str
    paths: str
    instead: str


def _rows() -> Iterator[Unserved]:
    for line in Path(__file__).with_name("unserved.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield Unserved(*line.split(" | "))


UNSERVED = tuple(_rows())


@cache
def _patterns() -> list[tuple[re.Pattern[str], Unserved]]:
    return [(re.compile(_expression(path)), row) for row in UNSERVED for path in row.paths.split()]


def _expression(path: str) -> str:
    escaped = re.escape(path)
    return escaped.replace(r"/\*\*", "(?:/.*)?").replace(r"\*", "[^/]+")


def unserved(path: str) -> Unserved | None:
    """Returns the row of the first pattern that a path has."""
    return next((row for pattern, row in _patterns() if pattern.fullmatch(path)), None)


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
