"""The text by which requests with the same cached prefix are known, whatever dialect they are in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# In the order in which prompts have them. A salt keeps caches apart.
_FIELDS = ("cache_salt", "system", "instructions", "messages", "prompt", "text", "input", "input_ids")
_INNER = ("content", "text")


def beginning(body: bytes) -> str:
    """Returns the texts of a request's prompt; empty for a body without any. One that is no whole JSON is its own text:
    where it was cut, its beginning is the same as that of others. So is one that is nested too deeply to be read."""
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return ""
        return "".join(text for name in _FIELDS for text in _texts(request.get(name)))
    except (ValueError, RecursionError):
        return body.decode(errors="replace")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, int):  # an id of a token
        yield f"{value} "
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for name in _INNER:
            yield from _texts(value.get(name))
