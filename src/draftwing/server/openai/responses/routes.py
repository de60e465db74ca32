"""OpenAI's /v1/responses in its text form, and the store of what was answered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from draftwing.errors import RequestError
from draftwing.server.chat import Chats
from draftwing.server.counting import counted
from draftwing.server.edge.body_limit import count_as_body
from draftwing.server.edge.keys import client_name
from draftwing.server.http import (
    SMALL,
    error_response,
    json_response,
    read_body,
    read_generation,
    respond,
    schema,
    unless_disconnected,
)
from draftwing.server.json_encoding import encode
from draftwing.server.openai.responses.history import HOW, History, listed, stored
from draftwing.server.openai.responses.rendering import ResponseObject
from draftwing.server.openai.responses.schema import ResponsesRequest
from draftwing.server.openai.responses.store import ResponseStore
from draftwing.server.service import Service

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
    limit = service.options.max_body_size
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
