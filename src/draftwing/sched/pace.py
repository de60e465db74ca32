"""How long prefills take, and how much of one may stand between two steps of requests that are being answered.

Whoever decodes waits for a prefill, and what waits to be prefilled grows while it runs. So beside them a prefill is
short: `STALL` times what it takes to read all weights for next to nothing, as the shortest step does, or the shortest
prefill, for a step reads few of a mixture's experts; then it still uses the device well. Where many wait it may be
longer, or they would be behind for as long as others decode; where most wait for short prompts, longer still. A few
long prompts are not many: those who decode would pay for them at every step, so of these it is shorter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import nlargest

import numpy as np

from draftwing.core import Chunk

STALL = 3.0  # times what reads all weights: as long may a prefill take beside requests that decode
SWIFT = 0.012  # seconds: as long may it take in any case, which no reader notices. Three steps of 2.5 ms, as with
# quantised weights, are parts of 100 tokens, which take nearly as long as 250
LONG = 16.0  # times what reads all weights: prompts that take longer are long
BESIDE = 1.25  # times a usual step: as long may a prefill of long prompts take, or twice as long as the shortest one
ALONE = 32.0  # times the shortest step: the same where nobody decodes, but may come. For the device that is long
CALM = 0.16  # seconds: as long may one take there in any case, which nobody who comes notices. Steps of quantised
# weights are short: in parts of 32 of them prompts spent 7% of the time on what each part takes at least
SPENT = 0.05  # of such a prefill: as much may be what each takes at least. Quantised weights are multiplied out first
MOST = 3.0  # times `ALONE`: longer a prefill never gets for that, for who comes meanwhile waits until it ends
SHARE = 8  # of the prefills that wait, each counted up to what one may take, one in so many is done at once
CROWD = 0.05  # seconds: as long may a prefill take for many prompts that each fit in a usual part
CROWDED = 8  # so many who decode wait for one more usual part for each such prompt
LEAST = 32  # tokens of short prompts: fewer are not worth a step
REST = 0.05  # of a part: as much more is taken along rather than left over
DECAY = 0.98  # of what older prefills tell, with each new one
EVEN = 256  # tokens: prefills of fewer tell less for their size. A GPU does them for the bytes of the weights alone
SPREAD = 250.0  # tokens: contexts have to differ by more before they tell what a key costs
TRUST = 0.1  # of what prefills tell of how long the shortest takes: so much counts that it takes as long as a step
OWN = 0.05  # of the seconds of tokens, at any context, that are not for keys
PAUSE = 4.0  # times what was expected: the rest of what a prefill takes is something else, as of a machine that paused
STEPS, RARE = 256, 20  # of late; one in so many may be as slow
PRESSED = 16  # steps in a row with prompts that wait: every gap has a part of one in it
NEAR = 64  # steps of late: half of them take longer than a usual one
DRIFT = 1.002  # with each step: what the shortest one takes may change


class Pace:
    """Seconds of a prefill: so many for each token and for each key that a token attends to, on top of those of the
    shortest, which reads all weights, too."""

    def __init__(self) -> None:
        self._stalls: deque[float] = deque(maxlen=STEPS)  # seconds of the prefill right before each step, 0 without
        self._pressed = 0  # steps in a row with prompts that wait
        self._steps: deque[float] = deque(maxlen=NEAR)  # seconds of steps that decoded
        self._usual, self._short = 0.0, float("inf")  # seconds of such a step, and of the shortest of late
        # Sums over prefills, the newer the heavier: of products of (1, tokens, keys), of seconds times these.
        self._known, self._told = np.zeros((3, 3)), np.zeros(3)
        self._start = self._token = self._key = 0.0  # seconds

    def record_step(self, seconds: float) -> None:
        """A step of requests that decode took so long."""
        if seconds > 0:
            self._steps.append(seconds)
            self._usual = sorted(self._steps)[len(self._steps) // 2]
            self._short = min(DRIFT * self._short, seconds)

    def record(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A prefill of these chunks took so long."""
        assert chunks
        if seconds <= 0:
            return
        if self._token:
            seconds = min(seconds, PAUSE * self.seconds(chunks))
        tokens, keys = _size(chunks)
        size = np.asarray((1.0, tokens, keys)) / max(tokens, EVEN)
        self._known = DECAY * self._known + np.outer(size, size)
        self._told = DECAY * self._told + size * (seconds / max(tokens, EVEN))
        self._fit()

    def _fit(self) -> None:
        """Least squares, where little is known drawn to prefills that begin as a step does and whose keys are free. Of
        the mean prefill it is right in any case."""
        count, tokens, keys = self._known[0].tolist()
        doubt = np.asarray((TRUST * count, 0.0, SPREAD**2 * self._known[1, 1]))
        guess = doubt * (self._short if self._steps else 0.0, 0.0, 0.0)
        start, _, key = np.linalg.solve(self._known + np.diag(doubt), self._told + guess)
        seconds = float(self._told[0]) / count
        self._start = min(max(float(start), 0.0), (1 - OWN) * seconds)
        beyond = seconds - self._start
        self._key = min(max(float(key), 0.0), (1 - OWN) * beyond * count / keys)
        self._token = (beyond * count - self._key * keys) / tokens

    def longer(self, chunks: Sequence[Chunk], waiting: bool = False) -> float:
        """Returns how many seconds longer than a plain one a step may take, right after a prefill of these chunks.

        Requests that decode have waited for it; with the step they wait no longer than one in `RARE` steps makes them
        wait in any case. Not at all where prompts wait all the time: then every gap has a part of a prompt in it, parts
        are as long as a usual step allows, and longer steps would make each gap longer by both. They would serve more.
        Asked for once before each step, without chunks if nothing was before it. waiting: whether a part of a prompt
        waits for it."""
        stall = self.seconds(chunks)
        self._stalls.append(stall)
        self._pressed = self._pressed + 1 if waiting else 0
        if not stall:
            return float("inf")
        if self.pressed:
            return 0.0
        return max(nlargest(max(len(self._stalls) // RARE, 1), self._stalls)[-1] - stall, 0.0)

    def rest(self) -> None:
        """Nobody runs."""
        self._pressed = 0

    @property
    def pressed(self) -> bool:
        """Whether prompts wait all the time."""
        return self._pressed > PRESSED

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        """Returns what a prefill of these chunks will take; 0 for none, and as long as nothing is known."""
        tokens, keys = _size(chunks)
        return self._start + tokens * self._token + keys * self._key if tokens and self._token else 0.0

    def price(self, context: int) -> float:
        """Returns the seconds of a prompt's token that attends to so many others; 0 as long as nothing is known."""
        return self._token + self._key * context

    def most(self, waiting: Sequence[float], decoding: int, alike: bool = True) -> float:
        """Returns how many seconds of prompt tokens are prefilled at once. waiting: seconds of what waits, by request.
        decoding: how many decode meanwhile. alike: whether all are one client's, with one priority; others do not wait
        for a crowd. All of it as long as nothing is known."""
        total = sum(waiting)
        if not self._steps or not self._token:
            return total
        if decoding:
            whole = max(self._short, self._start)
            each = max(STALL * whole - self._start, SWIFT - self._start)
            short = min(sum(one for one in waiting if one <= LONG * whole), max(each, LEAST * self._token))
            fit = [one for one in waiting if alike and one <= each]
            crowd = min(sum(fit), CROWD, CROWDED * len(fit) / decoding * each)
            beside = max(BESIDE * self._usual - self._start, self._start)
            part = max(beside, short, crowd, sum(min(one, each) for one in waiting) / SHARE)
        else:
            longest = max(MOST * ALONE * self._short, CALM)
            part = max(ALONE * self._short - self._start, CALM - self._start, min(self._start / SPENT, longest))
        return total if total <= (1 + REST) * part else part


def _size(chunks: Sequence[Chunk]) -> tuple[int, float]:
    """Tokens, and the keys that they attend to."""
    tokens, keys = 0, 0.0
    for _, start, length, *_ in chunks:
        tokens += length
        keys += length * (start + length / 2)
    return tokens, keys
