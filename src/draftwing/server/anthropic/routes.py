"""The endpoints of Anthropic's clients: /v1/messages and its /count_tokens."""

from __future__ import annotations

import dataclasses

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.server.anthropic.rendering import Message
from draftwing.server.anthropic.schema import CountRequest, MessagesRequest
from draftwing.server.chat import Chat, Chats
from draftwing.server.http import (
    json_response,
    read_body,
    read_generation,
    respond,
    schema,
    unless_disconnected,
    with_ignored_header,
)
from draftwing.server.json_encoding import encode
from draftwing.server.schema import ignored_fields
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
        size = len(await request.body())

        def chat() -> Chat:
            found = body.chat()
            return dataclasses.replace(found, ignored=(*ignored_fields(body), *found.ignored))

        ids, ignored = await unless_disconnected(request, chats.ids(chat, "messages", size))
        return with_ignored_header(json_response(encode({"input_tokens": len(ids)})), ignored)
