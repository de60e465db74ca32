"""What was said and called before, as chat templates want it."""

from __future__ import annotations

from typing import Any

from draftwing.errors import RequestError
from draftwing.requests.refusals import show
from draftwing.server.parsers.call import read_arguments
from draftwing.server.parts import MAX_IN_CALL, check_parts
from draftwing.server.schema import Body


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

    def say(self, role: str, text: str, **more: Any) -> None:
        """Adds a whole message."""
        self._end_turn()
        self._messages.append({"role": role, "content": text, **more})

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

    def result(self, call_id: str | None, text: str, where: str, kind: str) -> None:
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
