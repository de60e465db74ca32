"""How long prefills take, and how much of one may stand between two steps of requests that are being answered.

Whoever decodes waits for a prefill, and what waits to be prefilled grows while it runs. So beside them a prefill is
short: `STALL` times what the shortest one takes, which reads all weights for next to nothing; then it still uses the
device well. Where many wait it may be longer, or they would be behind for as long as others decode. One long prompt is
not many: those who decode would pay for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import nlargest

STALL = 3.0  # times the shortest prefill: as long may one take beside requests that decode
SHARE = 8  # of the tokens that wait one in so many is prefilled at once, if that is more
EACH = 512  # tokens of one request that count for this
LEAST = 64  # tokens: fewer are not worth a step
REST = 0.05  # of a part: as much more is taken along rather than left over
DECAY = 0.95  # of what older prefills tell, with each new one
STEPS, RARE = 256, 20  # of late; one in so many may be as slow
DRIFT = 1.002  # with each step: what the shortest one takes may change


class Pace:
    """Seconds of a prefill by its tokens: so many for each, on top of the shortest. A prefill of next to nothing takes
    as long as the shortest step, for that reads all weights, too."""

    def __init__(self) -> None:
        self._stalls: deque[float] = deque(maxlen=STEPS)  # seconds of the prefill right before each step, 0 without
        self._base = float("inf")  # seconds of the shortest step of late
        self._tokens = self._seconds = 0.0  # of prefills, the newer the heavier; seconds beyond the shortest step

    def record_step(self, seconds: float) -> None:
        """A step of requests that decode took so long."""
        if seconds > 0:
            self._base = min(DRIFT * self._base, seconds)

    def record(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long."""
        assert tokens > 0
        if seconds <= 0:
            return
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + max(seconds - self._least, 0.0)

    def longer(self, tokens: int) -> float:
        """Returns how many seconds longer than a plain one a step may take, right after a prefill of so many tokens.

        Requests that decode have waited for it; with the step they wait no longer than one in `RARE` steps makes them
        wait in any case. Asked for once before each step, 0 tokens if nothing was before it."""
        stall = self.seconds(tokens)
        self._stalls.append(stall)
        if not stall:
            return float("inf")
        return max(nlargest(max(len(self._stalls) // RARE, 1), self._stalls)[-1] - stall, 0.0)

    @property
    def _least(self) -> float:
        return self._base if self._base < float("inf") else 0.0

    def seconds(self, tokens: int) -> float:
        """Returns what a prefill of so many tokens will take; 0 for none, and as long as nothing is known."""
        return self._least + self._seconds / self._tokens * tokens if tokens and self._tokens else 0.0

    def most(self, waiting: Sequence[int]) -> int:
        """Returns how many of the tokens that wait to be prefilled, given by request, are so at once, beside requests
        that decode."""
        total = sum(waiting)
        if not self._least or not self._seconds:
            return total
        short = round((STALL - 1) * self._least * self._tokens / self._seconds)
        part = max(LEAST, short, -(-sum(min(tokens, EACH) for tokens in waiting) // SHARE))
        return total if total <= (1 + REST) * part else part
