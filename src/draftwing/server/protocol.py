"""Bodies of requests: which fields there are, of which type, and how they map to prompts and sampling parameters.

Ranges are checked in `draftwing.params`. A field typed `NotBuilt` asks for what this version does not do; it is
refused by name unless its value asks for nothing. Unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftwing import params as sampling
from draftwing.core import SamplingParams
from draftwing.errors import RequestError

NotBuilt = Any
Bookkeeping = Any  # for the client's own accounts; no effect here
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = Annotated[list[int], Field(max_length=4_000_000)]
MAX_PROMPTS = 1024

# The APIs' names of sampling fields -> ours; the rest is named alike.
_RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_SAMPLING = (
    "max_completion_tokens", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
    "sampling_seed", "stop", "stop_token_ids", "ignore_eos", "n", "skip_special_tokens",
    "spaces_between_special_tokens", "no_stop_trim",
)  # fmt: skip


def _documented(**bounds: Any) -> Any:
    """Bounds for /openapi.json only: they are checked in `draftwing.params`, whose messages say more."""
    return Field(default=None, json_schema_extra=bounds)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(Body):
    """What chat and text completions share. `default_length` is max_tokens where it is not given."""

    default_length: ClassVar[int | None]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = _documented(minimum=1)
    min_tokens: int | None = _documented(minimum=0)
    temperature: float | None = _documented(minimum=0, maximum=100)
    top_p: float | None = _documented(exclusiveMinimum=0, maximum=1)
    top_k: int | None = _documented(minimum=-1, maximum=2**31 - 1)
    min_p: float | None = _documented(minimum=0, maximum=1)
    seed: int | None = _documented(minimum=-(2**63), maximum=2**63 - 1)
    sampling_seed: int | None = _documented(minimum=-(2**63), maximum=2**63 - 1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = _documented(minimum=1, maximum=sampling.MAX_ANSWERS)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None

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

    frequency_penalty: NotBuilt = None
    presence_penalty: NotBuilt = None
    repetition_penalty: NotBuilt = None
    logit_bias: NotBuilt = None
    logprobs: NotBuilt = None
    response_format: NotBuilt = None
    json_schema: NotBuilt = None
    regex: NotBuilt = None
    ebnf: NotBuilt = None
    structural_tag: NotBuilt = None
    stop_regex: NotBuilt = None
    lora_path: NotBuilt = None
    session_params: NotBuilt = None
    extra_key: NotBuilt = None
    custom_logit_processor: NotBuilt = None
    custom_params: NotBuilt = None
    return_hidden_states: NotBuilt = None
    return_cached_tokens_details: NotBuilt = None
    return_spec_tokens_details: NotBuilt = None
    return_token_ids: NotBuilt = None
    return_prompt_token_ids: NotBuilt = None
    return_meta_info: NotBuilt = None

    def sampling(self) -> SamplingParams:
        """Checked parameters; raises RequestError for a range or for what is not built."""
        sampling.refuse_not_built(self.__dict__)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true", "stream_options")
        fields: dict[str, Any] = {"max_new_tokens": self.default_length}
        names: dict[str, str] = {}
        for name in _SAMPLING:
            value = getattr(self, name, None)
            ours = _RENAMED.get(name, name)
            # max_completion_tokens comes first and wins over the older max_tokens.
            if value is not None and ours not in names:
                fields[ours], names[ours] = value, name
        return sampling.sampling_params(fields, {"max_new_tokens": "max_tokens"} | names)

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


class TextPart(Body):
    type: str
    text: str | None = None
    # Other kinds of parts are known, to say that they are not built rather than that they are unknown.
    image_url: NotBuilt = None
    input_audio: NotBuilt = None
    video_url: NotBuilt = None
    file: NotBuilt = None
    refusal: NotBuilt = None
    cache_control: Bookkeeping = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: Bookkeeping = None
    annotations: Bookkeeping = None
    audio: NotBuilt = None
    tool_calls: NotBuilt = None
    tool_call_id: NotBuilt = None
    function_call: NotBuilt = None

    def plain(self, where: str) -> dict[str, Any]:
        """As chat templates want it: content is one string. `where` names the message in errors."""
        for name in ("audio", "tool_calls", "tool_call_id", "function_call"):
            if getattr(self, name) not in (None, []):
                raise RequestError(f"{where}.{name} is not supported by this version", f"{where}.{name}")
        if self.role in ("tool", "function"):
            raise RequestError(f"{where}.role {self.role!r} is not supported by this version", f"{where}.role")
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        message["content"] = self._text(where)
        for name in ("name", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
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
    return [message.plain(f"messages.{i}") for i, message in enumerate(messages)]


class ChatRequest(OpenAIBody):
    """Body of /v1/chat/completions. Without max_tokens an answer runs to the context limit."""

    default_length = None

    messages: list[Message]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None  # nothing to separate: no reasoning parser
    stream_reasoning: bool | None = None

    top_logprobs: NotBuilt = None
    tools: NotBuilt = None
    tool_choice: NotBuilt = None
    parallel_tool_calls: NotBuilt = None
    functions: NotBuilt = None
    function_call: NotBuilt = None
    modalities: NotBuilt = None
    audio: NotBuilt = None
    prediction: NotBuilt = None
    web_search_options: NotBuilt = None
    reasoning_effort: NotBuilt = None
    verbosity: NotBuilt = None
    continue_final_message: NotBuilt = None

    def conversation(self) -> list[dict[str, Any]]:
        return conversation(self.messages)


class CompletionRequest(OpenAIBody):
    """Body of /v1/completions."""

    default_length = 16

    prompt: str | list[str] | TokenIds | list[TokenIds]

    best_of: NotBuilt = None
    echo: NotBuilt = None
    suffix: NotBuilt = None


class GenerateRequest(Body):
    """Body of /generate: one of `text` and `input_ids`, single or batched."""

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    priority: Priority | None = None
    cache_salt: str | None = None

    input_embeds: NotBuilt = None
    image_data: NotBuilt = None
    audio_data: NotBuilt = None
    video_data: NotBuilt = None
    return_logprob: NotBuilt = None
    logprob_start_len: NotBuilt = None
    top_logprobs_num: NotBuilt = None
    token_ids_logprob: NotBuilt = None
    return_text_in_logprobs: NotBuilt = None
    return_hidden_states: NotBuilt = None
    return_prompt_token_ids: NotBuilt = None
    return_entropy: NotBuilt = None
    lora_path: NotBuilt = None
    session_params: NotBuilt = None
    session_id: NotBuilt = None
    extra_key: NotBuilt = None
    custom_logit_processor: NotBuilt = None

    def sampling(self, prompts: int) -> list[tuple[SamplingParams, bool]]:
        """Checked parameters of each of the prompts, and whether they say how long the answer may be."""
        sampling.refuse_not_built(self.__dict__)
        if not isinstance(self.sampling_params, list):
            fields = self.sampling_params or {}
            return [(sampling.sampling_params(fields, where="sampling_params."), "max_new_tokens" in fields)] * prompts
        if len(self.sampling_params) != prompts:
            raise RequestError(
                f"sampling_params must hold one entry per prompt; found {len(self.sampling_params)} for {prompts}",
                "sampling_params",
            )
        return [
            (sampling.sampling_params(fields, where=f"sampling_params.{i}."), "max_new_tokens" in fields)
            for i, fields in enumerate(self.sampling_params)
        ]

    def prompt(self) -> tuple[str, Any]:
        """Name and value of the field that holds the prompts."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give exactly one of text and input_ids", "text")
        return ("text", self.text) if self.text is not None else ("input_ids", self.input_ids)


class AbortRequest(Body):
    rid: str | None = None
    abort_all: bool | None = None


class TokenizeRequest(Body):
    """Body of /tokenize: one of `prompt`, a text or several, and `messages`, a conversation."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str]:
        every = self.prompt if isinstance(self.prompt, list) else [self.prompt or ""]
        if len(every) > MAX_PROMPTS or not every:
            raise RequestError(f"prompt takes from 1 to {MAX_PROMPTS} texts; found {len(every)}", "prompt")
        for text in every:
            sampling.check_text(text, "prompt")
        return every


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: TokenIds | list[TokenIds]
    skip_special_tokens: bool | None = None

    def batch(self, vocab_size: int) -> tuple[list[list[int]], bool]:
        """Lists of token ids, and whether they came as several."""
        batched = bool(self.tokens) and isinstance(self.tokens[0], list)
        every: list[Any] = self.tokens if batched else [self.tokens]
        if len(every) > MAX_PROMPTS:
            raise RequestError(f"tokens takes at most {MAX_PROMPTS} lists; found {len(every)}", "tokens")
        for token in (token for ids in every for token in ids):
            if not 0 <= token < vocab_size:
                raise RequestError(f"tokens: id {token} is outside of the vocabulary [0, {vocab_size})", "tokens")
        return every, batched


def split_prompts(field: str, value: str | list[Any]) -> tuple[list[str] | list[list[int]], bool]:
    """(prompts, batched) from a string, a list of strings, token ids, or lists of token ids."""
    single = isinstance(value, str) or (len(value) > 0 and isinstance(value[0], int))
    prompts = [value] if single else value
    if not prompts or not all(prompts):
        raise RequestError(f"{field} must not be empty", field)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{field} takes at most {MAX_PROMPTS} prompts; found {len(prompts)}", field)
    return prompts, not single  # type: ignore[return-value]
