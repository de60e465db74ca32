"""The endpoints of Anthropic's clients: /v1/messages and its /count_tokens."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.server.anthropic.rendering import Message
from draftwing.server.anthropic.schema import CountRequest, MessagesRequest
from draftwing.server.chat import Chats
from draftwing.server.counting import counted
from draftwing.server.http import read_body, read_generation, respond, schema, unless_disconnected
from draftwing.server.service import Service


def add_anthropic_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    @app.post("/messages", include_in_schema=False)
    @app.post("/v1/messages", openapi_extra=schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        async with read_generation(request, MessagesRequest) as body:
            generation, style = await unless_disconnected(request, chats.ask(body, len(await request.body())))
            managed = body.context_management is not None
            message = Message(generation, chats.reader(style), service.name_for(body.model), managed)
        return await respond(request, message, body.stream)

    @app.post("/messages/count_tokens", include_in_schema=False)
    @app.post("/v1/messages/count_tokens", openapi_extra=schema(CountRequest))
    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountRequest)
        return await counted(request, chats, body, "messages", len(await request.body()))
