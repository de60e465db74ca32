"""Responses, whatever they hold: which clients use a path, and errors, events and JSON in their dialect.

JSON is made by pydantic's encoder, in an eighth of the time of Python's own. An encoder keeps the interpreter's lock
until it ends. What is large is encoded in a thread, and in pieces, so that the event loop gets its turn between two
of them.
"""

from __future__ import annotations

import logging
import re
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwing.engine.process.link import EngineDead
from draftwing.errors import GenerationError
from draftwing.server.quotas import QueueFull

if TYPE_CHECKING:
    pass

_PIECE = 1024  # numbers and texts: a tenth of a millisecond
# Ends of lines to `str.splitlines`, by which clients of streams find events, and not to JSON, which escapes the others.
_LINE_ENDS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029"]


def encode(data: Any, large: bool = False) -> bytes:
    """Returns JSON in UTF-8 without white space, in one line whatever a reader takes for the end of one; null for
    numbers that JSON does not have. Raises ValueError for texts with lone surrogates. large: in pieces."""
    return b"".join(_pieces(data)) if large else _at_once(data)


def _at_once(data: Any) -> bytes:
    text = to_json(data, inf_nan_mode="null")
    for end, escaped in _LINE_ENDS:
        if end in text:
            text = text.replace(end, escaped)
    return text


def _pieces(data: Any) -> Iterator[bytes]:
    if not isinstance(data, dict | list) or _size(data) <= _PIECE:
        yield _at_once(data)
    elif isinstance(data, dict):
        before = b"{"
        for name, value in data.items():
            yield before + _at_once(str(name)) + b":"
            yield from _pieces(value)
            before = b","
        yield b"}"
    else:
        before = b"["
        for together in _parts(data):
            if len(together) == 1:
                yield before
                yield from _pieces(together[0])
            else:
                yield before + _at_once(together)[1:-1]
            before = b","
        yield b"]"


def _parts(data: list[Any]) -> Iterator[list[Any]]:
    """Yields a list as lists that are small, or have one entry."""
    if not any(issubclass(kind, dict | list) for kind in set(map(type, data))):  # as vectors are, and token ids
        yield from (data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE))
        return
    begin = total = 0
    for i, entry in enumerate(data):
        size = _size(entry)
        if i > begin and total + size > _PIECE:
            yield data[begin:i]
            begin, total = i, 0
        total += size
    yield data[begin:]


def _size(data: Any) -> int:
    """About how many numbers and texts are in it: entries of a list are as large as the first or the last, one of which
    may have nothing to tell."""
    if isinstance(data, dict):
        return sum(map(_size, data.values())) + 1
    if isinstance(data, list) and data:
        ends = data if len(data) == 1 else (data[0], data[-1])  # the same one twice would double at each depth
        return len(data) * max(map(_size, ends))
    return 1


logger = logging.getLogger(__name__)

IGNORED = "draftwing-ignored"  # a header
_MAX_IGNORED = 4096  # characters of the header that names fields without effect; clients take 8 KB of all headers

# The names that OpenAI's clients know, and Anthropic's.
_TYPES = {
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    403: ("PermissionDeniedError", "permission_error"),
    404: ("NotFoundError", "not_found_error"),
    405: ("MethodNotAllowedError", "invalid_request_error"),
    413: ("BadRequestError", "request_too_large"),
    415: ("BadRequestError", "invalid_request_error"),
    429: ("RateLimitError", "rate_limit_error"),
    503: ("ServiceUnavailableError", "api_error"),
}


def unmarked(body: bytes) -> bytes:
    """Returns JSON without the mark of UTF-8 (BOM) that some programs write before it, as RFC 8259 lets readers do."""
    return body.removeprefix(BOM_UTF8)


def error_body(path: str, status: int, message: str, param: str | None = None, code: Any = None) -> dict[str, Any]:
    """Returns the documented shape: Anthropic's under /v1/messages; elsewhere under /v1 OpenAI's, nested, and next to
    it the same flat, as SGLang has it; for native endpoints the nested message alone, for Ollama's the flat one."""
    kind = dialect(path)
    name, anthropic_name = _TYPES.get(status, ("InternalServerError", "api_error"))
    if kind == "anthropic":
        about: dict[str, Any] = {"type": anthropic_name, "message": message}
        known = {"details": {"error_code": code}} if code and code.startswith("thread_") else {}
        return {"type": "error", "error": about | known}
    if kind == "native":
        return {"error": {"message": message}}
    if kind == "ollama":
        return {"error": message}
    about = {"message": message, "type": name, "param": param, "code": code or status}
    return {"error": about, "object": "error", **about}


def dialect(path: str) -> Literal["openai", "responses", "anthropic", "ollama", "native"]:
    """Returns whose clients use a path. The paths of the dialects are there with and without /v1."""
    short = path.removeprefix("/v1")
    if path.startswith("/api/"):
        return "ollama"
    if short.startswith("/messages"):
        return "anthropic"
    if short.startswith("/responses"):
        return "responses"
    known = ("/chat/completions", "/completions", "/models")
    return "openai" if path != short or short.startswith(known) else "native"


def error_response(
    request: Request, status: int, message: str, param: str | None = None, code: Any = None, path: str | None = None
) -> Response:
    """path: that tells the dialect, where it is not the one that was asked for."""
    path = spoken_path(request, path)
    return json_response(encode(error_body(path, status, message, param, code)), status)


def spoken_path(request: Request, path: str | None = None) -> str:
    """Returns a path of the dialect in which a request is answered: Anthropic's clients say that they are."""
    path = path or request.url.path
    return "/v1/messages" if "anthropic-version" in request.headers and dialect(path) == "openai" else path


def json_response(content: bytes, status: int = 200) -> Response:
    """Returns a response of `content`, which is JSON."""
    return Response(content, status, media_type="application/json")


def failure(error: Exception) -> tuple[int, str]:
    """Returns the status and the message of what is no fault of the request."""
    if isinstance(error, QueueFull):
        return 429 if error.own else 503, str(error)
    if isinstance(error, EngineDead | GenerationError):
        return 503 if isinstance(error, EngineDead) else 500, str(error)
    return 500, "internal error; the server's log has the cause"


def stream_error(path: str, error: Exception) -> str:
    """Returns an error that comes when the response has begun, as an event of the stream."""
    (status, message), kind = failure(error), dialect(path)
    if kind == "anthropic":
        return named_event("error", error_body(path, status, message))
    if kind == "responses":
        return named_event("error", {"code": "server_error", "message": message, "param": None})
    if kind == "openai":
        return event(error_body(path, status, message))
    if kind == "ollama":
        return line(error_body(path, status, message))
    return event({"error": {"message": message, "type": "server_error", "code": status, "retryable": False}})


def event(data: Any, large: bool = False) -> str:
    """Returns one server-sent event. large: see `encode`."""
    return f"data: {encode(data, large).decode()}\n\n"


def named_event(name: str, data: dict[str, Any], large: bool = False) -> str:
    """Returns one server-sent event of a known type, which its data repeats. large: see `encode`."""
    return f"event: {name}\n{event({'type': name, **data}, large)}"


def line(data: Any, large: bool = False) -> str:
    """Returns one line of a stream of JSON, as Ollama's clients read it. large: see `encode`."""
    return f"{encode(data, large).decode()}\n"


DONE = "data: [DONE]\n\n"


class Closing(Response):
    """A response whose `close` runs however it ends, even when it never began."""

    close: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


class EventStream(Closing, StreamingResponse):
    """Server-sent events, or lines of JSON."""

    def __init__(self, path: str, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        kind = "application/x-ndjson" if dialect(path) == "ollama" else "text/event-stream"
        super().__init__(guarded(path, events), media_type=kind, headers={"cache-control": "no-cache"})
        self.close = close


class Whole(Closing):
    """JSON: a client that reads slowly holds all of it until it was sent, or cannot be."""

    def __init__(self, content: bytes, close: Callable[[], None]) -> None:
        super().__init__(content, media_type="application/json")
        self.close = close


async def guarded(path: str, events: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """Yields the events of a path, what they raise as the last one, and where the dialect has it the end."""
    try:
        async for text in events:
            yield text
    except (EngineDead, GenerationError, QueueFull) as error:
        yield stream_error(path, error)
    except Exception as error:
        logger.exception("a stream of %s ended by an exception", path)
        yield stream_error(path, error)
    if dialect(path) not in ("anthropic", "responses", "ollama"):  # their last event says that it is the last
        yield DONE


def with_ignored_header(response: Response, ignored: Sequence[str]) -> Response:
    """Returns the response with a header that names fields which had no effect."""
    if ignored:
        # Of tools, too, which clients choose: what a header cannot hold is left out of the names.
        names = re.sub(r"[^!-~ ]", "", ", ".join(ignored))
        response.headers[IGNORED] = names[:_MAX_IGNORED]
    return response
