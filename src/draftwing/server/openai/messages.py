"""Messages of a conversation, as requests hold them and as chat templates want them."""

from __future__ import annotations

from typing import Any, Literal

from draftwing.errors import RequestError
from draftwing.server.chat import template_call
from draftwing.server.schema import Body, Bookkeeping, NotBuilt, OtherKind


class TextPart(Body):
    type: str
    text: str | None = None
    # Other kinds of parts are known, to say that they are not built rather than that they are unknown.
    image_url: OtherKind = None
    input_audio: OtherKind = None
    video_url: OtherKind = None
    file: OtherKind = None
    refusal: OtherKind = None
    cache_control: Bookkeeping = None


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    """A call that an answer made, as it comes back in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Bookkeeping = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: Bookkeeping = None
    annotations: Bookkeeping = None
    audio: NotBuilt = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: NotBuilt = None

    def plain(self, where: str) -> dict[str, Any]:
        """As chat templates want it: content is one string. `where` names the message in errors."""
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) not in (None, []) and self.role != role:
                raise RequestError(f"{where}.{name} is for messages of the role {role!r}", f"{where}.{name}")
        if self.role == "tool" and self.tool_call_id is None:
            raise RequestError(f"{where}.tool_call_id is missing", f"{where}.tool_call_id")
        if self.role == "function":
            raise RequestError(f"{where}.role 'function' is not supported: use tools and 'tool'", f"{where}.role")
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self._text(where)
        for name in ("name", "reasoning_content", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        # Templates ask whether the key is there.
        if self.tool_calls:
            message["tool_calls"] = [
                template_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
        return message

    def _text(self, where: str) -> str:
        if self.content is None:
            if self.role != "assistant":
                raise RequestError(f"{where}.content must be a string or a list of text parts", f"{where}.content")
            return ""
        if isinstance(self.content, str):
            return self.content
        for i, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"{where}.content.{i} must be {{'type': 'text', 'text': ...}}; other kinds are not supported",
                    f"{where}.content.{i}",
                )
        return "".join(part.text or "" for part in self.content)


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates want them."""
    if not messages:
        raise RequestError("messages must hold at least one message", "messages")
    called: dict[str, str] = {}  # names of functions by call id
    plain = []
    for i, message in enumerate(messages):
        called |= {call.id: call.function.name for call in message.tool_calls or []}
        plain.append(message.plain(f"messages.{i}"))
        if message.tool_call_id in called:
            plain[-1].setdefault("name", called[message.tool_call_id])  # some templates show it with the result
    return plain
