"""Facts of a loaded engine, and which requests it lets in. No torch: the server's process refuses a request without
asking the engine's."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from draftwing.config.adapters import AdapterCard
from draftwing.config.options import Options
from draftwing.config.trees import PREDICTED, TreeShape
from draftwing.engine.provenance import Provenance
from draftwing.errors import TOO_LONG, ContextError, RequestError
from draftwing.images.processing import ImageProcessor
from draftwing.requests.pooling import Pooling
from draftwing.requests.request import MAX_PREDICTED, GenerationRequest, SpecLimits, Terms


@dataclass(frozen=True)
class EngineInfo:
    """Facts of a loaded engine; they do not change while it lives.

    architecture: as in a checkpoint's config ("LlamaForCausalLM").
    max_banned: most stop ids of a request with min_new_tokens.  dtype, device: as printed by torch ("float32", "cpu").
    weight_bytes: of the target's matrices, which every step reads, by type.  read_rate: bytes of memory that the device
    reads in a second; 0 as long as nobody has measured it, see `Engine.measure_read_rate` and `Engine.stats`.
    processors: names of the custom logits processors.  defaults: sampling fields of requests that do not set them, by
    their names in `SamplingParams`; `max_new_tokens` among them is for requests whose API has no limit of its own.
    """

    options: Options  # resolved
    architecture: str
    context_length: int
    vocab_size: int
    hidden_size: int
    stop_ids: frozenset[int]  # that end every answer
    max_total_tokens: int  # in the KV pool
    max_banned: int
    dtype: str
    device: str
    weight_bytes: Mapping[str, int] = field(default_factory=dict)
    pool_bytes: int = 0  # of the KV pool and of recurrent states, when all of them have been used; of one rank
    processors: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read_rate: float = 0.0
    capability: Mapping[str, Any] = field(default_factory=dict)  # as of `engine.startup.models`
    stored: Mapping[str, Any] = field(default_factory=dict)  # `models.library.stored_as`, and whether on_device
    images: ImageProcessor | None = None  # how pictures are prepared; None: the model reads none
    adapters: tuple[AdapterCard, ...] = ()  # that are there from the start
    head_rank: int = 0  # that adapters' own draft heads have room for, 0: they have none
    pooling: Pooling = field(default_factory=Pooling)  # how vectors are made of texts
    writes: bool = True  # whether it writes text; else vectors or scores are all that requests get
    provenance: Provenance | None = None  # of receipts; None: weights or drafts are made up, so there are none

    @property
    def sampling(self) -> dict[str, Any]:
        """Returns the defaults without the length, for APIs that have one of their own."""
        return {name: value for name, value in self.defaults.items() if name != "max_new_tokens"}

    @property
    def floor(self) -> float:
        """Returns seconds that reading the target's weights from memory takes, which no step can be below unless caches
        hold a part of them; 0: not known."""
        return sum(self.weight_bytes.values()) / self.read_rate if self.read_rate else 0.0

    @property
    def model_name(self) -> str:
        return self.options.model_names[0]

    @cached_property
    def shape(self) -> TreeShape:
        """Returns the largest tree that is drafted."""
        return self.options.speculative_shape

    @property
    def speculates(self) -> bool:
        return self.shape.depth > 0

    def deadline(self, arrived: float | None) -> float | None:
        """Returns when a request that came at `arrived` is aborted, both as `GenerationRequest.arrived`; None:
        never."""
        timeout = self.options.request_timeout
        return None if timeout is None else timeout + (time.monotonic() if arrived is None else arrived)

    def drafting(self, predicted: bool) -> tuple[str, SpecLimits]:
        """Returns the algorithm that drafts for a request, and its largest tree. predicted: whether the request brings
        a prediction, which is a way of drafting of its own."""
        if predicted and not self.speculates:
            return "prediction", SpecLimits(*PREDICTED.tree)
        depth, topk, nodes = self.shape.tree
        return self.options.drafter, SpecLimits(depth, topk, nodes)

    def check_writes(self) -> None:
        """Raises RequestError where the model writes no text."""
        if not self.writes:
            does, where = "makes vectors", "/v1/embeddings, /v1/rerank or /score"
            if self.pooling.scores:
                does, where = "scores pairs", "/v1/rerank or /score"
            raise RequestError(f"this model writes no text: it {does} of texts; ask {where}", "model")

    def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with its `terms`; one that has them is not looked at again.

        Raises RequestError, naming the field as `/generate` does, for one that can never run.

        Bad words and grammars are not checked: that takes a tokenizer.
        """
        if request.terms is not None:
            return request
        prompt, params = request.prompt_ids, request.params
        states = request.logprobs
        if not request.pooled or (self.pooling.kind == "last" and states is not None and states.start >= 0):
            self.check_writes()  # which gives out what it makes of a text, not the states of its tokens
        if not prompt:
            raise RequestError("the prompt is empty: at least one token is needed", "prompt")
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextError(
                f"the prompt is too long: it has {len(prompt)} tokens; {TOO_LONG} {self.context_length}, of which at "
                "least one must be new",
                "prompt",
                len(prompt),
                None,
                self.context_length,
            )
        self._check_ids(prompt, "input_ids")
        wanted = room if params.max_new_tokens is None else params.max_new_tokens
        if wanted > room:
            raise ContextError(
                f"{TOO_LONG} {self.context_length}, and there are {len(prompt)} prompt tokens: max_new_tokens must be "
                f"at most {room}; found {wanted}",
                "max_new_tokens",
                len(prompt),
                wanted,
                self.context_length,
            )
        # Those of other vocabularies end nothing: clients send the ids of all models that they know.
        stop_ids = frozenset(token for token in params.stop_token_ids if token < self.vocab_size)
        stop_ids |= frozenset() if params.ignore_eos else self.stop_ids
        if params.min_new_tokens and len(stop_ids) > self.max_banned:
            raise RequestError(
                f"with min_new_tokens, stop_token_ids and the model's own may be at most {self.max_banned} ids; "
                f"found {len(stop_ids)}",
                "stop_token_ids",
            )
        self._check_edits(request, stop_ids)
        self._check_thinking(request)
        self._check_logprobs(request)
        self._check_drafts(request)
        if request.receipt and request.images:
            raise RequestError("receipt: there is none of an answer to images", "receipt")
        if request.receipt and self.provenance is None:
            raise RequestError(
                "receipt: there is none of weights or drafts that are made up (load_format, simulate_accept_length)",
                "receipt",
            )
        if request.receipt and request.adapters:
            raise RequestError("receipt: there is none of answers by an adapter; leave one of both out", "receipt")
        return request._replace(terms=Terms(max(wanted, 1), stop_ids))

    def _check_edits(self, request: GenerationRequest, stop_ids: frozenset[int]) -> None:
        params = request.params
        self._check_ids([token for token, _ in params.logit_bias], "logit_bias")
        self._check_ids(params.allowed_token_ids, "allowed_token_ids")
        if params.min_new_tokens and params.allowed_token_ids and stop_ids >= set(params.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids holds only ids that end the answer, which min_new_tokens forbids",
                "allowed_token_ids",
            )
        processor = params.logits_processor
        if processor is not None and processor.name not in self.processors:
            known = ", ".join(self.processors) or "none"
            raise RequestError(
                f"custom_logit_processor {processor.name[:80]!r} is not one that the server was started with ({known})",
                "custom_logit_processor",
            )

    def _check_thinking(self, request: GenerationRequest) -> None:
        thinking, params = request.thinking, request.params
        if thinking is None:
            if params.thinking_budget is not None:
                raise RequestError(
                    "thinking_budget needs to know how the model marks its reasoning: start with --reasoning-parser",
                    "thinking_budget",
                )
            return
        self._check_ids(thinking.end, "thinking_budget")
        marker = "the marker that ends reasoning, which thinking_budget writes"
        if params.allowed_token_ids and not set(thinking.end) <= set(params.allowed_token_ids):
            raise RequestError(
                f"allowed_token_ids must hold {[*thinking.end]}, the tokens of {marker}", "allowed_token_ids"
            )
        if any(word[-1] in thinking.end for word in request.bad_word_ids or ()):
            raise RequestError(f"bad_words must not end with a token of {marker}", "bad_words")

    def _check_logprobs(self, request: GenerationRequest) -> None:
        wanted = request.logprobs
        if wanted is None:
            return
        self._check_ids(wanted.token_ids, "token_ids_logprob")
        if wanted.top > self.vocab_size:
            raise RequestError(
                f"top_logprobs_num must be at most {self.vocab_size}, the size of the vocabulary; found {wanted.top}",
                "top_logprobs_num",
            )
        if wanted.first_shown >= len(request.prompt_ids):
            raise RequestError(
                f"logprob_start_len must be below the prompt's {len(request.prompt_ids)} tokens; "
                f"found {wanted.first_shown}",
                "logprob_start_len",
            )

    def _check_drafts(self, request: GenerationRequest) -> None:
        limits = request.limits
        if limits is not None:
            _, shape = self.drafting(bool(request.prediction))
            for name, value, limit in (
                ("num_steps", limits.depth, shape.depth),
                ("topk", limits.topk, shape.topk),
                ("num_draft_tokens", limits.nodes, shape.nodes),
            ):
                if value > limit:
                    raise RequestError(
                        f"speculative.{name} must be at most {limit}, as the server was started; found {value}",
                        f"speculative.{name}",
                    )
        if request.prediction:
            if limits is not None and limits.depth == 0:
                raise RequestError("prediction is a way of drafting, which the request switches off", "prediction")
            if len(request.prediction) > MAX_PREDICTED:
                raise RequestError(
                    f"prediction takes at most {MAX_PREDICTED} tokens; found {len(request.prediction)}", "prediction"
                )
            self._check_ids(request.prediction, "prediction")

    def _check_ids(self, ids: Collection[int], param: str) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            bad = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise RequestError(f"token id {bad} in {param} is outside of the vocabulary [0, {self.vocab_size})", param)
