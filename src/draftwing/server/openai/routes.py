"""The endpoints of OpenAI's clients, under /v1."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from draftwing.errors import RequestError
from draftwing.requests.answer import Answer
from draftwing.requests.sampling_params import fit_default
from draftwing.server.chat import Chats, renamed
from draftwing.server.generation import Prompt
from draftwing.server.http import EventStream, error_response, read_body, schema, unless_disconnected
from draftwing.server.openai import rendering as responses
from draftwing.server.openai.message_builder import Speaker, Speech
from draftwing.server.openai.schema import ChatRequest, CompletionRequest, OpenAIBody
from draftwing.server.parsers.message import MessageReader, MessageStyle
from draftwing.server.service import Service

_CHAT_NAMES = {"thinking": "reasoning_effort"}  # of the fields that `Chats` names otherwise


def _renamed(error: RequestError, kind: responses.Kind, length: str | None) -> RequestError:
    """An error of the engine, which names fields as /generate does, with the names of this API.

    length: the field that limits the answer, where the client gave it.
    """
    source = "messages" if kind == "chat" else "prompt"
    names = {
        "input_ids": source,
        "max_new_tokens": length or source,
        "min_new_tokens": "min_tokens",
        "top_logprobs_num": "top_logprobs" if kind == "chat" else "logprobs",
    }
    return renamed(error, names | {"prompt": source})


def add_openai_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    _add_generation(app, service, chats)
    _add_models(app, service)


def _add_generation(app: FastAPI, service: Service, chats: Chats) -> None:
    async def respond(
        kind: responses.Kind,
        request: Request,
        body: OpenAIBody,
        prompts: list[Prompt],
        speaker: Speaker | None = None,
    ) -> Response:
        model, context = service.name_for(body.model), service.engine.info.context_length
        if body.length is None:
            prompts = [
                dataclasses.replace(one, params=fit_default(one.params, context - len(one.ids))) for one in prompts
            ]
        try:
            generation = await service.submit(prompts, body, body.predicted)
        except RequestError as error:
            raise _renamed(error, kind, body.length) from None
        shape = responses.Completion(kind, generation, model, service.tokenizer, service.texts, speaker)
        if body.stream:
            return EventStream(request.url.path, shape.events(body), generation.close)
        try:
            await unless_disconnected(request, generation.finish())
        finally:
            generation.close()
        return JSONResponse(shape.body())

    def speech(answer: Answer, style: MessageStyle) -> Speech:
        return Speech(answer, MessageReader(style, service.tokenizer))

    @app.post("/v1/chat/completions", openapi_extra=schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        params, logprobs = body.sampling(service.engine.info.defaults), body.wanted_logprobs()
        prompt, style = await chats.prompt(body.chat(), params, logprobs, body.grammar_field, _CHAT_NAMES)
        return await respond("chat", request, body, [prompt], lambda answer: speech(answer, style))

    @app.post("/v1/completions", openapi_extra=schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        params, logprobs = body.sampling(service.engine.info.defaults), body.wanted_logprobs()
        await service.check_grammars([(params, body.grammar_field)])
        every, _ = await service.encode("prompt", body.prompt)
        echoed = [""] * len(every)
        if body.echo:
            echoed = [service.tokenizer.decode(ids, params.skip_special_tokens) for ids in every]
        prompts = [Prompt(ids, params, logprobs=logprobs, echo=text) for ids, text in zip(every, echoed, strict=True)]
        return await respond("text", request, body, prompts)


def _add_models(app: FastAPI, service: Service) -> None:
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
