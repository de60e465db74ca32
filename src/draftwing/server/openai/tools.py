"""The tools of /v1/chat/completions, which choices there are among them, and their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from draftwing.errors import RequestError
from draftwing.requests.refusals import show
from draftwing.server.chat import MAX_TOOLS, checked_choice, checked_functions
from draftwing.server.parsers.grammars import Function, ToolChoice, custom_function
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
        """Returns characters of its grammar."""
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


def offered(tools: Sequence[ChatTool], choice: str | ChosenTool | None) -> tuple[list[Function], ToolChoice]:
    """Returns the functions that the model sees, and the choice among them. Raises RequestError for tools that cannot
    be offered, and for a choice that cannot be made."""
    functions = checked_functions([tool.plain(f"tools.{i}") for i, tool in enumerate(tools)])
    if choice is None or isinstance(choice, str):
        return functions, checked_choice(ToolChoice(choice or "auto"), functions)  # type: ignore[arg-type]
    check_kind(choice, "tool_choice")
    if choice.allowed_tools is None:
        return functions, _named(choice, functions)
    allowed, names = choice.allowed_tools, set()
    for i, tool in enumerate(allowed.tools):
        where = f"tool_choice.allowed_tools.tools.{i}"
        check_kind(tool, where)
        names.add(_named(tool, functions, where).name)
    # The model sees no others: without a grammar nothing else would keep it from calling them.
    functions = [function for function in functions if function.name in names]
    if not functions:
        raise RequestError("tool_choice.allowed_tools.tools must not be empty", "tool_choice.allowed_tools.tools")
    return functions, ToolChoice(allowed.mode)


def _named(tool: NamedTool | ChosenTool, functions: Sequence[Function], where: str = "tool_choice") -> ToolChoice:
    chosen = tool.function or tool.custom
    assert chosen is not None
    custom = any(function.custom and function.name == chosen.name for function in functions)
    if custom != (tool.type == "custom"):
        raise RequestError(f"{where}: there is no tool {show(chosen.name)} of type {tool.type!r}", where)
    return checked_choice(ToolChoice("named", chosen.name), functions, where)


def _called(name: str, arguments: str, custom: bool) -> dict[str, Any]:
    """Returns a call's fields by its kind."""
    if custom:
        return {"type": "custom", "custom": {"name": name, "input": arguments}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def whole_call(call: Call) -> dict[str, Any]:
    """Returns a call in a message."""
    return {"id": call.id, **_called(call.name, call.arguments, call.custom)}


def call_deltas(piece: CallPiece) -> list[dict[str, Any]]:
    """Calls as OpenAI streams them: id and name, then pieces of the arguments or of the input."""
    index, given = piece.index, piece.arguments
    begun = [] if piece.name is None else [{"index": index, "id": piece.id, **_called(piece.name, "", piece.custom)}]
    more = {"custom": {"input": given}} if piece.custom else {"function": {"arguments": given}}
    return [*begun, *([{"index": index, **more}] if given else [])]
