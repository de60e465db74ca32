"""Finished responses that later requests may go on from, or name items of: in memory, bounded, and by API key; what of
them a request names, and how one is stored."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from draftwing.errors import NotFound, RequestError
from draftwing.requests.refusals import show
from draftwing.server.http import encode
from draftwing.server.openai.responses.schema import Item, ResponsesRequest

MAX_RESPONSES = 1024  # that are stored at a time; the oldest go
SECONDS = 3600.0  # since a response was stored, or gone on from
LOOK_SECONDS = 60.0  # between two looks for what is older
_BYTES = 2048  # that a response takes besides its JSON, at most
_ITEM_BYTES = 256  # and each of its items, besides its id


@dataclass(frozen=True)
class Stored:
    """A response and what it was asked with, as JSON.

    head: the response without its output.  input, output: lists of items; of the input its own.  ids: of the items of
    both.  previous: id of the response that it goes on from.
    """

    id: str
    head: bytes
    input: bytes
    output: bytes
    ids: frozenset[str]
    previous: str | None = None

    @cached_property
    def size(self) -> int:
        """Returns bytes of memory."""
        ids = sum(map(len, self.ids)) + _ITEM_BYTES * len(self.ids)
        return len(self.head) + self.items_size + ids + _BYTES

    @property
    def items_size(self) -> int:
        """Returns bytes of the JSON of all its items."""
        return len(self.input) + len(self.output)

    @property
    def body(self) -> bytes:
        """Returns the response."""
        return b'%b,"output":%b}' % (self.head[:-1], self.output)

    def items(self) -> list[dict[str, Any]]:
        """Reads the items of the response's own input, and of its output."""
        found: list[dict[str, Any]] = json.loads(self.input) + json.loads(self.output)
        return found


@dataclass
class _Share:
    """What one client holds. responses: with the time of their last use, which they are in the order of."""

    responses: OrderedDict[str, tuple[Stored, float]] = field(default_factory=OrderedDict)
    by_item: dict[str, str] = field(default_factory=dict)
    bytes: int = 0

    def remove(self, id: str) -> None:
        stored, _ = self.responses.pop(id)
        self.bytes -= stored.size
        for item in stored.ids:
            if self.by_item.get(item) == id:
                del self.by_item[item]


class ResponseStore:
    """Keeps responses. Where there are too many, or too many bytes, the oldest of the client that holds most goes: who
    stores much takes nothing from others. Clients are told apart by the names of their keys. Safe to use from several
    threads.
    """

    def __init__(
        self,
        max_bytes: int,
        max_responses: int = MAX_RESPONSES,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes, self._max_responses, self._seconds, self._clock = max_bytes, max_responses, seconds, clock
        self._shares: dict[str, _Share] = {}
        self._lock = threading.Lock()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0

    @property
    def bytes(self) -> int:
        """Returns bytes of all responses that are held."""
        return sum(share.bytes for share in self._shares.values())

    def __len__(self) -> int:
        return sum(len(share.responses) for share in self._shares.values())

    def put(self, client: str, stored: Stored) -> None:
        """Keeps a response, behind all that it goes on from."""
        with self._lock:
            share = self._shares.setdefault(client, _Share())
            if stored.id in share.responses:
                share.remove(stored.id)
            for one in self._line(share, stored.previous):
                self._use(share, one)
            share.responses[stored.id] = stored, self._clock()
            share.bytes += stored.size
            for item in stored.ids:
                share.by_item.setdefault(item, stored.id)
            while self.bytes > self._max_bytes:
                self._drop(max(self._shares.values(), key=lambda share: share.bytes))
            while len(self) > self._max_responses:
                self._drop(max(self._shares.values(), key=lambda share: len(share.responses)))
            self._shares = {name: share for name, share in self._shares.items() if share.responses}

    def get(self, client: str, id: str) -> Stored | None:
        with self._lock:
            share = self._share(client)
            return share.responses[id][0] if id in share.responses else None

    def conversation(self, client: str, id: str) -> list[Stored] | None:
        """Returns a response and all that it goes on from, the first one first; None where one of them is not there any
        more. That it was asked for keeps all of them for longer."""
        with self._lock:
            share = self._share(client)
            found = self._line(share, id)
            if not found or found[0].previous is not None:
                return None
            for one in found:
                self._use(share, one)
            return found

    def holder(self, client: str, item: str) -> Stored | None:
        """Returns the response that an item is of. That it was asked for keeps it for longer."""
        with self._lock:
            share = self._share(client)
            id = share.by_item.get(item)
            if id is None:  # perhaps the one that held it first is gone, and another has it too
                # The newest first: what was found there last time mostly holds the next item, too.
                id = next((one.id for one, _ in reversed(share.responses.values()) if item in one.ids), None)
            if id is None:
                return None
            share.by_item[item] = id
            stored, _ = share.responses[id]
            self._use(share, stored)
            return stored

    def delete(self, client: str, id: str) -> bool:
        """Returns whether there was one."""
        with self._lock:
            share = self._share(client)
            found = id in share.responses
            if found:
                share.remove(id)
            return found

    def watch(self) -> None:
        """Sees to it that what is too old goes even if nobody asks; on the event loop."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(min(self._seconds, LOOK_SECONDS), self._look)

    def _look(self) -> None:
        self._timer = None
        with self._lock:
            self._expire()
            holds = len(self) > 0
        if holds:
            self.watch()

    # With the lock.

    def _share(self, client: str) -> _Share:
        self._expire()
        return self._shares.get(client) or _Share()

    def _use(self, share: _Share, stored: Stored) -> None:
        share.responses[stored.id] = stored, self._clock()
        share.responses.move_to_end(stored.id)

    def _line(self, share: _Share, id: str | None) -> list[Stored]:
        """Returns a response and those that it goes on from, as far as they are there, the first one first."""
        found: dict[str, Stored] = {}
        while id is not None and id in share.responses and id not in found:  # a client may give two of them one id
            found[id] = share.responses[id][0]
            id = found[id].previous
        return list(found.values())[::-1]

    def _drop(self, share: _Share) -> None:
        share.remove(next(iter(share.responses)))

    def _expire(self) -> None:
        now = self._clock()
        for share in self._shares.values():
            while share.responses and now - next(iter(share.responses.values()))[1] >= self._seconds:
                self._drop(share)


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
