"""The tools of /v1/responses: functions and custom tools, alone or in namespaces, as functions that a model knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from draftwing.errors import RequestError
from draftwing.requests.refusals import show
from draftwing.server.chat import AUTO, MAX_TOOLS, checked_choice, checked_functions
from draftwing.server.parsers.grammars import Function, ToolChoice, custom_function
from draftwing.server.schema import Body, Hint

# Tools that OpenAI's servers run, or whose calls only its models know how to write.
HOSTED = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
        "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
        "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    }
)  # fmt: skip
_ALONE = "only OpenAI's servers have it: offer a tool of type 'function' or 'custom' that your program runs"


class CustomFormat(Body):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class OneTool(Body, hints="async_ output_schema"):
    """A tool; which fields it has depends on its type. Those of `HOSTED` are not looked at."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    defer_loading: Hint = None  # of a tool that is there from the start
    allowed_callers: Hint = None

    @property
    def definition(self) -> int:
        """Returns characters of its grammar."""
        return len((self.format and self.format.definition) or "")


class ResponsesTool(OneTool):
    """A tool, or a namespace of several."""

    tools: list[OneTool] | None = None

    @property
    def definition(self) -> int:
        return super().definition + sum(tool.definition for tool in self.tools or ())


class AllowedTool(Body):
    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    namespace: str | None = None


class ChosenTool(AllowedTool):
    """A tool that has to be called, or several that may be."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS)] | None = None


@dataclass(frozen=True)
class Offer:
    """A tool as the request has it, and the function that the model sees."""

    function: Function
    name: str
    namespace: str | None = None


def flat_name(name: str, namespace: str | None) -> str:
    """Returns what a model calls a tool."""
    return name if namespace is None else f"{namespace}.{name}"


class Toolbox:
    """The tools of a request.

    functions: those that the model sees.  choice: among them.  ignored: names of what is left out.
    """

    def __init__(
        self,
        tools: Sequence[ResponsesTool] = (),
        added: Sequence[tuple[str, ResponsesTool]] = (),
        choice: str | ChosenTool | None = None,
    ) -> None:
        """added: tools of items of the input, with the fields that hold them; of two of a name the later one counts.
        Raises RequestError for tools that cannot be offered, and for a choice that cannot be made."""
        given = [(f"tools.{i}", tool) for i, tool in enumerate(tools)]
        own = list(_offers(given))
        checked_functions([(offer.function, where) for offer, where in own])
        found = {offer.function.name: (offer, where) for offer, where in (*own, *_offers(added))}
        functions = checked_functions([(offer.function, where) for offer, where in found.values()])
        hosted = [(where, tool.type) for where, tool in (*given, *added) if tool.type in HOSTED]
        if hosted and given and not found:  # those of items come of earlier answers
            where, kind = hosted[0]
            raise RequestError(f"{where}.type must not be {kind!r} alone: {_ALONE}", f"{where}.type")
        self.ignored = tuple(dict.fromkeys(f"tools.{kind}" for _, kind in hosted))
        self._offers = {name: offer for name, (offer, _) in found.items()}
        self.functions = functions
        self.choice = checked_choice(self._chosen(choice), self.functions)

    def __getitem__(self, name: str) -> Offer:
        """The tool that the model calls so."""
        return self._offers[name]

    def _chosen(self, choice: str | ChosenTool | None) -> ToolChoice:
        if choice is None:
            return AUTO
        if isinstance(choice, str):
            return ToolChoice(choice)  # type: ignore[arg-type]
        if choice.type != "allowed_tools":
            (one,) = self._named(choice, "tool_choice")
            return ToolChoice("named", one)
        if choice.mode is None or not choice.tools:
            raise RequestError("tool_choice must have mode and tools, which are allowed", "tool_choice")
        allowed = {n for i, tool in enumerate(choice.tools) for n in self._named(tool, f"tool_choice.tools.{i}")}
        # The model sees no others: without a grammar nothing else would keep it from calling them.
        self.functions = [one for one in self.functions if one.name in allowed]
        return ToolChoice(choice.mode)

    def _named(self, tool: AllowedTool, where: str) -> list[str]:
        """Returns what the model calls a tool that the request names; all of a namespace where one is allowed."""
        if tool.type in HOSTED:
            raise RequestError(f"{where} must not be {tool.type!r}: {_ALONE}", where)
        if tool.type == "namespace" and where != "tool_choice":
            found = [name for name, offer in self._offers.items() if offer.namespace == tool.name]
        else:
            name = flat_name(tool.name or "", tool.namespace)
            offer = self._offers.get(name)
            known = offer is not None and tool.type == ("custom" if offer.function.custom else "function")
            found = [name] if known else []
        if not found:
            message = f"{where} must name a tool that there is, as {{'type': 'function', 'name': ...}}"
            raise RequestError(f"{message}; found {show(tool.type)}, {show(tool.name)}", where)
        return found


def shown_tools(tools: Sequence[ResponsesTool]) -> list[dict[str, Any]]:
    """Returns the tools as a response repeats them: those that the model could see."""
    return [_shown(tool) for tool in tools if tool.type not in HOSTED]


def _shown(tool: OneTool) -> dict[str, Any]:
    shown = {"type": tool.type, "name": tool.name, "description": tool.description}
    if isinstance(tool, ResponsesTool) and tool.tools is not None:
        return shown | {"tools": list(map(_shown, tool.tools))}
    if tool.type == "custom":
        form = tool.format or CustomFormat(type="text")
        return shown | {"format": form.model_dump(exclude_none=True)}
    return shown | {"parameters": tool.parameters, "strict": bool(tool.strict)}


def _offers(tools: Sequence[tuple[str, ResponsesTool]]) -> Iterator[tuple[Offer, str]]:
    """Yields each tool, and the field that holds it."""
    for where, tool in tools:
        if tool.type in HOSTED:
            continue
        if tool.type != "namespace":
            if tool.tools is not None:
                raise RequestError(f"{where}.tools is for tools of type 'namespace'", f"{where}.tools")
            yield _offer(tool, where), where
            continue
        _check_fields(tool, ("name", "description", "tools"), where)
        if not tool.name or not tool.tools:
            name = f"{where}.{'tools' if tool.name else 'name'}"
            raise RequestError(f"{name} is missing: a namespace has a name and tools", name)
        about = f"{tool.name}: {tool.description}" if tool.description else None
        for j, inner in enumerate(tool.tools):
            yield _offer(inner, f"{where}.tools.{j}", tool.name, about), f"{where}.tools.{j}"
            about = None  # the model need not read it again


def _offer(tool: OneTool, where: str, namespace: str | None = None, about: str | None = None) -> Offer:
    name = flat_name(tool.name or "", namespace) if tool.name else ""
    texts = [text for text in (about, tool.description) if text]
    description = "\n\n".join(texts) if texts else tool.description
    if tool.type == "function":
        _check_fields(tool, ("name", "description", "parameters", "strict"), where)
        function = Function(name, description, tool.parameters, bool(tool.strict))
    elif tool.type == "custom":
        _check_fields(tool, ("name", "description", "format"), where)
        form = tool.format or CustomFormat(type="text")
        if (form.type == "grammar") != (form.syntax is not None):
            field = f"{where}.format.syntax"
            raise RequestError(f"{field} is for format.type 'grammar', which needs it", field)
        function = custom_function(name, description, form.syntax, form.definition, f"{where}.format")
    else:
        kinds = "'function', 'custom'" + (", 'namespace'" if namespace is None else "")
        raise RequestError(f"{where}.type must be one of {kinds}; found {show(tool.type)}", f"{where}.type")
    return Offer(function, tool.name or "", namespace)


def _check_fields(tool: OneTool, names: tuple[str, ...], where: str) -> None:
    """Raises RequestError for fields that are not known, or that a tool of its type does not have."""
    for name in tool.__pydantic_extra__ or {}:
        raise RequestError(f"{where}.{name[:200]} is not a known field", f"{where}.{name[:200]}")
    callers = tool.allowed_callers
    if isinstance(callers, list) and callers and "direct" not in callers:
        field = f"{where}.allowed_callers"
        raise RequestError(f"{field} must hold 'direct': nothing but the model calls tools here", field)
    for name in ("parameters", "strict", "format"):
        if getattr(tool, name) is not None and name not in names:
            raise RequestError(f"{where}.{name} is not a field of a tool of type {tool.type!r}", f"{where}.{name}")
