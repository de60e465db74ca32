"""What every endpoint shares: reads a body, or says in our words what is wrong with it, and responds."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, Union, get_args, get_origin

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from draftwing.engine.process.link import EngineDead
from draftwing.errors import GenerationError, NotFound, RequestError
from draftwing.requests.grammar_field import inlined
from draftwing.requests.refusals import show, suggestion
from draftwing.server.chat import Chat, Chats
from draftwing.server.edge.keys import client_name
from draftwing.server.edge.paths import Routes
from draftwing.server.http import (
    EventStream,
    Whole,
    dialect,
    encode,
    error_response,
    failure,
    guarded,
    json_response,
    unmarked,
    with_ignored_header,
)
from draftwing.server.kept_streams import HEADER as KEEP
from draftwing.server.kept_streams import kept
from draftwing.server.quotas import RETRY_SECONDS, QueueFull
from draftwing.server.schema import MAX_PARTS, Body, GenerationBody, NotBuilt, check_parts, ignored_fields

if TYPE_CHECKING:
    from draftwing.server.service import Generation, Service

_TOO_LONG = ("too_long", "string_too_long")  # says what is wrong, whatever other members of a union say
_EXPECTED = "Input should be "  # how pydantic begins to say what would do


class Digits(str):
    """An integer of a body as it is written there: it may be longer than Python converts."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def body_refusal(errors: list[Any], given: Any, model: type[BaseModel] | None = None) -> RequestError:
    """Returns the first field's errors in our words: pydantic names members of unions, of which clients know nothing.
    given: what was validated.  model: of a body."""
    # A union gives an error for each of its members. Those that got deepest say what is wrong, together.
    first = [(_path(error, given), error) for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    first = [one for one in first if one[1]["type"] in _TOO_LONG] or first
    path = max((path for path, _ in first), key=len)
    same = [error for at, error in first if at == path]
    name, kind = ".".join(map(str, path))[:200], same[0]["type"]
    messages = list(dict.fromkeys(error["msg"] for error in same))[:4]
    known = {"extra_forbidden": "is not a known field", "missing": "is missing", "not_built": messages[0]}
    expected = [message.removeprefix(_EXPECTED) for message in messages if message.startswith(_EXPECTED)]
    expected = ["a list" if one == "a valid array" else one for one in expected]
    field = name or "the body"
    if kind in known:
        message = f"{field} {known[kind]}"
        if kind == "extra_forbidden" and model is not None:
            message += suggestion(str(path[-1]), _known_fields(model, path[:-1]))
    elif expected:
        message = f"{field} must be {' or '.join(expected)}; found {show(_at(path, given))}"
    elif kind.startswith("string_"):
        value = _at(path, given)
        message = f"{field}: {messages[0]}; found {len(value) if kind == 'string_too_long' else show(value)}"
    else:
        message = f"{field}: {messages[0]}"
    return RequestError(message, name or "body")


def _path(error: Any, given: Any) -> tuple[int | str, ...]:
    """Returns the field of an error, without pydantic's names for members of unions."""
    found = []
    for part in error["loc"]:
        if (isinstance(given, dict) and part in given) or (isinstance(given, list) and part in range(len(given))):
            given = given[part]
            found.append(part)
    return (*found, error["loc"][-1]) if error["type"] == "missing" else tuple(found)


def _at(path: Sequence[int | str], given: Any) -> Any:
    for part in path:
        given = given[part]
    return given


def _known_fields(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Names of the fields that an object at a place inside of a body may have, without those that are refused."""
    kinds: list[Any] = [model]
    for part in place:
        kinds = [one for kind in kinds for one in _inside(kind, part)]
    found = dict.fromkeys(
        field.alias or ""
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        for field in kind.model_fields.values()
        if field.metadata != list(NotBuilt.__metadata__)
    )
    return [*found]


def _inside(kind: Any, part: int | str) -> list[Any]:
    """Returns types of what a value of a type holds in a field or as an entry."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [
            one for field in kind.model_fields.values() if field.alias == part for one in _members(field.annotation)
        ]
    return _members(get_args(kind)[0]) if get_origin(kind) is list else []


def _members(kind: Any) -> list[Any]:
    """Returns the types of a union, or the type itself."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _members(get_args(kind)[0])
    return [one for each in get_args(kind) for one in _members(each)] if origin in (Union, UnionType) else [kind]


T = TypeVar("T")


M = TypeVar("M", bound=BaseModel)


A = TypeVar("A", bound=GenerationBody)


LEARN_HEADER = "x-draftwing-learn"  # with one of these, as `"learn": false` in the body


_OFF = ("off", "false", "no", "0")


PRIORITY_HEADER = "x-draftwing-priority"  # a number, as the field `priority`; the lower one counts
LOWEST_PRIORITY = -(2**31)  # of a request


RECEIPT_HEADER = "x-draftwing-receipt"  # true or false, as the field `receipt`, which counts where both are given


SMALL = 65_536  # bytes of a body that is read at once; one of 4 MB may take 0.2 s
LARGE = 1 << 20  # bytes of one that is checked in a thread: those of pictures have 32 MiB


_MAX_ERRORS = 1000  # each takes time and memory


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
        response = error_response(request, *failure(error))
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
        _read_receipt_header(request, body)
        _read_priority_header(request, body)
        body.place.push(place)
        yield body


def _read_priority_header(request: Request, body: GenerationBody) -> None:
    given = request.headers.get(PRIORITY_HEADER)
    if given is None:
        return
    try:
        found = int(given)
    except ValueError:
        found = None
    if found is None or not LOWEST_PRIORITY <= found < -LOWEST_PRIORITY:
        expected = f"from {LOWEST_PRIORITY} to {-LOWEST_PRIORITY - 1}"
        raise RequestError(f"{PRIORITY_HEADER} must be a number {expected}; found {show(given)}", PRIORITY_HEADER)
    body.priority = min(body.priority or 0, found)


def _read_receipt_header(request: Request, body: GenerationBody) -> None:
    given = request.headers.get(RECEIPT_HEADER)
    if given is None:
        return
    if given.strip().lower() not in ("true", "false"):
        raise RequestError(f"{RECEIPT_HEADER} must be true or false; found {show(given)}", RECEIPT_HEADER)
    if "receipt" not in type(body).model_fields:
        raise RequestError(
            f"{RECEIPT_HEADER}: {request.url.path} has no receipts; /v1/chat/completions, /v1/completions, "
            "/v1/responses and /generate have them",
            RECEIPT_HEADER,
        )
    if "receipt" not in body.model_fields_set:
        body.receipt = given.strip().lower() == "true"  # type: ignore[attr-defined]


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
    body = unmarked(await request.body())
    if place is not None:  # not before: who sends slowly takes no place from others
        place.enter_context(service.engine.quota.reserve(client_name(), 1))

    def check(gone: Callable[[], bool] | None = None) -> None:
        check_parts(body, MAX_PARTS, 2 * service.countable)

    def read() -> M:
        if len(body) <= LARGE:
            check()
        return _read(body, model)

    if len(body) > LARGE:
        await service.pools.run(len(body), check)
    found = read() if len(body) <= SMALL else await service.pools.read(read)
    service.check_model(getattr(found, "model", None))
    return found


def _may_leave_out_its_type(request: Request) -> bool:
    """Returns whether a body need not say that it is JSON: Ollama's users send it by curl, which calls it a form. A
    browser tells of the page that sends a form."""
    from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    return dialect(request.url.path) == "ollama" and not from_page


def _read(body: bytes, model: type[M]) -> M:
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
        response = _stream(request, rendering)
    else:
        try:
            if KEEP in request.headers:
                raise RequestError(f"{KEEP} needs stream: true", KEEP)
            response = Whole(await unless_disconnected(request, _whole(rendering, echoed)), generation.close)
        except BaseException:
            generation.close()
            raise
    return with_ignored_header(response, generation.ignored)


def _stream(request: Request, rendering: Rendering) -> Response:
    path, close = request.url.path, rendering.generation.close
    try:
        found = kept(request, guarded(path, rendering.events()), close)
    except BaseException:
        close()
        raise
    return EventStream(path, rendering.events(), close) if found is None else found


async def _whole(rendering: Rendering, echoed: int) -> bytes:
    """Returns the body once the generation is finished."""
    answers = await rendering.generation.finish()
    size = sum(answer.entries + len(answer.text) + len(answer.request.prompt_ids) for answer in answers)
    return await rendering.generation.render(echoed + size, lambda large: encode(rendering.body(), large))


class Conversation(Protocol):
    """A body that holds one."""

    def chat(self) -> Chat: ...


async def counted(request: Request, chats: Chats, body: Conversation, field: str, size: int, **more: Any) -> Response:
    """Returns the number of tokens of a body's prompt. field, size: as of `Chats.ids`.  more: of the response."""

    def chat() -> Chat:
        found = body.chat()
        ignored = ignored_fields(body) if isinstance(body, Body) else ()
        return dataclasses.replace(found, ignored=(*ignored, *found.ignored))

    ids, ignored = await unless_disconnected(request, chats.ids(chat, field, size))
    return with_ignored_header(json_response(encode({**more, "input_tokens": len(ids)})), ignored)
