"""OpenAI's /v1/responses in its text form: one request, one response, nothing stored."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from draftwing.engine.process.link import EngineDead
from draftwing.errors import RequestError
from draftwing.requests.answer import Answer
from draftwing.requests.sampling_params import fit_default
from draftwing.server.chat import Chats, renamed
from draftwing.server.generation import Generation
from draftwing.server.http import EventStream, named_event, read_body, schema, unless_disconnected
from draftwing.server.openai.responses_schema import NAMES, ResponsesRequest
from draftwing.server.parsers.message import MessageReader, Part, Thought
from draftwing.server.parsers.tools import CallPiece
from draftwing.server.service import Service

Event = tuple[str, dict[str, Any]]


def add_responses_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    @app.post("/v1/responses", openapi_extra=schema(ResponsesRequest))
    async def create(request: Request) -> Response:
        body = await read_body(request, ResponsesRequest)
        chat, params = body.chat(), body.sampling(service.engine.info.defaults)
        names = {"thinking": "reasoning.effort"}
        prompt, style = await chats.prompt(chat, params, grammar_field="text.format", names=names)
        if body.max_output_tokens is None:
            room = service.engine.info.context_length - len(prompt.ids)
            prompt = dataclasses.replace(prompt, params=fit_default(prompt.params, room))
        try:
            generation = await service.submit([prompt], body)
        except RequestError as error:
            raise renamed(error, NAMES) from None
        items = Items(MessageReader(style, service.tokenizer))
        response = _Response(generation, items, body, service.name_for(body.model))
        if body.stream:
            return EventStream(request.url.path, response.events(), generation.close)
        try:
            (answer,) = await unless_disconnected(request, generation.finish())
        finally:
            generation.close()
        items.push(answer.text, answer)
        return JSONResponse(response.body())


class Items:
    """The output of one answer: items of reasoning, messages and calls, and the events by which they grow."""

    def __init__(self, reader: MessageReader) -> None:
        self.output: list[dict[str, Any]] = []
        self.reader = reader

    def push(self, text: str, answer: Answer) -> list[Event]:
        """Events of the next piece of text."""
        events: list[Event] = []
        final = answer.finish_reason is not None
        for part in self.reader.push(text, final, answer.token_ids):
            events += self._add(part)
        if final:
            if not self.output:
                events += self._begin(_message())
            events += self._end("completed" if _status(answer) == "completed" else "incomplete")
        return events

    def _add(self, part: Part) -> list[Event]:
        events: list[Event] = []
        if isinstance(part, CallPiece):
            if part.name is not None:
                events = self._begin(_call(part))
            self.output[-1]["arguments"] += part.arguments
            if part.arguments:
                events.append(self._event("response.function_call_arguments.delta", delta=part.arguments))
            return events
        item = _reasoning() if isinstance(part, Thought) else _message()
        if not self.output or self.output[-1]["type"] != item["type"]:
            events = self._begin(item)
        text = part.text if isinstance(part, Thought) else part
        content = self.output[-1]["content"][0]
        content["text"] += text
        more: dict[str, Any] = {} if isinstance(part, Thought) else {"logprobs": []}
        return [*events, self._event(f"response.{content['type']}.delta", content_index=0, delta=text, **more)]

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        events = self._end("completed")
        self.output.append(item)
        empty = {**item, "content": []} if "content" in item else dict(item)
        events.append(("response.output_item.added", {"output_index": len(self.output) - 1, "item": empty}))
        if "content" in item:
            events.append(self._event("response.content_part.added", content_index=0, part=dict(item["content"][0])))
        return events

    def _end(self, status: str) -> list[Event]:
        """Ends the last item, if there is one."""
        if not self.output:
            return []
        item = self.output[-1]
        item["status"] = status
        events = []
        if "content" in item:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            events.append(self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more))
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        else:
            arguments = item["arguments"]
            events.append(self._event("response.function_call_arguments.done", name=item["name"], arguments=arguments))
        return [*events, ("response.output_item.done", {"output_index": len(self.output) - 1, "item": item})]

    def _event(self, kind: str, /, **fields: Any) -> Event:
        """An event of the last item."""
        return kind, {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **fields}


class _Response:
    """The response object, as it is now, and the stream of events that ends with it."""

    def __init__(self, generation: Generation, items: Items, body: ResponsesRequest, model: str) -> None:
        self._generation, self._items, self._body, self._model = generation, items, body, model
        self._answer = generation.answers[0]
        self._created = time.time()
        self._number = -1

    async def events(self) -> AsyncIterator[str]:
        for name in ("response.created", "response.in_progress"):
            yield self._numbered(name, {"response": self.body()})
        try:
            async for answer, text in self._generation:
                for event in self._items.push(text, answer):
                    yield self._numbered(*event)
        except EngineDead as error:
            yield self._numbered("response.failed", {"response": self.body(str(error))})
            return
        yield self._numbered(f"response.{_status(self._answer)}", {"response": self.body()})

    def _numbered(self, name: str, data: dict[str, Any]) -> str:
        self._number += 1
        return named_event(name, {"sequence_number": self._number, **data})

    def body(self, lost: str | None = None) -> dict[str, Any]:
        """lost: why there will be no more of the answer."""
        answer, body, prompt = self._answer, self._body, self._generation.prompts[0]
        status = "failed" if lost is not None else _status(answer)
        if status == "failed":
            lost = lost or f"the request was aborted: {(answer.finish_reason or {}).get('message', '')}".rstrip(": ")
        ended = status in ("completed", "incomplete")
        return {
            "id": f"resp_{self._generation.job.id}",
            "object": "response",
            "created_at": int(self._created),
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": {"code": "server_error", "message": lost} if lost else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items.output if status != "in_progress" else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": prompt.params.temperature,
            "text": _text_config(body),
            "tool_choice": _tool_choice(body),
            "tools": [_tool(tool) for tool in body.tools or []],
            "top_logprobs": 0,
            "top_p": prompt.params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": body.user,
            **self._generation.label,
            **self._generation.speculative,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, answer = self._generation.prompt_tokens, len(self._answer.token_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": self._answer.meta.get("cached_tokens", 0),
                "cache_write_tokens": 0,
            },
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": self._items.reader.reasoning_tokens},
            "total_tokens": prompt + answer,
        }


def _status(answer: Answer) -> str:
    reason = (answer.finish_reason or {}).get("type")
    return {None: "in_progress", "stop": "completed", "length": "incomplete"}.get(reason, "failed")


def _item(prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}


def _message() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {**_item("msg", "message"), "role": "assistant", "content": [part]}


def _reasoning() -> dict[str, Any]:
    return {**_item("rs", "reasoning"), "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}


def _call(piece: CallPiece) -> dict[str, Any]:
    return {**_item("fc", "function_call"), "call_id": piece.id, "name": piece.name, "arguments": ""}


def _tool(tool: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    return (
        choice if isinstance(choice, str) else "auto" if choice is None else {"type": "function", "name": choice.name}
    )


def _text_config(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text and body.text.format
    shown = form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
    return {"format": shown, "verbosity": "medium"}
