"""What the scheduler and the engine exchange. No torch here: the scheduler imports this module.

`Plan` goes down to the executor, with a `Guidance` where the host takes part in the step, and `StepResult` comes back.
`Output` goes to whoever asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from draftwing.config.trees import (
    SOURCES,
    TreeShape,
)

if TYPE_CHECKING:
    from draftwing.requests.request import GenerationRequest, LogprobParams

IntArray = npt.NDArray[np.int64]
NOBODY: IntArray = np.empty(0, np.int64)  # no batch indices

# A node's mark, the same in ops/assign/spec.py and the kernels: its depth in the lowest bits, whether it is
# verified, from which bit on who proposed it, and from which bit on its survival in units of 1 / MARK_ONE.
MARK_DEPTH, MARK_VERIFIED, MARK_SOURCE, MARK_SURVIVAL, MARK_ONE = 0xFF, 1 << 8, 9, 16, (1 << 15) - 1
MARK_SOURCES = len(SOURCES) - 1  # of a mark from bit MARK_SOURCE on

# Set beside a drawn token, the same in the kernels: the logits that it was drawn from were not finite, so it means
# nothing. No draft equals such a token, so it is the last of its step.
NOT_FINITE = 1 << 32
FORBIDDEN = 1 << 33  # the same where the request's own parameters left no token; the kernels do not set it
TOKEN = NOT_FINITE - 1  # the token alone


MAX_BACKLOG = 32  # most committed positions of a row that a drafter with KV sees in one pass over rows
# Most that the KV of a drafter may lack which is made of tokens alone; others may lack `MAX_BACKLOG`.
MAX_TEXT_BACKLOG = 512


class TokenLogprobs(NamedTuple):
    """Log probabilities of one position: its token's own, the best tokens' from the best down with their ids, and those
    of further tokens. In arrays: there may be millions, and as many Python objects take twenty times the memory.

    hidden: the hidden state [H] that they come from, where it was asked for."""

    value: float
    best: array[float]
    best_ids: array[int]
    wanted: array[float]
    hidden: array[float] | None = None

    @classmethod
    def of(cls, value: float, top: Sequence[tuple[float, int]] = (), wanted: Sequence[float] = ()) -> TokenLogprobs:
        """Makes them of the best tokens `top` as (value, id)."""
        best, ids = array("d", [value for value, _ in top]), array("i", [id_ for _, id_ in top])
        return cls(value, best, ids, array("d", wanted))

    def __reduce__(self) -> tuple[Any, ...]:
        # They come one by one from another process, and there an array of nothing would take 80 bytes each time.
        return _restored, (self.value, self.best or None, self.best_ids or None, self.wanted or None, self.hidden)

    @property
    def top(self) -> list[tuple[float, int]]:
        """Returns the best tokens as (value, id), from the best down."""
        return list(zip(self.best, self.best_ids, strict=True))


_NO_VALUES, _NO_IDS = array("d"), array("i")  # of all positions without them; nobody changes those of a position


def _restored(
    value: float,
    best: array[float] | None,
    best_ids: array[int] | None,
    wanted: array[float] | None,
    hidden: array[float] | None,
) -> TokenLogprobs:
    return TokenLogprobs(value, best or _NO_VALUES, best_ids or _NO_IDS, wanted or _NO_VALUES, hidden)


class Admission(NamedTuple):
    """A request taking a row: what `RowTable` needs to know of it."""

    row: int
    tokens: list[int]  # everything known so far: prompt, and output when resumed
    slots: IntArray  # [cached] KV slots of the matched prefix
    request: GenerationRequest
    seed: int
    stop_ids: tuple[int, ...] = ()  # token ids that end it; the sampler bans them before `min_new_tokens`
    salt: int = 0  # 63 bits; rows of the same one share what drafters remember
    edited: bool = False  # whether its logits are, by the device or by the host
    adapter: int = 0  # slot of its adapter, 0: it has none
    head: int = 0  # the same where that drafts with a head of its own, 0: the model's drafts

    @property
    def prompt_len(self) -> int:
        """Returns tokens of the request, not counting output carried over a preemption."""
        return len(self.request.prompt_ids)


class Chunk(NamedTuple):
    """Positions `[start, start + length)` of a row's tokens to prefill in this step."""

    row: int
    start: int
    length: int
    final: bool  # the last chunk of the prompt: its last row's logits are sampled
    kept: int | None = None  # place of what the drafter may see of it later, see `DraftChunk`; None: it sees it at once
    saves: tuple[tuple[int, int], ...] = ()  # snapshots of a recurrent model: (tokens of the chunk, state slot)
    second: int = 0  # as of `GenerationRequest`, of a prompt that is read whole


class PromptPart(NamedTuple):
    """Queries of a prefill chunk whose next tokens' log probabilities are wanted: `[first, first + length)` of it."""

    chunk: int  # its number in the plan, which is also that of its row
    first: int
    length: int
    params: LogprobParams


class DraftDeferral(NamedTuple):
    """How much of prompts a drafter with KV may see later than the target, in one pass over several chunks.

    places: positions of all prompts of which the target's auxiliary hidden states are kept; 0: it sees every chunk at
    once.  most: positions of one pass.  from_tokens: the drafter needs a text's tokens alone, so nothing is kept, and
    there may be prompts that it does not see.  backlog: about as many positions of an answer it may lack then.
    by_slot: what it needs is kept beside each KV slot, so it sees nothing at all while nothing is drafted.
    """

    places: int = 0
    most: int = 0
    from_tokens: bool = False
    backlog: int = MAX_TEXT_BACKLOG
    by_slot: bool = False


NO_DEFERRAL = DraftDeferral()


class DraftChunk(NamedTuple):
    """Positions `[start, start + length)` of a row's text that a drafter has not seen, though it has seen all before.
    What it needs of them beside tokens is kept in the places `[at, at + length)`."""

    row: int
    start: int
    length: int
    at: int


class DraftExtend(NamedTuple):
    """What a drafter with KV has not seen yet, and is to see now: text that the host knows, and then committed
    positions of rows, as far as the device has come."""

    rows: IntArray  # [C] distinct; some may have been released
    behind: int  # upper bound of the positions that it has not seen, of any of them
    max_kv_len: int  # upper bound of their kv_len
    texts: tuple[DraftChunk, ...] = ()  # of prompts of rows that have been released, and of answers
    passes: int = 1  # in which it sees all this
    late: bool = False  # after the plan's uploads: all rows are the plan's, and their slots may change with it


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
    max_kv_len: int  # upper bound of kv_len over rows before this step (tree) or after it (prefill)
    admits: tuple[Admission, ...] = ()
    new_slots: tuple[tuple[int, int, IntArray], ...] = ()
    chunks: tuple[Chunk, ...] = ()
    noisy: IntArray = field(default_factory=lambda: NOBODY)  # batch indices with temperature > 0
    filtered: IntArray = field(default_factory=lambda: NOBODY)  # of those, with top-k, top-p or min-p
    banning: IntArray = field(default_factory=lambda: NOBODY)  # batch indices below min_new_tokens
    traced: IntArray = field(default_factory=lambda: NOBODY)  # batch indices whose drafts the host is told
    # What few plans have; a plan with any of it is `special`. All are batch indices of rows that draw.
    edited: IntArray = field(default_factory=lambda: NOBODY)  # whose logits the device edits
    guided: IntArray = field(default_factory=lambda: NOBODY)  # whose drafts and logits the host edits
    limited: IntArray = field(default_factory=lambda: NOBODY)  # with limits of their own on drafts, if there are any
    predicted: IntArray = field(default_factory=lambda: NOBODY)  # with a predicted output
    thinking: IntArray = field(default_factory=lambda: NOBODY)  # with a thinking budget
    adapted: bool = False  # whether any row has an adapter
    penalised: bool = False  # whether penalties and biases are all that makes it special
    logprobs: tuple[tuple[int, LogprobParams], ...] = ()
    prompt_parts: tuple[PromptPart, ...] = ()
    # Comes before `admits`, `new_slots` and all else of the plan, unless it is `late`.
    catch_up: DraftExtend | None = None
    # [S, 4] of models with recurrent layers: rows, and the state slots that their next steps read and write, and tokens
    # in the former; -1: as the device has it. Come with the uploads, of distinct rows.
    states: IntArray = field(default_factory=lambda: NOBODY)
    pooled: bool = False  # whether rows that draw want their hidden state alone, so that no logits are needed
    shown: tuple[DraftChunk, ...] = ()  # what the drafter sees of prompts after the uploads, and before the rows run
    mixed: bool = False  # whether the target's forward is one with that of another plan
    mixed_prefill: Plan | None = None  # of kind "tree", where it is mixed: the prefill in the same forward

    @property
    def parts(self) -> tuple[Plan, ...]:
        """Returns the plans of one forward, in the order in which they are committed."""
        return (self,) if self.mixed_prefill is None else (self, self.mixed_prefill)

    @property
    def nodes(self) -> int:
        """Queries of the trees of all rows; rows that ask for more have all of theirs verified."""
        return len(self.rows) * (self.shape.nodes if self.special else self.shape.queries)

    @cached_property
    def special(self) -> bool:
        """Returns whether it asks for more than drafting, sampling and filtering."""
        return bool(
            len(self.edited)
            or len(self.guided)
            or len(self.limited)
            or len(self.predicted)
            or len(self.thinking)
            or self.logprobs
            or self.prompt_parts
        )


class DraftTokens(NamedTuple):
    """Drafts of the `traced` rows of a plan, [T, N] each, as `ops.types.Draft` has them."""

    tokens: IntArray
    parent: IntArray


FEW_MARKS = 64  # nodes of a step up to which Python counts before numpy's operations have started


class TracedNode(NamedTuple):
    """A draft as a request is told of it.

    parent: its place among the step's nodes, None below the root.  source: who proposed it, an index into `SOURCES`.
    survival: the probability that it would be accepted, as it was estimated before, 0 .. 1.
    """

    parent: int | None
    token: int
    source: int
    survival: float
    verified: bool
    accepted: bool


class TracedStep(NamedTuple):
    """One step of a request that asked to see its drafts.

    number: among the request's steps, from 1; 0 for the end of its prompt.  seconds: that the step took.  requests: in
    its batch.  nodes: what was drafted, parents before children.  tokens: what was committed.
    """

    number: int
    seconds: float
    requests: int
    nodes: list[TracedNode]
    tokens: list[int]


@dataclass(frozen=True)
class StepResult:
    """What a step gave, on the host.

    tokens[B, depth + 1], count[B]: committed tokens of each row (prefill: one token of each final chunk); the last may
        be `NOT_FINITE` or `FORBIDDEN`.
    order[B, nodes]: how the step permuted the page-table entries kv_len .. kv_len + nodes - 1.
    mark[B, nodes]: of the draft's nodes, see `depth`, `verified`, `source` and `survival`.
    confidence[B]: the drafter's confidence for the next step.
    seconds: that the step took.  catching_up: those of them in which the drafter caught up first.
    threads: share of the host's threads that computed it, above 0; less than 1 where others keep processors busy.
    provisional: whether its two forwards took turns where there will be a graph of both, which takes less time.
    logprobs, prompt_logprobs: as the plan asks for them, of each row's tokens and of each of its prompt parts.
    drafts: of the rows that the plan wants traced; None without any, or where nothing was drafted.
    """

    tokens: IntArray
    count: IntArray
    order: IntArray
    mark: IntArray
    confidence: IntArray
    seconds: float = 0.0
    catching_up: float = 0.0
    threads: float = 1.0
    provisional: bool = False
    logprobs: tuple[list[TokenLogprobs], ...] = ()
    prompt_logprobs: tuple[list[TokenLogprobs], ...] = ()
    drafts: DraftTokens | None = None

    @cached_property
    def depth(self) -> IntArray:
        """Returns [B, nodes]: 0 for the root and for nodes that were not proposed."""
        return self.mark & MARK_DEPTH

    @cached_property
    def verified(self) -> npt.NDArray[np.bool_]:
        """Returns [B, nodes]: draft nodes that the target ran, the root not counted."""
        return ((self.mark & MARK_VERIFIED) != 0) & (self.depth > 0)

    @cached_property
    def source(self) -> IntArray:
        """Returns [B, nodes]: who proposed it, an index into `SOURCES`."""
        return (self.mark >> MARK_SOURCE) & MARK_SOURCES

    @cached_property
    def accepted_source(self) -> list[list[int]]:
        """Returns who proposed the accepted drafts of each row, in their order."""
        rows = zip(self.mark.tolist(), self.order.tolist(), self.count.tolist(), strict=True)
        return [[marks[node] >> MARK_SOURCE & MARK_SOURCES for node in order[1:count]] for marks, order, count in rows]

    @cached_property
    def proposed_by(self) -> list[list[int]]:
        """Returns draft nodes of each row that were verified, by source: [B][len(SOURCES)]."""
        if self.mark.size > FEW_MARKS:
            rows = len(self.mark)
            cell = self.source + len(SOURCES) * np.arange(rows)[:, None]
            counts = np.bincount(cell[self.verified], minlength=rows * len(SOURCES))
            return cast(list[list[int]], counts.reshape(rows, -1).tolist())
        found = [[0] * len(SOURCES) for _ in self.mark]
        for counted, marks in zip(found, self.mark.tolist(), strict=True):
            for mark in marks:
                if mark & MARK_VERIFIED and mark & MARK_DEPTH:
                    counted[mark >> MARK_SOURCE & MARK_SOURCES] += 1
        return found

    @cached_property
    def survival(self) -> npt.NDArray[np.float64]:
        """Returns [B, nodes]: the probability that it would be accepted, as it was estimated before; verified or
        not."""
        return np.asarray((self.mark >> MARK_SURVIVAL) / MARK_ONE, np.float64)

    @cached_property
    def proposed(self) -> IntArray:
        """Returns [B]: draft nodes that were verified."""
        return np.count_nonzero(self.verified, axis=1)


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
    trace: list[TracedStep] = field(default_factory=list)  # the steps of these tokens, where they were asked for


# ---- where in an answer ----------------------------------------------------------------------------------------------

STRETCH = 256  # tokens of an answer that are counted together first; then twice as many each time


def stretch_of(position: int) -> int:
    """Returns which stretch of an answer its token at a position is in."""
    return (position // STRETCH).bit_length()


def stretch_start(stretch: int) -> int:
    """Returns the position of its first token."""
    return STRETCH << stretch - 1 if stretch else 0
