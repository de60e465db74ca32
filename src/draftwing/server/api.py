"""The application: endpoints, errors, and who may use them."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

import draftwing
from draftwing.server.bridge import AsyncEngine
from draftwing.server.http import error_response, install_error_handlers
from draftwing.server.native_api import add_native_routes
from draftwing.server.openai_api import add_openai_routes
from draftwing.server.service import Service
from draftwing.text.tokenizer import Tokenizer


def create_app(engine: AsyncEngine, tokenizer: Tokenizer, drain: float = 5.0) -> FastAPI:
    """The application; its lifespan starts the engine's supervision and ends the engine's process.

    drain: seconds that the engine gets to end its last step.
    """
    service = Service(engine, tokenizer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop(drain)

    app = FastAPI(title="draftwing", version=draftwing.__version__, lifespan=lifespan, redirect_slashes=False)
    app.state.service = service
    install_error_handlers(app)
    add_openai_routes(app, service)
    add_native_routes(app, service)
    if service.options.api_key is not None:
        app.add_middleware(KeyCheck, key=service.options.api_key)
    return app


class KeyCheck:
    """Answers 401 to everything but health checks that has no `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/health") and scope["method"] != "OPTIONS":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                response = error_response(Request(scope), 401, "a valid API key is needed: Authorization: Bearer KEY")
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
