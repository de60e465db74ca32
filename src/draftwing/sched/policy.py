"""Which tree a step drafts, and how much of it is verified: the choice that gives the most tokens per second.

One policy for all drafters. What an option brings is learnt from the trees that were drafted (`sched.gains`), what it
costs is known from measurements (`sched.prices`). Plain decoding is an option like any other, and is chosen before
anything is drafted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from draftwing.core import LAG, LOOKUP_ALONE, MAX_CONFIDENCE, PLAIN, StepResult, TreeShape
from draftwing.sched import corrections
from draftwing.sched.gains import Gains
from draftwing.sched.prices import Prices


class Load(NamedTuple):
    """What there is to do in a step.

    confidences: of each row, the drafter's; 0 where nothing can be proposed.  context: tokens in the KV of all rows.
    longer: seconds that the step may take beyond one without drafts, because of what kept these rows waiting before it.
    whole: whether trees are verified whole, as those of rows are that ask for more than drafts and sampling.
    newest: number of the last admission among the rows; larger than before where a request is new.
    passes: of a drafter over what it has not seen of these rows, before it can draft.
    positions: in all of them but one; of a step that has ended, 0 where they are too few to tell what one takes.
    lasting: steps that it will go on for, once it has seen these: what is seen of a text stays so.
    """

    confidences: Sequence[int]
    context: int = 0
    longer: float = math.inf
    whole: bool = False
    newest: int = 0
    passes: int = 1
    positions: int = 0
    lasting: float = 1.0


class ShapePolicy(Protocol):
    """menu: all shapes, the largest first.

    sees_predictions: whether a confidence tells what a predicted output is worth. If not, it gets the largest shape.
    adapts: whether it drafts where that pays, and not otherwise.
    """

    adapts: bool
    menu: tuple[TreeShape, ...]
    sees_predictions: bool

    def choose(self, load: Load) -> TreeShape:
        """Returns the shape for a batch."""
        ...

    def record(self, shape: TreeShape, load: Load, result: StepResult, plain: bool = True) -> None:
        """Learns what a step of `shape` gave. load: what was known of its rows; confidence 0 where a row says nothing.
        plain: whether its seconds are a price of the shape.
        """
        ...

    def saving(self, load: Load, at_best: bool = False) -> float | None:
        """Returns the seconds that drafts save for each token of such rows, all together; None where it is unknown.
        at_best: if all of them were right."""
        return None

    def seconds(self, rows: int, context: int) -> float | None:
        """Returns about what a step of so many rows takes, `context` tokens in the KV of all; None where it is
        unknown."""
        return None

    def explain(self, load: Load) -> list[dict[str, Any]]:
        """Returns for each option: `shape`, `price_ms`, `gain` (expected accepted drafts of the batch), `rate`
        (expected tokens per second) and whether it is `chosen`: runs next, tries aside."""
        ...


class FixedShape(ShapePolicy):
    """Chooses always the same shape; plain decoding when no row has anything to propose."""

    sees_predictions, adapts = True, False

    def __init__(self, shape: TreeShape) -> None:
        self.menu: tuple[TreeShape, ...] = (shape,) if shape == PLAIN else (shape, PLAIN)
        self._prices: Prices | None = None  # as long as nobody has asked for them

    def choose(self, load: Load) -> TreeShape:
        return self.menu[0] if any(load.confidences) else PLAIN

    def record(self, shape: TreeShape, load: Load, result: StepResult, plain: bool = True) -> None:
        if plain and self._prices is not None:
            self._prices.record(shape, len(load.confidences), load.context, result.seconds)

    def seconds(self, rows: int, context: int) -> float | None:
        if self._prices is None:
            self._prices = Prices(self.menu, stepwise=False)
        return self._prices.seconds(self.menu[0], rows, context)

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


def _most(shape: TreeShape) -> int:
    """Drafts of a row that are accepted if all are right."""
    return min(shape.depth, shape.queries - 1)


# -- the choice --------------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """An option that is taken until that step, for rows like these."""

    option: int
    until: int
    confidences: Sequence[int]
    whole: bool
    newest: int


class MostTokens:
    """Chooses the option with the most expected tokens per second: (rows + expected accepted drafts) / price.

    A choice is kept for some steps, the more the longer it has been the best: to look costs the host time, and where
    nothing is worth drafting to try costs more. New requests end it, and so do rows that promise something else.
    """

    adapts = True
    PROBING = 0.008  # share of the time that options may cost that are only tried to learn from them
    # The same of all options that look as if they never paid, with all numbers of rows: what they were measured at may
    # have been wrong. Each has an equal part.
    RARELY = 0.003
    UNPRICED = 0.2  # share of a loss that counts where a price is a guess: a few steps make it a measurement
    STALE = 16  # steps after which an option's gain is not known any more
    OUTDATED, PLAIN_OUTDATED = 128, 32  # steps after which its price may have changed, if it did not run
    LONG_AGO = 1024  # the same of one that seems never to pay
    MARGIN = 1.02  # by which drafting has to be better: the host does more for it, which no step's seconds tell
    MOST = 1024  # queries of a step; more never pay
    KEPT = 4  # most steps that a choice of drafts is kept for
    REST = LAG - 2  # the same where nothing is drafted. Most drafters that lag have to catch up about as often anyway
    LATE = 4  # steps after which the result of a try that has not come never will
    ENTRY = 8  # most steps that drafting is taken to go on for once it has begun: they share what it costs to begin
    RECENT = 1 / 32  # what a step counts for in how often there is no time for drafts
    NEWS = 0.1  # drafts of a row: a try that raises what an option is expected to bring by more is followed by another
    DRIFT = 1.01  # with each time that the drafter catches up: what it takes at least may change

    def __init__(
        self, menu: Sequence[TreeShape], prices: Prices, sees_predictions: bool = False, least: int = MAX_CONFIDENCE
    ) -> None:
        """sees_predictions: as in `ShapePolicy`; whether confidences tell steps apart. least: as of `Gains`."""
        self.menu, self.prices, self.sees_predictions = tuple(menu), prices, sees_predictions
        self._plain = len(self.menu) - 1
        self._gains = Gains(self.menu, least)
        self._ran: dict[tuple[int, int], int] = {}  # the step in which an option last ran, with about so many rows
        self._steps = self._looked = 0
        self._allowance = 0.0  # seconds that may be lost by trying
        self._kept = Kept(self._plain, 0, (), False, 0)
        self._tries: dict[int, int] = {}  # options that are tried, and the step of each, whose result has not come yet
        self._promising: int | None = None  # one that brought more than was expected when it was tried
        self._best_before = self._plain
        self._pause = 1  # steps that the next choice is kept for
        self._hurried = 0.0  # share of late steps in which there was no time for drafts
        # Of the drafter's catching up, with about so many rows: seconds of the shortest pass, and of a position in the
        # cheapest. Short passes cost their launches, long ones their positions.
        self._catch_up: dict[int, float] = {}
        self._position: dict[int, float] = {}

    def choose(self, load: Load) -> TreeShape:
        chosen = self._choose(load) if any(load.confidences) else self._plain
        hurried = load.longer < math.inf and self._lags(chosen)
        self._hurried += self.RECENT * (hurried - self._hurried)
        return self.menu[chosen]

    def _choose(self, load: Load) -> int:
        self._steps += 1
        if not self._holds(load):
            self._kept = self._look(load)
        return self._kept.option

    def _holds(self, load: Load) -> bool:
        """Whether the last choice is good for this step, too. Where nothing is drafted for these rows nothing is for
        rows that promise less."""
        index, until, confidences, whole, newest = self._kept
        if self._steps > until or len(load.confidences) != len(confidences) or load.whole is not whole:
            return False
        if load.newest > newest:
            return False
        if index != self._plain:
            return load.longer == math.inf and load.confidences == confidences
        return load.confidences == confidences or (
            sum(load.confidences) <= sum(confidences) and max(load.confidences) <= max(confidences)
        )

    def _look(self, load: Load) -> Kept:
        once = Kept(0, self._steps, load.confidences, load.whole, max(load.newest, self._kept.newest))
        if load.newest > self._kept.newest:  # the text may be another
            self._pause = 1
        rates, prices, tokens = self._rates(load, self._entry(load))
        if not prices:
            return once
        best, since = self._best(rates), self._steps - self._looked
        self._looked = self._steps
        most = 4 * prices[best] + self._entry(load)  # a drafter that is far behind is tried, but seldom
        self._allowance = min(self._allowance + self.PROBING * prices[best] * since, most)
        self._tries = {i: step for i, step in self._tries.items() if self._steps - step <= self.LATE}
        tried = self._to_try(load, best, rates, prices, tokens)
        chosen = best if tried is None else tried
        self._ran[chosen, len(load.confidences).bit_length()] = self._steps
        if self._tries or load.longer < math.inf:  # what a try brings may change the choice
            return once._replace(option=chosen)
        most = self.REST if chosen == self._plain else self.KEPT
        self._pause = min(2 * self._pause, most) if best == self._best_before else 1
        self._best_before = best
        return once._replace(option=chosen, until=self._steps + self._pause - 1)

    def saving(self, load: Load, at_best: bool = False) -> float | None:
        rates, *_ = self._rates(load, at_best=at_best)
        if self._plain not in rates or not self._gains.known:
            return None
        return (1 - self._hurried) * (1 / rates[self._plain] - 1 / rates[self._best(rates)])

    def seconds(self, rows: int, context: int) -> float | None:
        return self.prices.seconds(PLAIN, rows, context)

    def _entry(self, load: Load) -> float:
        """Seconds that it costs to begin to draft, where the drafter has to catch up first."""
        if not self._lags(self._kept.option):
            return 0.0
        bucket = len(load.confidences).bit_length()
        a_pass, position = (
            known.get(bucket) or min(known.values(), default=0.0) for known in (self._catch_up, self._position)
        )
        return max(load.passes * a_pass, load.positions * position)

    def _shared_by(self, load: Load) -> float:
        """Steps that drafting goes on for once it has begun: as many as lie between two that have no time for it."""
        return max(min(1 / max(self._hurried, 1e-9) - 1, self.ENTRY), load.lasting)

    def _lags(self, index: int) -> bool:
        """Whether a drafter with a model may not see the steps of an option."""
        return not self.menu[index].depth or self.menu[index].by == LOOKUP_ALONE

    def _best(self, rates: dict[int, float]) -> int:
        best, plain = max(rates, key=rates.__getitem__), self._plain
        return plain if plain in rates and rates[best] < self.MARGIN * rates[plain] else best

    def _rates(
        self, load: Load, entry: float = 0.0, at_best: bool = False
    ) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
        """Tokens per second, seconds and tokens of each option that is possible. entry: seconds to begin to draft.
        at_best: if all drafts were right."""
        batch, context = len(load.confidences), load.context
        counts = Counter(load.confidences)
        del counts[0]
        rates, prices, tokens = {}, {}, {}
        plain = self.prices.seconds(PLAIN, batch, context) or math.inf
        longest, begin = plain + load.longer, entry / self._shared_by(load)
        for i, shape in enumerate(self.menu):
            if not shape.depth:
                price, brings = plain, float(batch)
                if price == math.inf:
                    continue
            else:
                if batch * shape.queries > self.MOST or (shape.verified and load.whole):
                    continue
                seconds = self.prices.seconds(shape, batch, context)
                at_once, on_average = (0.0, 0.0) if self._lags(i) else (entry, begin)
                if seconds is None or seconds + at_once > longest:
                    continue
                price = seconds + on_average
                brings = batch + (_most(shape) * counts.total() if at_best else self._gains.expected(i, counts))
            tokens[i], prices[i], rates[i] = brings, price, brings / price
        return rates, prices, tokens

    def _to_try(
        self, load: Load, best: int, rates: dict[int, float], prices: dict[int, float], tokens: dict[int, float]
    ) -> int | None:
        """An option of which too little is known, if trying it is within the allowance: the one that looks best."""
        found, loss, urgency, bucket = None, 0.0, (False, 0.0), len(load.confidences).bit_length()
        confidences, entry = {c for c in load.confidences if c}, self._entry(load) * (1 - 1 / self._shared_by(load))
        stale, rarely = max(self.STALE, self._pause), self.RARELY * prices[best] / max(len(self._ran), 1)
        for i in rates:
            if i == best or i in self._tries:
                continue
            priced = self.prices.known(self.menu[i], len(load.confidences))
            told = self._steps if i == self._plain else self._gains.told(i, confidences)
            # What would be best if its price were as far off as corrections reach may be: they are made where it runs.
            since = self._steps - self._ran.setdefault((i, bucket), self._steps)
            late, reach = (self.PLAIN_OUTDATED, 2.0) if i == self._plain else (self.OUTDATED, corrections.MOST)
            outdated = since > late and reach * rates[i] > rates[best]
            seconds = prices[i] if self._lags(i) else prices[i] + entry
            lost = max(seconds - tokens[i] / rates[best], 0.0) * (1.0 if priced else self.UNPRICED)
            long_ago = since > self.LONG_AGO and lost <= rarely * since
            if priced and self._steps - told < stale and not outdated and not long_ago and i != self._promising:
                continue
            hopeless = priced and not outdated and i != self._plain
            if hopeless and not long_ago and self._hopeless(i, load, prices[i], rates[best]):
                continue
            if (lost <= self._allowance or long_ago) and (found is None or (outdated, rates[i]) > urgency):
                found, loss, urgency = i, lost, (outdated, rates[i])
        if self._promising in (best, found):  # else it waits until a try is within the allowance
            self._promising = None
        if found is not None:
            self._tries[found] = self._steps
            self._allowance = max(self._allowance - loss, 0.0)
        return found

    def _hopeless(self, index: int, load: Load, price: float, rate: float) -> bool:
        """Whether an option would bring no more than `rate` if all its drafts were right."""
        rows = sum(confidence > 0 for confidence in load.confidences)
        return len(load.confidences) + _most(self.menu[index]) * rows <= rate * price

    # -- learning ------------------------------------------------------------------------------------------------------

    def record(self, shape: TreeShape, load: Load, result: StepResult, plain: bool = True) -> None:
        index, bucket = self.menu.index(shape), len(load.confidences).bit_length()
        if result.catching_up and not self._lags(index):  # others are of rows that are released, or far behind
            for known, count in ((self._catch_up, load.passes), (self._position, load.positions)):
                if count:
                    known[bucket] = min(self.DRIFT * known.get(bucket, math.inf), result.catching_up / count)
        if plain:
            seconds = result.seconds - result.catching_up
            self.prices.record(shape, len(load.confidences), load.context, seconds)
        tried = self._tries.pop(index, None) is not None
        if shape.depth and any(load.confidences):
            counts = Counter(load.confidences)
            before = self._gains.expected(index, counts) if tried else 0.0
            alone = tried and self._best_before == self._plain
            self._gains.learn(index, load.confidences, result, self._steps, alone)
            if tried and self._gains.expected(index, counts) - before > self.NEWS * len(load.confidences):
                self._promising, self._pause = index, 1

    def explain(self, load: Load) -> list[dict[str, Any]]:
        rates, prices, tokens = self._rates(load)
        batch = len(load.confidences)
        chosen = self._next(load)
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

    def _next(self, load: Load) -> int:
        """What the next step of these rows runs, unless something is tried in it."""
        if not any(load.confidences):
            return self._plain
        if self._steps < self._kept.until and self._holds(load):
            return self._kept.option
        rates, *_ = self._rates(load, self._entry(load))
        return self._best(rates) if rates else 0
