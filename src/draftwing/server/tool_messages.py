"""Tool calls and their results in a conversation, as chat templates want them."""

from __future__ import annotations

import json
from typing import Any


def template_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call that was made before. Templates write arguments as JSON, so they want the object; what is none, as the
    arguments of an answer that was cut, stays the text it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}
