"""Ollama's API, under /api: an answer as JSON, endpoints. There is one model; it is loaded, and stays so."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.config.model_list import seconds
from draftwing.errors import ConfigError, RequestError
from draftwing.models.stored import family_of
from draftwing.server.chat import Chats
from draftwing.server.endpoints import read_body, read_generation, respond, schema, unless_disconnected
from draftwing.server.http import encode, json_response, line, with_ignored_header
from draftwing.server.ollama_bodies import OllamaBody, OllamaChatRequest, OllamaGenerateRequest
from draftwing.server.openai.completions import durations
from draftwing.server.openai.logprobs import chat_logprobs
from draftwing.server.parsers.call import read_arguments
from draftwing.server.parsers.message import MessageReader, MessageStyle, Thought
from draftwing.server.schema import Body, Name, ignored_fields
from draftwing.server.service import Generation, Service
from draftwing.text.answer import Answer
from draftwing.text.detok import TokenTexts

Content = Callable[..., dict[str, Any]]  # makes what a line of the endpoint holds


def head(model: str) -> dict[str, Any]:
    """Returns what each line begins with."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def chat_content(text: str = "", **more: Any) -> dict[str, Any]:
    """Returns what a line of /api/chat holds."""
    return {"message": {"role": "assistant", "content": text, **more}}


def text_content(text: str = "", **more: Any) -> dict[str, Any]:
    """Returns what a line of /api/generate holds."""
    return {"response": text, **more}


class OllamaAnswer:
    """The response to /api/chat or /api/generate. Calls are given out when they are complete."""

    def __init__(
        self, generation: Generation, reader: MessageReader, model: str, texts: TokenTexts, content: Content
    ) -> None:
        self.generation, self._reader, self._model, self._texts = generation, reader, model, texts
        self._content = content
        self._answer: Answer = generation.answers[0]
        self._given = 0  # calls

    def body(self) -> dict[str, Any]:
        """Returns the whole answer as one object."""
        answer, reader = self._answer, self._reader
        reader.push(answer.text, True, answer.token_ids)
        more: dict[str, Any] = {"thinking": reader.reasoning} if reader.reasoning else {}
        calls = self._calls(True)
        more |= {"tool_calls": calls} if calls else {}
        return {**head(self._model), **self._content(reader.content, **more), **self._logprobs(), **self._ending()}

    async def events(self) -> AsyncIterator[str]:
        """Yields lines with what is new, then one that says how it ended."""
        read = 0  # of `Answer.entries`
        async for answer, text in self.generation:
            size, read = len(text) + answer.entries - read, answer.entries
            for one in await self.generation.render(size, partial(self._news, answer, text)):
                yield one
        yield line({**head(self._model), **self._content(), **self._ending()})

    def _news(self, answer: Answer, text: str, large: bool) -> list[str]:
        final = answer.finish_reason is not None
        contents: list[dict[str, Any]] = []
        for part in self._reader.push(text, final, answer.token_ids):
            # A call grows until something else comes.
            contents += self._new_calls(isinstance(part, Thought | str))
            if isinstance(part, Thought):
                contents.append(self._content(thinking=part.text))
            elif isinstance(part, str):
                contents.append(self._content(part))
        contents += self._new_calls(final)
        logprobs = self._logprobs()
        if logprobs and not contents:
            contents.append(self._content())
        lines = [{**head(self._model), **content, "done": False} for content in contents]
        if lines:
            lines[0] |= logprobs
        return [line(one, large) for one in lines]

    def _new_calls(self, complete: bool) -> list[dict[str, Any]]:
        """Returns a line's content with the calls that were not given out yet, if any. complete: the newest one is,
        too."""
        calls = self._calls(complete)
        return [self._content(tool_calls=calls)] if calls else []

    def _calls(self, complete: bool) -> list[dict[str, Any]]:
        calls = self._reader.calls
        end = len(calls) if complete else max(len(calls) - 1, self._given)
        found = []
        for index in range(self._given, end):
            call = calls[index]
            arguments = {"input": call.arguments} if call.custom else read_arguments(call.arguments) or {}
            found.append({"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}})
        self._given = end
        return found

    def _logprobs(self) -> dict[str, Any]:
        if self._answer.wanted is None:
            return {}
        tokens = self._answer.take_shown()
        return {"logprobs": chat_logprobs(self._answer, tokens, self._texts)["content"]} if tokens else {}

    def _ending(self) -> dict[str, Any]:
        """Tells how the answer ended, and times in nanoseconds; what it waited is in `total_duration` alone."""
        record = self.generation.records[0]
        prompt, answer = durations(self._answer, record)
        whole = max((record.ended or record.arrived) - record.arrived, prompt + answer)
        reason = (self._answer.finish_reason or {}).get("type", "stop")
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds(whole),
            "load_duration": 0,
            "prompt_eval_count": self.generation.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prompt),
            "eval_count": len(self._answer.token_ids),
            "eval_duration": _nanoseconds(answer),
        }


def _nanoseconds(seconds: float) -> int:
    return max(round(1e9 * seconds), 1)  # clients divide by them


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
    reason = "load"
    with suppress(ConfigError):  # of a time that nobody can read, which has no effect either
        reason = "load" if body.keep_alive is None or seconds(body.keep_alive) else "unload"
    loaded = {**head(service.name_for(body.model)), **content, "done": True, "done_reason": reason}
    return with_ignored_header(json_response(encode(loaded)), body.ignored)


async def _raw(service: Service, body: OllamaGenerateRequest) -> Generation:
    """Returns the answer to a raw prompt. Raises RequestError, as Ollama does, for what only a template could put into
    it."""
    if body.system:
        raise RequestError("system cannot be given with raw, whose prompt is used as it is", "system")
    if body.images:
        raise RequestError("images cannot be given with raw, whose prompt is used as it is", "images")
    assert body.prompt
    return await service.complete(body, body.prompt, ignored=() if body.think is None else ("think",))


def rounded(parameters: int) -> str:
    """Returns a number of parameters as Ollama writes it: 134.52M, 7.6B; empty: it is not known."""
    for unit, letter, places in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if parameters >= unit:
            return f"{parameters / unit:.{places if parameters % unit else 0}f}{letter}"
    return str(parameters or "")


def _add_models(app: FastAPI, service: Service, chats: Chats) -> None:
    info = service.engine.info
    family = family_of(info.architecture)
    size = info.stored.get("bytes") or sum(info.weight_bytes.values())
    stored_type = info.stored.get("type") or max(info.weight_bytes, key=info.weight_bytes.__getitem__, default="")
    started = datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
    details = {
        "parent_model": "",
        "format": info.stored.get("format", "safetensors"),
        "family": family,
        "families": [family],
        "parameter_size": rounded(info.stored.get("values", 0)),
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
        named = [{**card, "name": name, "model": name, "modified_at": started} for name in service.names]
        for name, adapter in service.engine.adapters.items():
            own = {"name": name, "model": name, "digest": adapter.digest, "modified_at": started}
            named.append({**card, **own, "details": details | {"parent_model": service.model}})
        return {"models": named}

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
        known = {"tools": tools, "vision": info.images is not None, "thinking": thinks}
        does = ["completion", *(name for name, there in known.items() if there)]
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
            "capabilities": does if info.writes else ["embedding"] * (not info.pooling.scores),
            "modified_at": started,
        }
        return with_ignored_header(json_response(encode(shown)), ignored_fields(body))
