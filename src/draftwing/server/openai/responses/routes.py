"""OpenAI's /v1/responses in its text form: one request, one response, nothing stored."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.server.chat import Chats
from draftwing.server.http import asking, respond, schema, unless_disconnected
from draftwing.server.openai.responses.rendering import ResponseObject
from draftwing.server.openai.responses.schema import ResponsesRequest
from draftwing.server.service import Service


def add_responses_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    @app.post("/responses", include_in_schema=False)
    @app.post("/v1/responses", openapi_extra=schema(ResponsesRequest))
    async def create(request: Request) -> Response:
        async with asking(request, ResponsesRequest) as body:
            generation, style = await unless_disconnected(request, chats.ask(body, len(await request.body())))
            response = ResponseObject(generation, chats.reader(style), body, service.name_for(body.model))
        return await respond(request, response, body.stream)
