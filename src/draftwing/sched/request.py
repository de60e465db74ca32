"""A request and its life: WAITING -> PREFILL -> DECODE -> DONE, and back to WAITING when it is preempted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np

from draftwing.core import IntArray, SamplingParams
from draftwing.sched.radix import Node


class ReqState(Enum):
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


class StopScanner(Protocol):
    """Watches the text of a request that has stop strings."""

    def push(self, token: int) -> str | None:
        """The stop string that the text contains now, if any."""
        ...

    def finish(self) -> str | None:
        """The same, once no token follows."""
        ...


@dataclass(eq=False)
class Req:
    """Owned by the Scheduler; nothing else changes it.

    `tokens` are the prompt and all committed output; the last one is not in the KV yet (kv == len(tokens) - 1 while
    decoding). `slots[:covered]` mirrors the page-table row; it is exact below `kv`, and above it a permutation that
    the step in flight may still change. `owned` tells the slots that are ours to free from those of the radix tree.
    """

    uid: str
    tokens: list[int]
    params: SamplingParams
    seed: int
    max_total: int  # tokens, prompt and output, at which it ends by length
    stop_ids: frozenset[int]  # end it; banned by the sampler below min_new_tokens
    priority: int = 0
    salt: int = 0
    arrival: int = 0
    scanner: StopScanner | None = None
    created: float = field(default_factory=time.monotonic)
    deadline: float | None = None  # monotonic seconds

    state: ReqState = ReqState.WAITING
    prompt_len: int = 0
    row: int = -1
    admission: int = -1
    node: Node | None = None
    slots: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    owned: np.ndarray = field(default_factory=lambda: np.empty(0, bool))
    covered: int = 0
    kv: int = 0  # committed length, as of the last commit
    sent: int = 0  # prompt positions whose prefill has been planned
    bound: int = 0  # upper bound of the device's kv_len, counting steps in flight
    inflight: int = 0  # planned steps whose result will add at least one token

    cached_tokens: int = 0
    retractions: int = 0
    verify_steps: int = 0
    proposed: int = 0
    accepted: list[int] = field(default_factory=list)  # [d] = steps in which d drafts were accepted
    hint: int = 0  # the drafter's outlook, as of the last commit

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: higher priority first, then first come."""
        return (-self.priority, self.arrival)

    @property
    def running(self) -> bool:
        return self.state in (ReqState.PREFILL, ReqState.DECODE)

    @property
    def may_grow(self) -> bool:
        """Whether another step can still add a token, counting the tokens that steps in flight will surely add."""
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

    def note_accepted(self, drafts: int) -> None:
        self.accepted.extend([0] * (drafts + 1 - len(self.accepted)))
        self.accepted[drafts] += 1
