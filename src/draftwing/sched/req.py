"""A request and its life: WAITING -> PREFILL -> DECODE -> DONE, and back to WAITING when it is preempted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from draftwing.config.trees import SOURCES
from draftwing.core import IntArray, TokenLogprobs, stretch_of
from draftwing.errors import RequestError
from draftwing.grammar.state import GrammarState
from draftwing.requests.images import with_keys
from draftwing.requests.request import GenerationRequest
from draftwing.sched.guidance import AsyncMask, BoundProcessor
from draftwing.sched.radix import Node

if TYPE_CHECKING:  # it brings tokenizers
    from draftwing.text.detok import StopStringScanner


class ReqState(Enum):
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


@dataclass(eq=False)
class HeldStates:
    """What a running request has. read, write: of its next step.  spare: its second slot, until its first step is
    planned.  begun: the node whose state that step reads.  writes: of the steps in flight, the oldest first, 0 of one
    that writes none.  newest, length: the slot that a committed step wrote last, 0 before there is one, and the tokens
    in it.  wanted: positions of its prompt at which snapshots are to be taken.  saves: those that are, with slots.
    fresh: as of `RowStates`, once the steps in flight have run."""

    read: int
    write: int
    spare: int
    begun: Node | None
    wanted: set[int]
    writes: deque[int] = field(default_factory=deque)
    newest: int = 0
    length: int = 0
    saves: list[tuple[int, int]] = field(default_factory=list)
    fresh: bool = False

    @property
    def own(self) -> list[int]:
        """Returns its slots but for those of `saves`."""
        return [self.write, self.spare] if self.spare else [self.read, self.write]


@dataclass(eq=False)
class Req:
    """A request that the scheduler runs. Only the scheduler changes it.

    `tokens` are the prompt and all committed output; the last one is not in the KV yet (kv == len(tokens) - 1 while
    decoding). `slots[:covered]` mirrors the page-table row; it is exact below `kv`, and above it a permutation that
    the step in flight may still change. `owned` tells the slots that are ours to free from those of the radix tree.
    """

    request: GenerationRequest
    seed: int
    max_total: int  # tokens, prompt and output, at which it ends by length
    stop_ids: frozenset[int]  # end it; banned by the sampler below min_new_tokens
    salt: int = 0  # requests of the same one share cached prefixes
    draft_salt: int | None = None  # and what drafters remember; None: by `salt`
    arrival: int = 0
    turn: int = 0  # of its client, see `FairQueue`
    scanner: StopStringScanner | None = None
    created: float = field(default_factory=time.monotonic)
    admitted: float | None = None  # monotonic seconds, the first time
    deadline: float | None = None
    # Whether it leaves no cached prefix and nothing is learnt of it; its salt is its own, so that it finds none either.
    private: bool = False
    grammar: GrammarState | None = None  # after the newest token
    processor: BoundProcessor | None = None
    adapter: int = 0  # slot of its adapter on the device, 0: it has none
    head: int = 0  # the same where that drafts with a head of its own, 0: the model's drafts
    drafts_as: str = ""  # what acceptance of its drafts is known by: its adapter, and the head of that
    returning: bool = False  # whether what is elsewhere of its text is being brought back: it gets no row before
    looked: int = -1  # how much had been evicted when it was last looked for there

    async_mask: AsyncMask | None = None  # where there is a grammar
    state: ReqState = ReqState.WAITING
    row: int = -1
    admission: int = -1
    node: Node | None = None
    states: HeldStates | None = None  # of a running request, where the model has recurrent layers
    slots: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    owned: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    covered: int = 0
    kv: int = 0  # committed length, as of the last commit
    sent: int = 0  # prompt positions whose prefill has been planned
    bound: int = 0  # upper bound of the device's kv_len, counting steps in flight
    behind: int = (
        0  # upper bound of the positions that the drafter's KV lacks, counting steps in flight (`sched.draft_backlog`)
    )
    skipped: bool = False  # whether the drafter does not see it, and drafts for it mean nothing (`RecomputeFromTokens`)
    caught_up: int = -1  # number of the last plan with which it caught up
    inflight: int = 0  # planned steps whose result will add at least one token

    cached_tokens: int = 0
    retractions: int = 0
    verify_steps: int = 0
    proposed_by: list[int] = field(default_factory=lambda: [0] * len(SOURCES))  # drafts that were verified, by source
    accepted_by: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    accepted: list[int] = field(default_factory=list)  # [d] = steps in which d drafts were accepted
    by_stretch: list[list[int]] = field(default_factory=list)  # of the answer (`stretch_of`): steps, accepted drafts
    confidence: int = 0  # the drafter's confidence, as of the last commit
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # as far as they are known

    def __post_init__(self) -> None:
        request = self.request
        self.uid, self.params = request.uid, request.params
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self._array, self._digest = np.empty(0, np.int64), b""
        self.limited = request.limits is not None
        self.may_draft = request.limits is None or request.limits.depth > 0
        self.special = self.edited or self.limited or bool(request.prediction)
        self.special |= request.logprobs is not None or request.thinking is not None
        if request.logprobs is not None and request.logprobs.start == 0:
            self.prompt_logprobs.append(None)  # nothing comes before the first token

    @property
    def array(self) -> IntArray:
        """Returns `keys` of all tokens; kept, for one that waits is looked at before every step."""
        if len(self._array) != len(self.tokens):
            self._array, self._digest = self.keys(len(self.tokens)), b""
        return self._array

    def keys(self, length: int) -> IntArray:
        """Returns the first `tokens` as the prefix cache compares them: those of images are the images' own."""
        tokens = np.asarray(self.tokens[:length], np.int64)
        return with_keys(tokens, self.request.images) if self.request.images else tokens

    @property
    def digest(self) -> bytes:
        """Returns a hash of `array`: as good as that is to tell whether others are the same."""
        array = self.array
        if not self._digest:
            self._digest = blake2b(array.tobytes(), digest_size=16).digest()
        return self._digest

    @property
    def forbidding(self) -> str:
        """Returns what is told where the request's parameters leave no token that may come next."""
        params = self.params
        given = {
            "grammar": self.grammar is not None,
            "logits processor": self.processor is not None,
            "allowed_token_ids": bool(params.allowed_token_ids),
            "bad_words": bool(self.request.bad_word_ids),
            "min_new_tokens": params.min_new_tokens > 0,
        }
        found = [name for name, one in given.items() if one] or ["penalties"]
        return f"no token may come next under {' and '.join(found)}"

    def follow(self, token: int) -> bool:
        """Takes the newest token into the grammar; whether the answer is complete with it.

        Raises RequestError when it is not a legal one, and when the grammar has become too complex."""
        assert self.grammar is not None and self.async_mask is not None
        if not self.async_mask.follow(token):
            raise RequestError("the answer left its grammar", "grammar")
        return self.grammar.complete

    @property
    def slow(self) -> bool:
        """Returns whether its grammar is, so that it takes part in steps without drafts."""
        return self.async_mask is not None and self.async_mask.slow

    @property
    def guided(self) -> bool:
        """Returns whether the host decides what may come next, for which it must know every token before."""
        return self.grammar is not None or self.processor is not None

    @property
    def edited(self) -> bool:
        """Returns whether its logits are, by the device or by the host."""
        return self.params.edited or self.guided

    @property
    def penalised(self) -> bool:
        """Returns whether penalties and biases are all that edits its logits."""
        params = self.params
        return params.penalised and not (self.guided or params.allowed_token_ids or params.bad_words)

    @property
    def draws_specially(self) -> bool:
        """Returns whether the sampler has more to do for it than to take the largest logit."""
        return self.params.temperature > 0 or self.params.min_new_tokens > 0

    @property
    def next_prompt_logprob(self) -> int | None:
        """Returns the first position of the prompt whose token's log probability is still wanted."""
        wanted = self.request.logprobs
        if wanted is None or wanted.start < 0:
            return None
        at = wanted.start + len(self.prompt_logprobs)
        return at if at < self.prompt_len else None

    @property
    def rank(self) -> tuple[int, int, int]:
        """Returns the order of service: higher priority first, then in turns of their clients, then first come."""
        return (-self.request.priority, self.turn, self.arrival)

    @property
    def unsent(self) -> int:
        """Returns tokens whose prefill is still to be planned."""
        return len(self.tokens) - self.sent

    @property
    def running(self) -> bool:
        return self.state in (ReqState.PREFILL, ReqState.DECODE)

    @property
    def may_grow(self) -> bool:
        """Returns whether another step can still add a token, counting the tokens that steps in flight will surely
        add."""
        return len(self.tokens) + self.inflight < self.max_total

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    def append_slots(self, new: IntArray) -> None:
        end = self.covered + len(new)
        if end > len(self.slots):
            room = max(end, 2 * len(self.slots), 64)
            self.slots = np.concatenate((self.slots[: self.covered], np.empty(room - self.covered, np.int64)))
            self.owned = np.concatenate((self.owned[: self.covered], np.zeros(room - self.covered, bool)))
        self.slots[self.covered : end] = new
        self.owned[self.covered : end] = True
        self.covered = end

    @property
    def proposed(self) -> int:
        """Drafts that were verified."""
        return sum(self.proposed_by)

    def note_proposed(self, by_source: Sequence[int]) -> None:
        for source, drafts in enumerate(by_source):
            self.proposed_by[source] += drafts

    def note_accepted(self, sources: Sequence[int], kept: int) -> None:
        """Takes note of a step's accepted drafts. kept: tokens of the step, which the answer has by now."""
        stretch = stretch_of(self.completion_tokens - kept)
        self.by_stretch.extend([0, 0] for _ in range(stretch + 1 - len(self.by_stretch)))
        self.by_stretch[stretch][0] += 1
        self.by_stretch[stretch][1] += len(sources)
        self.accepted.extend([0] * (len(sources) + 1 - len(self.accepted)))
        self.accepted[len(sources)] += 1
        for source in sources:
            self.accepted_by[source] += 1
