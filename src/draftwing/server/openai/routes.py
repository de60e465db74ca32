"""The endpoints of OpenAI's clients, under /v1 and, as llama.cpp has them, without it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.server.anthropic.rendering import model_card as anthropic_card
from draftwing.server.chat import Chats
from draftwing.server.counting import counted
from draftwing.server.http import (
    dialect,
    json_response,
    read_body,
    read_generation,
    respond,
    schema,
    spoken_path,
    unless_disconnected,
)
from draftwing.server.json_encoding import encode
from draftwing.server.openai.rendering import ChatCompletion, Completion, model_card
from draftwing.server.openai.responses.routes import add_responses_routes
from draftwing.server.openai.schema import ChatRequest, CompletionRequest
from draftwing.server.service import Service


def add_openai_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    _add_completions(app, service, chats)
    add_responses_routes(app, service, chats)
    _add_models(app, service)


def _add_completions(app: FastAPI, service: Service, chats: Chats) -> None:
    @app.post("/chat/completions", include_in_schema=False)
    @app.post("/v1/chat/completions", openapi_extra=schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        async with read_generation(request, ChatRequest) as body:
            generation, style = await unless_disconnected(request, chats.ask(body, len(await request.body())))
            completion = ChatCompletion(generation, service, body, lambda: chats.reader(style))
        return await respond(request, completion, body.stream)

    @app.post("/chat/completions/input_tokens", include_in_schema=False)
    @app.post("/v1/chat/completions/input_tokens", openapi_extra=schema(ChatRequest))
    async def input_tokens(request: Request) -> Response:
        """Counts the tokens of the prompt, as llama.cpp does; nothing is generated."""
        body = await read_body(request, ChatRequest)
        size = len(await request.body())
        return await counted(request, chats, body, "messages", size, object="response.input_tokens")

    @app.post("/completions", include_in_schema=False)
    @app.post("/v1/completions", openapi_extra=schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        async with read_generation(request, CompletionRequest) as body:
            asked = service.complete(body, body.prompt, body.add_special_tokens is not False)
            generation = await unless_disconnected(request, asked)
        return await respond(request, Completion(generation, service, body, bool(body.echo)), body.stream)


def _add_models(app: FastAPI, service: Service) -> None:
    def card(name: str, anthropic: bool = False) -> dict[str, Any]:
        make = anthropic_card if anthropic else model_card
        return make(name, int(service.started), service.engine.info.context_length)

    @app.get("/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """Returns the names that are served; to Anthropic's clients, which send `anthropic-version`, in their shape."""
        if _anthropic(request):
            cards = [card(name, True) for name in service.names]
            return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return {"object": "list", "data": [card(name) for name in service.names]}

    @app.get("/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if name not in service.names:
            raise service.no_model(name)
        return json_response(encode(card(name, _anthropic(request))))


def _anthropic(request: Request) -> bool:
    return dialect(spoken_path(request)) == "anthropic"
