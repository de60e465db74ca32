"""How long prefills take, and how much of one may stand between two steps of requests that are being answered.

Whoever decodes waits for a prefill, and what waits to be prefilled grows while it runs. So a prefill with them is
short: a *part* takes `PART` times what it takes to read all weights for next to nothing, as the shortest step does, or
the shortest prefill, for a step reads few of a mixture's experts; then it still uses the device well. Where many wait
it may be longer; of a few long prompts that take turns with steps it is shorter, for those who decode would pay for
them at every step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import nlargest

import numpy as np

from draftwing.core import Chunk
from draftwing.sched.policy.cost import DOUBT, OUTDATED, RECENT
from draftwing.sched.policy.cost_table import CONTEXT

PART = 3.0  # times what it takes to read all weights: as long may a prefill take while requests decode
UNNOTICED_GAP = 0.012  # seconds: as long may it take in any case, which no reader notices
LONG = 16.0  # times what it takes to read all weights: prompts that take longer are long
CROWD_GAP = 0.045  # seconds: as long may it take for many prompts of one client that each fit in a part
UNNOTICED_WAIT = 0.16  # seconds: as long may it take where nobody decodes, which nobody who comes then notices
CROWD = 8  # parts: as long may it take there, too; with others one in so many of those who wait is done at once
# Prefills: for so many counts the guess that the shortest takes as long as a step, and keys nothing. Where prefills are
# beside trees, and so of about one length, what the shortest took alone counts for 1 / PRIOR.
PRIOR = 0.1


class PrefillBudget:
    """Seconds of a prefill: so many for each token and for each key that a token attends to, on top of those of the
    shortest, which reads all weights, too."""

    def __init__(self, at_once: int = 1, measured: Sequence[tuple[int, float]] = ()) -> None:
        """at_once: tokens that attend to their keys in the time that fewer take.  measured: tokens and seconds of
        prefills before the first request. The first one of a request may load kernels, and would be believed as long
        as prefills are beside trees."""
        self._at_once = at_once
        self._stalls: deque[float] = deque(maxlen=OUTDATED)  # seconds of the prefill right before each step, 0 without
        self._waited = 0  # steps in a row that were right behind a prefill, with more prompts waiting
        self._mixed = 0.0  # share of the last `OUTDATED` steps that had parts of prompts in their forward
        self._steps: deque[float] = deque(maxlen=RECENT)  # seconds of steps that decoded
        self._usual, self._shortest = 0.0, math.inf  # seconds of such a step
        # Sums over prefills, the newer the heavier: of products of (1, tokens, keys) / seconds, and of these alone.
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)
        self._prefills = self._beside = 0.0  # how many these are, and were beside trees
        self._start = self._token = self._key = 0.0  # seconds
        self._read = 0.0  # the start of prefills by themselves
        for size, seconds in measured:
            self.record([Chunk(0, 0, size, True)], seconds)

    # -- learning -----------------------------------------------------------------------------------------------------

    def record_step(self, seconds: float) -> None:
        """Learns from a step of requests that decode."""
        if seconds > 0:
            self._steps.append(seconds)
            self._usual = sorted(self._steps)[len(self._steps) // 2]
            self._shortest = min((1 + 1 / (4 * OUTDATED)) * self._shortest, seconds)

    def record(self, chunks: Sequence[Chunk], seconds: float, nodes: int = 0) -> None:
        """Learns from a prefill of these chunks; what takes it far longer than expected is something else. nodes: of
        trees in the same forward; each is a token."""
        assert chunks
        if seconds <= 0:
            return
        if self._token:
            seconds = min(seconds, DOUBT * (self.seconds(chunks) + nodes * self._token))
        tokens, keys = self._size(chunks)
        size = np.asarray((1.0, tokens + nodes, keys)) / seconds
        keep = 1 - 1 / RECENT
        self._products = keep * self._products + np.outer(size, size)
        self._sums = keep * self._sums + size
        self._prefills = keep * self._prefills + 1
        self._beside = keep * self._beside + (nodes > 0)
        if self._beside > PRIOR * self._prefills:
            self._fit(max(self._read, self._shortest), 1 / PRIOR)
        else:
            self._fit(self._shortest, PRIOR)
            self._read = self._start

    def _fit(self, shortest: float, prior: float) -> None:
        """Least squares of relative errors, with `prior` prefills more that take as long as the shortest, and `PRIOR`
        in which keys are free."""
        shortest = shortest if self._steps else 0.0
        doubt = self._products.diagonal() / self._prefills * (prior, 0.0, PRIOR)
        doubt[2] += CONTEXT**2 * self._products[1, 1]
        start, _, key = np.linalg.solve(
            self._products + np.diag(doubt), self._sums + doubt * (shortest, 0.0, 0.0)
        ).tolist()  # fmt: skip
        products, total = self._products[1].tolist(), float(self._sums[1])  # of tokens
        self._start = min(max(start, 0.0), (1 - 1 / RECENT) * total / products[0])
        total -= self._start * products[0]
        self._key = min(max(key, 0.0), (1 - 1 / RECENT) * total / products[2])
        self._token = (total - self._key * products[2]) / products[1]

    def plan_step(self, prefilled: Sequence[Chunk], waiting: bool, mixed: bool = False) -> None:
        """Notes that a step of requests that decode is planned. prefilled: right before it.  waiting: whether a part of
        a prompt waits for it. Prompts that wait for something else, as for a grammar, make no gap longer.  mixed:
        whether parts of prompts will be in its forward."""
        self._mixed += (mixed - self._mixed) / OUTDATED
        self._stalls.append(self.seconds(prefilled))
        self._waited = self._waited + 1 if waiting and prefilled else 0

    def rest(self) -> None:
        """Notes that nobody runs."""
        self._waited = 0

    # -- what it knows ------------------------------------------------------------------------------------------------

    @property
    def crowded_out(self) -> bool:
        """Returns whether prompts wait all the time. Then every gap has a part of a prompt in it, and parts are as long
        as a usual step allows, so that longer steps would make each gap longer by both."""
        return self._waited > RECENT // 4

    def latency_slack(self, prefilled: Sequence[Chunk], mixed: bool = False) -> float:
        """Returns how many seconds longer than a plain one a step may take right after a prefill of these chunks: its
        requests have waited for that, and wait with the step no longer than two in `RECENT` steps. mixed: with parts of
        prompts in its forward, for which it is long already: such a step has no time for drafts, unless most steps of
        late are such, for there drafts are worth more than shorter waits."""
        if mixed and self._mixed < 0.5:
            return 0.0
        stall = self.seconds(prefilled)
        if self.crowded_out:
            return 0.0
        if not stall or not self._stalls:
            return math.inf
        allowed = nlargest(max(2 * len(self._stalls) // RECENT, 1), self._stalls)[-1]
        return max(allowed - stall, 0.0)

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        """Returns what a prefill of these chunks will take; 0 for none, and as long as nothing is known."""
        tokens, keys = self._size(chunks)
        return self._start + tokens * self._token + keys * self._key if tokens and self._token else 0.0

    @property
    def start(self) -> float:
        """Returns seconds of a prefill without tokens: about what it takes to read all weights."""
        return self._start

    def token_seconds(self, kv_tokens: int) -> float:
        """Returns the seconds of a prompt's token that attends to so many others; 0 as long as nothing is known."""
        return self._token + self._key * kv_tokens

    def in_parts(self, tokens: int) -> bool:
        """Returns whether a prompt is longer than a part."""
        return tokens * self._token > self._part() - self._start

    def _part(self) -> float:
        """Returns seconds of a part."""
        return max(PART * max(self._shortest, self._read), UNNOTICED_GAP)

    def pause(self, decoding: bool) -> float:
        """Returns how many seconds of something else may stand between two steps. decoding: whether anybody does."""
        return self._part() if decoding and self._steps else UNNOTICED_WAIT

    def max_seconds(
        self, waiting: Sequence[float], decoding: int, alike: bool = True, spared: float | None = None
    ) -> float:
        """Returns how many seconds of prompt tokens are prefilled at once. waiting: seconds of what waits, by request.
        decoding: how many decode meanwhile. alike: whether all are one client's, with one priority; others do not wait
        for a crowd. spared: beside a step in one forward, as many more, or fewer; half of what it would be is left, and
        long prompts have as much as others, for each part saves a reading of all weights. None: by itself. All of it as
        long as nothing is known."""
        if not self._steps or not self._token:
            return sum(waiting)
        if not decoding:
            return max(UNNOTICED_WAIT, CROWD * self._part()) - self._start
        whole, part = max(self._shortest, self._read), self._part() - self._start
        few = min(sum(one for one in waiting if spared is not None or one <= LONG * whole), part)
        fit = [one for one in waiting if alike and one <= part]
        crowd = min(sum(fit), CROWD_GAP, CROWD * len(fit) / decoding * part)
        usual = max(self._usual - self._start, self._start)
        longest = max(usual, few, crowd, sum(min(one, part) for one in waiting) / CROWD)
        longest = max(longest + (spared or 0.0), longest / 2)
        rest = sum(waiting) - longest  # what is not worth another prefill is done with this one
        return longest + rest if 0 < rest < self._start / CROWD else longest

    def _size(self, chunks: Sequence[Chunk]) -> tuple[int, float]:
        """Returns tokens, and the keys that they attend to; of few tokens those of as many as take the same time."""
        tokens, keys = 0, 0.0
        for _, start, length, *_ in chunks:
            tokens += length
            keys += length * (start + length / 2)
        return tokens, keys * max(self._at_once / tokens, 1.0) if tokens else 0.0
