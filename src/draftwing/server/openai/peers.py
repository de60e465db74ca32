"""Fields that SGLang, vLLM and llama.cpp add to OpenAI's: other names for what is here, and what is not built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from draftwing.errors import RequestError
from draftwing.grammar.ebnf import GrammarError
from draftwing.grammar.limits import whitespace_regex
from draftwing.requests.grammar_field import GRAMMARS, STRUCTURED_KINDS, as_grammar
from draftwing.requests.request import MAX_COMPLETION_LOGPROBS, MAX_LOGPROBS, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.schema import Body, GenerationBody, Hint, Name, sampled

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
    "images_config cache_prompt id_slot return_progress timings_per_token verbose repeat_last_n "
    "repetition_penalty_range",
    not_built="ec_transfer_params kv_transfer_params logits_processors "
    "repetition_detection return_token_offsets return_weight_versions "
    "routed_experts_prompt_start truncate_prompt_tokens truncation_side use_beam_search vllm_xargs "
    "watermarking bootstrap_host bootstrap_port bootstrap_room extra_key lora_path "
    "return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids "
    "return_routed_experts return_sampling_mask return_spec_tokens_details routed_experts_start_len "
    "session_id session_params watermark",
    untyped="guided_json guided_regex guided_choice guided_grammar grammar",
    sampling="thinking_budget",
):
    """What chat and text completions of the peers know."""

    include_stop_str_in_output: Any = sampled("no_stop_trim")
    request_id: Name | None = None

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
