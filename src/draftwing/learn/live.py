"""What served requests say of a head: acceptance length over time, and whether it fell with a swap."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

POINT_SECONDS = 60.0  # of a point of the curve
POINTS = 720  # that are kept: half a day
# Swept in docs/dev/learning.md, "When is a head swapped back?".
ENOUGH = 50  # requests on each side of a swap
WINDOW = 400  # newest requests before a swap that are compared with
ERRORS = 3.0  # standard errors by which it must have fallen: it is looked at again and again


class Point(NamedTuple):
    """at: unix seconds at which it begins.  tokens: that steps with and without drafts have given.  steps: of a row."""

    at: float
    tokens: int
    steps: int


class Swap(NamedTuple):
    """at: unix seconds.  head: the number that was swapped in, None for the command line's."""

    at: float
    head: int | None


class LiveAcceptance:
    """Counts requests as they end. Of fixed size."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.swaps: deque[Swap] = deque(maxlen=32)
        self._before: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # tokens and steps of requests
        self._since: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def add(self, at: float, drafts: int, steps: int) -> None:
        """A request has ended. drafts: that were accepted.  steps: in which something was verified; 0 says nothing."""
        if not steps:
            return
        tokens = drafts + steps
        self._since.append((tokens, steps))
        begin = at - at % POINT_SECONDS
        if self.points and self.points[-1].at == begin:
            last = self.points.pop()
            self.points.append(Point(begin, last.tokens + tokens, last.steps + steps))
        else:
            self.points.append(Point(begin, tokens, steps))

    def swapped(self, at: float, head: int | None, failed: bool = False) -> None:
        """Another head drafts from now on. failed: the one before had made it worse, and says nothing of the next."""
        self.swaps.append(Swap(at, head))
        if not failed:
            self._before.extend(self._since)
        self._since.clear()

    def curve(self, most: int) -> list[Point]:
        """Returns at most so many points, of neighbours put together."""
        points, size = list(self.points), -(-len(self.points) // most)
        groups = [points[i : i + size] for i in range(0, len(points), max(size, 1))]
        return [
            Point(group[0].at, sum(one.tokens for one in group), sum(one.steps for one in group)) for group in groups
        ]

    @property
    def fell(self) -> bool:
        """Whether it is lower since the last swap than before, by more than requests differ anyway."""
        if min(len(self._before), len(self._since)) < ENOUGH:
            return False
        (before, old), (since, new) = _mean(self._before), _mean(self._since)
        return since < before - ERRORS * math.hypot(old, new)


def _mean(requests: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """Tokens per step, a ratio of sums, and its standard error."""
    counts = list(requests)
    total = sum(steps for _, steps in counts)
    mean = sum(tokens for tokens, _ in counts) / total
    squares = sum((tokens - mean * steps) ** 2 for tokens, steps in counts)
    return mean, math.sqrt(squares * len(counts) / (len(counts) - 1)) / total
