"""What a step costs: seconds of every tree shape by batch size and context, measured at the start and corrected since.

A measurement is of a shape, a batch size and a context: the tokens in the KV of all the batch's rows together. Between
batch sizes prices are interpolated. In the context they are a line, whose slope depends on the batch size. What was
never measured is estimated from what was, and rather too high than too low.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from draftwing.core import PLAIN, Plan, TreeShape
from draftwing.sched.corrections import Corrections

VERSION = 2  # of what `to_json` returns
ROW_COST = 0.05  # a guess: of a plain step, for each row more that the target runs
LEVEL_COST = 0.2  # a guess: of a plain step, for each level that is drafted
DOUBT = 3  # so many steps in turn that take less than a third: the machine was busy when it was measured
AGREE = 1.25  # two measurements of a step that differ by less say the same
FIRST = 3  # samples of what was not measured at the start: their least is taken for a measurement


class Line(NamedTuple):
    """Seconds of a step of one shape and batch size, by the context."""

    empty: float
    slope: float  # for each token


class Prices:
    """Seconds of steps: a line of what was measured, which is kept, times what `Corrections` say of its bucket of batch
    sizes."""

    def __init__(self, menu: Sequence[TreeShape], stepwise: bool) -> None:
        """stepwise: a batch costs what the next larger measured size does, as with graphs, which are padded; else
        prices between two sizes lie on a line."""
        self.menu = tuple(menu)
        self.stepwise = stepwise
        self._measured: dict[TreeShape, dict[int, dict[int, float]]] = {}  # shape -> batch -> context -> seconds
        self._tried: dict[tuple[TreeShape, int], int] = {}  # samples that measurements were made of in operation
        self._settled: set[tuple[TreeShape, int]] = set()  # steps that correct prices, and give no measurement
        self._corrections = Corrections()
        self._lines: dict[tuple[TreeShape, int], Line] = {}  # what was asked for
        self._doubts = 0  # steps in turn
        self._doubts_of: dict[TreeShape, int] = {}  # the same of a shape's own steps, which may be far between

    # -- what is known ------------------------------------------------------------------------------------------------

    def measured(self, shape: TreeShape, batch: int, context: int, seconds: float) -> None:
        """Takes a measurement. One of the same step replaces it; one of no time is none."""
        assert batch > 0 and context >= 0
        if seconds <= 0:
            return
        self._measured.setdefault(shape, {}).setdefault(batch, {})[context] = seconds
        self._lines.clear()

    def seconds(self, shape: TreeShape, batch: int, context: int) -> float | None:
        """Returns what a step will take; None only if nothing at all is known."""
        line = self._lines.get((shape, batch)) or self._line(shape, batch)
        if line is None:
            return None
        return (line.empty + line.slope * context) * self._corrections.factor(shape, batch.bit_length())

    def known(self, shape: TreeShape, batch: int) -> bool:
        """Returns whether it was measured at a size that is near: less than twice or half as large."""
        sizes = self._measured.get(shape)
        return sizes is not None and any(batch <= 2 * size and size <= 2 * batch for size in sizes)

    @property
    def complete(self) -> bool:
        """Whether every shape of the menu was measured."""
        return all(shape in self._measured for shape in self.menu)

    def record(self, shape: TreeShape, batch: int, context: int, seconds: float) -> None:
        """Corrects prices by what a step took."""
        if seconds <= 0:
            return
        expected = self.seconds(shape, batch, context)
        if expected is not None and DOUBT * seconds < expected and self._doubtful(shape, batch):
            self._doubts += 1
            self._doubts_of[shape] = self._doubts_of.get(shape, 0) + 1
            if max(self._doubts, self._doubts_of[shape]) < DOUBT:
                return
            self._forget(None if self._doubts == DOUBT else shape)
        self._doubts = self._doubts_of[shape] = 0
        if (shape, batch) not in self._settled and self._learn(shape, batch, context, seconds):
            return
        assert expected is not None, "what is settled has a price"
        self._corrections.learn(shape, batch.bit_length(), seconds / expected)

    def _doubtful(self, shape: TreeShape, batch: int) -> bool:
        """Returns whether a step that took far less than expected says that measurements are wrong. A machine may
        become slower, but not much faster; and of plain steps even a guess is rather low."""
        if self._tried.get((shape, batch), FIRST) < FIRST:
            return False
        return shape == PLAIN or self.known(shape, batch)

    def _forget(self, shape: TreeShape | None) -> None:
        """All of a shape, None: of all. What other shapes' steps agree with stays."""
        if shape is None or not self._measured.keys() - {shape}:
            for known in (self._measured, self._tried, self._settled, self._corrections, self._lines, self._doubts_of):
                known.clear()
            return
        self._measured.pop(shape, None)
        self._tried = {step: samples for step, samples in self._tried.items() if step[0] != shape}
        self._settled = {step for step in self._settled if step[0] != shape}
        self._corrections.forget(shape)
        self._lines.clear()

    def _learn(self, shape: TreeShape, batch: int, context: int, seconds: float) -> bool:
        """Takes a step in operation for a measurement where there is none; returns whether it did. The first step pays
        for caches and allocations."""
        tried = self._tried.get((shape, batch), 0)
        if tried == FIRST or (not tried and self.known(shape, batch)):
            self._settled.add((shape, batch))
            return False
        found = self._measured.setdefault(shape, {}).setdefault(batch, {})
        factor = self._corrections.factor(shape, batch.bit_length())  # by which its price will be multiplied
        least = min([seconds / factor, *found.values()])
        found.clear()
        found[context] = least
        self._tried[shape, batch] = tried + 1
        self._lines.clear()
        return True

    # -- interpolation ------------------------------------------------------------------------------------------------

    def _line(self, shape: TreeShape, batch: int) -> Line | None:
        """Finds a line and keeps it."""
        if not self._measured:
            return None
        line = self._lines[shape, batch] = Line(self._empty(shape, batch), self._slope(shape, batch))
        return line

    def _empty(self, shape: TreeShape, batch: int) -> float:
        """Seconds of a step without context."""
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
        """Of a size that was measured."""
        context, seconds = min(self._measured[shape][size].items())
        return max(seconds - context * self._slope(shape, size), seconds / 2) if context else seconds

    @staticmethod
    def _beyond(points: list[tuple[int, float]], shape: TreeShape, batch: int) -> float:
        """Above the largest size: as steep as over the upper half of the sizes, or over all of them."""
        last, seconds = points[-1]
        steepness = ROW_COST * shape.queries * seconds / last if len(points) == 1 else 0.0
        for size, less in points[:1] + [point for point in points if 2 * point[0] <= last][-1:]:
            if size < last:
                steepness = max(steepness, (seconds - less) / (last - size))
        return seconds + steepness * (batch - last)

    def _slope(self, shape: TreeShape, batch: int) -> float:
        """Seconds for each token of the context: the shape's own, else that of plain steps, else another's."""
        for one in (shape, PLAIN, *self._measured):
            slopes = [(size, _steepness(found)) for size, found in sorted(self._measured.get(one, {}).items())
                      if len(found) > 1]  # fmt: skip
            if slopes:
                break
        else:
            return 0.0
        at = bisect_left([size for size, _ in slopes], batch)
        if at == 0 or at == len(slopes):
            return slopes[min(at, len(slopes) - 1)][1]
        (below, less), (size, more) = slopes[at - 1], slopes[at]
        return less + (more - less) * (batch - below) / (size - below)

    def _guess(self, shape: TreeShape, batch: int) -> float:
        """Of a shape that was never measured: by what its rows may cost beside plain steps. It is not cheaper than what
        is smaller, and not dearer than what is larger."""
        known = [(other, self._empty(other, batch)) for other in self._measured]
        plain = min(seconds / _relative(other, batch) for other, seconds in known)
        if PLAIN in self._measured:
            plain = self._empty(PLAIN, batch)
        guess = plain * _relative(shape, batch)
        size = shape.depth, shape.queries
        least = [seconds for other, seconds in known if other.depth <= size[0] and other.queries <= size[1]]
        most = [seconds for other, seconds in known if other.depth >= size[0] and other.queries >= size[1]]
        return min([max([guess, *least]), *most])

    # -- keeping them -------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Returns all that is known, for `from_json`."""
        return {
            "version": VERSION,
            "stepwise": self.stepwise,
            "measured": [[list(shape), batch, context, seconds] for shape, batch, context, seconds in self.points()],
            "corrections": [
                [shape and list(shape), bucket, factor] for shape, bucket, factor in self._corrections.items()
            ],
        }

    @classmethod
    def from_json(cls, content: Any, menu: Sequence[TreeShape], stepwise: bool) -> Prices:
        """Returns the prices that `to_json` gave, of the shapes of the menu. Raises ValueError for anything else.

        Corrections are of another day: new samples soon count for more.
        """
        prices = cls(menu, stepwise)
        try:
            if content["version"] != VERSION or content["stepwise"] is not stepwise:
                raise ValueError(f"expected version {VERSION}, stepwise {stepwise}")
            for numbers, batch, context, seconds in content["measured"]:
                if (priced := TreeShape(*map(_count, numbers))) in prices.menu:
                    size, tokens = _count(batch, 1), _count(context)
                    prices._measured.setdefault(priced, {}).setdefault(size, {})[tokens] = _positive(seconds)
            for numbers, bucket, factor in content["corrections"]:
                shape = None if numbers is None else TreeShape(*map(_count, numbers))
                if shape is None or shape in prices.menu:
                    prices._corrections.restore(shape, _count(bucket), _positive(factor))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not what `to_json` gives: {error!r}") from None
        return prices

    def look_again(self, other: Prices, instead: bool = False) -> bool:
        """Takes what another start has measured: of each step the least, for other programs only ever add to it; or
        `instead` of what was known. Returns whether both have measured every shape, and the same. Where a price is
        another one now, what was learnt of these prices in operation goes."""
        pairs = []
        for shape, batch, context, seconds in list(other.points()):
            known = self._measured.get(shape, {}).get(batch, {}).get(context)
            self.measured(shape, batch, context, seconds if known is None or instead else min(known, seconds))
            if known is not None:
                pairs.append((shape, known / seconds))
        if any(ratio > AGREE or (instead and ratio < 1 / AGREE) for _, ratio in pairs):
            self._corrections.clear()
        alike = all(1 / AGREE < ratio < AGREE for _, ratio in pairs)
        return alike and {shape for shape, _ in pairs} >= set(self.menu)

    def points(self) -> Iterator[tuple[TreeShape, int, int, float]]:
        """Yields all measurements: shape, batch size, context, seconds."""
        for shape, sizes in self._measured.items():
            for batch, found in sizes.items():
                for context, seconds in found.items():
                    yield shape, batch, context, seconds


class PricedSteps:
    """Which steps' seconds are a price of their shape."""

    UNPRICED = 64  # tree steps in turn without a price; then one behind a prefill gives it all the same
    PRICED = 4  # steps without drafts, once as many have run in turn: one in so many is a price

    def __init__(self) -> None:
        self._behind_prefills: set[int] = set()  # numbers of steps in flight
        self._since = 0  # tree steps since the last that was a price
        self._plain = 0  # steps without drafts in turn

    def planned(self, step: int, behind_prefill: bool) -> None:
        """The tree step of this number is planned, right behind a prefill or not."""
        if behind_prefill:
            self._behind_prefills.add(step)

    def take(self, plan: Plan) -> bool:
        """Returns whether the seconds of a tree step that has ended are a price. Asked for once.

        Not where a row wants more than drafts and sampling. A step behind a prefill takes longer on a CPU, whose caches
        it finds full of other things; these are mostly plain ones (`Pace.longer`), which would look dearer than others
        beside drafts. Nor are most of many steps without drafts in turn, for it costs the host time."""
        behind = plan.step in self._behind_prefills
        self._behind_prefills.discard(plan.step)
        self._plain = 0 if plan.shape.depth else self._plain + 1
        spared = self._plain > self.PRICED and self._since < self.PRICED - 1
        price = not plan.special and not spared and (not behind or self._since >= self.UNPRICED)
        self._since = 0 if price else self._since + 1
        return price


def _relative(shape: TreeShape, batch: int) -> float:
    """A guess at a step's price beside that of a plain one."""
    more = shape.queries - 1
    return 1 + LEVEL_COST * shape.depth + min(ROW_COST * more * batch, more)


def _steepness(found: dict[int, float]) -> float:
    """Least squares, of lines through the point of the least context; never downwards."""
    (origin, base), *others = sorted(found.items())
    return max(sum((context - origin) * (seconds - base) for context, seconds in others)
               / sum((context - origin) ** 2 for context, _ in others), 0.0)  # fmt: skip


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"expected a whole number from {least}, found {value!r}")
    return value


def _positive(value: Any) -> float:
    if not isinstance(value, float | int) or not 0 < value < 1e6:
        raise ValueError(f"expected a positive number, found {value!r}")
    return float(value)
