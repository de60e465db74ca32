"""The nouns that every part of the engine shares. No torch here: the scheduler imports this module.

`Plan` goes from the scheduler down to the executor, `StepResult` comes back; nothing else passes between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
NOBODY: IntArray = np.empty(0, np.int64)  # no batch indices


class TreeShape(NamedTuple):
    """Shape of one draft tree. Plain decoding is `(0, 1, 1)`, a chain of k drafts is `(k, 1, k + 1)`.

    depth: levels below the root, so at most `depth + 1` tokens are committed by one step.
    topk:  branching factor of the growth loop.
    nodes: nodes that the target verifies, the root included.
    """

    depth: int
    topk: int
    nodes: int

    @property
    def max_commit(self) -> int:
        return self.depth + 1


PLAIN = TreeShape(0, 1, 1)
PREDICTED = TreeShape(8, 1, 9)  # of drafts copied from a predicted output, where there is no other drafter
# What a request may ask of the edits of its logits.
MOST_BIASES = 1024  # distinct token ids
MOST_BAD_WORDS = 128  # token sequences
MOST_BAD_WORD_TOKENS = 16  # of one sequence
MOST_PREDICTED = 16384  # tokens of a predicted output
MAX_HINT = 31  # a drafter's outlook for a row's next draft lies in [0, MAX_HINT]


class Grammar(NamedTuple):
    """What an answer must be: `text` in the language that `kind` names, a JSON document where that is JSON."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str


class Processor(NamedTuple):
    """A logit processor of the server by its name, and what it is called with, as JSON."""

    name: str
    params: str


class LogprobParams(NamedTuple):
    """Log probabilities that a request wants, of the model's own distribution: softmax(logits), before any edit.

    top: how many best tokens of each position.  token_ids: further tokens of each position.
    start: first prompt position whose token's log probability is wanted; -1: only the answer's.
    """

    top: int = 0
    token_ids: tuple[int, ...] = ()
    start: int = -1


class TokenLogprobs(NamedTuple):
    """Of one position: its token's own, the best tokens' as (value, id) from the best down, the further tokens'."""

    value: float
    top: list[tuple[float, int]]
    wanted: list[float]


class SpecLimits(NamedTuple):
    """The largest draft tree that a request wants, no larger than the engine's; depth 0 switches drafting off."""

    depth: int
    topk: int
    nodes: int


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of the sampler and of the stop rules; field names as in `/generate`'s `sampling_params`."""

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    sampling_seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all of them
    bad_words: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    grammar: Grammar | None = None
    logit_processor: Processor | None = None

    @property
    def edited(self) -> bool:
        """Whether logits are changed by something that the device knows: penalties, biases, bans."""
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
        )

    @property
    def guided(self) -> bool:
        """Whether what may come next is decided on the host, from the tokens so far."""
        return self.grammar is not None or self.logit_processor is not None

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p removes any token."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True)
class GenRequest:
    """One prompt, one answer. `cache_salt` isolates the prefix cache and the n-gram memory.

    limits: None drafts as the engine does.  prediction: token ids that the answer is expected to resemble.
    """

    uid: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    logprobs: LogprobParams | None = None
    limits: SpecLimits | None = None
    prediction: tuple[int, ...] = ()


class Admission(NamedTuple):
    """A request taking a row: what `SlotTable` needs to know of it."""

    row: int
    tokens: list[int]  # everything known so far: prompt, and output when resumed
    slots: IntArray  # [cached] KV slots of the matched prefix
    seed: int
    params: SamplingParams
    prompt_len: int  # of the request, not counting output carried over a preemption
    stop_ids: tuple[int, ...]  # token ids that end it; the sampler bans them before `min_new_tokens`
    salt: int  # 63-bit hash of cache_salt; 0 without one
    edited: bool = False  # whether its logits are
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    limits: SpecLimits | None = None
    prediction: tuple[int, ...] = ()


class Chunk(NamedTuple):
    """Positions `[start, start + length)` of a row's tokens to prefill in this step."""

    row: int
    start: int
    length: int
    final: bool  # the last chunk of the prompt: its last row's logits are sampled


class PromptPart(NamedTuple):
    """Queries of a prefill chunk whose next tokens' log probabilities are wanted: `[first, first + length)` of it."""

    chunk: int  # its number in the plan, which is also that of its row
    first: int
    length: int
    params: LogprobParams


@dataclass(frozen=True)
class Plan:
    """One step of the engine, decided on the host. Holds numpy and plain Python only, so that it pickles.

    `new_slots` are written into page-table rows before anything runs: (row, first position, slot ids). They come after
    `admits` and may name rows that do not run in this step.
    For kind "tree" every row of `rows` runs `shape`; for "prefill" the `chunks` run and `rows` are their rows.
    """

    step: int
    kind: Literal["prefill", "tree"]
    rows: IntArray  # [B]
    admission: IntArray  # [B] admission number of each row: a result whose number is no longer current is dropped
    shape: TreeShape
    max_bound: int  # upper bound of kv_len over rows before this step (tree) or after it (prefill)
    admits: tuple[Admission, ...] = ()
    new_slots: tuple[tuple[int, int, IntArray], ...] = ()
    chunks: tuple[Chunk, ...] = ()
    noisy: IntArray = field(default_factory=lambda: NOBODY)  # batch indices with temperature > 0
    filtered: IntArray = field(default_factory=lambda: NOBODY)  # of those, with top-k, top-p or min-p
    banning: IntArray = field(default_factory=lambda: NOBODY)  # batch indices below min_new_tokens
    # What few plans have; a plan with any of it is `special`. All are batch indices of rows that draw.
    edited: IntArray = field(default_factory=lambda: NOBODY)  # whose logits the device edits
    guided: IntArray = field(default_factory=lambda: NOBODY)  # whose drafts and logits the host edits
    limited: IntArray = field(default_factory=lambda: NOBODY)  # with limits of their own on drafts
    predicted: IntArray = field(default_factory=lambda: NOBODY)  # with a predicted output
    logprobs: tuple[tuple[int, LogprobParams], ...] = ()
    prompt_parts: tuple[PromptPart, ...] = ()

    @property
    def special(self) -> bool:
        """Whether it asks for more than drafting, sampling and filtering."""
        return bool(
            len(self.edited)
            or len(self.guided)
            or len(self.limited)
            or len(self.predicted)
            or self.logprobs
            or self.prompt_parts
        )


@dataclass(frozen=True)
class StepResult:
    """What a step gave, on the host.

    tokens[B, depth + 1], count[B]: committed tokens of each row (prefill: one token of each final chunk).
    order[B, nodes]: how the step permuted the page-table entries kv_len .. kv_len + nodes - 1.
    depth[B, nodes]: of the draft's nodes, 0 for the root and for those that were not proposed.
    hint[B]: the drafter's outlook for the next step.
    logprobs, prompt_logprobs: as the plan asks for them, of each row's tokens and of each of its prompt parts.
    """

    tokens: IntArray
    count: IntArray
    order: IntArray
    depth: IntArray
    hint: IntArray
    seconds: float = 0.0
    logprobs: tuple[list[TokenLogprobs], ...] = ()
    prompt_logprobs: tuple[list[TokenLogprobs], ...] = ()

    @cached_property
    def proposed(self) -> IntArray:
        """[B]: live draft nodes, the root not counted."""
        return np.count_nonzero(self.depth, axis=1)


@dataclass
class Output:
    """News of one request, from the scheduler to whoever asked: new tokens, and how it ended if it did."""

    uid: str
    token_ids: list[int]
    finish_reason: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict)  # filled when finished
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each of token_ids, where they were asked for
    # Of the prompt's tokens from `LogprobParams.start` on, None for position 0; comes once, with the first token.
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
