"""How long prefills take, and how much of one may stand between two steps of requests that are being answered.

Whoever decodes waits for a prefill, and what waits to be prefilled grows while it runs. So beside them a prefill is
short: `STALL` times what the shortest one takes, which reads all weights for next to nothing; then it still uses the
device well. Where much waits it may be longer, or those who wait would be behind for as long as others decode.
"""

from __future__ import annotations

import numpy as np

STALL = 3.0  # times the shortest prefill: as long may one take beside requests that decode
SHARE = 8  # of the tokens that wait one in so many is prefilled at once, if that is more
LEAST = 64  # tokens: fewer are not worth a step
REST = 0.15  # of a part: as much more is taken along rather than left over
DECAY = 0.95  # of what older prefills tell, with each new one


class Pace:
    """Seconds of a prefill by its tokens: a line through those of late."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens^2, tokens * seconds; the newer the heavier
        self._base = self._slope = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long."""
        assert tokens > 0
        if seconds <= 0:
            return
        self._sums = DECAY * self._sums + (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        weight, x, y, xx, xy = self._sums.tolist()
        spread = weight * xx - x * x
        mean = y / x
        # Least squares, neither below 0; through the origin as long as all are alike.
        self._slope = min(max((weight * xy - x * y) / spread, 0.0), mean) if spread > 0.01 * x * x else mean
        self._base = (y - self._slope * x) / weight

    def seconds(self, tokens: int) -> float:
        """Returns what a prefill of so many tokens will take; 0 for none, and as long as nothing is known."""
        return self._base + self._slope * tokens if tokens else 0.0

    def most(self, waiting: int) -> int:
        """Returns how many of the tokens that wait to be prefilled are so at once, beside requests that decode."""
        if not self._base or not self._slope:
            return waiting
        short = round((STALL - 1) * self._base / self._slope)
        part = max(LEAST, short, -(-waiting // SHARE))
        return waiting if waiting <= (1 + REST) * part else part
