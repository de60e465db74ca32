"""Bodies of /generate and of the other native endpoints; see `draftwing.server.openai.schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema, model_validator

from draftwing.errors import RequestError
from draftwing.requests.refusals import check_text
from draftwing.requests.request import LogprobParams, logprob_params
from draftwing.requests.sampling_params import HINTS, Budget, SamplingParams, field_schemas
from draftwing.requests.stop_regex import MAX_TOGETHER, parts
from draftwing.server.chat import Chat
from draftwing.server.openai.schema import ChatTool, Message, conversation, offered
from draftwing.server.schema import (
    MAX_PROMPTS,
    Body,
    GenerationBody,
    Name,
    TokenIds,
    asks_for_nothing,
    characters,
)

_Sampling = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "properties": field_schemas(), "additionalProperties": False}),
]


class GenerateRequest(
    GenerationBody,
    hints="conversation_id custom_labels data_parallel_rank images_config log_metrics mm_processor_kwargs "
    "routing_key use_audio_in_video video_config",
    not_built="input_embeds image_data audio_data video_data return_prompt_token_ids "
    "return_entropy lora_path session_params session_id background bootstrap_host bootstrap_port "
    "bootstrap_room modalities no_logs require_reasoning return_bytes return_flat_raw_output_top_logprobs "
    "return_flat_raw_top_logprobs return_routed_experts return_sampling_mask routed_experts_start_len "
    "watermark extra_key",
):
    """Body of /generate: one of `text` and `input_ids`, single or batched."""

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: _Sampling | list[_Sampling] | None = None
    rid: Name | list[Name] | None = None  # type: ignore[assignment]

    # One for all prompts, or a list of one for each.
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int] | list[list[int] | None] | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | list[bool] | None = None
    custom_logit_processor: str | list[str | None] | None = None
    max_thinking_tokens: Budget | None = None  # another name of `thinking_budget`, of all prompts

    def each_sampling(self, prompts: int, defaults: Mapping[str, Any]) -> list[tuple[SamplingParams, bool]]:
        """Returns checked parameters of each of the prompts, and whether they say how long the answer may be. Raises
        RequestError. defaults: of the model, for what is not given."""
        processors = self._each("custom_logit_processor", prompts)
        given = self.sampling_params or {}
        if not isinstance(given, list):
            if len(set(processors)) < 2:
                return [self._checked(given, "sampling_params.", processors[0], defaults)] * prompts
            given = [given] * prompts
        if len(given) != prompts:
            raise RequestError(
                f"sampling_params must hold one entry per prompt; found {len(given)} for {prompts}", "sampling_params"
            )
        found, size = [], 0
        compiled: dict[str, tuple[str, ...]] = {}  # expressions, by how they were given: compiled once
        for i, (fields, name) in enumerate(zip(given, processors, strict=True)):
            asked = repr(fields.get("stop_regex"))
            known = {"stop_regex": compiled[asked]} if asked in compiled else {}
            found.append(self._checked(fields | known, f"sampling_params.{i}.", name, defaults))
            if not known:
                compiled[asked] = found[-1][0].stop_regex
                size += sum(map(parts, compiled[asked]))
            if size > MAX_TOGETHER:
                where = f"sampling_params.{i}.stop_regex"
                raise RequestError(
                    f"{where} has {size} parts with those before it, at most {MAX_TOGETHER} are allowed", where
                )
        return found

    @property
    def ignored(self) -> tuple[str, ...]:
        found = [name for name in HINTS if not all(asks_for_nothing(name, one.get(name)) for one in self._fields)]
        return (*super().ignored, *(f"sampling_params.{name}" for name in found))

    @property
    def expressions(self) -> int:
        return sum(characters(fields.get("stop_regex")) for fields in self._fields)

    @property
    def _fields(self) -> list[dict[str, Any]]:
        """`sampling_params` as a list."""
        return self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params or {}]

    def _checked(
        self, fields: dict[str, Any], where: str, processor: str | None, defaults: Mapping[str, Any]
    ) -> tuple[SamplingParams, bool]:
        if processor is not None:
            if fields.get("custom_logit_processor") is not None:
                raise RequestError(f"{where}custom_logit_processor is given twice", "custom_logit_processor")
            fields = fields | {"custom_logit_processor": processor}
        known = {name: value for name, value in fields.items() if value is not None or name == "max_new_tokens"}
        known.setdefault("thinking_budget", self.max_thinking_tokens)
        params = SamplingParams.read(known, where=where, defaults=defaults)
        return params, "max_new_tokens" in fields

    def each_logprobs(self, prompts: int, hidden_size: int) -> list[LogprobParams | None]:
        """Returns the log probabilities that are asked for each of the prompts. Raises RequestError."""
        columns = [self._each(name, prompts) for name in ("return_logprob", "logprob_start_len", "top_logprobs_num")]
        ids = self.token_ids_logprob
        nested = ids is not None and any(not isinstance(one, int) for one in ids)
        columns.append(self._each("token_ids_logprob", prompts) if nested else [ids] * prompts)
        states = self._each("return_hidden_states", prompts)
        return [
            logprob_params(*values, hidden=hidden_size if state else 0)
            for state, values in zip(states, zip(*columns, strict=True), strict=True)
        ]

    def _each(self, name: str, prompts: int) -> list[Any]:
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * prompts
        if len(value) != prompts:
            raise RequestError(f"{name} must hold one entry per prompt; found {len(value)} for {prompts}", name)
        return value

    def renamed(self, error: RequestError) -> RequestError:
        # In the engine's words, but for the field that has another name here.
        if self.max_thinking_tokens is None or any("thinking_budget" in fields for fields in self._fields):
            return error
        ours, name = "thinking_budget", "max_thinking_tokens"
        return RequestError(str(error).replace(ours, name), name if error.param == ours else error.param, error.code)

    @property
    def length(self) -> str | None:
        return "max_new_tokens"  # each prompt has its own

    def prompt(self) -> tuple[str, Any]:
        """Returns name and value of the field that holds the prompts."""
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
    content: str | None = None  # as llama.cpp names the prompt
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # as llama.cpp names it, where a text has none of them by default
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: list[ChatTool] | None = None

    @model_validator(mode="after")
    def _named(self) -> TokenizeRequest:
        if self.prompt is None:
            self.prompt = self.content
        if self.add_special_tokens is None:
            self.add_special_tokens = bool(self.add_special) if self.content is not None else self.add_special
        return self

    def chat(self) -> Chat:
        """Returns the conversation. Raises RequestError for what it cannot be."""
        return Chat(
            conversation(self.messages or []),
            offered(self.tools or (), None)[0],
            template=self.chat_template_kwargs or {},
            continued=bool(self.continue_final_message),
            prompted=self.add_generation_prompt is not False,
        )

    def prompts(self) -> list[str]:
        every = self.prompt if isinstance(self.prompt, list) else [self.prompt or ""]
        if len(every) > MAX_PROMPTS or not every:
            raise RequestError(f"prompt takes from 1 to {MAX_PROMPTS} texts; found {len(every)}", "prompt")
        for text in every:
            check_text(text, "prompt")
        return every


class DeleteTraffic(Body):
    """Body of /delete_traffic."""

    client: Name  # the name of a key; "anonymous" for requests without one


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: TokenIds | list[TokenIds]
    skip_special_tokens: bool | None = None

    def batch(self) -> tuple[list[list[int]], bool]:
        """Lists of token ids, and whether they came as several."""
        batched = bool(self.tokens) and isinstance(self.tokens[0], list)
        every: list[Any] = self.tokens if batched else [self.tokens]
        if len(every) > MAX_PROMPTS:
            raise RequestError(f"tokens takes at most {MAX_PROMPTS} lists; found {len(every)}", "tokens")
        return every, batched
