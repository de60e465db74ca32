"""Bodies of /v1/chat/completions and /v1/completions, with the fields that SGLang, vLLM and llama.cpp add to OpenAI's,
and the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from draftwing.errors import RequestError
from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.limits import whitespace_regex
from draftwing.images.parts import Said, content_of
from draftwing.images.reader import Picture
from draftwing.requests.grammar_field import GRAMMARS, STRUCTURED_KINDS, as_grammar
from draftwing.requests.refusals import no_text, show
from draftwing.requests.request import (
    MAX_COMPLETION_LOGPROBS,
    MAX_LOGPROBS,
    LogprobParams,
    prediction_text,
)
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.chat import Chat, ChatLogprobs
from draftwing.server.conversation import MessagePart, message_of, template_call
from draftwing.server.openai.tools import CalledCustom, CalledFunction, ChatTool, ChosenTool, check_kind, offered
from draftwing.server.schema import (
    AdapterName,
    Body,
    Effort,
    EffortTokens,
    GenerationBody,
    Hint,
    Name,
    Prediction,
    TokenIds,
    sampled,
    split_effort,
)

# vLLM's and llama.cpp's fields for a grammar, and what each is called here.
GRAMMAR_FIELDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "grammar": "ebnf",
}


class StructuredOutputs(
    Body,
    hints="disable_fallback",
    not_built="disable_additional_properties",
    untyped="json_ regex choice grammar structural_tag",
):
    """vLLM's field for a grammar, of which it takes one."""

    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


class PeerFields(
    GenerationBody,
    hints="guided_decoding_backend mm_processor_kwargs stream_interval custom_labels data_parallel_rank "
    "images_config cache_prompt return_progress timings_per_token verbose repeat_last_n "
    "repetition_penalty_range",
    not_built="ec_transfer_params kv_transfer_params logits_processors "
    "repetition_detection return_token_offsets return_weight_versions "
    "routed_experts_prompt_start truncate_prompt_tokens truncation_side use_beam_search vllm_xargs "
    "watermarking bootstrap_host bootstrap_port bootstrap_room extra_key "
    "return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids "
    "return_routed_experts return_sampling_mask return_spec_tokens_details routed_experts_start_len "
    "session_id session_params watermark",
    untyped="guided_json guided_regex guided_choice guided_grammar grammar",
    sampling="thinking_budget",
):
    """What chat and text completions of the peers know."""

    include_stop_str_in_output: Any = sampled("no_stop_trim")
    request_id: Name | None = None
    receipt: bool | None = None
    id_slot: Annotated[int, Field(ge=-1, lt=10**9)] | None = None
    lora_path: AdapterName | list[AdapterName | None] | None = None

    repeat_penalty: Any = sampled("repetition_penalty")  # as llama.cpp names it

    # In vLLM, llama.cpp (two names), and Qwen's own API.
    thinking_token_budget: Any = sampled("thinking_budget")
    reasoning_budget_tokens: Any = sampled("thinking_budget")
    thinking_budget_tokens: Any = sampled("thinking_budget")

    logprob_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_whitespace_pattern: str | None = None

    length_penalty: Hint = None  # of beam search alone, which is refused

    @property
    def asked_id(self) -> str | None:
        return self.rid if self.rid is not None else self.request_id

    def answer_logprobs(self) -> LogprobParams | None:
        """Returns those that the answer is to have. Raises RequestError."""
        return None

    def wanted_logprobs(self) -> LogprobParams | None:
        asked = self.answer_logprobs()
        if self.prompt_logprobs is None:
            return asked
        if self.stream:
            raise RequestError("prompt_logprobs is not for stream: true", "prompt_logprobs")
        asked = asked or LogprobParams()
        return asked._replace(top=max(asked.top, self.prompt_logprobs), start=0)

    def _with_token_ids(self, asked: LogprobParams | None) -> LogprobParams | None:
        """Returns the log probabilities that are asked for, of given tokens in place of the best. Raises
        RequestError."""
        if self.logprob_token_ids is None:
            return asked
        if asked is None:
            raise RequestError("logprob_token_ids needs logprobs", "logprob_token_ids")
        return asked._replace(top=0, token_ids=tuple(self.logprob_token_ids))

    @property
    def grammar_field(self) -> str | None:
        found = self._peer_grammar()
        return super().grammar_field if found is None else found[0]

    def sampling(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        found = self._peer_grammar()
        if found is not None:
            name, kind, value = found
            other = next((one for one in GRAMMARS if getattr(self, one, None) is not None), None)
            if other is not None:
                raise RequestError(f"{name} and {other} cannot be given together", name)
            kind, value = as_grammar(kind, value, name)
            fields |= {kind: value, "called": {kind: name}}
        params = super().sampling(defaults, **fields)
        whitespace = self._whitespace()
        if whitespace is None or params.grammar is None:
            return params
        return params.replace(grammar=params.grammar._replace(whitespace=whitespace))

    def _whitespace(self) -> str | None:
        """Returns the white space that JSON of the grammar may have, if the request says. Raises RequestError."""
        inner = self.structured_outputs or StructuredOutputs()
        given = {
            "guided_whitespace_pattern": self.guided_whitespace_pattern,
            "structured_outputs.whitespace_pattern": inner.whitespace_pattern,
            "structured_outputs.disable_any_whitespace": "" if inner.disable_any_whitespace else None,
        }
        found = {name: pattern for name, pattern in given.items() if pattern is not None}
        for name, pattern in found.items():
            try:
                whitespace_regex(pattern)
            except GrammarError as error:
                raise RequestError(f"{name}: {error}", name) from None
        return next(iter(found.values()), None)

    def _peer_grammar(self) -> tuple[str, str, Any] | None:
        """(the field, the kind of grammar, its value) of a grammar in the peers' fields. Raises RequestError."""
        given = [(name, kind, getattr(self, name)) for name, kind in GRAMMAR_FIELDS.items()]
        inner = self.structured_outputs or StructuredOutputs()
        inside = {name.removesuffix("_"): value for name, value in inner} | {"json_object": inner.json_object or None}
        given += [(f"structured_outputs.{name}", kind, inside[name]) for name, kind in STRUCTURED_KINDS.items()]
        found = [one for one in given if one[2] is not None]
        if len(found) > 1:
            raise RequestError(f"{found[1][0]} and {found[0][0]} cannot be given together", found[1][0])
        return found[0] if found else None


class TextPart(
    MessagePart,
    hints="cache_control prompt_cache_breakpoint",
    bookkeeping="id annotations citations logprobs signature provider_specific_fields",
):
    pass


class ToolCall(Body, hints="cache_control", bookkeeping="index extra_content provider_specific_fields"):
    """A call that an answer made, as it comes back in the conversation."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def plain(self, where: str) -> tuple[str, str, Any]:
        """Returns the call's id, and name and arguments of the function that the model called. Raises RequestError."""
        check_kind(self, where)
        if self.custom is not None:
            return self.id, self.custom.name, {"input": self.custom.input}
        assert self.function is not None
        return self.id, self.function.name, self.function.arguments


class Message(
    Body,
    hints="cache_control",
    not_built="audio function_call images",
    bookkeeping="id refusal annotations citations context encrypted_content executed_tools logprobs "
    "padding parsed provider_specific_fields reasoning_details reasoning_opaque search_results thinking_blocks",
):
    # Clients, OpenRouter and LiteLLM among them, send answers back as they came.
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # as vLLM names it, GitHub's Copilot, and others
    reasoning_text: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _today(cls, message: Any) -> Any:
        return message_of(message) if isinstance(message, dict) else message

    def plain(self, where: str) -> dict[str, Any]:
        """Makes the message that chat templates want: content is one string, or parts where there are pictures. where:
        the message's name in errors."""
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) not in (None, []) and self.role != role:
                raise RequestError(f"{where}.{name} is for messages of the role {role!r}", f"{where}.{name}")
        if self.role == "tool" and self.tool_call_id is None:
            raise RequestError(f"{where}.tool_call_id is missing", f"{where}.tool_call_id")
        if self.role == "function":
            raise RequestError(f"{where}.role 'function' is not supported: use tools and 'tool'", f"{where}.role")
        said, thoughts = self._read(where)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content_of(said),
        }
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        named = (self.reasoning_content, self.reasoning, self.reasoning_text, self.thinking)
        thought = next((one for one in named if one is not None), thoughts)
        if thought is not None:
            message["reasoning_content"] = thought
        # Templates ask whether the key is there.
        if self.tool_calls:
            calls = [(f"{where}.tool_calls.{i}", call) for i, call in enumerate(self.tool_calls)]
            message["tool_calls"] = [
                template_call(*call.plain(here), f"{here}.function.arguments") for here, call in calls
            ]
        return message

    def _read(self, where: str) -> tuple[Said, str | None]:
        """Returns what the content says and shows, and its reasoning."""
        if self.content is None and self.role not in ("assistant", "tool"):
            raise RequestError(f"{where}.content must be a string or a list of text parts", f"{where}.content")
        if not isinstance(self.content, list):
            return [self.content or ""], None
        answers = self.role == "assistant"
        texts: list[str | Picture] = []
        thoughts: list[str] = []
        for i, part in enumerate(self.content):
            said: str | Picture | None = part.said(answers)
            thought = part.thought if answers else None
            if said is None and not answers:
                said = part.picture(f"{where}.content.{i}")
            if said is not None:
                texts.append(said)
            elif thought is not None:
                thoughts.append(thought)
            else:
                raise no_text(part.type, f"{where}.content.{i}", f"{where}.content.{i}")
        return texts, "".join(thoughts) if thoughts else None


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns messages as chat templates want them."""
    if not messages:
        raise RequestError("messages must hold at least one message", "messages")
    called: dict[str, str] = {}  # names of functions by call id
    plain = []
    for i, message in enumerate(messages):
        plain.append(message.plain(f"messages.{i}"))
        called |= {call["id"]: call["function"]["name"] for call in plain[-1].get("tool_calls", [])}
        if message.tool_call_id in called:
            plain[-1].setdefault("name", called[message.tool_call_id])  # some templates show it with the result
    return plain


class StreamOptions(Body, hints="include_obfuscation"):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(
    PeerFields,
    hints="user metadata store safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention",
    sampling="temperature top_p top_k min_p seed sampling_seed stop stop_token_ids stop_regex ignore_eos n "
    "skip_special_tokens spaces_between_special_tokens no_stop_trim frequency_penalty presence_penalty "
    "repetition_penalty logit_bias allowed_token_ids bad_words custom_logit_processor custom_params "
    "response_format json_schema regex ebnf structural_tag",
):
    """What chat and text completions share."""

    model: Name | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Any = sampled("max_new_tokens")
    min_tokens: Any = sampled("min_new_tokens")

    service_tier: Hint = None
    prediction: Prediction | None = None
    speculative_trace: bool | None = None

    return_token_ids: bool | None = None

    def sampling(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only for stream: true", "stream_options")
        if self.speculative_trace and not self.stream:
            raise RequestError("speculative_trace is only for stream: true", "speculative_trace")
        return super().sampling(defaults, **fields)

    @property
    def adds_special_tokens(self) -> bool:
        """Returns whether prompts are texts, to which the tokens are added that the tokenizer puts before them."""
        return False

    @property
    def predicted(self) -> str:
        return "" if self.prediction is None else prediction_text(self.prediction)

    @property
    def traced(self) -> bool:
        return bool(self.speculative_trace)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ReasoningConfig(Body):
    """OpenRouter's field for what `reasoning_effort` and `thinking_budget` say."""

    effort: Effort | EffortTokens | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=10**9)] | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingSwitch(Body, hints="clear_thinking keep display"):
    """The field of DeepSeek's, GLM's and Kimi's APIs."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Field(ge=0, lt=10**9)] | None = None

    @property
    def enabled(self) -> bool | None:
        return {"enabled": True, "disabled": False}.get(self.type)


class ChatRequest(
    OpenAIBody,
    ChatLogprobs,
    hints="verbosity media_io_kwargs use_audio_in_video video_config",
    not_built="functions function_call modalities moderation audio web_search_options add_special_tokens "
    "chat_template echo input_ids task",
):
    """Body of /v1/chat/completions. Without max_tokens an answer runs to the model's default length, or to the context
    limit."""

    source, id_prefix = "messages", "chatcmpl-"
    names: ClassVar = {"top_logprobs_num": "top_logprobs", "token_ids_logprob": "logprob_token_ids"}

    messages: list[Message]
    max_completion_tokens: Any = sampled("max_new_tokens")
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | EffortTokens | None = None
    reasoning: ReasoningConfig | None = None
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None  # as Qwen's API has it

    documents: list[dict[str, Any]] | None = None

    @property
    def definitions(self) -> int:
        return sum(tool.definition for tool in self.tools or ())

    def chat(self) -> Chat:
        functions, choice = offered(self.tools or (), self.tool_choice)
        if self.continue_final_message and self.add_generation_prompt:
            name = "add_generation_prompt"
            raise RequestError(f"{name} and continue_final_message cannot both be true", name)
        effort, budget = self._reasoning
        switches = (self.enable_thinking, self.thinking and self.thinking.enabled)
        enabled = next((one for one in (*switches, self.reasoning and self.reasoning.enabled) if one is not None), None)
        return Chat(
            conversation(self.messages),
            functions,
            choice,
            parallel=self.parallel_tool_calls is not False,
            template=({"documents": self.documents} if self.documents else {}) | (self.chat_template_kwargs or {}),
            continued=bool(self.continue_final_message),
            prompted=self.add_generation_prompt is not False,
            thinking=False if effort == "none" or enabled is False else None,
            effort=effort,
            reasons=bool(budget or enabled),
            separate_reasoning=self.separate_reasoning is not False,
            stream_reasoning=self.stream_reasoning is not False,
        )

    def sampling(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        return super().sampling(defaults, thinking_budget=self._reasoning[1], **fields)

    @property
    def _reasoning(self) -> tuple[str | None, int | None]:
        """Returns the effort of reasoning, and the most tokens for it."""
        asked = self.reasoning or ReasoningConfig()
        effort, budget = split_effort(asked.effort if self.reasoning_effort is None else self.reasoning_effort)
        switch = self.thinking or ThinkingSwitch(type="auto")
        limits = (asked.max_tokens, switch.budget_tokens, budget)
        return effort, next((one for one in limits if one is not None), None)

    def answer_logprobs(self) -> LogprobParams | None:
        return self._with_token_ids(ChatLogprobs.wanted_logprobs(self))

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    @property
    def thinking_field(self) -> str:
        names = ("reasoning_effort", "reasoning", "thinking", "enable_thinking")
        return next((name for name in names if getattr(self, name) is not None), "reasoning_effort")


DEFAULT_LENGTH = 16  # tokens of a completion


class CompletionRequest(OpenAIBody, not_built="suffix prompt_embeds"):
    """Body of /v1/completions. Without max_tokens an answer has at most 16 tokens, as OpenAI's."""

    source, id_prefix = "prompt", "cmpl-"
    names: ClassVar = {"top_logprobs_num": "logprobs", "token_ids_logprob": "logprob_token_ids"}

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    best_of: int | None = None

    add_special_tokens: bool | None = None

    @property
    def adds_special_tokens(self) -> bool:
        texts = isinstance(self.prompt, str) or any(isinstance(one, str) for one in self.prompt)
        return texts and self.add_special_tokens is not False

    def sampling(self, defaults: Mapping[str, Any], **fields: Any) -> SamplingParams:
        params = super().sampling(defaults, max_new_tokens=DEFAULT_LENGTH, **fields)
        if self.best_of is not None and self.best_of != params.n:
            raise RequestError(
                f"best_of must equal n, which is {params.n}: answers are not ranked; found {show(self.best_of)}",
                "best_of",
            )
        return params

    def answer_logprobs(self) -> LogprobParams | None:
        asked = None if self.logprobs is None else LogprobParams(self.logprobs, start=0 if self.echo else -1)
        return self._with_token_ids(asked)
