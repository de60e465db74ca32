"""The application in front of several models: finds the one that a request names and hands the request to its server.

Lists, health and what loads and unloads are answered here; all else by the server of a model, as if it were alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from draftwing.config.api_keys import read_keys
from draftwing.config.model_list import seconds
from draftwing.config.options import Options
from draftwing.errors import CheckpointError, ConfigError, DraftwingError, NotFound, RequestError, listed
from draftwing.requests.refusals import check_level
from draftwing.server.app import free_paths
from draftwing.server.batches.routes import UPLOADS, add_batches, refuse_batches
from draftwing.server.edge.keys import Allowances, KeyCheck, Keyring
from draftwing.server.edge.limits import SMALL, BodyLimit
from draftwing.server.endpoints import install_error_handlers, unless_disconnected
from draftwing.server.http import IGNORED, EventStream, dialect, encode, json_response, line, spoken_path, unmarked
from draftwing.server.ollama import VERSION, chat_content, head, text_content
from draftwing.server.router.library import Library
from draftwing.server.router.listing import Listing, show
from draftwing.server.router.model import Model
from draftwing.server.router.models import Models
from draftwing.server.router.overview import Overview
from draftwing.server.router.process import ModelServer
from draftwing.server.router.proxy import forward
from draftwing.server.service import MAX_BODY_WITH_IMAGES
from draftwing.server.ui.routes import add_page
from draftwing.version import __version__

_METHODS = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]
_WATCHED, _FLUSH = ("/metrics", "/ui/engine"), "/flush_cache"
USUAL_ROWS = 64  # requests that an engine runs at once, where no option says
# By which Ollama's clients load and unload models: without one of these nothing is generated.
_PROMPTS = {"/api/chat": ("messages", chat_content), "/api/generate": ("prompt", text_content)}


class Front:
    """Several models as what a `uvicorn_server.Server` serves."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.lost: Callable[[], None] = lambda: None

    @property
    def draining(self) -> bool:
        return self.models.ending

    @draining.setter
    def draining(self, value: bool) -> None:
        self.models.ending = value

    @property
    def active(self) -> int:
        return sum(model.in_flight + len(model.waiting) for model in self.models.every)

    def abort(self, name: str | None) -> None:
        """Ends all requests: their models' processes end."""
        self.models.kill()

    def end_all(self, message: str) -> None:
        self.models.kill()

    def kill(self) -> None:
        self.models.kill()


class Forwarded(Response):
    """The response of a model's server, which it keeps until it has ended."""

    def __init__(self, server: ModelServer, held: AsyncExitStack, body: bytes, followed: str = "") -> None:
        """followed: a field that the front has followed, of which the server says that it has no effect."""
        super().__init__()
        self._server, self._held, self._asked, self._followed = server, held, body, followed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def how() -> str:
            return f"the model's process ended: {await asyncio.to_thread(self._server.how_it_ended)}"

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                names = headers.get(IGNORED, "").split(", ")
                if self._followed in names:
                    del headers[IGNORED]
                    if rest := [name for name in names if name != self._followed]:
                        headers[IGNORED] = ", ".join(rest)
            await send(message)

        async with self._held:
            await forward(scope, receive, told if self._followed else send, self._server.path, self._asked, how)


def create_front(models: Models, options: Options, default: str | None = None) -> FastAPI:
    """Returns the application; its lifespan ends the processes of models. default: the model of requests that name
    none. Raises ConfigError for keys that cannot be read."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if batches is not None:
            batches.start()
        yield
        if batches is not None:
            await batches.stop()
        await models.close()

    keyring = Keyring(read_keys(options))

    def reload_keys() -> None:
        """Has the keys that are in their file now, here and in servers that run."""
        keyring.reload(lambda: read_keys(options))
        for model in models.every:
            if model.server is not None:
                model.server.reload()

    app = FastAPI(
        title="draftwing", version=__version__, lifespan=lifespan, redirect_slashes=False, openapi_url=None,
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.state.reload_keys = reload_keys
    _add_own(app, models)
    _add_lists(app, models, lambda: next((one.key for one in keyring.keys.values()), None))
    _add_loading(app, models)
    _add_sleep(app, models, default)
    _add_stored(app, models, options)
    rows = min([_rows(model) for model in models.every], default=USUAL_ROWS)
    batches = add_batches(app, options, keyring, rows, lambda: models.ending)
    if batches is None:
        refuse_batches(app)
    if not options.disable_ui:
        add_page(app)
    overview = None if options.disable_ui else Overview(models, options.models_memory and options.models_memory * 1e9)
    _add_rest(app, models, default, overview)
    install_error_handlers(app)
    max_size, streamed = options.max_body_size or MAX_BODY_WITH_IMAGES, None if batches is None else UPLOADS
    app.add_middleware(BodyLimit, max_size=max_size, streamed=streamed)
    if keyring.keys:
        # What a key may use is counted where tokens are: by each model's server.
        app.add_middleware(
            KeyCheck, keys=keyring, closed=options.has_key, allowances=Allowances(()), free=free_paths(options)
        )
    return app


def _rows(model: Model) -> int:
    return model.served.arguments.get("max_running_requests") or USUAL_ROWS


def _add_own(app: FastAPI, models: Models) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/health_generate", methods=["GET", "HEAD"])
    @app.api_route("/liveness", methods=["GET", "HEAD"])
    async def health() -> Response:
        return Response()

    @app.api_route("/readiness", methods=["GET", "HEAD"])
    async def readiness() -> Response:
        return Response(status_code=503 if models.ending else 200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        return {"version": VERSION}


def _add_lists(app: FastAPI, models: Models, key: Callable[[], str | None]) -> None:
    listing = Listing(key)

    @app.get("/models")
    @app.get("/v1/models")
    async def every(request: Request) -> dict[str, Any]:
        models.look()
        if dialect(spoken_path(request)) == "anthropic":
            cards = [listing.anthropic(model) for model in models.every]
            ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
            return {"data": cards, "has_more": False} | ends
        await models.refresh()
        return {"object": "list", "data": [await listing.openai(model) for model in models.every]}

    @app.get("/models/{name:path}")
    @app.get("/v1/models/{name:path}")
    async def one(request: Request, name: str) -> dict[str, Any]:
        model = models.find(name)
        anthropic = dialect(spoken_path(request)) == "anthropic"
        return listing.anthropic(model) if anthropic else await listing.openai(model)

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        models.look()
        return {"models": [await listing.ollama(model) for model in models.every]}

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        await models.refresh()
        return {"models": [await listing.running(model) for model in models.loaded]}


def _add_loading(app: FastAPI, models: Models) -> None:
    @app.post("/models/load")
    async def load(request: Request) -> dict[str, Any]:
        """Loads a model, as llama.cpp's router does, but answers when it is loaded."""
        model = _named(models, await _read(request))
        await unless_disconnected(request, models.load(model))
        return {"success": True}

    @app.post("/models/unload")
    async def unload(request: Request) -> dict[str, Any]:
        """Unloads a model when it has answered what it was asked."""
        model = _named(models, await _read(request))
        if not await models.unload(model):
            raise RequestError(f"the model {model.served.name!r} is not loaded", "model")
        return {"success": True}


def _add_sleep(app: FastAPI, models: Models, default: str | None) -> None:
    """By vLLM's names; the model is named behind a question mark, or in the body."""

    async def named(request: Request) -> Model:
        body = await _read(request) if await request.body() else {}
        return _named(models, {**({"model": default} if default else {}), **request.query_params, **body})

    @app.post("/sleep")
    async def sleep(request: Request, level: int = Query(1)) -> Response:
        """Has a model give its memory back when it has answered what it was asked; a request wakes it up."""
        check_level(level)
        model = await named(request)
        if not await unless_disconnected(request, models.sleep(model)):
            raise RequestError(f"the model {model.served.name!r} is not loaded", "model")
        return Response()

    @app.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        await unless_disconnected(request, models.wake_up(await named(request)))
        return Response()

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, bool]:
        return {"is_sleeping": (await named(request)).asleep}


def _add_stored(app: FastAPI, models: Models, options: Options) -> None:
    folder = None if options.models_dir is None else Path(options.models_dir).expanduser().absolute()
    library = Library(models, folder, options.models_cache)

    @app.post("/api/pull")
    async def pull(request: Request) -> Response:
        """Fetches a model into the caches; it stops when the client goes away, and the next one goes on there."""
        found = await _read(request)
        name = found.get("model", found.get("name"))
        if not isinstance(name, str):
            raise RequestError("name a model, in the field model", "model")
        name = library.check(name)
        if found.get("stream", True):
            return EventStream(request.url.path, _lines(library.pull(name)), lambda: None)
        await unless_disconnected(request, _last(library.pull(name)))
        return json_response(encode({"status": "success"}))

    @app.delete("/api/delete")
    async def delete(request: Request) -> Response:
        with _refused():
            await library.delete(_named(models, await _read(request), "name"))
        return Response()


async def _lines(statuses: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for status in statuses:
            yield line(status)
    except DraftwingError as error:
        yield line({"error": str(error)})


async def _last(statuses: AsyncIterator[dict[str, Any]]) -> None:
    with _refused():
        async for _ in statuses:
            pass


@contextmanager
def _refused() -> Iterator[None]:
    """What is wrong with a model that was named is the request's fault."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise RequestError(str(error), "model") from None


def _add_rest(app: FastAPI, models: Models, default: str | None, overview: Overview | None) -> None:
    """overview: for the page, None: there is none."""

    @app.post("/api/show")
    async def shown(request: Request) -> Response:
        found = await _read(request)
        model = _named(models, found, "name")
        if model.takes_requests:
            return await handed(request, model)
        return json_response(encode(await asyncio.to_thread(show, model)))

    @app.api_route("/{path:path}", methods=_METHODS)
    async def rest(request: Request) -> Response:
        if request.method in ("GET", "HEAD", "OPTIONS", "DELETE"):
            if overview is not None and request.url.path == "/ui/info" and "model" not in request.query_params:
                return json_response(encode(await overview.facts()))
            model = named(request.query_params)
            flushes = request.url.path == _FLUSH  # by GET, too; that takes an engine which is awake
            if model.asleep and model.server is not None and not flushes:  # nor wakes it up
                return Forwarded(model.server, AsyncExitStack(), b"")
            if not model.takes_requests and not (model.asleep and flushes):  # to look at something loads nothing
                raise RequestError(f"the model {model.served.name!r} is not loaded; POST /models/load does", "model")
            if request.url.path in _WATCHED and model.server is not None:  # who only watches keeps no model
                return Forwarded(model.server, AsyncExitStack(), b"")
            return await handed(request, model)
        found = await _read(request)
        model, path = named({**request.query_params, **found}), request.url.path
        kept = _kept(found) if path.startswith("/api/") else None
        awake = model.server is not None and not model.asleep
        if kept == 0 and path in _PROMPTS and not found.get(_PROMPTS[path][0]) and not awake:
            await models.unload(model)
            content = _PROMPTS[path][1]()
            freed = {**head(model.served.name), **content, "done": True, "done_reason": "unload"}
            return json_response(encode(freed))
        return await handed(request, model, kept)

    def named(given: Mapping[str, Any]) -> Model:
        """Returns the model that a request names, or the default one."""
        return _named(models, {"model": default, **given} if default is not None else given)

    async def handed(request: Request, model: Model, kept: float | None = None) -> Response:
        body = await request.body()  # which was read before
        async with AsyncExitStack() as held:
            server = await unless_disconnected(request, _held(held, models, model))
            if kept is not None:
                model.keep_alive = kept
            return Forwarded(server, held.pop_all(), body, "" if kept is None else "keep_alive")


async def _held(held: AsyncExitStack, models: Models, model: Model) -> ModelServer:
    return await held.enter_async_context(models.use(model))


def _named(models: Models, given: Mapping[str, Any], other: str = "model") -> Model:
    name = given.get("model", given.get(other))
    if isinstance(name, str) and name:
        return models.find(name)
    known = listed([repr(model.served.name) for model in models.every]) or "none"
    if name is not None:
        raise RequestError(f"model must be a name; this server has {known}", "model")
    raise NotFound(f"name a model, in the body or as ?model=NAME: this server has {known}", "model", "model_not_found")


def _kept(given: Mapping[str, Any]) -> float | None:
    """Returns the seconds that Ollama's `keep_alive` asks for. Raises RequestError."""
    if given.get("keep_alive") is None:
        return None
    try:
        return seconds(given["keep_alive"])
    except ConfigError as error:
        raise RequestError(str(error), "keep_alive") from None


async def _read(request: Request) -> dict[str, Any]:
    """Returns the body, an object of JSON; that of another type, which the model's server judges, has no fields."""
    body = unmarked(await request.body())
    read = partial(from_json, body, cache_strings=False)
    try:
        found = read() if len(body) <= SMALL else await asyncio.to_thread(read)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise RequestError("the body must be an object of JSON")
    return found
