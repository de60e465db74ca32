"""What was measured of steps, and what is estimated from that.

The context of a step is the number of tokens in the KV of all its rows. Between batch sizes costs are interpolated. In
the context they are a line, whose slope depends on the batch size. What was never measured is estimated from what was,
and rather too high than too low."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from draftwing.config.trees import PLAIN, TreeShape

ROW_COST = 0.2  # of a plain step, for each row more that the target runs: a guess for shapes that never ran
CONTEXT = 250.0  # tokens: contexts have to differ by more before they show what a key costs
# Tokens: contexts that differ by less tell it only where no others are known, as steps of one context differ by as much
# as so few keys cost. Just below what a start on a CPU measures (docs/dev/policy.md).
FAR = 1000


class Line(NamedTuple):
    """Seconds of a step of one shape and batch size, by the context."""

    empty: float
    slope: float  # for each token


class CostTable:
    def __init__(self, stepwise: bool) -> None:
        """stepwise: a batch costs what the next larger measured size does, as with graphs, which are padded; else costs
        between two sizes lie on a line."""
        self.stepwise = stepwise
        self._measured: dict[TreeShape, dict[int, dict[int, float]]] = {}  # shape -> batch -> context -> seconds
        self._lines: dict[tuple[TreeShape, int], Line] = {}  # what was asked for

    def __contains__(self, shape: TreeShape) -> bool:
        return shape in self._measured

    def sizes(self, shape: TreeShape) -> list[int]:
        """Returns the batch sizes at which a shape was measured."""
        return [*self._measured.get(shape, ())]

    def at(self, shape: TreeShape, batch: int) -> dict[int, float]:
        """Returns what was measured of a shape and batch size: seconds by context."""
        return self._measured.get(shape, {}).get(batch, {})

    def measure(self, shape: TreeShape, batch: int, context: int, seconds: float, alone: bool = False) -> None:
        """Takes a measurement in place of an earlier one. alone: and forgets those of other contexts."""
        found = self._measured.setdefault(shape, {}).setdefault(batch, {})
        if alone:
            found.clear()
        found[context] = seconds
        self._lines.clear()

    def is_longer(self, shape: TreeShape, context: int) -> bool:
        """Returns whether the shape was measured, and with no context half as long. Only where batches are not padded:
        what is measured at the start with padded ones includes long contexts."""
        found = self._measured.get(shape, {}).values()
        return bool(found) and not self.stepwise and context > CONTEXT + 2 * max(map(max, found))

    def extend(self, shape: TreeShape, batch: int, context: int, seconds: float) -> None:
        """Takes a measurement of a longer context."""
        if not self.at(shape, batch):
            self.measure(shape, batch, 0, self._empty(shape, batch))
        self.measure(shape, batch, context, seconds)

    def forget(self, shape: TreeShape | None) -> None:
        """Forgets what was measured of a shape; None: of all."""
        if shape is None:
            self._measured.clear()
        else:
            self._measured.pop(shape, None)
        self._lines.clear()

    def shapes(self) -> set[TreeShape]:
        """Returns the shapes that were measured."""
        return set(self._measured)

    def points(self) -> Iterator[tuple[TreeShape, int, int, float]]:
        """Yields all measurements: shape, batch size, context, seconds."""
        for shape, sizes in self._measured.items():
            for batch, found in sizes.items():
                for context, seconds in found.items():
                    yield shape, batch, context, seconds

    def near(self, shape: TreeShape, batch: int) -> list[int]:
        """Returns the measured sizes of a shape that are at most twice or half as large."""
        return [size for size in self._measured.get(shape, ()) if batch <= 2 * size and size <= 2 * batch]

    def smaller(self, shape: TreeShape, batch: int) -> list[int]:
        """Returns the measured sizes of a shape by which a batch is estimated that is larger than one of them; none
        where they do not tell what more rows take: they are less than two, and no other shape does, see `_teller`."""
        sizes = self.sizes(shape)
        tells = len(sizes) > 1 or self._teller(shape) is not None
        return sizes if tells and batch > min(sizes, default=batch) else []

    def _teller(self, shape: TreeShape) -> TreeShape | None:
        """Returns the shape of fewest nodes whose steps tell what the target takes for more rows of a tree that was
        measured at one size alone: at least two sizes of it were."""
        if not shape.depth:
            return None
        known = [one for one, sizes in self._measured.items() if len(sizes) > 1]
        return min(known, key=lambda one: one.queries, default=None)

    def line(self, shape: TreeShape, batch: int) -> Line | None:
        """Returns the seconds of such steps by context; None if nothing at all was measured."""
        found = self._lines.get((shape, batch))
        if found is None and self._measured:
            found = self._lines[shape, batch] = Line(self._empty(shape, batch), self._slope(shape, batch))
        return found

    def _empty(self, shape: TreeShape, batch: int) -> float:
        """Returns seconds of a step without context."""
        sizes = self._measured.get(shape)
        if sizes is None:
            return self._guess(shape, batch)
        points = [(size, self._without_context(shape, size)) for size in sorted(sizes)]
        at = bisect_left([size for size, _ in points], batch)
        if at == len(points):
            return self._beyond(points, shape, batch)
        size, seconds = points[at]
        if self.stepwise or size == batch or at == 0:
            return seconds
        below, less = points[at - 1]
        return less + (seconds - less) * (batch - below) / (size - below)

    def _without_context(self, shape: TreeShape, size: int) -> float:
        """Returns seconds of a measured size."""
        context, seconds = min(self._measured[shape][size].items())
        return max(seconds - context * self._slope(shape, size), seconds / 2) if context else seconds

    def _beyond(self, points: list[tuple[int, float]], shape: TreeShape, batch: int) -> float:
        """Returns seconds above the largest size: as steep as over the upper half of the sizes, or over all of them. Of
        a single size: what drafts take times the batch, and what another shape's steps of as many nodes do."""
        last, seconds = points[-1]
        other = self._teller(shape) if len(points) == 1 else None
        if other is not None:
            before, after = (self._empty(other, round(size * shape.queries / other.queries)) for size in (last, batch))
            return max(seconds - before, 0.0) * batch / last + after
        steepness = ROW_COST * shape.queries * seconds / last if len(points) == 1 else 0.0
        for size, less in points[:1] + [point for point in points if 2 * point[0] <= last][-1:]:
            if size < last:
                steepness = max(steepness, (seconds - less) / (last - size))
        return seconds + steepness * (batch - last)

    def _slope(self, shape: TreeShape, batch: int) -> float:
        """Returns seconds for each token of the context: the shape's own, else that of plain steps and more for more
        queries, else another's. Plain steps get the least that it says: then they run, and are measured."""
        for far, one in itertools.product((FAR, 0), (shape, PLAIN, *self._measured)):
            slopes = [(size, _steepness(found)) for size, found in sorted(self._measured.get(one, {}).items())
                      if max(found) - min(found) > far]  # fmt: skip
            if slopes:
                break
        else:
            return 0.0
        times = self._times(shape, one)
        at = bisect_left([size for size, _ in slopes], batch)
        if at == 0 or at == len(slopes):
            return times * slopes[min(at, len(slopes) - 1)][1]
        (below, less), (size, more) = slopes[at - 1], slopes[at]
        return times * (less + (more - less) * (batch - below) / (size - below))

    def _times(self, shape: TreeShape, other: TreeShape) -> float:
        """Guesses what a key costs a shape, by what it costs another. A GPU reads keys once for all queries."""
        more = shape.queries - other.queries
        if self.stepwise or shape == other:
            return 1.0
        return 1 + ROW_COST * more if more > 0 else 1.0 if shape.depth else 1 / other.queries

    def _guess(self, shape: TreeShape, batch: int) -> float:
        """Guesses a never measured shape's seconds by what its rows may cost relative to plain steps: not cheaper than
        what is smaller, and not more expensive than what is larger."""
        known = [(other, self._empty(other, batch)) for other in self._measured]
        plain = min(seconds / _relative(other, batch) for other, seconds in known)
        if PLAIN in self._measured:
            plain = self._empty(PLAIN, batch)
        guess = plain * _relative(shape, batch)
        size = shape.depth, shape.queries
        lower = [seconds for other, seconds in known if other.depth <= size[0] and other.queries <= size[1]]
        upper = [seconds for other, seconds in known if other.depth >= size[0] and other.queries >= size[1]]
        return min([max([guess, *lower]), *upper])


def _relative(shape: TreeShape, batch: int) -> float:
    """Guesses a step's seconds as a multiple of a plain one's."""
    more = shape.queries - 1
    return 1 + min(ROW_COST * more * batch, more)


def _steepness(found: dict[int, float]) -> float:
    """Least squares, of lines through the point of the least context; never downwards."""
    (origin, base), *others = sorted(found.items())
    return max(sum((context - origin) * (seconds - base) for context, seconds in others)
               / sum((context - origin) ** 2 for context, _ in others), 0.0)  # fmt: skip
