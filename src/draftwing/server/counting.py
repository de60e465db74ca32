"""How many tokens a conversation is, in the APIs that ask for it before they send it."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from draftwing.server.chat import Chat, Chats
from draftwing.server.http import json_response, unless_disconnected, with_ignored_header
from draftwing.server.json_encoding import encode
from draftwing.server.schema import Body, ignored_fields


class Conversation(Protocol):
    """A body that holds one."""

    def chat(self) -> Chat: ...


async def counted(request: Request, chats: Chats, body: Conversation, field: str, size: int, **more: Any) -> Response:
    """Returns the number of tokens of a body's prompt. field, size: as of `Chats.ids`.  more: of the response."""

    def chat() -> Chat:
        found = body.chat()
        ignored = ignored_fields(body) if isinstance(body, Body) else ()
        return dataclasses.replace(found, ignored=(*ignored, *found.ignored))

    ids, ignored = await unless_disconnected(request, chats.ids(chat, field, size))
    return with_ignored_header(json_response(encode({**more, "input_tokens": len(ids)})), ignored)
