"""The HTTP endpoints: validate, tokenize, submit, and turn answers into responses."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

import draftwing
from draftwing.core import SamplingParams
from draftwing.errors import RequestError
from draftwing.params import check_text
from draftwing.server import responses
from draftwing.server.bridge import AsyncEngine
from draftwing.server.generation import Generation, Job
from draftwing.server.http import (
    EventStream,
    error_response,
    install_error_handlers,
    read_body,
    unless_disconnected,
)
from draftwing.server.protocol import (
    AbortRequest,
    Body,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    OpenAIBody,
    split_prompts,
)

if TYPE_CHECKING:
    from draftwing.engine.engine import Engine

logger = logging.getLogger(__name__)
_RESERVED_TEMPLATE_KEYS = frozenset({"messages", "tools", "add_generation_prompt", "conversation", "self"})
_MAX_LOGGED_MODELS = 100


class Service:
    """What the endpoints work on. The engine is not closed here."""

    def __init__(self, engine: Engine) -> None:
        self.engine = AsyncEngine(engine)
        self.tokenizer = engine.tokenizer
        self.model = engine.model_name
        self.started = time.time()
        self.draw = random.Random(engine.options.random_seed)
        self._strangers: set[str] = set()

    async def encode(self, field: str, value: str | list[Any]) -> tuple[list[list[int]], bool]:
        """Prompts as token ids from any of the forms, and whether they came as a batch."""
        prompts, batched = split_prompts(field, value)
        ids = []
        for prompt in prompts:
            # In a thread: a long prompt takes long enough to hold up every stream.
            tokens = await asyncio.to_thread(self.tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
            if not tokens:
                raise RequestError(f"{field} gives no tokens", field)
            ids.append(tokens)
        return ids, batched

    async def encode_chat(self, body: ChatRequest) -> list[int]:
        conversation = body.conversation()
        extra = body.chat_template_kwargs or {}
        taken = _RESERVED_TEMPLATE_KEYS & extra.keys()
        if taken:
            raise RequestError(f"chat_template_kwargs must not hold {min(taken)!r}", "chat_template_kwargs")
        return await asyncio.to_thread(self.tokenizer.encode_chat, conversation, **extra)

    def submit(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        body: OpenAIBody | GenerateRequest,
        names: list[str] | None = None,
    ) -> Generation:
        job_id = body.rid if isinstance(body.rid, str) else uuid.uuid4().hex
        job = Job(prompts, params, names or [job_id] * len(prompts), body.priority or 0, body.cache_salt, job_id)
        return Generation(self.engine, job, self.draw)

    def name_for(self, asked: str | None) -> str:
        """The model name of a response: what was asked for, since every name is served by the one model there is."""
        if asked is None:
            return self.model
        if asked != self.model and asked not in self._strangers and len(self._strangers) < _MAX_LOGGED_MODELS:
            self._strangers.add(asked)
            logger.info("a request asks for model %.200r; it is served by %r", asked, self.model)
        return asked


def create_app(engine: Engine) -> FastAPI:
    """The application; its lifespan starts and stops the engine's thread."""
    service = Service(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.stop()

    app = FastAPI(title="draftwing", version=draftwing.__version__, lifespan=lifespan, redirect_slashes=False)
    app.state.service = service
    install_error_handlers(app)
    _add_openai_routes(app, service)
    _add_native_routes(app, service)
    return app


def _schema(model: type[Body]) -> dict[str, Any]:
    """The body's schema for /openapi.json: bodies are read by hand, so FastAPI does not know it."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inline(schema, definitions)}}}
    }


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {key: _inline(value, definitions) for key, value in node.items()}
    return [_inline(item, definitions) for item in node] if isinstance(node, list) else node


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    async def respond(
        kind: responses.Kind, request: Request, body: OpenAIBody, prompts: list[list[int]], params: SamplingParams
    ) -> Response:
        model = service.name_for(body.model)
        try:
            generation = service.submit(prompts, [params] * len(prompts), body)
        except RequestError as error:
            # The engine names fields as /generate does.
            source = "messages" if kind == "chat" else "prompt"
            lengths = ("max_completion_tokens", "max_tokens")
            length = next((name for name in lengths if getattr(body, name, None) is not None), source)
            ours = {"max_new_tokens": length, "prompt": source, "input_ids": source}
            raise RequestError(str(error), ours.get(error.param or "", error.param)) from None
        if body.stream:
            events = responses.completion_events(kind, generation, model, body)
            return EventStream(request.url.path, events, generation.close)
        try:
            await unless_disconnected(request, generation.finish())
        finally:
            generation.close()
        return JSONResponse(responses.completion(kind, generation, model))

    @app.post("/v1/chat/completions", openapi_extra=_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        params = body.sampling()
        return await respond("chat", request, body, [await service.encode_chat(body)], params)

    @app.post("/v1/completions", openapi_extra=_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        params = body.sampling()
        prompts, _ = await service.encode("prompt", body.prompt)
        return await respond("text", request, body, prompts, params)

    def card() -> dict[str, Any]:
        return responses.model_card(service.model, int(service.started), service.engine.engine.context_length)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if name == service.model:
            return JSONResponse(card())
        message = f"the model {name[:200]!r} does not exist; this server has {service.model!r}"
        return error_response(request, 404, message, "model", "model_not_found")


def _add_native_routes(app: FastAPI, service: Service) -> None:
    @app.put("/generate", include_in_schema=False)
    @app.post("/generate", openapi_extra=_schema(GenerateRequest))
    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateRequest)
        prompts, batched = await service.encode(*body.prompt())
        params = body.sampling(len(prompts))
        generation = service.submit(prompts, params, body, _names(body.rid, len(prompts)))
        many = batched or len(generation.answers) > 1
        if body.stream:
            return EventStream(request.url.path, responses.generated_events(generation, many), generation.close)
        try:
            answers = await unless_disconnected(request, generation.finish())
        finally:
            generation.close()
        results = [responses.generated(answer) for answer in answers]
        return JSONResponse(results if many else results[0])

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.engine.healthy else 503)

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        options = service.engine.engine.options
        return {
            "model_path": options.model,
            "served_model_name": service.model,
            "tokenizer_path": options.tokenizer_path or options.model,
            "is_generation": True,
            "weight_version": "default",
        }

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        engine = service.engine.engine
        return {
            **dataclasses.asdict(engine.options),
            "served_model_name": service.model,
            "context_length": engine.context_length,
            "max_total_num_tokens": engine.max_total_tokens,
            "startup_time": service.started,
            "version": draftwing.__version__,
        }

    @app.get("/flush_cache", include_in_schema=False)
    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        if await service.engine.flush_cache():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("The cache is in use: requests are running or waiting.\n", status_code=400)

    @app.post("/abort_request", openapi_extra=_schema(AbortRequest))
    async def abort_request(request: Request) -> Response:
        body = await read_body(request, AbortRequest)
        if body.rid is None and not body.abort_all:
            raise RequestError("give rid, or abort_all: true", "rid")
        service.engine.abort(None if body.abort_all else body.rid)
        return Response(status_code=200)


def _names(rid: str | list[str] | None, prompts: int) -> list[str] | None:
    """The id of each prompt: distinct ones unless the client chose one for all."""
    if isinstance(rid, list) and len(rid) != prompts:
        raise RequestError(f"rid must hold one id per prompt; found {len(rid)} for {prompts}", "rid")
    if isinstance(rid, list):
        return [check_text(name, "rid") for name in rid]
    return None if isinstance(rid, str) else [uuid.uuid4().hex for _ in range(prompts)]
