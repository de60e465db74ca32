"""The application: endpoints, errors, and who may use them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from draftwing.config.api_keys import read_keys
from draftwing.config.options import Options
from draftwing.server.anthropic import add_anthropic_routes
from draftwing.server.batches.routes import UPLOADS, add_batches
from draftwing.server.chat import Chats
from draftwing.server.edge.keys import DOCS_PATHS, FREE_PATHS, METRICS_PATHS, Allowances, KeyCheck, Keyring
from draftwing.server.edge.limits import BodyLimit, ResponseThrottle
from draftwing.server.edge.paths import CleanPaths
from draftwing.server.embeddings import add_embedding_routes
from draftwing.server.endpoints import install_error_handlers
from draftwing.server.engine_client import AsyncEngine
from draftwing.server.generate import add_generate
from draftwing.server.kept_streams import add_kept_streams
from draftwing.server.learning import Collector, Learning
from draftwing.server.ollama import add_ollama_routes
from draftwing.server.openai.completions import add_openai_routes
from draftwing.server.operations import add_operations
from draftwing.server.reference import add_reference
from draftwing.server.rerank import add_rerank_routes
from draftwing.server.service import Service
from draftwing.server.slots import add_slot_routes
from draftwing.server.telemetry.metrics import Metrics, add_metrics_route
from draftwing.server.telemetry.observer import Observer, Watcher
from draftwing.server.ui.routes import add_ui_routes, is_file
from draftwing.text.tokenizer import Tokenizer
from draftwing.version import __version__

_NO_HEAD = frozenset({"/flush_cache", "/ui/engine"})  # it would do something; it would not end


def create_app(
    engine: AsyncEngine, tokenizer: Tokenizer, drain: float = 5.0, watchers: Sequence[Watcher] = ()
) -> FastAPI:
    """Returns the application; its lifespan starts the engine's supervision and ends the engine's process.

    drain: seconds that the engine gets to end its last step.  watchers: of requests; closed at the end.
    Raises ConfigError for keys that cannot be read, and folders of `learn` and `batches_dir` that cannot be used.
    """
    options = engine.info.options
    keys = read_keys(options)
    learning = None if options.learn is None else Learning.of(engine)
    collector = None if learning is None else Collector.of(options, tokenizer.vocabulary_hash, learning.taught)
    service = Service(engine, tokenizer, collector, learning)
    keyring, allowances = Keyring(keys), Allowances(keys)
    numbers = dict if learning is None else learning.numbers
    metrics = Metrics(
        service.model, lambda: engine.info.max_total_tokens, engine.stats, service.options.drafts, numbers
    )
    learners = [one for one in (collector, learning) if one is not None]
    engine.observer = observer = Observer([metrics.requests, allowances, *learners, *watchers])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        task = None if learning is None else asyncio.create_task(learning.run())
        if batches is not None:
            batches.start()
        yield
        if batches is not None:
            await batches.stop()
        if task is not None:
            task.cancel()
        await engine.stop(drain)
        service.pools.close()
        await asyncio.to_thread(observer.close)

    app = FastAPI(
        title="draftwing",
        version=__version__,
        servers=[{"url": options.root_path}] if options.root_path else None,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # which would load scripts from elsewhere
        redoc_url=None,
    )

    def reload_keys() -> None:
        """Has the keys that are in their file now. Requests that run go on."""
        if keyring.reload(lambda: read_keys(options)):
            observer.rekeyed([*keyring.keys.values()])

    app.state.service, app.state.reload_keys = service, reload_keys
    chats = Chats(service)
    add_openai_routes(app, service, chats)
    add_anthropic_routes(app, service, chats)
    add_ollama_routes(app, service, chats)
    add_embedding_routes(app, service)
    add_rerank_routes(app, service)
    add_generate(app, service)
    add_operations(app, service, chats)
    add_slot_routes(app, service)
    add_kept_streams(app)
    add_metrics_route(app, metrics)
    add_reference(app)
    if not service.options.disable_ui:
        add_ui_routes(app, service, chats, learning)
    rows = service.options.max_running_requests or 1
    batches = add_batches(app, options, keyring, rows, lambda: engine.draining, lambda: engine.error is None)
    _add_heads(app)
    install_error_handlers(app)
    app.add_middleware(BodyLimit, max_size=service.max_body_size, streamed=None if batches is None else UPLOADS)
    free = free_paths(service.options)
    if keys:
        app.add_middleware(KeyCheck, keys=keyring, closed=service.options.has_key, allowances=allowances, free=free)
    app.add_middleware(observer.middleware)
    return app


def paced(app: ASGIApp, options: Options) -> ASGIApp:
    """Returns the application behind `ResponseThrottle`, which is to be outside of all else that answers, and
    `CleanPaths`."""
    return CleanPaths(ResponseThrottle(app, free=free_paths(options)))


def free_paths(options: Options) -> Callable[[str], bool]:
    """Returns whether a path may be read without a key."""
    groups = {"metrics": METRICS_PATHS, "docs": DOCS_PATHS}
    paths = FREE_PATHS.union(*(group for name, group in groups.items() if options.public_endpoints in (name, "all")))
    return lambda path: path in paths or is_file(path)


def _add_heads(app: FastAPI) -> None:
    """Has the application answer HEAD where it answers GET; the server leaves the body out."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()) and route.path not in _NO_HEAD:
            head = copy.copy(route)  # to make one anew takes as long as for GET
            head.methods, head.include_in_schema = {"HEAD"}, False
            app.router.routes.append(head)
