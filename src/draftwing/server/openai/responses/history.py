"""What requests go on from: stored conversations and items as input, and responses as they are stored."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from draftwing.errors import NotFound, RequestError
from draftwing.requests.refusals import show
from draftwing.server.json_encoding import encode
from draftwing.server.openai.responses.schema import Item, ResponsesRequest
from draftwing.server.openai.responses.store import ResponseStore, Stored

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
HOW = "finished ones are kept for an hour, in memory, unless store is false; send all items as input instead"


class History:
    """What of the store a request names.

    size: bytes of its JSON.
    """

    def __init__(self, body: ResponsesRequest, store: ResponseStore, client: str) -> None:
        """Raises RequestError for what is not stored, or not any more, and for an item that is named twice."""
        self._body = body
        self._earlier = self._conversation(store, client)
        self._holders: dict[str, Stored] = {}  # by item
        for i, item in enumerate(body.items):
            if item.kind == "item_reference":
                self._holders[item.id or ""] = self._holder(store, client, item, f"input.{i}.id")
        held = {one.id: one.items_size for one in (*self._earlier, *self._holders.values())}
        self.size = sum(held.values())

    def _conversation(self, store: ResponseStore, client: str) -> list[Stored]:
        id = self._body.previous_response_id
        if id is None:
            return []
        found = store.conversation(client, id)
        if found is None:
            message = (
                f"previous_response_id: the response {show(id)}, or one that it goes on from, is not stored: {HOW}"
            )
            raise RequestError(message, "previous_response_id", "previous_response_not_found")
        return found

    def _holder(self, store: ResponseStore, client: str, item: Item, where: str) -> Stored:
        if item.id is None:
            raise RequestError(f"{where} is missing: an item_reference names an item", where)
        if item.id in self._holders:
            raise RequestError(f"{where}: the item {show(item.id)} is there twice", where)
        found = store.holder(client, item.id)
        if found is None:
            raise NotFound(f"{where}: no item {show(item.id)} is stored: {HOW}", where)
        return found

    def enter(self) -> None:
        """Puts it into the request."""
        if not self._earlier and not self._holders:
            return
        holders = {one.id: one for one in self._holders.values()}
        named = {id: {item["id"]: item for item in one.items()} for id, one in holders.items()}
        earlier = [item for one in self._earlier for item in one.items()]
        own = [
            Item.model_validate(named[self._holders[item.id or ""].id][item.id])
            if item.kind == "item_reference"
            else item
            for item in self._body.items
        ]
        self._body.go_on([Item.model_validate(item) for item in earlier], own)


def listed(line: Sequence[Stored]) -> list[dict[str, Any]]:
    """Returns all that went into the last one of a line of responses, each of which goes on from the one before it."""
    earlier = [item for one in line[:-1] for item in one.items()]
    own: list[dict[str, Any]] = json.loads(line[-1].input)
    return earlier + own


def stored(body: ResponsesRequest, response: dict[str, Any]) -> Stored:
    """Returns a finished response as it is stored; made in a thread where it is large."""
    items = [_shown(item) for item in body.items]
    ids = frozenset(item["id"] for item in (*items, *response["output"]))
    others = {name: value for name, value in response.items() if name != "output"}
    head, given, output = (encode(part, True) for part in (others, items, response["output"]))
    return Stored(response["id"], head, given, output, ids, body.previous_response_id)


def _shown(item: Item) -> dict[str, Any]:
    """Returns an item of the input as it is listed: with an id, and a message's content as parts."""
    shown = item.model_dump(by_alias=True, exclude_none=True) | {"type": item.kind}
    shown.setdefault("id", f"{_PREFIXES.get(item.kind, item.kind)}_{uuid.uuid4().hex}")
    if item.kind == "reasoning":
        return {"summary": []} | shown
    if item.kind == "message":
        shown = {"status": "completed"} | shown
        if isinstance(item.content, str):
            answered = item.role == "assistant"
            part = {"type": "output_text" if answered else "input_text", "text": item.content}
            shown["content"] = [part | ({"annotations": []} if answered else {})]
    return shown
