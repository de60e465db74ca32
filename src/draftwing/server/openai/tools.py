"""The tools of /v1/chat/completions, which choices there are among them, and their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from draftwing.errors import RequestError
from draftwing.requests.refusals import show
from draftwing.server.chat import MAX_TOOLS, checked_choice, checked_functions
from draftwing.server.parsers.custom import InputReader, custom_function
from draftwing.server.parsers.grammars import Function, ToolChoice
from draftwing.server.parsers.message import Call
from draftwing.server.parsers.tools import CallPiece
from draftwing.server.schema import Body


class ChatFunction(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(Body):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class ChatCustom(Body):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class ChatTool(Body, hints="cache_control"):
    type: Literal["function", "custom"]
    function: ChatFunction | None = None
    custom: ChatCustom | None = None

    @property
    def definition(self) -> int:
        """Characters of its grammar."""
        grammar = self.custom and self.custom.format and self.custom.format.grammar
        return len(grammar.definition) if grammar else 0

    def plain(self, where: str) -> tuple[Function, str]:
        """Makes a function of the tool, and names the field that holds it. Raises RequestError."""
        check_kind(self, where)
        if self.function is not None:
            given = self.function
            return Function(given.name, given.description, given.parameters, bool(given.strict)), f"{where}.function"
        assert self.custom is not None
        form = self.custom.format or CustomFormat(type="text")
        grammar, field = form.grammar, f"{where}.custom.format.grammar"
        if (form.type == "grammar") != (grammar is not None):
            raise RequestError(f"{field} is for format.type 'grammar', which needs it", field)
        syntax, definition = (None, None) if grammar is None else (grammar.syntax, grammar.definition)
        made = custom_function(self.custom.name, self.custom.description, syntax, definition, field)
        return made, f"{where}.custom"


class CalledFunction(Body, bookkeeping="parsed_arguments provider_specific_fields"):
    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustom(Body):
    name: str
    input: str


class ChosenName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function", "custom"]
    function: ChosenName | None = None
    custom: ChosenName | None = None


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS)]


class ChosenTool(Body):
    """A tool that has to be called, or several that may be."""

    type: Literal["function", "custom", "allowed_tools"]
    function: ChosenName | None = None
    custom: ChosenName | None = None
    allowed_tools: AllowedTools | None = None


def check_kind(part: Any, where: str) -> None:
    """Raises RequestError unless a part of the body has the field that its `type` names, and no other."""
    for kind in ("function", "custom", "allowed_tools"):
        given, field = getattr(part, kind, None) is not None, f"{where}.{kind}"
        if given != (part.type == kind):
            wrong = f"is for the type {kind!r}; found {show(part.type)}" if given else "is missing"
            raise RequestError(f"{field} {wrong}", field)


def offered(
    tools: Sequence[ChatTool], choice: str | ChosenTool | None
) -> tuple[list[Function], ToolChoice, frozenset[str]]:
    """Returns the functions that the model sees, the choice among them, and the names of those that are custom tools.
    Raises RequestError for tools that cannot be offered, and for a choice that cannot be made."""
    functions = checked_functions([tool.plain(f"tools.{i}") for i, tool in enumerate(tools)])
    customs = frozenset(tool.custom.name for tool in tools if tool.custom is not None)
    if choice is None or isinstance(choice, str):
        return functions, checked_choice(ToolChoice(choice or "auto"), functions), customs  # type: ignore[arg-type]
    check_kind(choice, "tool_choice")
    if choice.allowed_tools is None:
        return functions, checked_choice(ToolChoice("named", _name(choice, customs)), functions), customs
    allowed = choice.allowed_tools
    names = set()
    for i, tool in enumerate(allowed.tools):
        where = f"tool_choice.allowed_tools.tools.{i}"
        check_kind(tool, where)
        named = ToolChoice("named", _name(tool, customs, where))
        names.add(checked_choice(named, functions, where).name)
    # The model sees no others: without a grammar nothing else would keep it from calling them.
    functions = [function for function in functions if function.name in names]
    if not functions:
        raise RequestError("tool_choice.allowed_tools.tools must not be empty", "tool_choice.allowed_tools.tools")
    return functions, ToolChoice(allowed.mode), customs


def _name(tool: NamedTool | ChosenTool, customs: frozenset[str], where: str = "tool_choice") -> str:
    chosen = tool.function or tool.custom
    assert chosen is not None
    if (chosen.name in customs) != (tool.type == "custom"):
        raise RequestError(f"{where}: there is no tool {show(chosen.name)} of type {tool.type!r}", where)
    return chosen.name


def whole_call(call: Call, custom: bool) -> dict[str, Any]:
    """A call in a message. custom: of a custom tool."""
    if not custom:
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    reader = InputReader()
    given = reader.push(call.arguments) + reader.finish()
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": given}}


class CallDeltas:
    """Calls of one answer as OpenAI streams them: id and name, then pieces of the arguments or of the input.

    What is held back of an input that is none comes with `finish`.
    """

    def __init__(self, customs: frozenset[str]) -> None:
        self._customs = customs
        self._inputs: dict[int, InputReader] = {}  # by call

    def push(self, piece: CallPiece) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        index, given = piece.index, piece.arguments
        if piece.name is not None:
            if piece.name in self._customs:
                self._inputs[index] = InputReader()
            kind, field = ("custom", "input") if index in self._inputs else ("function", "arguments")
            deltas.append({"index": index, "id": piece.id, "type": kind, kind: {"name": piece.name, field: ""}})
        if index in self._inputs:
            given = self._inputs[index].push(given)
        return [*deltas, *self._more(index, given)]

    def finish(self) -> list[dict[str, Any]]:
        return [delta for index, reader in self._inputs.items() for delta in self._more(index, reader.finish())]

    def _more(self, index: int, given: str) -> list[dict[str, Any]]:
        more = {"custom": {"input": given}} if index in self._inputs else {"function": {"arguments": given}}
        return [{"index": index, **more}] if given else []
