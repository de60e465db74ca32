"""Which tree a step drafts, and how much of it is verified: the choice that gives the most tokens per second.

One policy for all drafters. What an option brings is learnt from the trees that were drafted: every node comes back
with its calibrated survival (`core.StepResult.survival`), so one tree tells what all smaller options would have
brought, verified or not. What an option costs is known from measurements (`sched.prices`). Plain decoding is an option
like any other, and is chosen before anything is drafted.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from draftwing.core import BOTH, LOOKUP_ALONE, MAX_CONFIDENCE, MODEL, PLAIN, StepResult, TreeShape
from draftwing.sched.prices import Prices


class Load(NamedTuple):
    """What there is to do in a step.

    confidences: of each row, the drafter's; 0 where nothing can be proposed.  context: tokens in the KV of all rows.
    longer: seconds that the step may take beyond one without drafts, because of what kept these rows waiting before it.
    whole: whether trees are verified whole, as those of rows are that ask for more than drafts and sampling.
    """

    confidences: Sequence[int]
    context: int = 0
    longer: float = math.inf
    whole: bool = False


class ShapePolicy(Protocol):
    """menu: all shapes, the largest first.

    sees_predictions: whether a confidence tells what a predicted output is worth. If not, it gets the largest shape.
    """

    menu: tuple[TreeShape, ...]
    sees_predictions: bool

    def choose(self, load: Load) -> TreeShape:
        """Returns the shape for a batch."""
        ...

    def record(self, shape: TreeShape, load: Load, result: StepResult, plain: bool = True) -> None:
        """Learns what a step of `shape` gave. load: what was known of its rows; confidence 0 where a row says nothing.
        plain: whether the step had no rows that ask for more than drafts and sampling, so that its time says something.
        """
        ...

    def explain(self, load: Load) -> list[dict[str, Any]]:
        """Returns for each option: `shape`, `price_ms`, `gain` (expected accepted drafts of the batch), `rate`
        (expected tokens per second) and whether it is `chosen`."""
        ...


class FixedShape:
    """Chooses always the same shape; plain decoding when no row has anything to propose."""

    sees_predictions = True

    def __init__(self, shape: TreeShape) -> None:
        self.menu: tuple[TreeShape, ...] = (shape,) if shape == PLAIN else (shape, PLAIN)

    def choose(self, load: Load) -> TreeShape:
        return self.menu[0] if any(load.confidences) else PLAIN

    def record(self, shape: TreeShape, load: Load, result: StepResult, plain: bool = True) -> None:
        pass

    def explain(self, load: Load) -> list[dict[str, Any]]:
        chosen = self.choose(load)
        return [{"shape": shape, "price_ms": None, "gain": None, "rate": None, "chosen": shape == chosen}
                for shape in self.menu]  # fmt: skip


# -- menus -------------------------------------------------------------------------------------------------------------


def part_of(shape: TreeShape, verified: int) -> TreeShape:
    """Returns the shape with so many nodes of a row verified on average."""
    return shape._replace(verified=0 if verified >= shape.nodes else verified)


def tree_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Options for a drafter that pays for every level it drafts, on a device that drafts a wide level as fast as a
    narrow one: the whole tree, parts of it, a tree of half the depth, one level, nothing."""
    depth, topk, nodes = shape.tree
    menu = [part_of(shape, n) for n in (nodes, nodes // 2, nodes // 4) if n > 1]
    if depth > 3:
        half = TreeShape(depth // 2, topk, max(nodes // 2, depth // 2 + 1))
        menu.append(part_of(half, max(nodes // 4, 2)))
    if depth > 1:
        menu.append(part_of(TreeShape(1, topk, topk + 1), 2))
    return (*dict.fromkeys(menu), PLAIN)


def chain_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """The same where every row of a level costs: the whole tree, the chain as deep, half of it, one level, nothing."""
    chains = []
    depth = shape.depth
    while depth:
        chains.append(TreeShape(depth, 1, depth + 1))
        depth //= 2
    longest = part_of(chains[0], (chains[0].nodes + 1) // 2)
    return (*dict.fromkeys((shape, chains[0], *((longest,) if shape.depth > 2 else ()), *chains[1:])), PLAIN)


def match_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """The same for a drafter that pays for nothing but what is verified: parts of the largest tree."""
    parts, nodes = [shape], shape.nodes // 2
    while nodes > 1:
        parts.append(part_of(shape, nodes))
        nodes //= 2
    return (*parts, PLAIN)


def half_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """The same where a step may have to verify whole trees: halves of it."""
    menu = [shape]
    while menu[-1].nodes > 3:
        nodes = menu[-1].nodes // 2
        menu.append(TreeShape(min(shape.depth, nodes - 1), min(shape.topk, nodes - 1), nodes))
    return (*menu, PLAIN)


# -- the choice --------------------------------------------------------------------------------------------------------


class MostTokens:
    """Chooses the option with the most expected tokens per second: (rows + expected accepted drafts) / price."""

    RATE = 0.05  # of gains, per row; what is known from few rows is a mean
    PRIOR = 4  # rows that the first guess counts for
    PROBING = 0.008  # share of the time that options may cost that are only tried to learn from them
    UNPRICED = 0.2  # share of a loss that counts where a price is a guess: a few steps make it a measurement
    FAITH = 20.0  # drafts: for as many it counts that expectations are taken to be right
    FADE = 0.98  # of what older steps say about expectations, with each new one
    STALE = 16  # steps after which an option's gain is not known any more
    OUTDATED = 128  # steps after which its price may have changed, if it did not run
    OLD = 10  # steps without news of an option after which its next step counts for this many
    MARGIN = 1.02  # by which drafting has to be better: the host does more for it, which no step's seconds tell
    MOST = 1024  # queries of a step; more never pay

    def __init__(
        self, menu: Sequence[TreeShape], prices: Prices, sees_predictions: bool = False, least: int = MAX_CONFIDENCE
    ) -> None:
        """sees_predictions: as in `ShapePolicy`; whether confidences tell steps apart. least: confidence of a drafter
        that can always propose something, 0 of one that only copies; what is above it speaks of copies."""
        self.menu, self.prices, self.sees_predictions = tuple(menu), prices, sees_predictions
        # gains[option][confidence]: drafts that are accepted of a row, and the rows that this is known from.
        self._gains = [[_first_guess(shape, c, least) for c in range(MAX_CONFIDENCE + 1)] for shape in menu]
        self._rows = [[0] * (MAX_CONFIDENCE + 1) for _ in menu]
        # Of each option: drafts that were expected to be accepted, and those that were.
        self._kept = [[self.FAITH, self.FAITH] for _ in menu]
        self._told = [[0] * (MAX_CONFIDENCE + 1) for _ in menu]  # the step that last told of an option and confidence
        self._smaller = [[i for i, other in enumerate(self.menu) if _is_part(other, shape)] for shape in self.menu]
        self._ran: dict[tuple[int, int], int] = {}  # the step in which an option last ran, with about so many rows
        self._steps = 0
        self._allowance = 0.0  # seconds that may be lost by trying

    def choose(self, load: Load) -> TreeShape:
        if not any(load.confidences):
            return PLAIN
        self._steps += 1
        rates, prices, tokens = self._rates(load)
        if not prices:
            return self.menu[0]
        best = self._best(rates)
        self._allowance = min(self._allowance + self.PROBING * prices[best], 4 * prices[best])
        tried = self._to_try(best, rates, prices, tokens, load.confidences)
        chosen = best if tried is None else tried
        self._ran[chosen, len(load.confidences).bit_length()] = self._steps
        return self.menu[chosen]

    def _best(self, rates: dict[int, float]) -> int:
        best, plain = max(rates, key=lambda i: rates[i]), len(self.menu) - 1
        return plain if plain in rates and rates[best] < self.MARGIN * rates[plain] else best

    def _rates(self, load: Load) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
        """Tokens per second, seconds and tokens of each option that is possible."""
        batch, context = len(load.confidences), load.context
        counts = Counter(c for c in load.confidences if c)
        rates, prices, tokens = {}, {}, {}
        plain = self.prices.seconds(PLAIN, batch, context) or math.inf
        longest = plain + load.longer
        for i, shape in enumerate(self.menu):
            price = self.prices.seconds(shape, batch, context)
            if price is None or (shape.depth and batch * shape.queries > self.MOST):
                continue
            if (shape.depth and price > longest) or (shape.verified and load.whole):
                continue
            tokens[i] = batch + self._expected(i, counts) if shape.depth else float(batch)
            prices[i], rates[i] = price, tokens[i] / price
        return rates, prices, tokens

    def _expected(self, index: int, counts: Mapping[int, int]) -> float:
        """Drafts that an option will have accepted; counts: rows by confidence. What was chosen because it looked best
        is a little less good than it looked, so that its promises are held against what came of them."""
        expected, kept = self._kept[index]
        return min(kept / expected, 1.0) * sum(count * self._gains[index][c] for c, count in counts.items())

    def _to_try(
        self, best: int, rates: dict[int, float], prices: dict[int, float], tokens: dict[int, float],
        confidences: Sequence[int],
    ) -> int | None:  # fmt: skip
        """An option of which too little is known, if trying it is within the allowance: the one that looks best."""
        found, loss, batch, classes = None, 0.0, len(confidences), {c for c in confidences if c}
        for i in rates:
            priced = self.prices.known(self.menu[i], batch)
            told = self._steps if not self.menu[i].depth else min(self._told[i][c] for c in classes)
            # What would be best at half its price may be. Its price is corrected only where it runs.
            since = self._steps - self._ran.setdefault((i, batch.bit_length()), self._steps)
            outdated = since > self.OUTDATED and 2 * rates[i] > rates[best]
            if i == best or (priced and self._steps - told < self.STALE and not outdated):
                continue
            lost = max(prices[i] - tokens[i] / rates[best], 0.0) * (1.0 if priced else self.UNPRICED)
            if lost <= self._allowance and (found is None or rates[i] > rates[found]):
                found, loss = i, lost
        if found is not None:
            self._allowance -= loss
        return found

    # -- learning ------------------------------------------------------------------------------------------------------

    def record(self, shape: TreeShape, load: Load, result: StepResult, plain: bool = True) -> None:
        if plain:
            self.prices.record(shape, len(load.confidences), load.context, result.seconds)
        if not shape.depth or not any(load.confidences):
            return
        index = self.menu.index(shape)
        self._hold(index, load.confidences, result)
        told = self._smaller[index]
        before = self._gains[index].copy()
        for i, gains in zip(told, gains_by_row(result, [self.menu[i] for i in told]), strict=True):
            self._learn(i, load.confidences, gains)
        self._carry_over(index, before, set(load.confidences))

    def _hold(self, index: int, confidences: Sequence[int], result: StepResult) -> None:
        """Compares what was expected of a step with what came of it, row by row that says anything."""
        gains, kept = self._gains[index], self._kept[index]
        expected = sum(gains[c] for c in confidences)
        found = sum(count - 1 for c, count in zip(confidences, result.count.tolist(), strict=True) if c)
        faith = self.FAITH * (1 - self.FADE)
        kept[0] = self.FADE * kept[0] + faith + expected
        kept[1] = self.FADE * kept[1] + faith + found

    def _carry_over(self, index: int, before: Sequence[float], confidences: set[int]) -> None:
        """Options that the step told nothing of change as the one that it was: text that is easy, or hard, is so for
        all that the same drafters make. What a lookup finds says nothing of what a model guesses."""
        for confidence in confidences - {0}:
            ratio = (self._gains[index][confidence] + 0.01) / (before[confidence] + 0.01)
            for i, shape in enumerate(self.menu):
                if shape.depth and shape.by == self.menu[index].by and i not in self._smaller[index]:
                    gains = self._gains[i]
                    gains[confidence] = min(ratio * gains[confidence], shape.depth, shape.queries - 1)

    def _learn(self, index: int, confidences: Sequence[int], gains: Sequence[float]) -> None:
        sums: dict[int, tuple[int, float]] = {}
        for confidence, gain in zip(confidences, gains, strict=True):
            if confidence:
                count, total = sums.get(confidence, (0, 0.0))
                sums[confidence] = count + 1, total + gain
        known, rows = self._gains[index], self._rows[index]
        for confidence, (count, total) in sums.items():
            age = min(max(self._steps - self._told[index][confidence], 1), self.OLD)  # it may have been another text
            self._told[index][confidence] = self._steps
            rows[confidence] += count
            weight = max(1 - (1 - self.RATE) ** (count * age), count / (self.PRIOR + rows[confidence]))
            known[confidence] += weight * (total / count - known[confidence])

    def explain(self, load: Load) -> list[dict[str, Any]]:
        rates, prices, tokens = self._rates(load)
        batch = len(load.confidences)
        chosen = self._best(rates) if rates else len(self.menu) - 1
        return [
            {
                "shape": shape,
                "price_ms": 1000 * prices[i] if i in prices else None,
                "gain": tokens[i] - batch if i in tokens else None,
                "rate": rates.get(i),
                "chosen": i == chosen,
            }
            for i, shape in enumerate(self.menu)
        ]


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
    known = (result.survival.tolist(), result.depth.tolist(), result.source.tolist())
    nodes = [
        (value, level, row, source)
        for row, one in enumerate(zip(*known, strict=True))
        for value, level, source in zip(*one, strict=True)
        if level
    ]
    rows, found = len(result.mark), []
    for shape in options:
        gains = [0.0] * rows
        alone = shape.by == LOOKUP_ALONE
        fitting = (node for node in nodes if node[1] <= shape.depth and not (alone and node[3] == MODEL))
        for value, _, row, _ in heapq.nlargest(rows * (shape.queries - 1), fitting):
            gains[row] += value
        found.append(gains)
    return found


def _is_part(part: TreeShape, whole: TreeShape) -> bool:
    """Whether a tree of shape `whole` tells what one of shape `part` would have brought. One that two drafters made
    tells what the lookup alone would have."""
    if not part.depth or (part.by, whole.by) not in ((part.by, part.by), (LOOKUP_ALONE, BOTH)):
        return False
    return part.depth <= whole.depth and part.topk <= whole.topk and part.queries <= whole.nodes


def _first_guess(shape: TreeShape, confidence: int, least: int) -> float:
    """Drafts of a row that are accepted, before anything is known; least: as of `MostTokens`."""
    copied = 0.25 * max(confidence - least, 0)
    grown = sum(0.7 ** (level + 1) for level in range(shape.depth)) if least and shape.by != LOOKUP_ALONE else 0.0
    return min(shape.depth, shape.queries - 1, max(copied, grown))
