"""What each option of a menu brings: drafts that are accepted of a row, by the drafter's confidence.

It is learnt from the trees that were drafted: every node comes back with its calibrated survival
(`core.StepResult.survival`), so one tree tells what all smaller options would have brought, verified or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from draftwing.core import (
    BOTH,
    LOOKUP_ALONE,
    MARK_DEPTH,
    MARK_ONE,
    MARK_SOURCE,
    MARK_SURVIVAL,
    MAX_CONFIDENCE,
    MODEL,
    StepResult,
    TreeShape,
)

RATE = 0.06  # of learning, per row; what is known from few rows is a mean
PRIOR = 4  # rows that the first guess counts for
FAITH = 40.0  # drafts: for as many it counts that expectations are taken to be right
FADE = 0.98  # of what older steps say about expectations, with each new one
OLD = 10  # steps without news of an option after which its next step counts for this many
OFTEN = 64  # steps that tell of an option: from then on it is well known
SELDOM = 2  # of what is well known one step in so many tells enough


class Gains:
    """Expected drafts by option and confidence, in the order of the menu. Steps are numbered by whoever asks."""

    def __init__(self, menu: Sequence[TreeShape], least: int = MAX_CONFIDENCE) -> None:
        """least: confidence of a drafter that can always propose something, 0 of one that only copies; what is above
        it speaks of copies."""
        self._menu = tuple(menu)
        # [option][confidence]: drafts that are accepted of a row, and the rows that this is known from.
        self._gains = [[_first_guess(shape, c, least) for c in range(MAX_CONFIDENCE + 1)] for shape in menu]
        self._rows = [[0] * (MAX_CONFIDENCE + 1) for _ in menu]
        self._told = [[0] * (MAX_CONFIDENCE + 1) for _ in menu]  # the step that last told of an option and confidence
        # Of all options of the same drafters: drafts that were expected to be accepted, and those that were.
        promises = {shape.by: [FAITH, FAITH] for shape in menu}
        self._kept = [promises[shape.by] for shape in menu]
        self._smaller = [[i for i, other in enumerate(menu) if _is_part(other, shape)] for shape in menu]
        self._parts = [
            {i for i in smaller if menu[i].queries <= shape.queries and menu[i].nodes <= shape.nodes}
            for shape, smaller in zip(menu, self._smaller, strict=True)
        ]  # fmt: skip
        self._larger = [
            [i for i, other in enumerate(menu)
             if other.depth and other.by == shape.by and i not in self._smaller[at]]
            for at, shape in enumerate(menu)
        ]  # fmt: skip
        self._learnt = [0] * len(self._menu)  # steps that each option told something in
        self._last = [0] * len(self._menu)  # the last of them

    @property
    def known(self) -> bool:
        """Whether any step has told of them."""
        return any(self._learnt)

    def expected(self, index: int, counts: Mapping[int, int]) -> float:
        """Returns the drafts that an option will have accepted; counts: rows by confidence. What was chosen because it
        looked best is a little less good than it looked, so that its promises are held against what came of them."""
        expected, kept = self._kept[index]
        gains = self._gains[index]
        found = sum([gains[c] * count for c, count in counts.items()])
        return found * kept / expected if kept < expected else found

    def told(self, index: int, confidences: Iterable[int]) -> int:
        """Returns the step that last told of the option, of that confidence that was told of least lately."""
        told = self._told[index]
        return min([told[c] for c in confidences])

    def learn(self, index: int, confidences: Sequence[int], result: StepResult, step: int, tried: bool) -> None:
        """A step of an option gave this. confidences: of its rows, 0 where a row says nothing.  tried: whether it was
        taken to learn from it; else it is looked at now and then, where it is well known."""
        if not tried and self._learnt[index] > OFTEN and step - self._last[index] < SELDOM:
            return
        self._learnt[index] += 1
        self._last[index] = step
        rows_of: dict[int, list[int]] = {}
        for row, confidence in enumerate(confidences):
            if confidence:
                rows_of.setdefault(confidence, []).append(row)
        self._hold(index, rows_of, result)
        told = self._smaller[index]
        before = {confidence: self._gains[index][confidence] for confidence in rows_of}
        for i, gains in zip(told, gains_by_row(result, [self._menu[i] for i in told]), strict=True):
            self._learn(i, rows_of, gains, step, tried)
        self._carry_over(index, before)

    def _hold(self, index: int, rows_of: Mapping[int, Sequence[int]], result: StepResult) -> None:
        """Compares what was expected of a step with what came of it, row by row that says anything."""
        gains, kept, count = self._gains[index], self._kept[index], result.count.tolist()
        expected, found = 0.0, 0
        for confidence, rows in rows_of.items():
            expected += gains[confidence] * len(rows)
            found += sum([count[row] for row in rows]) - len(rows)
        faith = FAITH * (1 - FADE)
        kept[0] = FADE * kept[0] + faith + expected
        kept[1] = FADE * kept[1] + faith + found

    def _carry_over(self, index: int, before: Mapping[int, float]) -> None:
        """Options that the step told nothing of change as the one that it was: text that is easy, or hard, is so for
        all that the same drafters make, and what has a tree as its part brings no less. What a lookup finds says
        nothing of what a model guesses."""
        for confidence, gain in before.items():
            ratio = (self._gains[index][confidence] + 0.01) / (gain + 0.01)
            for i in self._larger[index]:
                gains, shape = self._gains[i], self._menu[i]
                least = self._gains[index][confidence] if index in self._parts[i] else 0.0
                gains[confidence] = min(max(ratio * gains[confidence], least), shape.depth, shape.queries - 1)

    def _learn(
        self, index: int, rows_of: Mapping[int, Sequence[int]], gains: Sequence[float], step: int, tried: bool
    ) -> None:
        known, counts, told = self._gains[index], self._rows[index], self._told[index]
        for confidence, rows in rows_of.items():
            age = OLD if tried else min(max(step - told[confidence], 1), OLD)  # it may have been another text
            told[confidence], count = step, len(rows)
            counts[confidence] += count
            mean = sum([gains[row] for row in rows]) / count
            weight = max(1 - (1 - RATE) ** (count * age), count / (PRIOR + counts[confidence]))
            known[confidence] += weight * (mean - known[confidence])


def gains_by_row(result: StepResult, options: Sequence[TreeShape]) -> list[list[float]]:
    """What each row of a step was expected to have accepted, had it been a step of one of these options, which are
    parts of its own: [option][row]."""
    if result.mark.size <= 64:  # operations of numpy take longer to start
        return _few_gains(result, options)
    survival, depth = np.where(result.depth > 0, result.survival, 0.0), result.depth
    rows = len(depth)
    found = []
    for shape in options:
        worth = np.where(depth <= shape.depth, survival, 0.0)
        if shape.by == LOOKUP_ALONE:
            worth = np.where(result.source == MODEL, 0.0, worth)
        spare = rows * (shape.queries - 1)
        if spare < worth.size:
            least = np.partition(worth, worth.size - spare, axis=None)[worth.size - spare] if spare else np.inf
            over, ties = worth > least, worth == least  # of those that tie only so many are verified
            share = (spare - int(over.sum())) / max(int(ties.sum()), 1)
            worth = np.where(over, worth, np.where(ties, worth * share, 0.0))
        found.append(worth.sum(axis=1).tolist())
    return found


def _few_gains(result: StepResult, options: Sequence[TreeShape]) -> list[list[float]]:
    """The same in plain Python, from the node that survives most probably down."""
    nodes = sorted(
        ((mark >> MARK_SURVIVAL, mark & MARK_DEPTH, row, (mark >> MARK_SOURCE) & 3)
         for row, marks in enumerate(result.mark.tolist()) for mark in marks if mark & MARK_DEPTH),
        reverse=True,
    )  # fmt: skip
    rows, found = len(result.mark), []
    for shape in options:
        gains, spare, depth, alone = [0] * rows, rows * (shape.queries - 1), shape.depth, shape.by == LOOKUP_ALONE
        for value, level, row, source in nodes:
            if level <= depth and not (alone and source == MODEL):
                gains[row] += value
                spare -= 1
                if not spare:
                    break
        found.append([gain / MARK_ONE for gain in gains])
    return found


def _is_part(part: TreeShape, whole: TreeShape) -> bool:
    """Whether a tree of shape `whole` tells what one of shape `part` would have brought. One that two drafters made
    tells what the lookup alone would have."""
    if not part.depth or (part.by, whole.by) not in ((part.by, part.by), (LOOKUP_ALONE, BOTH)):
        return False
    return part.depth <= whole.depth and part.topk <= whole.topk and part.queries <= whole.nodes


def _first_guess(shape: TreeShape, confidence: int, least: int) -> float:
    """Drafts of a row that are accepted, before anything is known; least: as of `Gains`."""
    copied = 0.25 * max(confidence - least, 0)
    grown = sum(0.7 ** (level + 1) for level in range(shape.depth)) if least and shape.by != LOOKUP_ALONE else 0.0
    return min(shape.depth, shape.queries - 1, max(copied, grown))
