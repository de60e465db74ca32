"""Body of /v1/responses, and the conversation that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, model_validator

from draftwing.errors import RequestError
from draftwing.images.reader import Picture
from draftwing.requests.refusals import no_text, show
from draftwing.requests.request import MAX_OPENAI_LOGPROBS, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.chat import Chat, ChatBody
from draftwing.server.conversation import LEFT_OUT, Conversation, MessagePart, item_of, only
from draftwing.server.openai.responses.tools import ChosenTool, ResponsesTool, Toolbox, flat_name
from draftwing.server.schema import (
    Body,
    Effort,
    EffortTokens,
    Hint,
    Name,
    sampled,
    split_effort,
)

# What responses may hold besides. Reasoning comes as text that can be sent again, and nothing comes of tools that a
# server would run: these ask for nothing more.
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)


_BOOKKEEPING = ("status", "phase", "caller", "async_", "created_by", "parsed_arguments")  # of items that come back


_KINDS = frozenset({
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "additional_tools", "item_reference",
})  # fmt: skip


class Content(MessagePart, hints="prompt_cache_breakpoint", bookkeeping="annotations logprobs parsed"):
    """A part of an item."""

    own = frozenset({"input_text", "output_text", "refusal", "reasoning_text", "summary_text"})

    refusal: str | None = None

    def said(self, answers: bool) -> str | None:
        return self.refusal if answers and self.type == "refusal" else super().said(answers)


class Item(Body, bookkeeping=" ".join(_BOOKKEEPING)):
    """An item of the input; which fields it has depends on its type. Ids and states are those of earlier responses."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Content] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[Content] | None = None
    summary: list[Content] | None = None
    tools: list[ResponsesTool] | None = None
    encrypted_content: str | None = None
    id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, item: Any) -> Any:
        return item_of(item, _KINDS) if isinstance(item, dict) else item

    @property
    def kind(self) -> str:
        """Returns the item's type; some may leave it out."""
        given = [name for name in self.model_fields_set if getattr(self, name) is not None]
        if given == ["id"]:
            return "item_reference"
        return self.type or "message"


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextConfig(Body, hints="verbosity"):
    format: TextFormat | None = None


class Reasoning(Body, hints="generate_summary mode"):
    effort: Effort | EffortTokens | None = None
    summary: Hint = None  # reasoning comes as it is
    context: Hint = None  # the chat template decides which reasoning it shows


class StreamOptions(Body, hints="include_obfuscation"):
    """Options of a stream."""


class ResponsesRequest(
    ChatBody,
    hints="client_metadata prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier "
    "return_progress timings_per_token verbose",
    not_built="access_programs background context_management conversation image moderation prompt",
    sampling="temperature top_p seed top_k min_p stop stop_token_ids ignore_eos skip_special_tokens "
    "frequency_penalty presence_penalty repetition_penalty logit_bias thinking_budget",
):
    """Body of /v1/responses. Without max_output_tokens an answer runs to the context limit."""

    source = "input"
    names: ClassVar = {
        "min_new_tokens": "max_output_tokens",
        "response_format": "text.format",
        "thinking": "reasoning.effort",
        "top_logprobs_num": "top_logprobs",
    }

    model: Name | None = None
    input: str | list[Item]
    instructions: str | None = None
    receipt: bool | None = None
    max_output_tokens: Any = sampled("max_new_tokens")
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_OPENAI_LOGPROBS)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    max_tool_calls: int | None = None  # of tools that a server runs: there are none

    truncation: Hint = None  # what does not fit is refused

    _toolbox: Toolbox = PrivateAttr(default_factory=Toolbox)
    _earlier: list[Item] = PrivateAttr(default_factory=list)

    @property
    def toolbox(self) -> Toolbox:
        """Returns the request's tools; once `chat` has been called."""
        return self._toolbox

    @property
    def items(self) -> list[Item]:
        """Returns the input as items."""
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def definitions(self) -> int:
        items = [] if isinstance(self.input, str) else self.input
        tools = [tool for item in (*self._earlier, *items) for tool in item.tools or ()]
        return sum(tool.definition for tool in (*tools, *(self.tools or ())))

    def go_on(self, earlier: list[Item], items: list[Item]) -> None:
        """Takes the stored conversation before the input, and the input without references to what is stored."""
        self._earlier, self.input = earlier, items

    def wanted_logprobs(self) -> LogprobParams | None:
        asked = self.top_logprobs or LOGPROBS in (self.include or ())
        return LogprobParams(self.top_logprobs or 0) if asked else None

    def chat(self) -> Chat:
        self._check()
        places = [("previous_response_id", item) for item in self._earlier]
        places += [(f"input.{i}", item) for i, item in enumerate(self.items)]
        added = [(f"{where}.tools.{i}", tool) for where, item in places for i, tool in enumerate(item.tools or [])]
        self._toolbox = Toolbox(self.tools or (), added, self.tool_choice)
        effort, budget = self._effort
        return Chat(
            _conversation(places, self.instructions),
            self._toolbox.functions,
            self._toolbox.choice,
            parallel=self.parallel_tool_calls is not False,
            template=self.chat_template_kwargs or {},
            thinking=False if effort == "none" else None,
            effort=effort,
            ignored=self._toolbox.ignored,
            reasons=bool(budget),
        )

    @property
    def _effort(self) -> tuple[str | None, int | None]:
        return split_effort(None if self.reasoning is None else self.reasoning.effort)

    def sampling(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        form = None if self.text is None else self.text.format
        made = None if form is None else _response_format(form)
        fields |= {"response_format": made, "thinking_budget": self._effort[1]}
        return super().sampling(defaults, **fields)

    def _check(self) -> None:
        if not self.items:
            raise RequestError("input must hold at least one item", "input")
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


def _conversation(items: Sequence[tuple[str, Item]], instructions: str | None) -> list[dict[str, Any]]:
    """items: with the fields that hold them."""
    found = Conversation(instructions)
    for where, item in items:
        _add(found, item, where)
    return found.done()


def _add(found: Conversation, item: Item, where: str) -> None:
    """Adds an item of the field `where` to a conversation. Raises RequestError for what it cannot be."""
    kind = item.kind
    if kind in LEFT_OUT:
        return
    if kind == "reasoning":
        _only(item, ("content", "summary", "encrypted_content"), where)
        if thought := _thought(item, where):
            found.think(thought)
    elif kind in ("function_call", "custom_tool_call"):
        custom = kind == "custom_tool_call"
        _only(item, ("call_id", "name", "namespace", "input" if custom else "arguments"), where)
        if item.call_id is None or item.name is None or (custom and item.input is None):
            raise RequestError(f"{where} must have call_id, name and {'input' if custom else 'arguments'}", where)
        arguments = {"input": item.input} if custom else item.arguments
        found.call(item.call_id, flat_name(item.name, item.namespace), arguments, f"{where}.arguments")
    elif kind in ("function_call_output", "custom_tool_call_output"):
        _only(item, ("call_id", "name", "namespace", "output"), where)
        output = _said(item.output or "", f"{where}.output", "input_text")
        found.result(item.call_id, output, f"{where}.call_id", kind.removesuffix("_output"))
    elif kind == "additional_tools":
        _only(item, ("role", "tools"), where)
    elif kind == "message" and item.role is not None:
        _only(item, ("role", "content"), where)
        if item.role == "assistant":
            found.answer(_text(item.content or "", f"{where}.content", "output_text", answers=True))
        else:
            role = "system" if item.role == "developer" else item.role
            found.say(role, _said(item.content, f"{where}.content", "input_text"))
    else:
        name = f"{where}.{'role' if kind == 'message' else 'type'}"
        raise RequestError(f"{name} is missing or not supported; found the type {show(kind)}", name)


def _thought(item: Item, where: str) -> str:
    """Returns what a model can read of its reasoning: the text, else a summary; nothing of what another server has made
    unreadable."""
    if item.content is not None:
        return _text(item.content, f"{where}.content", "reasoning_text")
    summary = item.summary or []
    return "\n\n".join(_text([part], f"{where}.summary", "summary_text") for part in summary)


def _text(content: str | list[Content] | None, where: str, expected: str, answers: bool = False) -> str:
    """expected: the kind of parts, where reasoning is one."""
    if isinstance(content, str):
        return content
    if content is None:
        raise RequestError(f"{where} must be a string or a list of text parts", where)
    texts = [part.text if part.type == expected else part.said(answers) for part in content]
    for i, (part, text) in enumerate(zip(content, texts, strict=True)):
        if text is None:
            raise no_text(part.type, f"{where}.{i}", f"{where}.{i}", expected)
    return "".join(text or "" for text in texts)


def _said(content: str | list[Content] | None, where: str, expected: str) -> list[str | Picture]:
    """Returns what a content says and shows. expected: as of `_text`."""
    if not isinstance(content, list):
        return [_text(content, where, expected)]
    found: list[str | Picture] = []
    for i, part in enumerate(content):
        picture = part.picture(f"{where}.{i}")
        text = part.text if part.type == expected else part.said(False)
        if picture is None and text is None:
            raise no_text(part.type, f"{where}.{i}", f"{where}.{i}", expected)
        found.append(text or "" if picture is None else picture)
    return found


def _only(item: Item, names: tuple[str, ...], where: str) -> None:
    only(item, (*names, "type", "id", *_BOOKKEEPING), where, f"{item.kind!r} item")
