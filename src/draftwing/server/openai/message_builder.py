"""How an answer's text becomes the message of a chat completion: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftwing.requests.answer import Answer
from draftwing.server.parsers.message import MessageReader, Thought
from draftwing.server.parsers.tools import CallPiece

Delta = dict[str, Any]


class Speech:
    """One answer. Text comes in pieces of any size; what comes of them does not depend on the sizes."""

    def __init__(self, answer: Answer, reader: MessageReader) -> None:
        self._answer, self._reader = answer, reader

    def push(self, text: str, final: bool) -> list[Delta]:
        """Deltas of the message that follow from the next piece; `final` says that nothing comes after it."""
        deltas: list[Delta] = []
        for part in self._reader.push(text, final, self._answer.token_ids):
            if isinstance(part, Thought):
                deltas.append({"reasoning_content": part.text})
            elif isinstance(part, str):
                deltas.append({"content": part, "reasoning_content": None})
            else:
                deltas += [{"tool_calls": [call]} for call in _call_deltas(part)]
        self._answer.reasoning_tokens = self._reader.reasoning_tokens
        return deltas

    def message(self) -> dict[str, Any]:
        """The whole message, role included, after the final piece."""
        reader = self._reader
        # An answer that is all reasoning or calls has no content; an empty one has an empty content.
        content = reader.content if reader.content or not (reader.calls or reader.reasoning) else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message["reasoning_content"] = reader.reasoning or None
        if reader.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in reader.calls
            ]
        return message

    def finish_reason(self, reason: str) -> str:
        """As the response tells it, after the final piece; reason: the engine's ("stop", "length", "abort")."""
        return "tool_calls" if reason == "stop" and self._reader.calls else reason


Speaker = Callable[[Answer], Speech]


def _call_deltas(piece: CallPiece) -> list[Delta]:
    """As OpenAI streams a call: its id and name, then pieces of its arguments."""
    deltas: list[Delta] = []
    if piece.name is not None:
        function = {"name": piece.name, "arguments": ""}
        deltas.append({"index": piece.index, "id": piece.id, "type": "function", "function": function})
    if piece.arguments:
        deltas.append({"index": piece.index, "function": {"arguments": piece.arguments}})
    return deltas
