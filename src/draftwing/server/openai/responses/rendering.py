"""An answer as the object of /v1/responses: items of output, and the events by which they grow."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from draftwing.engine.process.link import EngineDead
from draftwing.server.blocks import Blocks, Event, text_of
from draftwing.server.http import named_event
from draftwing.server.openai.responses.schema import ResponsesRequest
from draftwing.server.parsers.message import MessageReader, Part, Thought
from draftwing.server.parsers.tools import CallPiece
from draftwing.server.service import Generation
from draftwing.text.answer import Answer


class _Items(Blocks):
    """The output of one answer: items of reasoning, messages and calls."""

    def push(self, text: str, answer: Answer) -> list[Event]:
        events = super().push(text, answer)
        if answer.finish_reason is not None and not self.blocks:  # an empty answer is an empty message
            events = [*self._begin(""), *self._end(answer)]
        return events

    def make(self, part: Part) -> dict[str, Any]:
        if isinstance(part, CallPiece):
            return {**_item("fc", "function_call"), "call_id": part.id, "name": part.name, "arguments": ""}
        if isinstance(part, Thought):
            return {**_item("rs", "reasoning"), "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {**_item("msg", "message"), "role": "assistant", "content": [content]}

    def began(self) -> list[Event]:
        item = self.blocks[-1]
        if "content" not in item:
            return [("response.output_item.added", {"output_index": self.last, "item": dict(item)})]
        empty = ("response.output_item.added", {"output_index": self.last, "item": {**item, "content": []}})
        return [empty, self._event("response.content_part.added", content_index=0, part=dict(item["content"][0]))]

    def grew(self, part: Part) -> list[Event]:
        text = text_of(part)
        if isinstance(part, CallPiece):
            self.blocks[-1]["arguments"] += text
            return [self._event("response.function_call_arguments.delta", delta=text)] if text else []
        content = self.blocks[-1]["content"][0]
        content["text"] += text
        more: dict[str, Any] = {} if isinstance(part, Thought) else {"logprobs": []}
        return [self._event(f"response.{content['type']}.delta", content_index=0, delta=text, **more)]

    def ended(self, answer: Answer | None) -> list[Event]:
        item = self.blocks[-1]
        item["status"] = "completed" if answer is None or _status(answer) == "completed" else "incomplete"
        done = "response.output_item.done", {"output_index": self.last, "item": item}
        if "content" not in item:
            name, arguments = item["name"], item["arguments"]
            return [self._event("response.function_call_arguments.done", name=name, arguments=arguments), done]
        part = item["content"][0]
        more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        return [
            self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more),
            self._event("response.content_part.done", content_index=0, part=part),
            done,
        ]

    def _event(self, kind: str, /, **fields: Any) -> Event:
        """An event of the last item."""
        return kind, {"item_id": self.blocks[-1]["id"], "output_index": self.last, **fields}


class ResponseObject:
    """The response object, as it is now, and the stream of events that ends with it."""

    def __init__(self, generation: Generation, reader: MessageReader, body: ResponsesRequest, model: str) -> None:
        self.generation, self._items, self._body, self._model = generation, _Items(reader), body, model
        self._answer = generation.answers[0]
        self._created = time.time()
        self._number = -1

    def body(self) -> dict[str, Any]:
        self._items.push(self._answer.text, self._answer)
        return self._now()

    async def events(self) -> AsyncIterator[str]:
        for name in ("response.created", "response.in_progress"):
            yield self._numbered(name, {"response": self._now()})
        try:
            async for answer, text in self.generation:
                for event in await self._items.read(self.generation, text, answer):
                    yield self._numbered(*event)
        except EngineDead as error:
            yield self._numbered("response.failed", {"response": self._now(str(error))})
            return
        yield self._numbered(f"response.{_status(self._answer)}", {"response": self._now()})

    def _numbered(self, name: str, data: dict[str, Any]) -> str:
        self._number += 1
        return named_event(name, {"sequence_number": self._number, **data})

    def _now(self, lost: str | None = None) -> dict[str, Any]:
        """The response as far as it is. lost: why there will be no more of the answer."""
        answer, body, params = self._answer, self._body, self._answer.request.params
        status = "failed" if lost is not None else _status(answer)
        if status == "failed":
            lost = lost or f"the request was aborted: {(answer.finish_reason or {}).get('message', '')}".rstrip(": ")
        ended = status in ("completed", "incomplete")
        return {
            "id": f"resp_{self.generation.id}",
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
            "output": self._items.blocks if status != "in_progress" else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": _text_config(body),
            "tool_choice": _tool_choice(body),
            "tools": [_tool(tool) for tool in body.tools or []],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": body.user,
            **self.generation.label,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, answer = self.generation.prompt_tokens, len(self._answer.token_ids)
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
