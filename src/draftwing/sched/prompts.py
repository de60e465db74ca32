"""Whether a draft model sees prompts: if its drafts of the answers save more time than that takes.

A pass of a model over a prompt takes a GPU milliseconds of launches, whatever the prompt's size. A short answer does
not bring that back, nor does any where nothing is drafted. What is not known is found out by drafting, and what was
found out may change, so a small share of the time goes into prompts that do not seem worth it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

TRIED = 0.004  # share of the time that prompts may cost more than they save
SAVED_UP = 4.0  # passes: as much of it may be spent at once
LATE = 16  # passes, and answers, of late that tell of others
PART = 1024  # tokens of a prompt: more are prefilled part by part, and shown before the last part


class PromptWorth:
    def __init__(self, most: int) -> None:
        """most: positions of a pass."""
        self._most = max(most, 1)
        self._passes: deque[float] = deque(maxlen=LATE)  # seconds
        self._answers: deque[int] = deque(maxlen=LATE)  # tokens
        self._allowance = 0.0  # seconds

    def record(self, seconds: float, showing: float, passes: int, shown: int) -> None:
        """A step took so long, `showing` of it for passes over text, and over so many positions of prompts beside."""
        passes += -(-shown // self._most)
        if showing > 0 and passes:
            self._passes.append(showing / passes)
        most = SAVED_UP * median(self._passes) if self._passes else 0.0
        self._allowance = min(self._allowance + TRIED * seconds, most)

    def ended(self, tokens: int) -> None:
        """An answer has so many."""
        self._answers.append(tokens)

    def are_worth(self, tokens: Sequence[int], limits: Sequence[int], saving: float | None) -> bool:
        """Whether prompts that are prefilled together are to be seen: the ends of all take one pass. tokens: of each,
        those that are not cached.  limits: tokens of their answers at most.  saving: seconds that drafts save for each
        of these, None where that is not known."""
        if saving is None or not self._passes or not self._answers:
            return True
        passes = 1 + sum(-(-length // self._most) for length in tokens if length > PART)
        usual = fmean(self._answers)
        loss = passes * median(self._passes) - sum(min(usual, limit) for limit in limits) * saving
        if loss > self._allowance:
            return False
        self._allowance -= max(loss, 0.0)
        return True
