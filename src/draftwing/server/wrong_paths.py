"""What is wrong with a path or a method that is not served, in a sentence: the route of another server, a base address
with too much in it, a slip."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwing.requests.refusals import suggestion
from draftwing.server.unserved import unserved

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
