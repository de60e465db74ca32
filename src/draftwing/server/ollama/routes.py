"""The endpoints of Ollama's clients, under /api. There is one model; it is loaded, and stays so."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.errors import RequestError
from draftwing.server.chat import Chats
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
from draftwing.server.ollama.rendering import Content, OllamaAnswer, chat_content, head, text_content
from draftwing.server.ollama.schema import OllamaBody, OllamaChatRequest, OllamaGenerateRequest
from draftwing.server.parsers.message import MessageStyle
from draftwing.server.schema import Body, Name, ignored_fields
from draftwing.server.service import Generation, Service

# The release of Ollama whose API this is: clients refuse servers that say they are older than what they need.
VERSION = "0.12.6"


class ShowRequest(Body, hints="verbose options", not_built="system template"):
    """Body of /api/show."""

    model: Name | None = None
    name: Name | None = None  # as older clients call it


def add_ollama_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    _add_answers(app, service, chats)
    _add_models(app, service, chats)


def _add_answers(app: FastAPI, service: Service, chats: Chats) -> None:
    @app.post("/api/chat", openapi_extra=schema(OllamaChatRequest))
    async def chat(request: Request) -> Response:
        return await answered(request, OllamaChatRequest, chat_content)

    @app.post("/api/generate", openapi_extra=schema(OllamaGenerateRequest))
    async def generate(request: Request) -> Response:
        return await answered(request, OllamaGenerateRequest, text_content)

    async def answered(request: Request, model: type[OllamaBody], content: Content) -> Response:
        async with read_generation(request, model) as body:
            if not getattr(body, body.source):
                return _loaded(body, service, content())
            if isinstance(body, OllamaGenerateRequest) and body.raw:
                generation, style = await unless_disconnected(request, _raw(service, body)), MessageStyle()
            else:
                generation, style = await unless_disconnected(request, chats.ask(body, len(await request.body())))
            name = service.name_for(body.model)
            answer = OllamaAnswer(generation, chats.reader(style), name, service.texts, content)
        return await respond(request, answer, body.stream is not False)


def _loaded(body: OllamaBody, service: Service, content: dict[str, Any]) -> Response:
    """Returns the answer to a request without a prompt, by which clients load and free models."""
    reason = "unload" if str(body.keep_alive).rstrip("smh") == "0" else "load"
    loaded = {**head(service.name_for(body.model)), **content, "done": True, "done_reason": reason}
    return with_ignored_header(json_response(encode(loaded)), body.ignored)


async def _raw(service: Service, body: OllamaGenerateRequest) -> Generation:
    """Returns the answer to a raw prompt. Raises RequestError, as Ollama does, for what only a template could put into
    it."""
    if body.system:
        raise RequestError("system cannot be given with raw, whose prompt is used as it is", "system")
    assert body.prompt
    return await service.complete(body, body.prompt, ignored=() if body.think is None else ("think",))


def _rounded(parameters: int) -> str:
    """Returns a number of parameters as Ollama writes it: 134.52M, 7.6B; empty: it is not known."""
    for unit, letter, places in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if parameters >= unit:
            return f"{parameters / unit:.{places if parameters % unit else 0}f}{letter}"
    return str(parameters or "")


def _add_models(app: FastAPI, service: Service, chats: Chats) -> None:
    info = service.engine.info
    family = info.architecture.removesuffix("ForCausalLM").lower()
    size = info.stored.get("bytes") or sum(info.weight_bytes.values())
    stored_type = info.stored.get("type") or max(info.weight_bytes, key=info.weight_bytes.__getitem__, default="")
    started = datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
    details = {
        "parent_model": "",
        "format": info.stored.get("format", "safetensors"),
        "family": family,
        "families": [family],
        "parameter_size": _rounded(info.stored.get("values", 0)),
        "quantization_level": stored_type,
    }
    card = {
        "name": service.model,
        "model": service.model,
        "size": size,
        "digest": hashlib.sha256(service.model.encode()).hexdigest(),
        "details": details,
    }

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [{**card, "name": name, "model": name, "modified_at": started} for name in service.names]}

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        far = "9999-12-31T23:59:59Z"  # it stays loaded
        here = {
            "expires_at": far,
            "context_length": info.context_length,
            "size_vram": size * bool(info.stored.get("on_device")),
        }
        return {"models": [{**card, **here}]}

    @app.post("/api/show", openapi_extra=schema(ShowRequest))
    async def show(request: Request) -> Response:
        body = await read_body(request, ShowRequest)
        tools = await service.pools.run(0, lambda gone: chats.calls_tools)
        thinks = chats.harmony or chats.reasoning is not None
        shown = {
            "modelfile": "",
            "parameters": "",
            "template": service.tokenizer.chat_source or "",
            "details": details,
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": info.stored.get("values", 0),
                f"{family}.context_length": info.context_length,
            },
            "capabilities": ["completion", *(["tools"] if tools else []), *(["thinking"] if thinks else [])],
            "modified_at": started,
        }
        return with_ignored_header(json_response(encode(shown)), ignored_fields(body))
