"""What served requests say of a head: acceptance length over time, and whether it fell with a swap."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

POINT_SECONDS = 60.0  # of a point of the curve
POINTS = 720  # that are kept: half a day
# Swept in docs/dev/learning.md, "When is a head swapped back?" and behind it.
ENOUGH = 50  # requests on each side of a swap
WINDOW = 400  # newest requests before a swap that are compared with
ERRORS = 3.0  # standard errors by which it must have fallen: it is looked at again and again
FEW = 4  # requests of a client, below which it counts together with others
SHARED = 0.5  # of the steps before a swap: as many have to be of clients who ask since, too


class Point(NamedTuple):
    """at: unix seconds at which it begins.  tokens: that steps with and without drafts have given.  steps: of a row."""

    at: float
    tokens: int
    steps: int


class Swap(NamedTuple):
    """at: unix seconds.  head: the number that was swapped in, None for the command line's."""

    at: float
    head: int | None


class Request(NamedTuple):
    """tokens: that its steps have given."""

    client: str
    tokens: int
    steps: int


class LiveAcceptance:
    """Counts requests as they end. Of fixed size.

    Clients differ more than heads do, so each is compared with itself: neither does who asks more since a swap make a
    head look bad, nor who sends other requests than before, but for a share of it that the client had before."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.swaps: deque[Swap] = deque(maxlen=32)
        self._before: deque[Request] = deque(maxlen=WINDOW)
        self._since: deque[Request] = deque(maxlen=WINDOW)

    def add(self, at: float, drafts: int, steps: int, client: str = "") -> None:
        """A request has ended. drafts: that were accepted.  steps: in which something was verified; 0 says nothing."""
        if not steps:
            return
        tokens = drafts + steps
        self._since.append(Request(client, tokens, steps))
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
    def newest(self) -> float | None:
        """Returns the acceptance length of the newest requests since the last swap; None: there are none."""
        steps = sum(request.steps for request in self._since)
        return round(sum(request.tokens for request in self._since) / steps, 3) if steps else None

    def by_client(self) -> dict[str, float]:
        """Returns the acceptance length of each client with a name, in the newest requests since the last swap."""
        tokens, steps = Counter[str](), Counter[str]()
        for request in self._since:
            tokens[request.client] += request.tokens
            steps[request.client] += request.steps
        return {client: tokens[client] / steps[client] for client in sorted(steps) if client}

    @property
    def fell(self) -> bool:
        """Whether it is lower since the last swap than before, by more than requests differ anyway. Clients weigh as
        much as they did before."""
        before, since = (Counter(request.client for request in part) for part in (self._before, self._since))
        own = {client for client in before if min(before[client], since[client]) >= FEW}
        pairs = [pair for pair in _paired(self._before, self._since, own) if min(map(len, pair)) > 1]
        weights = [sum(request.steps for request in old) for old, _ in pairs]
        counts = [sum(map(len, side)) for side in zip(*pairs, strict=True)]
        if min(counts, default=0) < ENOUGH or sum(weights) < SHARED * sum(request.steps for request in self._before):
            return False
        fall = variance = 0.0
        for weight, (old, new) in zip(weights, pairs, strict=True):
            share, (first, error), (later, other) = weight / sum(weights), _mean(old), _mean(new)
            fall += share * (first - later)
            variance += share**2 * (error**2 + other**2)
        return fall > ERRORS * math.sqrt(variance)


def _paired(
    before: Iterable[Request], since: Iterable[Request], own: Set[str]
) -> Iterator[tuple[list[Request], list[Request]]]:
    """Yields the requests of each client in `own`, and those of all others together."""
    groups: dict[str | None, tuple[list[Request], list[Request]]] = {}
    for side, requests in enumerate((before, since)):
        for request in requests:
            client = request.client if request.client in own else None
            groups.setdefault(client, ([], []))[side].append(request)
    yield from groups.values()


def _mean(requests: Sequence[Request]) -> tuple[float, float]:
    """Tokens per step, a ratio of sums, and its standard error. Of several clients that is at least what follows from
    how they differ: on the other side of a swap others of them may ask more."""
    total = sum(request.steps for request in requests)
    mean = sum(request.tokens for request in requests) / total
    errors = [request.tokens - mean * request.steps for request in requests]
    by_client: defaultdict[str, float] = defaultdict(float)
    for request, error in zip(requests, errors, strict=True):
        by_client[request.client] += error
    units = [part for part in (errors, [*by_client.values()]) if len(part) > 1]
    squares = max(sum(one**2 for one in part) * len(part) / (len(part) - 1) for part in units)
    return mean, math.sqrt(squares) / total
