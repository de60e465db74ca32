"""Bodies in and errors out: what every endpoint shares, whatever it generates."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwing.engine.process.link import EngineDead
from draftwing.errors import GenerationError, NotFound, RequestError
from draftwing.requests.grammar_field import inlined
from draftwing.server.admission_quota import RETRY_SECONDS, QueueFull
from draftwing.server.body_refusals import Digits, body_refusal
from draftwing.server.json_encoding import encode
from draftwing.server.parts import MAX_PARTS, check_parts
from draftwing.server.schema import GenerationBody
from draftwing.server.wrong_paths import Routes

if TYPE_CHECKING:
    from draftwing.server.service import Generation, Service

logger = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
A = TypeVar("A", bound=GenerationBody)

LEARN_HEADER = "x-draftwing-learn"  # with one of these, as `"learn": false` in the body
_OFF = ("off", "false", "no", "0")
_MAX_IGNORED = 4096  # characters of the header that names fields without effect; clients take 8 KB of all headers
SMALL = 65_536  # bytes of a body that is read at once; one of 4 MB may take 0.2 s
_MAX_ERRORS = 1000  # each takes time and memory

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


def _failure(error: Exception) -> tuple[int, str]:
    """Returns the status and the message of what is no fault of the request."""
    if isinstance(error, QueueFull):
        return 429 if error.own else 503, str(error)
    if isinstance(error, EngineDead | GenerationError):
        return 503 if isinstance(error, EngineDead) else 500, str(error)
    return 500, "internal error; the server's log has the cause"


def stream_error(path: str, error: Exception) -> str:
    """Returns an error that comes when the response has begun, as an event of the stream."""
    (status, message), kind = _failure(error), dialect(path)
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


def install_error_handlers(app: FastAPI) -> None:
    """To be called when the application has its routes."""
    routes = Routes(app.routes)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        status = 404 if isinstance(error, NotFound) else 400
        return error_response(request, status, str(error), error.param, error.code)

    async def query(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = body_refusal([e | {"loc": e["loc"][1:]} for e in error.errors()], dict(request.query_params))
        return error_response(request, 400, str(found), found.param)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405):  # of the router
            refusal = routes.refusal(request.method, request.url.path)
            response = error_response(request, refusal.status, refusal.message, path=refusal.meant)
            if refusal.allow:
                response.headers["allow"] = ", ".join(refusal.allow)
            return response
        message = f"{error.detail}: {request.method} {request.url.path[:200]}"
        response = error_response(request, error.status_code, message)
        response.headers.update(error.headers or {})
        return response

    async def failed(request: Request, error: Exception) -> Response:
        response = error_response(request, *_failure(error))
        if isinstance(error, QueueFull):
            response.headers["retry-after"] = str(RETRY_SECONDS)
        return response

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(RequestValidationError, query)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, disconnected)
    for kind in (EngineDead, QueueFull, GenerationError, Exception):
        app.add_exception_handler(kind, failed)


@cache  # to make them takes most of the time that an application does
def schema(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the body's schema for /openapi.json: bodies are read by hand, so FastAPI does not know it."""
    body = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = body.pop("$defs", {})
    for part in (body, *definitions.values()):
        # Fields of any type are those that are not built, or have no effect: nothing to advertise.
        known = {name: field for name, field in part["properties"].items() if field.keys() - {"default", "title"}}
        part["properties"] = known
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(body, definitions)}}}}


@asynccontextmanager
async def read_generation(request: Request, model: type[A]) -> AsyncIterator[A]:
    """Reads a body that asks for answers, which counts as one that waits until they are asked for. Raises QueueFull,
    before the body is looked at, where there is no room."""
    with ExitStack() as place:
        body = await read_body(request, model, place)
        if request.headers.get(LEARN_HEADER, "").strip().lower() in _OFF:
            body.learn = False
        body.place.push(place)
        yield body


async def read_body(request: Request, model: type[M], place: ExitStack | None = None) -> M:
    """Returns the body as `model`. Raises RequestError, naming the field, for anything that is not one.

    place: see `read_generation`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json and not _may_leave_out_its_type(request):
        raise RequestError(f"the content type must be application/json; found {kind[:80]!r}", "content-type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HTTPException(415, "the body must not be compressed")
    service: Service = request.app.state.service
    if place is not None:
        service.check_room(1, held=0)
    body = await request.body()
    if place is not None:  # not before: who sends slowly takes no place from others
        place.enter_context(service.preparing())
    inline = len(body) <= SMALL
    found = _read(body, model, service) if inline else await service.pools.read(lambda: _read(body, model, service))
    service.check_model(getattr(found, "model", None))
    return found


def _may_leave_out_its_type(request: Request) -> bool:
    """Returns whether a body need not say that it is JSON: Ollama's users send it by curl, which calls it a form. A
    browser tells of the page that sends a form."""
    from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    return dialect(request.url.path) == "ollama" and not from_page


def _read(body: bytes, model: type[M], service: Service) -> M:
    check_parts(body, MAX_PARTS, 2 * service.countable)
    try:
        found = model.model_validate_json(body)
        _ = found.ignored if isinstance(found, GenerationBody) else ()
        return found
    except ValidationError as error:
        if error.error_count() > _MAX_ERRORS:
            raise RequestError(f"the body has {error.error_count()} fields or values that are wrong", "body") from None
        # Without the input: it may be huge, or hold what no response can.
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        given = None if errors[0]["type"] == "json_invalid" else json.loads(body, parse_int=Digits)
        raise body_refusal(errors, given, model) from None


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which is cancelled when the client goes away. The body has been read before."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for waiting in (task, watcher):
            waiting.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        super().__init__(_guarded(path, events), media_type=kind, headers={"cache-control": "no-cache"})
        self.close = close


class Whole(Closing):
    """JSON: a client that reads slowly holds all of it until it was sent, or cannot be."""

    def __init__(self, content: bytes, close: Callable[[], None]) -> None:
        super().__init__(content, media_type="application/json")
        self.close = close


async def _guarded(path: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
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


class Rendering(Protocol):
    """A generation as the response of a dialect."""

    generation: Generation

    def body(self) -> Any:
        """Returns the response to a finished generation."""

    def events(self) -> AsyncIterator[str]:
        """Yields server-sent events while it runs."""


async def respond(request: Request, rendering: Rendering, stream: bool | None, echoed: int = 0) -> Response:
    """Sends the response as events or at once; the generation is aborted when the client goes away. A header names
    fields that had no effect. echoed: bytes of the request that the response repeats."""
    generation = rendering.generation
    response: Response
    if stream:
        response = EventStream(request.url.path, rendering.events(), generation.close)
    else:
        try:
            response = Whole(await unless_disconnected(request, _whole(rendering, echoed)), generation.close)
        except BaseException:
            generation.close()
            raise
    return with_ignored_header(response, generation.ignored)


def with_ignored_header(response: Response, ignored: Sequence[str]) -> Response:
    """Returns the response with a header that names fields which had no effect."""
    if ignored:
        # Of tools, too, which clients choose: what a header cannot hold is left out of the names.
        names = re.sub(r"[^!-~ ]", "", ", ".join(ignored))
        response.headers["draftwing-ignored"] = names[:_MAX_IGNORED]
    return response


async def _whole(rendering: Rendering, echoed: int) -> bytes:
    """Returns the body once the generation is finished."""
    answers = await rendering.generation.finish()
    size = sum(answer.entries + len(answer.text) + len(answer.request.prompt_ids) for answer in answers)
    return await rendering.generation.render(echoed + size, lambda large: encode(rendering.body(), large))
