"""What was said and called before, as chat templates want it; what a model reads of each part of a message, whichever
server's answer it was.

What another server ran (searches, code, MCP), and what it made unreadable, is left out: its answer stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from draftwing.errors import RequestError
from draftwing.images.parts import Said, content_of
from draftwing.images.reader import Picture
from draftwing.requests.refusals import show
from draftwing.server.parsers.call import read_arguments
from draftwing.server.schema import MAX_IN_CALL, Body, check_parts, hints_of

# Fields of a part that hold what is read, by its kind. In anybody's messages:
_TEXTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), ("text",)),
    "search_result": ("title", "source", "content"),
    "document": ("title", "context", "source"),
    "tool_reference": ("tool_name",),
}
# In answers. Of reasoning, the first one that is there:
_ANSWERS = {
    "refusal": ("refusal",),
    "compaction": ("content",),
    **dict.fromkeys(("audio", "output_audio"), ("transcript",)),
}
_THOUGHTS = frozenset({"thinking", "reasoning", "reasoning_text", "summary_text"})
_THOUGHT_IN = ("thinking", "reasoning", "text", "content", "summary")
# What is left out of answers: parts, and items of /v1/responses.
LEFT_OUT = frozenset({
    "server_tool_use", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "web_search_tool_result",
    "web_fetch_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "tool_search_tool_result", "advisor_tool_result", "container_upload",
    "redacted_thinking", "fallback", "reference", "tool_addition", "tool_removal",
    "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call", "program", "program_output",
    "compaction", "compaction_trigger",
})  # fmt: skip
# Calls of tools that the client runs and OpenAI defines: functions here. Where each says what is to be done:
_ACTIONS = ("action", "actions", "operation")
_CLIENT_RUN = {f"{name}_call": name for name in ("apply_patch", "computer", "local_shell", "shell")}


# Kinds of parts that are pictures: OpenAI's in both APIs, Anthropic's, and what a tool gives that uses a computer.
_PICTURES = frozenset({"image_url", "input_image", "image", "computer_screenshot"})


class MessagePart(Body):
    """A part of a message. Of a kind that is not one of the class's `own` only what is read is kept."""

    own: ClassVar[frozenset[str]] = frozenset({"text"})

    type: str
    text: str | None = None
    image: str | None = None  # address of a picture

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, part: Any) -> Any:
        kind = _kind(part)
        if not kind or kind in cls.own:
            return part
        return {
            "type": kind,
            "text": _text_of(kind, part),
            "image": _address_of(part) if kind in _PICTURES else None,
            **{name: part[name] for name in hints_of(cls) & part.keys()},
        }

    def said(self, answers: bool) -> str | None:
        """Returns what is read of the part as text; None where it has none. answers: whether it is the assistant's."""
        if answers and self.type in LEFT_OUT:
            return self.text or ""
        return self.text if self.type in _TEXTS or (answers and self.type in _ANSWERS) else None

    def picture(self, where: str) -> Picture | None:
        """Returns the picture that the part is, None where it is none. Raises RequestError. where: the part, for
        errors."""
        if self.type not in _PICTURES:
            return None
        if self.image is None:
            raise RequestError(f"{where}: expected a picture, as data:image/png;base64,... ; found none", where)
        return Picture(self.image, where)

    @property
    def thought(self) -> str | None:
        """Returns what is read of the part as reasoning; None where it has none."""
        return self.text if self.type in _THOUGHTS else None


def _address_of(part: Mapping[str, Any]) -> str | None:
    """Returns the address of a picture: of OpenAI's `image_url`, a text or an object with a `url`, or of Anthropic's
    `source`, and of a part that was read before and stored."""
    given = next((part[name] for name in ("image_url", "source", "image") if part.get(name) is not None), None)
    if isinstance(given, Mapping):
        data = given.get("data")
        if given.get("type") == "base64" and isinstance(data, str):
            return f"data:{given.get('media_type')};base64,{data}"
        given = given.get("url")
    return given if isinstance(given, str) else None


def message_of(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message of /v1/chat/completions with what it says in older ways, and in sound, said as text and by
    calls."""
    called, audio, name = message.get("function_call"), message.get("audio"), message.get("name")
    transcript = audio.get("transcript") if isinstance(audio, Mapping) else None
    if isinstance(transcript, str):
        message = {**message, "content": message.get("content") or transcript, "audio": None}
    if isinstance(message.get("refusal"), str) and not message.get("content"):
        message = {**message, "content": message["refusal"]}
    if isinstance(called, Mapping) and isinstance(called.get("name"), str):
        made = {"id": f"call_{called['name']}", "function": called}
        message = {**message, "tool_calls": message.get("tool_calls") or [made], "function_call": None}
    if message.get("role") == "function" and isinstance(name, str):
        message = {**message, "role": "tool", "tool_call_id": f"call_{name}"}
    return message


def _text_of(kind: str, part: Mapping[str, Any]) -> str | None:
    if kind in _THOUGHTS:
        return next((text for name in _THOUGHT_IN if (text := _joined(part.get(name))) is not None), None)
    names = _TEXTS.get(kind, _ANSWERS.get(kind, ()))
    given = [_joined(part.get(name)) for name in names if part.get(name) is not None]
    return None if None in given or not given else "\n".join(text for text in given if text)


def _joined(value: Any) -> str | None:
    """Returns a text, those of a list of parts, or that of a document's source; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get({"text": "data", "content": "content"}.get(_kind(value), ""))
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    texts = [one.get("text") if isinstance(one, Mapping) else None for one in value if _kind(one) not in LEFT_OUT]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def item_of(item: dict[str, Any], own: frozenset[str]) -> dict[str, Any]:
    """Returns an item of /v1/responses. Of a kind that is not one of `own` only what is read is kept: the call of a
    tool that the client runs, or what it gave."""
    kind = _kind(item)
    if kind == "additional_tools":
        return {name: value for name, value in item.items() if name != "role"}  # of whatever kind
    if not kind or kind in own:
        return item
    if kind == "tool_search_output":
        return {"type": "additional_tools", "tools": item.get("tools")}
    call = _CLIENT_RUN.get(kind.removesuffix("_output"))
    if call is None:
        return {"type": kind}
    made = {"type": "function_call", "call_id": item.get("call_id") or item.get("id")}
    if kind in _CLIENT_RUN:
        return {**made, "name": call, "arguments": {name: item[name] for name in _ACTIONS if name in item}}
    return {**made, "type": "function_call_output", "output": _given(item.get("output"))}


def _given(output: Any) -> Any:
    """Returns what a tool gave that the client ran: of a shell all texts, of a screen the picture."""
    if isinstance(output, Mapping):
        return [output]
    if not isinstance(output, list):
        return output
    streams = [one.get(name) for one in output if isinstance(one, Mapping) for name in ("stdout", "stderr")]
    return "".join(text for text in streams if isinstance(text, str))


class Conversation:
    """Messages as chat templates want them, in the making. What the assistant thinks, says and calls in a row is one
    message; results of tools are messages of their own."""

    def __init__(self, system: str | None = None) -> None:
        self._messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}  # names of functions by call id
        self._open = False  # whether the last message is one that the assistant goes on with
        # Its pieces, joined when it ends: there may be tens of thousands.
        self._said: list[str] = []
        self._thought: list[str] = []
        if system:
            self.say("system", system)

    def say(self, role: str, text: str | Said, **more: Any) -> None:
        """Adds a whole message."""
        self._end_turn()
        content = text if isinstance(text, str) else content_of(text)
        self._messages.append({"role": role, "content": content, **more})

    def answer(self, text: str, begin: bool = False) -> None:
        """Adds what the assistant says. begin: in a new message."""
        self._turn(begin)
        self._said.append(text)

    def think(self, text: str) -> None:
        self._turn()
        self._thought.append(text)

    def call(self, call_id: str, name: str, arguments: Any, where: str) -> None:
        """Adds a call. where: see `template_call`."""
        self._called[call_id] = name
        self._turn().setdefault("tool_calls", []).append(template_call(call_id, name, arguments, where))

    def result(self, call_id: str | None, text: str | Said, where: str, kind: str) -> None:
        """Adds what a called function gave. Raises RequestError where nothing has that id: `where` is the field that
        holds it, `kind` what calls are here."""
        name = self._called.get(call_id or "")
        if call_id is None or name is None:
            raise RequestError(f"{where} must be the id of a {kind} before it; found {show(call_id)}", where)
        self.say("tool", text, tool_call_id=call_id, name=name)

    def done(self) -> list[dict[str, Any]]:
        """Returns all messages; what is added afterwards begins a new one."""
        self._end_turn()
        return self._messages

    def _turn(self, begin: bool = False) -> dict[str, Any]:
        if begin or not self._open:
            self.say("assistant", "")
            self._open = True
        return self._messages[-1]

    def _end_turn(self) -> None:
        if self._open:
            message = self._messages[-1]
            message["content"] = "".join(self._said)
            if self._thought:
                message["reasoning_content"] = "".join(self._thought)
            self._said, self._thought, self._open = [], [], False


def template_call(call_id: str, name: str, arguments: Any, where: str) -> dict[str, Any]:
    """Returns a call that was made before, as chat templates want it. They write arguments as JSON, so they want the
    object; what is none stays the text it is. Raises RequestError for one that is too large: `where` is the field that
    holds it."""
    if arguments is None or isinstance(arguments, str):
        check_parts((arguments or "").encode(errors="replace"), MAX_IN_CALL, MAX_IN_CALL, where)
        found = read_arguments(arguments or "")
        arguments = arguments if found is None else found
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def only(part: Body, names: tuple[str, ...], where: str, kind: str) -> None:
    """Raises RequestError for fields that a part of its type does not have. kind: of part, in words."""
    for name, value in part.__dict__.items():
        # Null and empty lists are what responses hold where there is nothing.
        if value not in (None, []) and name not in names:
            raise RequestError(f"{where}.{name} is not supported in a {kind}", f"{where}.{name}")
