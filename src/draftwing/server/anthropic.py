"""Anthropic's API: /v1/messages and its /count_tokens. An answer as a message, endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from draftwing.engine.process.link import EngineDead
from draftwing.server.anthropic_bodies import CountRequest, MessagesRequest
from draftwing.server.chat import Chats
from draftwing.server.content_blocks import ContentBlocks, Event, text_of, why_aborted
from draftwing.server.endpoints import counted, read_body, read_generation, respond, schema, unless_disconnected
from draftwing.server.http import named_event
from draftwing.server.parsers.call import read_arguments
from draftwing.server.parsers.message import MessageReader, Part, Thought
from draftwing.server.service import Generation, Service
from draftwing.text.answer import Answer

_DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}


class _Content(ContentBlocks):
    """The blocks of a message. `inputs` has the arguments of each call as text."""

    def __init__(self, reader: MessageReader) -> None:
        super().__init__(reader)
        self.inputs: dict[int, str] = {}

    def make(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Thought):
            return {"type": "thinking", "thinking": "", "signature": ""}
        if isinstance(part, str):
            return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}

    def began(self) -> list[Event]:
        return [("content_block_start", {"index": self.last, "content_block": dict(self.blocks[-1])})]

    def grew(self, part: Part) -> list[Event]:
        block, text = self.blocks[-1], text_of(part)
        kind, field = _DELTAS.get(block["type"], ("input_json_delta", "partial_json"))
        if block["type"] in _DELTAS:
            block[field] += text
        else:
            self.inputs[self.last] = self.inputs.get(self.last, "") + text
        return [("content_block_delta", {"index": self.last, "delta": {"type": kind, field: text}})]

    def ended(self, answer: Answer | None) -> list[Event]:
        return [("content_block_stop", {"index": self.last})]


class Message:
    """One answer as a message, or as the events that build it."""

    def __init__(self, generation: Generation, reader: MessageReader, model: str, managed: bool = False) -> None:
        """managed: the request asked that its context be managed; that nothing was is reported."""
        self.generation, self._model = generation, model
        self._managed: dict[str, Any] = {"context_management": {"applied_edits": []}} if managed else {}
        self._content = _Content(reader)
        self._answer: Answer = generation.answers[0]

    def body(self) -> dict[str, Any]:
        self._check()
        self._content.push(self._answer.text, self._answer)
        for index, text in self._content.inputs.items():
            # Clients complete an input that is cut in the same way when they stream it.
            self._content.blocks[index]["input"] = read_arguments(text) or {}
        message = self._message(self._content.blocks)
        return message | self._ending() | {"usage": self._usage(len(self._answer.token_ids)), **self._managed}

    async def events(self) -> AsyncIterator[str]:
        start = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
        yield named_event("message_start", {"message": start})
        yield named_event("ping", {})
        async for answer, text in self.generation:
            for event in await self._content.read(self.generation, text, answer):
                yield named_event(*event)
        self._check()
        usage = self._usage(len(self._answer.token_ids))
        yield named_event("message_delta", {"delta": self._ending(), "usage": usage, **self._managed})
        yield named_event("message_stop", {})

    def _check(self) -> None:
        """Raises EngineDead for an aborted answer: the API has no word for it."""
        if (self._answer.finish_reason or {}).get("type") == "abort":
            raise EngineDead(why_aborted(self._answer))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self.generation.label,
        }

    def _ending(self) -> dict[str, Any]:
        answer, matched = self._answer, self._answer.matched_stop
        assert answer.finish_reason is not None
        if answer.finish_reason["type"] == "length":
            reason = "max_tokens"
        elif self._content.reader.calls_end(matched):
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(matched, str) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": matched if reason == "stop_sequence" else None}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        """What was cached is known at the end; `input_tokens` are the others."""
        cached = self._answer.meta.get("cached_tokens", 0)
        return {
            "input_tokens": self.generation.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }


def model_card(name: str, created: float, context_length: int) -> dict[str, Any]:
    return {
        "id": name,
        "type": "model",
        "display_name": name,
        "max_input_tokens": context_length,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
    }


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
