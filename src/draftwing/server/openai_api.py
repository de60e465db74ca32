"""The endpoints of OpenAI's clients, under /v1."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from draftwing.core import SamplingParams
from draftwing.errors import RequestError
from draftwing.params import fit_default
from draftwing.server import responses
from draftwing.server.http import EventStream, error_response, read_body, schema, unless_disconnected
from draftwing.server.protocol import ChatRequest, CompletionRequest, OpenAIBody
from draftwing.server.service import Service


def _renamed(error: RequestError, source: str, length: str | None) -> RequestError:
    """An error of the engine, which names fields as /generate does, with the names of this API.

    source: the field that holds the prompt.  length: the one that limits the answer, where the client gave it.
    """
    names = {"input_ids": source, "max_new_tokens": length or source, "min_new_tokens": "min_tokens"}
    message = re.sub("|".join(names), lambda found: names[found[0]], str(error))
    return RequestError(message, (names | {"prompt": source}).get(error.param or "", error.param))


def add_openai_routes(app: FastAPI, service: Service) -> None:
    async def respond(
        kind: responses.Kind, request: Request, body: OpenAIBody, prompts: list[list[int]], params: SamplingParams
    ) -> Response:
        model = service.name_for(body.model)
        every = [params] * len(prompts)
        if body.length is None:
            every = [fit_default(params, service.engine.info.context_length - len(prompt)) for prompt in prompts]
        try:
            generation = service.submit(prompts, every, body)
        except RequestError as error:
            raise _renamed(error, "messages" if kind == "chat" else "prompt", body.length) from None
        if body.stream:
            events = responses.completion_events(kind, generation, model, body)
            return EventStream(request.url.path, events, generation.close)
        try:
            await unless_disconnected(request, generation.finish())
        finally:
            generation.close()
        return JSONResponse(responses.completion(kind, generation, model))

    @app.post("/v1/chat/completions", openapi_extra=schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        params = body.sampling()
        return await respond("chat", request, body, [await service.encode_chat(body)], params)

    @app.post("/v1/completions", openapi_extra=schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        params = body.sampling()
        prompts, _ = await service.encode("prompt", body.prompt)
        return await respond("text", request, body, prompts, params)

    def card() -> dict[str, Any]:
        return responses.model_card(service.model, int(service.started), service.engine.info.context_length)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if name == service.model:
            return JSONResponse(card())
        message = f"the model {name[:200]!r} does not exist; this server has {service.model!r}"
        return error_response(request, 404, message, "model", "model_not_found")
