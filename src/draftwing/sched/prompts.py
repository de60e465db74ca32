"""Whether a draft model sees prompts: if its drafts of the answers save more time than that takes.

A pass of a model over a prompt takes a GPU milliseconds of launches, whatever the prompt's size. A short answer does
not bring that back, nor does any where nothing is drafted. What is not known is found out by drafting, and what was
found out may change, so a small share of the time goes into prompts that do not seem worth it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import fmean, median

TRIED = 0.004  # share of the time that prompts may cost more than they save
SAVED_UP = 4.0  # passes: as much of it may be spent at once, or what prompts take that were not seen
LATE = 16  # passes, and answers of about the same limit, of late that tell of others
PART = 1024  # tokens of a prompt: more are prefilled part by part, and shown before the last part


class PromptWorth:
    def __init__(self, most: int) -> None:
        """most: positions of a pass."""
        self._most = max(most, 1)
        self._passes: deque[float] = deque(maxlen=LATE)  # seconds
        # By about the limit: tokens of answers. Long ones are asked for beside short ones.
        self._answers: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=LATE))
        self._allowance = 0.0  # seconds
        self._refused = 0.0  # seconds that a prompt which was refused would have lost at most, until as much is tried

    def record(self, seconds: float, showing: float, passes: int, shown: int) -> None:
        """A step took so long, `showing` of it for passes over text, and over so many positions of prompts beside."""
        passes += -(-shown // self._most)
        if showing > 0 and passes:
            self._passes.append(showing / passes)
        most = SAVED_UP * median(self._passes) if self._passes else 0.0
        self._allowance = min(self._allowance + TRIED * seconds, max(most, self._refused))

    def ended(self, tokens: int, limit: int) -> None:
        """An answer has so many, where it could have `limit`."""
        self._answers[limit.bit_length()].append(tokens)

    def are_worth(
        self, tokens: Sequence[int], limits: Sequence[int], saving: float | None, at_best: float | None = None
    ) -> bool:
        """Whether prompts that are prefilled together are to be seen: the ends of all take one pass. tokens: of each,
        those that are not cached.  limits: tokens of their answers at most.  saving: seconds that drafts save for each
        of these, None where that is not known.  at_best: the same if all drafts were right; where not even that brings
        back what prompts cost, there is nothing to find out."""
        if saving is None or not self._passes or not self._answers:
            return True
        a_pass, parts = median(self._passes), [-(-length // self._most) for length in tokens if length > PART]
        cost, answers = (1 + sum(parts)) * a_pass, sum(map(self._usual, limits))
        loss = cost - answers * saving
        if at_best is not None and cost > answers * max(at_best, saving):
            return False
        if loss > self._allowance:  # of many together the longest alone: they would all take it in one step
            self._refused = max(self._refused, min(loss, (1 + max(parts, default=0)) * a_pass))
            return False
        self._allowance -= max(loss, 0.0)
        if loss >= self._refused:
            self._refused = 0.0
        return True

    def _usual(self, limit: int) -> float:
        """Tokens of an answer that can have so many; all of these where nothing is known of such a limit."""
        answers = self._answers.get(limit.bit_length())
        return min(fmean(answers), limit) if answers else limit
