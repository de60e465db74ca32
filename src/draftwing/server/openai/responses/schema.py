"""Body of /v1/responses, and the conversation that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from draftwing.errors import RequestError
from draftwing.requests.refusals import show
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.chat import AUTO, Chat, ChatBody, Conversation, checked_choice, checked_functions, only
from draftwing.server.parsers.grammars import Function, ToolChoice
from draftwing.server.schema import (
    Body,
    Bookkeeping,
    Effort,
    EffortTokens,
    Name,
    NotBuilt,
    OtherKind,
    sampled,
    split_effort,
)

# What responses may hold besides. Reasoning comes as text that can be sent again, and nothing comes of tools that a
# server would run: these ask for nothing more.
INCLUDED = (
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)


class Content(Body):
    """A part of an item: input_text, output_text, reasoning_text or summary_text."""

    type: str
    text: str | None = None
    annotations: Bookkeeping = None
    logprobs: Bookkeeping = None

    # Of other kinds of parts, to say that they are not built rather than that they are unknown.
    image_url: OtherKind = None
    file_id: OtherKind = None
    file_data: OtherKind = None
    file_url: OtherKind = None
    filename: OtherKind = None
    detail: OtherKind = None
    input_audio: OtherKind = None
    refusal: str | None = None
    prompt_cache_breakpoint: Bookkeeping = None


class Item(Body):
    """An item of the input; which fields it has depends on its type. Ids and states are those of earlier responses."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Content] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Content] | None = None
    summary: list[Content] | None = None
    id: Bookkeeping = None
    status: Bookkeeping = None
    phase: Bookkeeping = None

    encrypted_content: OtherKind = None
    namespace: OtherKind = None
    caller: OtherKind = None


class ResponsesTool(Body):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    defer_loading: NotBuilt = None
    allowed_callers: NotBuilt = None
    output_schema: NotBuilt = None


class NamedChoice(Body):
    type: str
    name: str | None = None


class TextFormat(Body):
    model_config = ConfigDict(alias_generator=lambda name: name.removesuffix("_"))

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: NotBuilt = None


class Reasoning(Body):
    effort: Effort | EffortTokens | None = None
    summary: NotBuilt = None  # reasoning is not summarised
    generate_summary: NotBuilt = None


class StreamOptions(Body):
    include_obfuscation: NotBuilt = None


class ResponsesRequest(ChatBody):
    """Body of /v1/responses. Nothing is stored. Without max_output_tokens an answer runs to the context limit."""

    source = "input"
    names: ClassVar = {
        "min_new_tokens": "max_output_tokens",
        "response_format": "text.format",
        "thinking": "reasoning.effort",
    }

    model: Name | None = None
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Any = sampled("max_new_tokens")
    temperature: Any = sampled("temperature")
    top_p: Any = sampled("top_p")
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream_options: StreamOptions | None = None

    # Beyond OpenAI's, as in the other APIs.
    seed: Any = sampled("seed")
    top_k: Any = sampled("top_k")
    min_p: Any = sampled("min_p")
    stop: Any = sampled("stop")
    stop_token_ids: Any = sampled("stop_token_ids")
    ignore_eos: Any = sampled("ignore_eos")
    skip_special_tokens: Any = sampled("skip_special_tokens")
    frequency_penalty: Any = sampled("frequency_penalty")
    presence_penalty: Any = sampled("presence_penalty")
    repetition_penalty: Any = sampled("repetition_penalty")
    logit_bias: Any = sampled("logit_bias")
    thinking_budget: Any = sampled("thinking_budget")
    chat_template_kwargs: dict[str, Any] | None = None

    include: list[str] | None = None
    max_tool_calls: Bookkeeping = None  # of tools that a server runs
    store: Bookkeeping = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: Bookkeeping = None
    service_tier: Bookkeeping = None
    prompt_cache_key: Bookkeeping = None
    prompt_cache_retention: Bookkeeping = None

    access_programs: NotBuilt = None
    background: NotBuilt = None
    context_management: NotBuilt = None
    conversation: NotBuilt = None
    image: NotBuilt = None
    moderation: NotBuilt = None
    prompt: NotBuilt = None
    prompt_cache_options: NotBuilt = None
    top_logprobs: NotBuilt = None
    truncation: NotBuilt = None

    def chat(self) -> Chat:
        self._check()
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        functions = checked_functions([_function(tool, f"tools.{i}") for i, tool in enumerate(self.tools or [])])
        effort, budget = self._effort
        return Chat(
            _conversation(items, self.instructions),
            functions,
            checked_choice(_choice(self.tool_choice), functions),
            parallel=self.parallel_tool_calls is not False,
            template=self.chat_template_kwargs or {},
            thinking=False if effort == "none" else None,
            effort=effort,
            reasons=bool(budget),
        )

    @property
    def _effort(self) -> tuple[str | None, int | None]:
        return split_effort(None if self.reasoning is None else self.reasoning.effort)

    def sampling(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        form = None if self.text is None else self.text.format
        made = None if form is None else _response_format(form)
        fields |= {"response_format": made, "thinking_budget": self._effort[1]}
        return super().sampling(defaults, max_new_tokens=None, **fields)

    def _check(self) -> None:
        if self.previous_response_id is not None:
            raise RequestError(
                "previous_response_id is not supported: responses are not stored; send the conversation as input",
                "previous_response_id",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true", "stream_options")
        for i, name in enumerate(self.include or []):
            if name not in INCLUDED:
                known = ", ".join(INCLUDED)
                raise RequestError(f"include.{i} must be one of {known}; found {show(name)}", f"include.{i}")


def _response_format(form: TextFormat) -> dict[str, Any]:
    """Makes the `response_format` of chat completions, which has a schema and its name in an object of its own."""
    if form.type != "json_schema":
        for name in ("name", "description", "schema_", "strict"):
            if getattr(form, name) is not None:
                name = f"text.format.{name.removesuffix('_')}"
                raise RequestError(f"{name} is for text.format.type 'json_schema'", name)
        return {"type": form.type}
    if form.schema_ is None:
        raise RequestError("text.format.schema is missing", "text.format.schema")
    return {"type": "json_schema", "json_schema": {"schema": form.schema_}}


def _function(tool: ResponsesTool, where: str) -> tuple[Function, str]:
    if tool.type != "function":
        raise RequestError(f"{where}.type must be 'function'; found {show(tool.type)}", f"{where}.type")
    return Function(tool.name or "", tool.description, tool.parameters, bool(tool.strict)), where


def _choice(given: str | NamedChoice | None) -> ToolChoice:
    if given is None:
        return AUTO
    if isinstance(given, str):
        return ToolChoice(given)  # type: ignore[arg-type]
    if given.type != "function" or given.name is None:
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'name': ...}", "tool_choice"
        )
    return ToolChoice("named", given.name)


def _conversation(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    if not items:
        raise RequestError("input must hold at least one item", "input")
    found = Conversation(instructions)
    for i, item in enumerate(items):
        where, kind = f"input.{i}", item.type or "message"
        if kind == "reasoning":
            _only(item, ("content", "summary"), where)
            if item.content is None and item.summary:
                raise RequestError(f"{where}.content is missing: summaries are not supported", f"{where}.content")
            found.think(_text(item.content or "", f"{where}.content", "reasoning_text"))
        elif kind == "function_call":
            _only(item, ("call_id", "name", "arguments"), where)
            if item.call_id is None or item.name is None or item.arguments is None:
                raise RequestError(f"{where} must have call_id, name and arguments", where)
            found.call(item.call_id, item.name, item.arguments)
        elif kind == "function_call_output":
            _only(item, ("call_id", "output"), where)
            output = _text(item.output, f"{where}.output", "input_text")
            found.result(item.call_id, output, f"{where}.call_id", "function_call")
        elif kind == "message" and item.role is not None:
            _only(item, ("role", "content"), where)
            if item.role == "assistant":
                found.answer(_text(item.content, f"{where}.content", "output_text", "input_text"))
            else:
                role = "system" if item.role == "developer" else item.role
                found.say(role, _text(item.content, f"{where}.content", "input_text"))
        else:
            name = f"{where}.{'role' if kind == 'message' else 'type'}"
            raise RequestError(f"{name} is missing or not supported; found the type {show(kind)}", name)
    return found.done()


def _text(content: str | list[Content] | None, where: str, *kinds: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{where} must be a string or a list of text parts", where)
    for i, part in enumerate(content):
        if part.type not in kinds or part.text is None:
            raise RequestError(
                f"{where}.{i} must be {{'type': {kinds[0]!r}, 'text': ...}}; found the type {show(part.type)}",
                f"{where}.{i}",
            )
    return "".join(part.text or "" for part in content)


def _only(item: Item, names: tuple[str, ...], where: str) -> None:
    only(item, (*names, "type", "id", "status", "phase"), where, f"{item.type or 'message'!r} item")
