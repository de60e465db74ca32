"""The endpoints of Anthropic's clients: /v1/messages and its /count_tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pydantic_core
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from draftwing.engine.process.link import EngineDead
from draftwing.errors import RequestError
from draftwing.requests.answer import Answer
from draftwing.server.anthropic.schema import NAMES, CountRequest, MessagesRequest
from draftwing.server.chat import Chats, renamed
from draftwing.server.generation import Generation
from draftwing.server.http import EventStream, named_event, read_body, schema, unless_disconnected
from draftwing.server.parsers.message import MessageReader, Part, Thought
from draftwing.server.parsers.tools import CallPiece
from draftwing.server.service import Service


def add_anthropic_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    @app.post("/v1/messages", openapi_extra=schema(MessagesRequest))
    async def messages(request: Request) -> Response:
        body = await read_body(request, MessagesRequest)
        chat, params = body.chat(), body.sampling(service.engine.info.defaults)
        prompt, style = await chats.prompt(chat, params, grammar_field="output_config.format")
        try:
            generation = await service.submit([prompt], body)
        except RequestError as error:
            raise renamed(error, NAMES) from None
        rendering = _Rendering(generation, MessageReader(style, service.tokenizer), service.name_for(body.model))
        if body.stream:
            return EventStream(request.url.path, rendering.events(), generation.close)
        try:
            await unless_disconnected(request, generation.finish())
        finally:
            generation.close()
        return JSONResponse(rendering.body())

    @app.post("/v1/messages/count_tokens", openapi_extra=schema(CountRequest))
    async def count_tokens(request: Request) -> dict[str, int]:
        body = await read_body(request, CountRequest)
        text = chats.render(body.chat(), {"tools": "tools", "thinking": "thinking"})
        (ids,) = await service.tokenize([text], add_special_tokens=False)
        return {"input_tokens": len(ids)}


class _Rendering:
    """One answer as Anthropic's message, or as the events that build it."""

    def __init__(self, generation: Generation, reader: MessageReader, model: str) -> None:
        self._generation, self._reader, self._model = generation, reader, model
        self._answer: Answer = generation.answers[0]
        self._kind: str | None = None  # of the block that is open
        self._blocks = 0

    def body(self) -> dict[str, Any]:
        """Of a finished generation."""
        self._check()
        content: list[dict[str, Any]] = []
        inputs: list[str] = []
        for part in self._reader.push(self._answer.text, True, self._answer.token_ids):
            begun = self._begin(part)
            if begun is not None:
                content.append(begun)
                inputs.append("")
            if isinstance(part, Thought):
                content[-1]["thinking"] += part.text
            elif isinstance(part, str):
                content[-1]["text"] += part
            else:
                inputs[-1] += part.arguments
        for block, text in zip(content, inputs, strict=True):
            if block["type"] == "tool_use":
                # Clients complete an input that is cut in the same way when they stream it.
                block["input"] = pydantic_core.from_json(text, allow_partial=True)
        return self._message(content) | self._ending() | {"usage": self._usage(len(self._answer.token_ids))}

    async def events(self) -> AsyncIterator[str]:
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        yield named_event("message_start", {"message": start})
        yield named_event("ping", {})
        async for answer, text in self._generation:
            final = answer.finish_reason is not None
            for part in self._reader.push(text, final, answer.token_ids):
                for piece in self._delta(part):
                    yield piece
        self._check()
        if self._blocks:
            yield named_event("content_block_stop", {"index": self._blocks - 1})
        usage = {"output_tokens": len(self._answer.token_ids)}
        yield named_event("message_delta", {"delta": self._ending(), "usage": usage})
        yield named_event("message_stop", {})

    def _delta(self, part: Part) -> list[str]:
        events: list[str] = []
        begun = self._begin(part)
        if begun is not None:
            if self._blocks:
                events.append(named_event("content_block_stop", {"index": self._blocks - 1}))
            events.append(named_event("content_block_start", {"index": self._blocks, "content_block": begun}))
            self._blocks += 1
        if isinstance(part, Thought):
            delta = {"type": "thinking_delta", "thinking": part.text}
        elif isinstance(part, str):
            delta = {"type": "text_delta", "text": part}
        else:
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
        return [*events, named_event("content_block_delta", {"index": self._blocks - 1, "delta": delta})]

    def _begin(self, part: Part) -> dict[str, Any] | None:
        """The empty block that `part` begins; None where it goes on with the one before."""
        if isinstance(part, Thought):
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
        elif isinstance(part, str):
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
        same = block["type"] == self._kind and (not isinstance(part, CallPiece) or part.name is None)
        self._kind = block["type"]
        return None if same else block

    def _check(self) -> None:
        """Raises EngineDead for an aborted answer: the API has no word for it."""
        reason = self._answer.finish_reason or {}
        if reason.get("type") == "abort":
            raise EngineDead(f"the request was aborted: {reason.get('message', '')}".rstrip(": "))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.job.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._generation.label,
            **self._generation.speculative,
        }

    def _ending(self) -> dict[str, Any]:
        answer, matched = self._answer, self._answer.matched_stop
        assert answer.finish_reason is not None
        if answer.finish_reason["type"] == "length":
            reason = "max_tokens"
        elif self._reader.calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(matched, str) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": self._generation.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": output_tokens,
        }
