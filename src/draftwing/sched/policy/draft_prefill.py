"""Whether a draft model sees a prompt: if its drafts of the answer save more time than that takes.

A pass of a model over a prompt takes a GPU milliseconds of launches, whatever the prompt's size. A short answer does
not bring that back, nor does any where nothing is drafted. What is not known is found out by drafting, and what was
found out may change, so exploring pays for prompts that do not seem worth it, too (`ShapePolicy.spend`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

from draftwing.sched.policy.cost import RECENT


class DraftPrefill:
    def __init__(self, max_chunk: int) -> None:
        """max_chunk: positions of a pass."""
        self._max_chunk = max(max_chunk, 1)
        self._passes: deque[float] = deque(maxlen=RECENT)  # seconds
        # By about the limit: tokens of answers. Long ones are asked for along with short ones.
        self._answers: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT))

    def record(self, seconds: float, passes: int, shown: int) -> None:
        """Learns what passes took: so many over text, and those over so many positions of prompts."""
        passes += -(-shown // self._max_chunk)
        if seconds > 0 and passes:
            self._passes.append(seconds / passes)

    def ended(self, tokens: int, limit: int) -> None:
        """Learns how long an answer is that could have `limit` tokens."""
        self._answers[limit.bit_length()].append(tokens)

    def should_prefill(
        self,
        prompts: Sequence[tuple[int, bool]],
        limits: Sequence[int],
        saving: float | None,
        at_best: float | None,
        spend: Callable[[float], bool],
    ) -> bool:
        """Decides whether prompts that are prefilled together are seen: the ends of all take one pass. prompts: tokens
        of each that are not cached, and whether it comes in parts, which are seen before its end. limits: tokens of
        their answers at most.  saving: seconds that drafts save for each of these, None where that is not known.
        at_best: the same if all drafts were right; where not even that brings back what prompts cost, there is nothing
        to find out. spend: takes what it loses out of what exploring may cost."""
        if saving is None or not self._passes or not self._answers:
            return True
        a_pass, parts = median(self._passes), [-(-size // self._max_chunk) for size, in_parts in prompts if in_parts]
        cost, answers = (1 + sum(parts)) * a_pass, sum(map(self._usual, limits))
        if at_best is not None and cost > answers * max(at_best, saving):
            return False
        return cost <= answers * saving or spend(cost - answers * saving)

    def _usual(self, limit: int) -> float:
        """Returns tokens of an answer that can have so many; all of these where nothing is known of such a limit."""
        answers = self._answers.get(limit.bit_length())
        return min(fmean(answers), limit) if answers else limit
