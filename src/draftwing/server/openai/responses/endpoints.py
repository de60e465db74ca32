"""OpenAI's /v1/responses in its text form: an answer as items of output and the events by which they grow, and the
endpoints."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from draftwing.engine.process.link import EngineDead
from draftwing.errors import RequestError
from draftwing.server.chat import Chats
from draftwing.server.content_blocks import ContentBlocks, Event, text_of, why_aborted
from draftwing.server.edge.keys import client_name
from draftwing.server.edge.limits import count_as_body
from draftwing.server.endpoints import SMALL, counted, read_body, read_generation, respond, schema, unless_disconnected
from draftwing.server.http import encode, error_response, json_response, named_event
from draftwing.server.openai.logprobs import TextTokens, chat_logprobs
from draftwing.server.openai.responses.schema import ResponsesRequest
from draftwing.server.openai.responses.store import HOW, History, ResponseStore, listed, stored
from draftwing.server.openai.responses.tools import Toolbox, shown_tools
from draftwing.server.parsers.message import MessageReader, Part, Thought
from draftwing.server.parsers.tools import CallPiece
from draftwing.server.service import Generation, Service
from draftwing.text.answer import Answer
from draftwing.text.detok import TokenTexts


class _Items(ContentBlocks):
    """The output of one answer: items of reasoning, messages and calls."""

    def __init__(self, reader: MessageReader, toolbox: Toolbox, answer: Answer, texts: TokenTexts) -> None:
        super().__init__(reader)
        self._toolbox, self._answer, self._texts = toolbox, answer, texts
        self._tokens = None if answer.wanted is None else TextTokens(answer, texts)
        self._ranges: Iterator[range] = iter(())  # of tokens, of the parts that came last
        self._given = 0  # characters
        self._ends: Iterator[int] = iter(())  # of the pieces that are being read, in characters

    def push(self, text: str, answer: Answer) -> list[Event]:
        events = super().push(text, answer)
        if answer.finish_reason is not None and not self.blocks:  # an empty answer is an empty message
            events = [*self._begin(""), *self._end(answer)]
        return events

    def pieces(self, text: str) -> list[str]:
        if self._tokens is None:
            return [text]
        found = self._tokens.pieces(self._given, text)
        self._ends = accumulate(map(len, found), initial=self._given)
        self._given += len(text)
        next(self._ends)
        return found

    def take_parts(self, parts: Sequence[Part]) -> None:
        if self._tokens is not None:
            self._ranges = iter(self._tokens.take(list(map(text_of, parts)), next(self._ends)))

    def make(self, part: Part) -> dict[str, Any]:
        if isinstance(part, CallPiece):
            assert part.name is not None
            offer = self._toolbox[part.name]
            item = _item("ctc", "custom_tool_call") if part.custom else _item("fc", "function_call")
            named = {"call_id": part.id, "name": offer.name, "input" if part.custom else "arguments": ""}
            return item | named | ({} if offer.namespace is None else {"namespace": offer.namespace})
        if isinstance(part, Thought):
            return {**_item("rs", "reasoning"), "summary": [], "content": [{"type": "reasoning_text", "text": ""}]}
        content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {**_item("msg", "message"), "role": "assistant", "content": [content]}

    def began(self) -> list[Event]:
        item = self.blocks[-1]
        if "content" not in item:
            return [("response.output_item.added", {"output_index": self.last, "item": dict(item)})]
        empty = ("response.output_item.added", {"output_index": self.last, "item": {**item, "content": []}})
        part = copy.deepcopy(item["content"][0])
        return [empty, self._event("response.content_part.added", content_index=0, part=part)]

    def grew(self, part: Part) -> list[Event]:
        text, tokens = text_of(part), next(self._ranges, ())
        if isinstance(part, CallPiece):
            field, kind = _grows(self.blocks[-1])
            self.blocks[-1][field] += text
            return [self._event(f"response.{kind}.delta", delta=text)] if text else []
        content = self.blocks[-1]["content"][0]
        content["text"] += text
        more: dict[str, Any] = {}
        if "logprobs" in content:
            more["logprobs"] = chat_logprobs(self._answer, tokens, self._texts)["content"] if tokens else []
            content["logprobs"] += more["logprobs"]
        return [self._event(f"response.{content['type']}.delta", content_index=0, delta=text, **more)]

    def ended(self, answer: Answer | None) -> list[Event]:
        item = self.blocks[-1]
        item["status"] = "completed" if answer is None or _status(answer) == "completed" else "incomplete"
        done = "response.output_item.done", {"output_index": self.last, "item": item}
        if "content" not in item:
            field, kind = _grows(item)
            given = {"name": item["name"]} if field == "arguments" else {}
            return [self._event(f"response.{kind}.done", **given, **{field: item[field]}), done]
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        return [
            self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more),
            self._event("response.content_part.done", content_index=0, part=part),
            done,
        ]

    def _event(self, kind: str, /, **fields: Any) -> Event:
        """Returns an event of the last item."""
        return kind, {"item_id": self.blocks[-1]["id"], "output_index": self.last, **fields}


class ResponseObject:
    """The response object, as it is now, and the stream of events that ends with it."""

    def __init__(
        self,
        generation: Generation,
        reader: MessageReader,
        body: ResponsesRequest,
        model: str,
        texts: TokenTexts,
        size: int,
        keep: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """size: bytes of the request, which the response repeats.  keep: stores the response, when it is finished."""
        self._size, self._keep = size, keep
        self.generation, self._body, self._model = generation, body, model
        self._answer = generation.answers[0]
        self._items = _Items(reader, body.toolbox, self._answer, texts)
        self._created = time.time()
        self._number = -1
        self._read = 0  # of `Answer.entries`

    def body(self) -> dict[str, Any]:
        self._items.push(self._answer.text, self._answer)
        return self._stored(self._now())

    async def events(self) -> AsyncIterator[str]:
        for name in ("response.created", "response.in_progress"):
            yield await self._whole(name)
        try:
            async for answer, text in self.generation:
                size, self._read = len(text) + answer.entries - self._read, answer.entries
                for event in await self.generation.render(size, partial(self._news, answer, text)):
                    if isinstance(event, str):
                        yield event
                    else:
                        # It repeats the whole text.
                        yield await self.generation.render(
                            len(answer.text) + answer.entries, partial(named_event, *event)
                        )
        except EngineDead as error:
            yield await self._whole("response.failed", str(error))
            return
        yield await self._whole()

    def _news(self, answer: Answer, text: str, large: bool) -> list[str | Event]:
        """Returns events of an answer that made progress; those that repeat a whole part are not JSON yet."""
        found: list[str | Event] = []
        for name, data in map(self._numbered, self._items.push(text, answer)):
            found.append((name, data) if name.endswith(".done") else named_event(name, data, large))
        return found

    async def _whole(self, name: str | None = None, lost: str | None = None) -> str:
        """Returns an event that holds the response. name: None where it has ended, and is stored before the client
        hears of it, who may go on at once.  lost: see `_now`."""

        def made(large: bool) -> str:
            response = self._now(lost)
            if name is None:
                self._stored(response)
            event = name or f"response.{response['status']}", {"response": response}
            return named_event(*self._numbered(event), large)

        answer = self._answer
        return await self.generation.render(self._size + len(answer.text) + answer.entries, made)

    def _stored(self, response: dict[str, Any]) -> dict[str, Any]:
        if self._keep is not None and response["status"] in ("completed", "incomplete"):
            self._keep(response)
        return response

    def _numbered(self, event: Event) -> Event:
        self._number += 1
        return event[0], {"sequence_number": self._number, **event[1]}

    def _now(self, lost: str | None = None) -> dict[str, Any]:
        """Returns the response as far as it is. lost: why there will be no more of the answer."""
        answer, body, params = self._answer, self._body, self._answer.request.params
        status = "failed" if lost is not None else _status(answer)
        if status == "failed":
            lost = lost or why_aborted(answer)
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
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": self._items.blocks if status != "in_progress" else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": self._keep is not None,
            "temperature": params.temperature,
            "text": _text_config(body),
            "tool_choice": _tool_choice(body),
            "tools": shown_tools(body.tools or ()),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": body.user,
            **answer.receipt_field,
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


def _grows(item: dict[str, Any]) -> tuple[str, str]:
    """Returns the field of a call that grows, and how its events are called."""
    custom = item["type"] == "custom_tool_call"
    return ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True)


def _text_config(body: ResponsesRequest) -> dict[str, Any]:
    form = body.text and body.text.format
    shown = form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}
    return {"format": shown, "verbosity": "medium"}


T = TypeVar("T")


def add_responses_routes(app: FastAPI, service: Service, chats: Chats) -> None:
    store = ResponseStore(service.options.response_store_size)

    async def entered(request: Request, body: ResponsesRequest) -> int:
        """Puts what a request goes on from into it, and returns the bytes of all that it is made of."""
        history = History(body, store, client_name())
        await _read(request, service, history.size, history.enter)
        return history.size + len(await request.body())

    @app.post("/responses/input_tokens", include_in_schema=False)
    @app.post("/v1/responses/input_tokens", openapi_extra=schema(ResponsesRequest))
    async def input_tokens(request: Request) -> Response:
        """Counts the tokens of the prompt; nothing is generated."""
        body = await read_body(request, ResponsesRequest)
        size = await entered(request, body)
        return await counted(request, chats, body, "input", size, object="response.input_tokens")

    @app.post("/responses", include_in_schema=False)
    @app.post("/v1/responses", openapi_extra=schema(ResponsesRequest))
    async def create(request: Request) -> Response:
        client = client_name()
        async with read_generation(request, ResponsesRequest) as body:
            size = await entered(request, body)
            generation, style = await unless_disconnected(request, chats.ask(body, size))

            def keep(response: dict[str, Any]) -> None:
                store.put(client, stored(body, response))

            keeps = store.keeps and body.store is not False
            if keeps:
                store.watch()
            reader, model = chats.reader(style), service.name_for(body.model)
            response = ResponseObject(generation, reader, body, model, service.texts, size, keep if keeps else None)
        return await respond(request, response, body.stream, size)

    @app.get("/responses/{id}", include_in_schema=False)
    @app.get("/v1/responses/{id}")
    async def retrieve(request: Request, id: str, stream: bool = False) -> Response:
        if stream:
            raise RequestError("stream is not supported here: the response is finished", "stream")
        found = store.get(client_name(), id)
        return _missing(request, id) if found is None else json_response(found.body)

    @app.delete("/responses/{id}", include_in_schema=False)
    @app.delete("/v1/responses/{id}")
    async def delete(request: Request, id: str) -> Response:
        if not store.delete(client_name(), id):
            return _missing(request, id)
        return json_response(encode({"id": id, "object": "response", "deleted": True}))

    @app.get("/responses/{id}/input_items", include_in_schema=False)
    @app.get("/v1/responses/{id}/input_items")
    async def input_items(
        request: Request,
        id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        found = store.get(client_name(), id)
        if found is None:
            return _missing(request, id)
        line = store.conversation(client_name(), id) or [found]
        size = sum(one.items_size for one in line)
        items = await _read(request, service, size, lambda: listed(line))
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            raise RequestError("after must be the id of an item of the list", "after")
        begin = 0 if after is None else ids.index(after) + 1
        page, shown = items[begin : begin + limit], ids[begin : begin + limit]
        ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
        body = {"object": "list", "data": page, **ends, "has_more": begin + limit < len(items)}
        return json_response(await service.pools.render(size, partial(encode, body)))


async def _read(request: Request, service: Service, size: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`, which reads so many bytes of JSON from the store: as if they had come as the
    body."""
    limit = service.max_body_size
    if size > limit:
        raise RequestError(
            f"the stored conversation has {size} bytes, more than a body may have (--max-body-size, {limit})",
            "previous_response_id",
            "context_length_exceeded",
        )
    count_as_body(request.scope, size)
    return work() if size <= SMALL else await service.pools.read(work)


def _missing(request: Request, id: str) -> Response:
    return error_response(request, 404, f"no response {id[:200]!r} is stored: {HOW}")
