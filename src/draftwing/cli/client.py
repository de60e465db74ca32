"""A small HTTP client of the server: JSON in, JSON or a stream of events out."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from draftwing.errors import DraftwingError


class ServerError(DraftwingError):
    """The server cannot be reached, or refused a request."""


class Client:
    """Speaks to the server at `url`; may be used by several threads, each request has a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        wrong = ServerError(f"expected a URL such as http://127.0.0.1:30000; found {url!r}")
        try:
            parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
            _ = parts.port  # raises where it is none
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self._parts, self._timeout = parts, timeout
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._base}"
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, path: str, *place: str | int) -> Any:
        """Returns what the answer holds, at a place within. Raises ServerError, also where there is no such place."""
        with self._answer("GET", path, None) as answer:
            return part(json.load(answer), place, self._url + path)

    def post(self, path: str, body: Mapping[str, Any], *place: str | int) -> Any:
        """Returns as `get`."""
        with self._answer("POST", path, body) as answer:
            return part(json.load(answer), place, self._url + path)

    def flush_cache(self) -> None:
        with self._answer("POST", "/flush_cache?timeout=10", {}):
            pass

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the data of each event until [DONE]; raises ServerError for an error among them."""
        with self._answer("POST", path, {**body, "stream": True}) as answer:
            for line in answer:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerError(_message(event, "the stream broke off"))
                    yield event
        raise ServerError("the stream ended before its end was announced")

    @contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None
        with closing(kind(self._parts.hostname, self._parts.port, timeout=self._timeout)) as connection:
            try:
                text = None if body is None else json.dumps(body)
                connection.request(method, self._base + path, text, self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    raise ServerError(_message(answer.read(), f"status {answer.status}"))
                yield answer
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"no answer from {self._parts.geturl()}: {error or type(error).__name__}") from None
            except ValueError:
                raise ServerError(f"expected JSON of {self._url}{path}; another program may run there") from None


def part(found: Any, place: Sequence[str | int], where: str) -> Any:
    """Returns what stands at a place in what a server has answered. Raises ServerError. where: its address."""
    if not isinstance(found, dict):
        raise ServerError(f"expected an object of JSON of {where}; another program may run there")
    for name in place:
        try:
            found = found[name]
        except (LookupError, TypeError):
            missing = ".".join(map(str, place))
            raise ServerError(f"expected {missing} in the answer of {where}; another program may run there") from None
    return found


def _message(body: Any, otherwise: str) -> str:
    """Returns what an error body says, in either of the server's shapes."""
    if isinstance(body, bytes):
        try:
            body = json.loads(body)
        except ValueError:
            return otherwise
    for part in (body, body.get("error") if isinstance(body, dict) else None):
        if isinstance(part, dict) and isinstance(part.get("message"), str):
            return str(part["message"])
    return otherwise
