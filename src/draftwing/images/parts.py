"""Pictures in the messages of a conversation, between texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from draftwing.images.reader import Picture

Said = Sequence[str | Picture]  # what a message says and shows


def content_of(said: Said) -> str | list[dict[str, Any]]:
    """Returns a message's content: a text, or parts where there are pictures. These are as chat templates want them but
    for the `Picture` in them, which `shown` takes out."""
    if not any(isinstance(one, Picture) for one in said):
        return "".join(str(one) for one in said)
    parts: list[dict[str, Any]] = []
    for is_picture, some in groupby(said, lambda one: isinstance(one, Picture)):
        if is_picture:
            parts += [{"type": "image", "picture": one} for one in some]
        elif text := "".join(str(one) for one in some):
            parts.append({"type": "text", "text": text})
    return parts


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """Returns the pictures of a conversation, in order."""
    every = (message.get("content") for message in messages)
    parts = (part for content in every if isinstance(content, list) for part in content)
    return [part["picture"] for part in parts if isinstance(part, Mapping) and "picture" in part]


def shown(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns a conversation as chat templates want it, which only know where pictures are."""

    def without(part: Any) -> Any:
        return {"type": "image"} if isinstance(part, Mapping) and "picture" in part else part

    return [
        {**message, "content": [without(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
