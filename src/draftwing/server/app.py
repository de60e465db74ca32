"""The application: endpoints, errors, and who may use them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

import draftwing
from draftwing.server.anthropic.routes import add_anthropic_routes
from draftwing.server.border.bodies import BodyLimit
from draftwing.server.chat import Chats
from draftwing.server.engine_client import AsyncEngine
from draftwing.server.http import error_response, install_error_handlers
from draftwing.server.native.routes import add_native_routes
from draftwing.server.openai.routes import add_openai_routes
from draftwing.server.service import Service
from draftwing.server.telemetry.metrics import Metrics, add_metrics_route
from draftwing.server.telemetry.observer import Observer, Watcher
from draftwing.server.ui.routes import add_ui_routes, is_file
from draftwing.text.tokenizer import Tokenizer


def create_app(
    engine: AsyncEngine, tokenizer: Tokenizer, drain: float = 5.0, watchers: Sequence[Watcher] = ()
) -> FastAPI:
    """The application; its lifespan starts the engine's supervision and ends the engine's process.

    drain: seconds that the engine gets to end its last step.  watchers: of requests; closed at the end.
    """
    service = Service(engine, tokenizer)
    metrics = Metrics(
        service.model,
        lambda: engine.info.max_total_tokens,
        engine.stats,
        service.options.drafts,
    )
    engine.observer = observer = Observer([metrics.requests, *watchers])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop(drain)
        service.lanes.close()
        await asyncio.to_thread(observer.close)

    app = FastAPI(title="draftwing", version=draftwing.__version__, lifespan=lifespan, redirect_slashes=False)
    app.state.service = service
    install_error_handlers(app)
    chats = Chats(service)
    add_openai_routes(app, service, chats)
    add_anthropic_routes(app, service, chats)
    add_native_routes(app, service, chats)
    add_metrics_route(app, metrics)
    if not service.options.disable_ui:
        add_ui_routes(app, service)
    app.add_middleware(BodyLimit, most=service.options.max_body_size)
    if service.options.api_key is not None:
        app.add_middleware(KeyCheck, key=service.options.api_key)
    app.add_middleware(observer.middleware)
    return app


class KeyCheck:
    """Answers 401 to everything but health checks and the page's own files that has neither
    `Authorization: Bearer KEY` nor, as Anthropic's clients send it, `x-api-key: KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        free = scope["type"] != "http" or scope["path"].startswith("/health") or scope["method"] == "OPTIONS"
        if not free and not is_file(scope["path"]):
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"")
            # Both are compared in any case: how long it takes tells nothing.
            bearer = hmac.compare_digest(given, b"Bearer " + self._key)
            if not hmac.compare_digest(headers.get(b"x-api-key", b""), self._key) and not bearer:
                response = error_response(Request(scope), 401, "a valid API key is needed: Authorization: Bearer KEY")
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
