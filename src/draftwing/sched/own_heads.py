"""Whether adapters' own draft heads are better than the model's head, by the requests that have them.

Until it is known, some requests of an adapter have the model's head, one of each few, by chance: requests of different
kinds may come in turn. So both are judged by the same traffic, whatever else changes meanwhile."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

TURNS: Final = 4  # requests of which one has the model's head
ENOUGH: Final = 16  # requests of each head before one is believed to be better
MOST: Final = 100  # requests of each head, after which the difference is too small to matter
ERRORS: Final = 3.0  # standard errors that it has to be: it is looked at again and again
KNOWN: Final = 1024  # heads of which something is remembered


class Request(NamedTuple):
    """tokens: that its steps have given."""

    tokens: int
    steps: int


@dataclass
class _Trial:
    """What is known of one head."""

    turns: list[bool] = field(default_factory=list)  # of the next requests, the last one first
    own: list[Request] = field(default_factory=list)
    model: list[Request] = field(default_factory=list)
    better: bool | None = None  # None: nobody knows yet


class OwnHeads:
    """Not for several threads at once."""

    def __init__(self) -> None:
        self._trials: OrderedDict[str, _Trial] = OrderedDict()  # by key: of an adapter and its head
        self._random = random.Random(0)

    def next(self, key: str) -> bool:
        """Returns whether the next request with the adapter drafts with its own head. key: of both."""
        trial = self._of(key)
        if trial.better is not None:
            return trial.better
        if not trial.turns:
            trial.turns = [True] * TURNS
            trial.turns[self._random.randrange(TURNS)] = False
        return trial.turns.pop()

    def is_worse(self, key: str) -> bool:
        """Returns whether it is known that the model's head is better."""
        return key in self._trials and self._trials[key].better is False

    def ended(self, key: str, own: bool, drafts: int, steps: int) -> bool | None:
        """Notes a request that had the adapter's own head, or the model's. drafts: that were accepted.  steps: in which
        something was verified; 0 says nothing. Returns what is known since then of which is better, if it was not."""
        trial = self._of(key)
        if trial.better is not None or not steps:
            return None
        (trial.own if own else trial.model).append(Request(drafts + steps, steps))
        if min(len(trial.own), len(trial.model)) < ENOUGH:
            return None
        (mine, error), (other, others) = _mean(trial.own), _mean(trial.model)
        if abs(mine - other) > ERRORS * math.hypot(error, others):
            trial.better = mine > other
        elif min(len(trial.own), len(trial.model)) >= MOST:
            trial.better = True
        return trial.better

    def _of(self, key: str) -> _Trial:
        trial = self._trials.pop(key, None) or _Trial()
        self._trials[key] = trial
        if len(self._trials) > KNOWN:
            self._trials.popitem(last=False)
        return trial


def _mean(requests: Sequence[Request]) -> tuple[float, float]:
    """Returns tokens per step, a ratio of sums, and its standard error."""
    steps, count = sum(one.steps for one in requests), len(requests)
    mean = sum(one.tokens for one in requests) / steps
    squares = sum((one.tokens - mean * one.steps) ** 2 for one in requests)
    return mean, math.sqrt(squares * count / (count - 1)) / steps
