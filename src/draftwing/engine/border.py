"""What the world outside the engine knows of it, and which requests it lets in. Pure: no torch, so that the server's
process refuses a request without asking the engine's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from draftwing.config import Options
from draftwing.core import GenRequest
from draftwing.errors import RequestError


class Terms(NamedTuple):
    """On what a request is let in: its most new tokens, and the token ids that end it."""

    new_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class EngineInfo:
    """Facts of a loaded engine; they do not change while it lives.

    architecture: as in a checkpoint's config ("LlamaForCausalLM").
    max_banned: most stop ids of a request with min_new_tokens.  dtype, device: as printed by torch ("float32", "cpu").
    """

    options: Options  # resolved
    architecture: str
    context_length: int
    vocab_size: int
    stop_ids: frozenset[int]  # that end every answer
    max_total_tokens: int  # in the KV pool
    max_banned: int
    dtype: str
    device: str

    @property
    def model_name(self) -> str:
        return self.options.served_model_name or self.options.model

    def admit(self, request: GenRequest) -> Terms:
        """Raises RequestError, naming the field as `/generate` does, for a request that can never run."""
        prompt, params = request.prompt_ids, request.params
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        self._check_ids(prompt, "input_ids")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        room = self.context_length - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with at least one new token the context of "
                f"{self.context_length} is exceeded",
                "prompt",
            )
        wanted = room if params.max_new_tokens is None else params.max_new_tokens
        if wanted > room:
            raise RequestError(
                f"{len(prompt)} prompt tokens and {wanted} new ones exceed the context of {self.context_length}: "
                f"max_new_tokens must be at most {room}",
                "max_new_tokens",
            )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        if params.min_new_tokens and len(stop_ids) > self.max_banned:
            raise RequestError(
                f"with min_new_tokens, stop_token_ids and the model's own may be at most {self.max_banned} ids; "
                f"found {len(stop_ids)}",
                "stop_token_ids",
            )
        return Terms(wanted, stop_ids)

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        bad = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} in {param} is outside of the vocabulary [0, {self.vocab_size})", param)
