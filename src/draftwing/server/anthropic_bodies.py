"""Bodies of Anthropic's API, and the conversation that they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Tag

from draftwing.errors import ContextError, RequestError
from draftwing.images.reader import Picture
from draftwing.requests.refusals import no_text, show
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.chat import AUTO, Chat, ChatBody, checked_choice, checked_functions
from draftwing.server.conversation import Conversation, MessagePart, only
from draftwing.server.parsers.grammars import Function, ToolChoice
from draftwing.server.schema import HINT, Body, Hint, Name, sampled

# Types of tools that Anthropic defines: a name and the date of its version.
_HOSTED = re.compile(r"([a-z][a-z0-9_]{0,39})_[0-9]{8}|(mcp_toolset)")
_EDITS = ("clear_thinking_", "clear_tool_uses_", "compact_")  # they ask that the model see less
_EFFORTS = {"max": "xhigh"}  # the most there is, by OpenAI's name


class TextBlock(MessagePart, hints="cache_control", bookkeeping="citations"):
    pass


class Block(TextBlock, bookkeeping="caller toolset_name signature"):
    """A part of a message; which fields it has depends on its type."""

    own = frozenset({"text", "thinking", "tool_use", "tool_result"})

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Body, hints="cache_control defer_loading input_examples"):
    """A function of the client's."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # inputs always stream as they come
    allowed_callers: Annotated[list[str] | None, HINT] = None  # "direct" is the client


class HostedTool(Body):
    """A tool that Anthropic's servers run, or whose input its models know without a schema. There is none here."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None

    @property
    def kind(self) -> str:
        """Returns the tool's type without the date."""
        found = _HOSTED.fullmatch(self.type)
        assert found is not None
        return found[1] or found[2]


def _sort_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return "hosted" if isinstance(kind, str) and _HOSTED.fullmatch(kind) else "custom"


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("custom")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_sort_of_tool)
]


class AnthropicChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body, hints="display"):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | None = None


class OutputConfig(Body, hints="task_budget"):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ContextEdit(Body):
    model_config = ConfigDict(extra="allow")

    type: str
    keep: Any = None


class ContextManagement(Body):
    edits: list[ContextEdit] | None = None


class CountRequest(Body, hints="cache_control speed billing_policy"):
    """Body of /v1/messages/count_tokens: what the prompt is made of."""

    model: Name
    messages: list[AnthropicMessage]
    system: str | list[TextBlock] | None = None
    tools: list[AnyTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an older name of `output_config.format`
    mcp_servers: Hint = None
    context_management: ContextManagement | None = None

    def chat(self) -> Chat:
        """Returns the conversation. Raises RequestError for what it cannot be."""
        messages = _conversation(self.messages, _texts(self.system, "system"))
        if not self.messages:
            raise RequestError("messages must hold at least one message", "messages")
        if messages[-1]["role"] == "assistant" and messages[-1].get("tool_calls"):
            name = f"messages.{len(self.messages) - 1}"
            raise RequestError(f"{name}: a message with tool_use blocks cannot be the last one", name)
        tools, given = self.tools or [], self.tool_choice
        found = [_function(tool, f"tools.{i}") for i, tool in enumerate(tools) if isinstance(tool, AnthropicTool)]
        functions = checked_functions(found, "input_schema")
        hosted = [tool for tool in tools if isinstance(tool, HostedTool)]
        self._check_hosted(hosted, bool(functions))
        choice = AUTO if given is None else checked_choice(_choice(given), functions)
        kind = None if self.thinking is None else self.thinking.type
        effort = None if self.output_config is None else self.output_config.effort
        ignored = [f"tools.{tool.kind}" for tool in hosted]
        ignored += ["context_management"] if _edits(self.context_management) else []
        return Chat(
            messages,
            functions,
            choice,
            parallel=not (given is not None and given.disable_parallel_tool_use),
            continued=self.messages[-1].role == "assistant",
            thinking={"enabled": True, "disabled": False}.get(kind or ""),
            effort=_EFFORTS.get(effort or "", effort),
            ignored=tuple(ignored),
        )

    def _check_hosted(self, hosted: Sequence[HostedTool], functions: bool) -> None:
        """Raises RequestError where tools that are not there are all that there is, or have to be called. Beside
        functions they are left out: the model does not see them."""
        choice, instead = self.tool_choice, "offer a tool with an input_schema, and run it in the client"
        if choice is not None and choice.name is not None and choice.name in {tool.name for tool in hosted}:
            name = "tool_choice.name"
            raise RequestError(f"{name}: this server has no {show(choice.name)} of its own; {instead}", name)
        if hosted and not functions:
            raise RequestError(f"tools: this server has no {hosted[0].kind} of its own; {instead}", "tools")
        if self.mcp_servers and not functions:
            raise RequestError(f"mcp_servers: this server calls no other servers; {instead}", "mcp_servers")


class MessagesRequest(
    CountRequest,
    ChatBody,
    hints="metadata service_tier fallbacks fallback_credit_token diagnostics return_progress timings_per_token verbose",
    not_built="compaction container inference_geo",
    sampling="temperature top_p top_k seed",  # the last one as in the other APIs
):
    """Body of /v1/messages."""

    source = "messages"
    names: ClassVar = {
        "min_new_tokens": "max_tokens",
        "response_format": "output_config.format",
        "effort": "output_config.effort",
        "thinking_budget": "thinking.budget_tokens",
    }

    max_tokens: Any = sampled("max_new_tokens", required=True)
    stop_sequences: Any = sampled("stop")
    thread: Any = None  # Anthropic's tool runner sends it, and goes on without it when it gets the code below

    @property
    def _format_field(self) -> str:
        return "output_config.format" if self.output_format is None else "output_format"

    @property
    def grammar_field(self) -> str | None:
        return f"{self._format_field}.schema"

    def sampling(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        if self.max_tokens is None:
            raise RequestError("max_tokens is missing", "max_tokens")
        if self.thread is not None:
            message = "thread is not supported: conversations are not stored; send all messages"
            raise RequestError(message, "thread", "thread_unsupported_request")
        form, thinking, name = (self.output_config or OutputConfig()).format, self.thinking, self._format_field
        if form is not None and self.output_format is not None:
            raise RequestError("output_format and output_config.format cannot be given together", "output_format")
        form = form or self.output_format
        if thinking is not None and thinking.budget_tokens is not None and thinking.type != "disabled":
            budget = thinking.budget_tokens
            if isinstance(self.max_tokens, int) and budget >= self.max_tokens:
                raise RequestError(
                    f"thinking.budget_tokens must be less than max_tokens; found {budget} and {self.max_tokens}",
                    "thinking.budget_tokens",
                )
            fields["thinking_budget"] = budget
        if form is not None:
            if form.schema_ is None:
                raise RequestError(f"{name}.schema is missing", f"{name}.schema")
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return super().sampling(defaults, **fields)

    def renamed(self, error: RequestError) -> RequestError:
        if not isinstance(error, ContextError):
            return super().renamed(error)
        # In Anthropic's words, by which clients know what to do: shorten the conversation, or ask for less.
        prompt, asked, context = error.prompt, error.asked, error.context
        if asked is None:
            message = f"prompt is too long: {prompt} tokens > {context - 1} maximum"
            return RequestError(message, "messages", error.code)
        return RequestError(
            f"input length and `max_tokens` exceed context limit: {prompt} + {asked} > {context}, decrease input "
            "length or `max_tokens` and try again",
            "max_tokens",
            error.code,
        )


def _edits(management: ContextManagement | None) -> bool:
    """Returns whether it asks that the model see less of the conversation than there is: it always sees all. Raises
    RequestError for edits that may ask for anything else."""
    edits = (management or ContextManagement()).edits or []
    for i, edit in enumerate(edits):
        if not edit.type.startswith(_EDITS):
            name = f"context_management.edits.{i}.type"
            raise RequestError(f"{name} must begin with {', '.join(_EDITS)}; found {show(edit.type)}", name)
    return any(not edit.type.startswith("clear_thinking_") or edit.keep != "all" for edit in edits)


def _function(tool: AnthropicTool, where: str) -> tuple[Function, str]:
    if tool.type not in (None, "custom"):
        raise RequestError(f"{where}.type must be 'custom'; found {show(tool.type)}", f"{where}.type")
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        name = f"{where}.allowed_callers"
        raise RequestError(f"{name} must hold 'direct': no other tool can call it here", name)
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is missing", f"{where}.input_schema")
    return Function(tool.name, tool.description, tool.input_schema, bool(tool.strict)), where


def _choice(given: AnthropicChoice) -> ToolChoice:
    if (given.name is not None) != (given.type == "tool"):
        raise RequestError("tool_choice.name is for tool_choice.type 'tool', which needs it", "tool_choice.name")
    if given.type == "tool":
        return ToolChoice("named", given.name or "")
    return ToolChoice("required" if given.type == "any" else given.type)


def _texts(content: str | Sequence[TextBlock] | None, where: str) -> str:
    """Returns the text of a content that may hold nothing else."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text(block, f"{where}.{i}") for i, block in enumerate(content))


def _said(content: str | Sequence[TextBlock] | None, where: str) -> list[str | Picture]:
    """Returns what a content says and shows."""
    if content is None or isinstance(content, str):
        return [content or ""]
    return [_one_said(block, f"{where}.{i}") for i, block in enumerate(content)]


def _one_said(block: TextBlock, where: str) -> str | Picture:
    found = block.picture(where)
    return _text(block, where) if found is None else found


def _text(block: TextBlock, where: str, answers: bool = False) -> str:
    text = block.said(answers)
    if text is None:
        raise no_text(block.type, where, f"{where}.type")
    _only(block, ("text",), where)
    return text


def _only(block: TextBlock, names: tuple[str, ...], where: str) -> None:
    only(block, (*names, "type", "cache_control", "signature", "citations"), where, f"{block.type!r} block")


def _conversation(messages: list[AnthropicMessage], system: str) -> list[dict[str, Any]]:
    found = Conversation(system)
    for i, message in enumerate(messages):
        where = f"messages.{i}.content"
        if isinstance(message.content, str):
            found.say(message.role, message.content)
        elif message.role == "assistant":
            _assistant(found, message.content, where)
        elif message.role == "system":
            found.say("system", _texts(message.content, where))
        else:
            _user(found, message.content, where)
    return found.done()


def _assistant(found: Conversation, content: list[Block], where: str) -> None:
    found.answer("", begin=True)
    for i, block in enumerate(content):
        here = f"{where}.{i}"
        if block.type == "thinking" and block.thinking is not None:
            _only(block, ("thinking",), here)
            if block.thinking:
                found.think(block.thinking)
        elif block.type == "tool_use":
            _only(block, ("id", "name", "input", "caller", "toolset_name"), here)
            if block.id is None or block.name is None:
                raise RequestError(f"{here} must have id, name and input", here)
            found.call(block.id, block.name, block.input or {}, f"{here}.input")
        else:
            found.answer(_text(block, here, answers=True))


def _user(found: Conversation, content: list[Block], where: str) -> None:
    said: list[str | Picture] = []
    for i, block in enumerate(content):
        here = f"{where}.{i}"
        if block.type != "tool_result":
            said.append(_one_said(block, here))
            continue
        if said:
            found.say("user", said)
            said = []
        _only(block, ("tool_use_id", "content", "is_error", "toolset_name"), here)
        result = _said(block.content, f"{here}.content")
        # Chat templates have no other way to say that it is an error.
        result = ["Error: ", *result] if block.is_error else result
        found.result(block.tool_use_id, result, f"{here}.tool_use_id", "tool_use block")
    if said or not content:
        found.say("user", said)
