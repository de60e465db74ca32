"""Bodies of OpenAI's requests: which fields there are, of which type, and how they map to sampling parameters.

Ranges are checked in `requests.sampling_params` and `requests.options`. A field typed `NotBuilt` asks for what this
version does not do; it is refused by name unless its value asks for nothing. Unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from draftwing.core import LogprobParams, SamplingParams
from draftwing.errors import RequestError
from draftwing.requests import sampling_params as sampling
from draftwing.requests.options import MOST_COMPLETION_LOGPROBS, MOST_OPENAI_LOGPROBS, prediction_text
from draftwing.server.body import (
    Body,
    Bookkeeping,
    NotBuilt,
    Prediction,
    Priority,
    ResponseFormat,
    Speculative,
    TokenIds,
    documented,
)
from draftwing.server.chat import Chat, checked_choice, checked_functions
from draftwing.server.messages import Message, conversation
from draftwing.server.parsers.grammars import Function, ToolChoice

# The APIs' names of sampling fields -> ours; the rest is named alike.
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_SAMPLING = (
    "max_completion_tokens", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "sampling_seed", "stop", "stop_token_ids", "stop_regex", "ignore_eos", "n", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "custom_logit_processor", "custom_params", *sampling.GRAMMARS,
)  # fmt: skip


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(Body):
    """What chat and text completions share. `default_length` is max_tokens where it is not given."""

    default_length: ClassVar[int | None]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = documented(minimum=1)
    min_tokens: int | None = documented(minimum=0)
    temperature: float | None = documented(minimum=0, maximum=100)
    top_p: float | None = documented(exclusiveMinimum=0, maximum=1)
    top_k: int | None = documented(minimum=-1, maximum=2**31 - 1)
    min_p: float | None = documented(minimum=0, maximum=1)
    seed: int | None = documented(minimum=-(2**63), maximum=2**63 - 1)
    sampling_seed: int | None = documented(minimum=-(2**63), maximum=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: int | None = documented(minimum=1, maximum=sampling.MAX_ANSWERS)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

    frequency_penalty: float | None = documented(minimum=-2, maximum=2)
    presence_penalty: float | None = documented(minimum=-2, maximum=2)
    repetition_penalty: float | None = documented(exclusiveMinimum=0, maximum=2)
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    custom_logit_processor: str | None = None
    custom_params: dict[str, Any] | None = None

    response_format: ResponseFormat | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    speculative: Speculative | None = None
    prediction: Prediction | None = None

    rid: str | None = None
    priority: Priority | None = None
    cache_salt: str | None = None

    user: Bookkeeping = None
    metadata: Bookkeeping = None
    store: Bookkeeping = None
    service_tier: Bookkeeping = None
    safety_identifier: Bookkeeping = None
    prompt_cache_key: Bookkeeping = None
    prompt_cache_retention: Bookkeeping = None

    lora_path: NotBuilt = None
    session_params: NotBuilt = None
    extra_key: NotBuilt = None
    return_hidden_states: NotBuilt = None
    return_cached_tokens_details: NotBuilt = None
    return_spec_tokens_details: NotBuilt = None
    return_token_ids: NotBuilt = None
    return_prompt_token_ids: NotBuilt = None
    return_meta_info: NotBuilt = None

    def sampling(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Checked parameters; raises RequestError for a range or for what is not built. defaults: of the model, for
        fields that are not given."""
        sampling.refuse_not_built(self.__dict__)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true", "stream_options")
        fields: dict[str, Any] = {**(defaults or {}), "max_new_tokens": self.default_length}
        names: dict[str, str] = {}
        for name in _SAMPLING:
            value = getattr(self, name, None)
            ours = _RENAMED.get(name, name)
            # max_completion_tokens comes first and wins over the older max_tokens.
            if value is not None and ours not in names:
                fields[ours], names[ours] = value, name
        ours_by_default = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        return sampling.sampling_params(fields, ours_by_default | names)

    def wanted_logprobs(self) -> LogprobParams | None:
        """The log probabilities that are asked for. Raises RequestError."""
        raise NotImplementedError

    @property
    def predicted(self) -> str:
        """The text that the answer is expected to resemble. Raises RequestError."""
        return "" if self.prediction is None else prediction_text(self.prediction)

    @property
    def grammar_field(self) -> str | None:
        """Name of the field that holds a grammar."""
        return next((name for name in sampling.GRAMMARS if getattr(self, name) is not None), None)

    @property
    def length(self) -> str | None:
        """Name of the field by which the client limits the length; None where it leaves that to us."""
        names = ("max_completion_tokens", "max_tokens")
        return next((name for name in names if getattr(self, name, None) is not None), None)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatFunction(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self) -> Function:
        return Function(self.name, self.description, self.parameters, bool(self.strict))


class ChatTool(Body):
    type: Literal["function"]
    function: ChatFunction


class ChosenFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(OpenAIBody):
    """Body of /v1/chat/completions. Without max_tokens an answer runs to the context limit."""

    default_length = None

    messages: list[Message]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = documented(minimum=0, maximum=MOST_OPENAI_LOGPROBS)

    functions: NotBuilt = None
    function_call: NotBuilt = None
    modalities: NotBuilt = None
    audio: NotBuilt = None
    web_search_options: NotBuilt = None
    verbosity: NotBuilt = None

    def chat(self) -> Chat:
        """The conversation. Raises RequestError for what it cannot be."""
        given = self.tools or []
        functions = checked_functions([(tool.function.plain(), f"tools.{i}.function") for i, tool in enumerate(given)])
        choice = self.tool_choice or "auto"
        named = ToolChoice(choice) if isinstance(choice, str) else ToolChoice("named", choice.function.name)
        return Chat(
            conversation(self.messages),
            functions,
            checked_choice(named, functions),
            parallel=self.parallel_tool_calls is not False,
            template=self.chat_template_kwargs or {},
            continued=bool(self.continue_final_message),
            thinking=False if self.reasoning_effort == "none" else None,
            separate_reasoning=self.separate_reasoning is not False,
            stream_reasoning=self.stream_reasoning is not False,
        )

    def wanted_logprobs(self) -> LogprobParams | None:
        top = self.top_logprobs or 0
        _check_top("top_logprobs", top, MOST_OPENAI_LOGPROBS)
        if not self.logprobs:
            if top:
                raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
            return None
        return LogprobParams(top)


class CompletionRequest(OpenAIBody):
    """Body of /v1/completions."""

    default_length = 16

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    logprobs: int | None = documented(minimum=0, maximum=MOST_COMPLETION_LOGPROBS)
    best_of: int | None = None

    suffix: NotBuilt = None

    def sampling(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        params = super().sampling(defaults)
        if self.best_of is not None and self.best_of != params.n:
            found = sampling.show(self.best_of)
            raise RequestError(
                f"best_of must equal n, which is {params.n}: answers are not ranked; found {found}", "best_of"
            )
        return params

    def wanted_logprobs(self) -> LogprobParams | None:
        if self.logprobs is None:
            return None
        _check_top("logprobs", self.logprobs, MOST_COMPLETION_LOGPROBS)
        return LogprobParams(self.logprobs, start=0 if self.echo else -1)


def _check_top(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise RequestError(f"{name} must be an integer from 0 to {most}; found {sampling.show(value)}", name)
