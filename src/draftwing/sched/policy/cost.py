"""What a step costs: measured seconds (`CostTable`), times how far they are off in operation.

The correction of a cost is a product of two factors. The *speed* is shared by all shapes of about the same batch size:
a machine has other things to do, and its clock changes. The shape's *own* factor is for what was measured wrong. A
sample moves a shape's own factor by `idle / (idle + RECENT)` of its error, where `idle` counts the steps since the
shape ran before, and the speed by `RATE` of the rest. So while one shape runs for long the speed follows it, and a
shape that runs rarely is corrected at once.

Steps that run in fewer threads than usual have factors of their own, and teach nothing else but what was only
guessed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.sched.policy.cost_table import CostTable

VERSION = 2  # of what `to_json` returns
RECENT = 32  # steps, or samples: what "of late" means wherever the policy forgets
HOLD = 4  # steps: a choice is kept for so many, as looking at all options costs the host time; what was learnt, too
RATE = 0.06  # share of a new sample in a mean that is known well
OUTDATED = 128  # steps in which the least seconds that were seen may grow by a factor of e; that a text may go on for
AGREE = 1.25  # factor: two measurements of a step that differ by less say the same, and one step corrects by no more
DOUBT = 3  # so many steps in a row that take less than one part in so many disprove a measurement; as many make one


@dataclass
class _Factors:
    """What steps have taught. Keys are `batch.bit_length()`."""

    steps: dict[int, int] = field(default_factory=dict)  # corrections of about so many rows
    speed: dict[int, float] = field(default_factory=dict)  # logarithms
    own: dict[tuple[TreeShape, int], tuple[float, int]] = field(default_factory=dict)  # and when the shape last ran
    # Of a shape's first steps, as long as none has agreed with what was measured: how many took longer, and the least
    # error. None: one has.
    first: dict[tuple[TreeShape, int], tuple[int, float] | None] = field(default_factory=dict)

    def disproved(self, step: tuple[TreeShape, int], error: float) -> float | None:
        """Returns the least error of a shape's first `DOUBT` steps, if all of them took longer than agrees: stalls add,
        but seldom to each of so many. None for all other steps."""
        found = self.first.get(step, (0, math.inf))
        if found is None or error <= math.log(AGREE):
            self.first[step] = None
            return None
        count, least = found[0] + 1, min(found[1], error)
        if count < DOUBT:
            self.first[step] = count, least
            return None
        del self.first[step]
        return least

    def forget(self, shape: TreeShape) -> None:
        """Forgets what is a shape's own."""
        self.own = {step: factor for step, factor in self.own.items() if step[0] != shape}
        self.first = {step: found for step, found in self.first.items() if step[0] != shape}


class StepCost:
    """Seconds of a step of each shape of a menu, of what precedes drafts, and how they change."""

    def __init__(self, menu: Sequence[TreeShape], stepwise: bool) -> None:
        """stepwise: see `CostTable`, which is `table`."""
        self.menu = tuple(menu)
        self.table = CostTable(stepwise)
        self._samples: dict[tuple[TreeShape, int], int] = {}  # steps in operation that a measurement was made of
        # Of which fewer are all that is known, see `_sampled`, or that `doubt_smallest` doubts.
        self._unsure: set[tuple[TreeShape, int]] = set()
        self.threads = 1.0  # in which share of the threads steps run now, see `StepResult`
        self._factors = {1.0: _Factors()}  # by that share
        # Of such steps whose context is longer than any measured: the context, least seconds, and how many there were.
        self._longer: dict[tuple[TreeShape, int], tuple[int, float, int]] = {}
        self._doubts = 0  # steps in a row
        self._doubts_of: dict[TreeShape, int] = {}  # the same of a shape's own steps, which may be far between
        # Of the drafter's passes over its backlog: least seconds of a pass, and of a position. Short passes cost their
        # launches, long ones their positions.
        self._pass: dict[int, float] = {}
        self._position: dict[int, float] = {}

    # -- what is known ------------------------------------------------------------------------------------------------

    def seconds(self, shape: TreeShape, batch: int, context: int) -> float | None:
        """Returns what a step will take; None only if nothing at all is known."""
        line = self.table.line(shape, batch)
        return None if line is None else (line.empty + line.slope * context) * self.factor(shape, batch)

    def factor(self, shape: TreeShape, batch: int) -> float:
        """Returns what measurements are multiplied with."""
        bucket = batch.bit_length()
        return math.exp(self._speed(bucket) + self._own(shape, bucket))

    def _speed(self, bucket: int) -> float:
        """Of fewer threads, as long as nothing is known, as if they shared all work alike."""
        known = self._factors_now.speed.get(bucket)
        return self._factors[1.0].speed.get(bucket, 0.0) - math.log(self.threads) if known is None else known

    def _own(self, shape: TreeShape, bucket: int) -> float:
        step = shape, bucket
        known = self._factors_now.own.get(step) or self._factors[1.0].own.get(step)
        return known[0] if known else 0.0

    @property
    def _factors_now(self) -> _Factors:
        return self._factors.get(self.threads) or _Factors()

    def known(self, shape: TreeShape, batch: int) -> bool:
        """Returns whether the shape was measured at a size that is near."""
        return bool(self.table.near(shape, batch))

    def guessed(self, shape: TreeShape, batch: int) -> bool:
        """Returns whether neither the shape at such a size nor what it can be estimated by was measured, or too little
        to be believed."""
        sizes = self.table.near(shape, batch) or self.table.smaller(shape, batch)
        unsure = [size for size in sizes if (shape, size) in self._unsure]
        return batch in unsure or len(unsure) == len(sizes)

    @property
    def complete(self) -> bool:
        """Returns whether every shape of the menu was measured."""
        return all(shape in self.table for shape in self.menu)

    def backlog(self, batch: int, passes: int, positions: int) -> float:
        """Returns the seconds that a drafter takes for what it has not seen of a batch: so many passes, and so many
        positions in all but one of them."""
        a_pass, position = (
            known.get(batch.bit_length()) or min(known.values(), default=0.0) for known in (self._pass, self._position)
        )
        return max(passes * a_pass, positions * position)

    # -- learning -----------------------------------------------------------------------------------------------------

    def measured(self, shape: TreeShape, batch: int, context: int, seconds: float) -> None:
        """Takes a measurement in place of an earlier one; of no time it is none."""
        assert batch > 0 and context >= 0
        if seconds > 0:
            self.table.measure(shape, batch, context, seconds)

    def record(self, shape: TreeShape, batch: int, context: int, seconds: float) -> None:
        """Learns from what a step took."""
        if seconds <= 0:
            return
        expected = self.seconds(shape, batch, context)
        if self.threads < 1 and expected is not None and not self.guessed(shape, batch):
            self._correct(shape, batch, math.log(seconds / expected))
            return
        if expected is not None and self.threads == 1 and self._too_fast(shape, batch, seconds, expected):
            self._doubts += 1
            self._doubts_of[shape] = self._doubts_of.get(shape, 0) + 1
            if max(self._doubts, self._doubts_of[shape]) < DOUBT:
                return
            self._forget(None if self._doubts == DOUBT else shape)
        self._doubts = self._doubts_of[shape] = 0
        if not self._sampled(shape, batch, context, seconds):
            assert expected is not None, "what was measured has a cost"
            self._correct(shape, batch, math.log(seconds / expected))

    def doubt_smallest(self, bucket: int = 1) -> None:
        """Takes what is known of the smallest drafts for a guess, if none ran yet. bucket: `bit_length` of the batches.
        Where a start was disturbed, or plain steps take longer than it found, the machine may be slower, or one of the
        two was measured wrong: a try tells which. Not with graphs, which a start can measure well."""
        smallest = min((shape for shape in self.menu if shape.depth), key=lambda shape: shape.queries, default=PLAIN)
        _, ran = self._factors_now.own.get((smallest, bucket), (0.0, 0))  # below 0: of another day
        if self.table.stepwise or smallest == PLAIN or ran > 0:
            return
        for size in self.table.sizes(smallest):
            if size.bit_length() == bucket:
                self._unsure.add((smallest, size))
                self._samples.pop((smallest, size), None)

    def record_backlog(self, batch: int, passes: int, positions: int, seconds: float) -> None:
        """Learns from what a drafter took for its backlog. positions: 0 where they are too few to show what one
        takes."""
        for known, count in ((self._pass, passes), (self._position, positions)):
            if count:
                bucket = batch.bit_length()
                known[bucket] = min((1 + 1 / OUTDATED) * known.get(bucket, math.inf), seconds / count)

    def _too_fast(self, shape: TreeShape, batch: int, seconds: float, expected: float) -> bool:
        """Returns whether a step took so little that measurements have to be wrong, not how fast the machine was of
        late. It may become slower, but not much faster; and of plain steps even a guess is rather low."""
        if DOUBT * seconds * max(self.factor(shape, batch), 1.0) >= expected:
            return False
        if self._samples.get((shape, batch), DOUBT) < DOUBT:
            return False
        return not shape.depth or self.known(shape, batch)

    def _forget(self, shape: TreeShape | None) -> None:
        """Forgets all of a shape, None: of all. What other shapes' steps agree with stays."""
        if shape is None or not self.table.shapes() - {shape}:
            self.table.forget(None)
            for known in (self._samples, self._longer, self._doubts_of, self._unsure):
                known.clear()
            self._factors = {1.0: _Factors()}
            return
        self.table.forget(shape)
        self._samples = {step: samples for step, samples in self._samples.items() if step[0] != shape}
        self._longer = {step: known for step, known in self._longer.items() if step[0] != shape}
        self._unsure = {step for step in self._unsure if step[0] != shape}
        for factors in self._factors.values():
            factors.forget(shape)

    def _sampled(self, shape: TreeShape, batch: int, context: int, seconds: float) -> bool:
        """Takes a step in operation for a measurement where there is none, or none of a context like its own; returns
        whether it did. Of the first steps the least counts, for they pay for caches and allocations. Until there are
        `DOUBT` of them what was guessed before is tried as guesses are: it may cost much less than the first one."""
        step, longer = (shape, batch), self._longer.get((shape, batch))
        if longer is not None and context < longer[0]:  # of other rows
            del self._longer[step]
            longer = None
        if longer is None and self.table.is_longer(shape, context):
            longer = context, math.inf, 0
        if longer is not None:
            return self._sampled_longer(step, longer, seconds)
        samples = self._samples.get(step, 0)
        guessed = self.guessed(*step)
        if samples == DOUBT or (not samples and self.known(*step) and not guessed):
            return False
        if not samples and guessed:
            self._unsure.add(step)
        elif samples + 1 == DOUBT:
            self._unsure.discard(step)
        seconds /= self.factor(shape, batch)  # by which it will be multiplied
        minimum = min([seconds, *self.table.at(shape, batch).values()])
        self.table.measure(shape, batch, context, minimum, alone=True)
        self._samples[step] = samples + 1
        return True

    def _sampled_longer(self, step: tuple[TreeShape, int], known: tuple[int, float, int], seconds: float) -> bool:
        """Takes the least of `DOUBT` steps of a context that is longer than any measured. Of plain steps all are waited
        for: the first one of a batch size may take twice as long, and who looks dear then is not run again."""
        context, least, samples = known
        least = min(least, seconds / self.factor(*step))
        self._longer[step] = context, least, samples + 1
        if step[0].depth or samples + 1 == DOUBT:
            self.table.extend(*step, context, least)
        if samples + 1 == DOUBT:
            del self._longer[step]
        return True

    def _correct(self, shape: TreeShape, batch: int, error: float) -> None:
        """error: logarithm of a step's seconds divided by those expected. What stalls one step says little."""
        factors, bucket = self._factors.setdefault(self.threads, _Factors()), batch.bit_length()
        speed, own = self._speed(bucket), self._own(shape, bucket)
        now = factors.steps[bucket] = factors.steps.get(bucket, 0) + 1
        _, ran = factors.own.get((shape, bucket), (0.0, now - RECENT))
        share = (now - ran) / (now - ran + RECENT)
        rate = (1 - share) * max(RATE, 1 / now)
        longer = factors.disproved((shape, bucket), error)
        if longer is not None:  # of plain steps it is the machine: drafts are compared with them
            share, rate = (1.0, 0.0) if shape.depth else (0.0, 1.0)
            if not shape.depth:  # what others have taken of late is known: it has been the machine there, too
                for step, (its, when) in factors.own.items():
                    if step[1] == bucket and now - when < RECENT:
                        factors.own[step] = its - longer, when
                self.doubt_smallest(bucket)
        error = longer or min(max(error, -math.log(DOUBT)), math.log(AGREE))
        limit = 2 * math.log(DOUBT)  # what is further off was measured wrong
        factors.own[shape, bucket] = min(max(own + share * error, -limit), limit), now
        factors.speed[bucket] = speed + rate * error

    def times(self, factor: float) -> StepCost:
        """Returns what is known now of steps that take so many times as long."""
        cost = deepcopy(self)
        cost._longer.clear()
        for shape, batch, context, seconds in list(self.table.points()):
            cost.table.measure(shape, batch, context, factor * seconds)
        return cost

    # -- keeping it for the next start --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Returns all that is known of steps, for `from_json`; what too few steps have measured is not."""
        usual = self._factors[1.0]
        factors: list[tuple[list[int] | None, int, float]] = [(None, *speed) for speed in usual.speed.items()]
        factors += [(list(shape), bucket, own) for (shape, bucket), (own, _) in usual.own.items()]
        return {
            "version": VERSION,
            "stepwise": self.table.stepwise,
            "measured": [
                [list(shape), batch, *point]
                for shape, batch, *point in self.table.points()
                if (shape, batch) not in self._unsure or not self._samples.get((shape, batch))
            ],
            "corrections": [[shape, bucket, math.exp(factor)] for shape, bucket, factor in factors],
        }

    @classmethod
    def from_json(cls, content: Any, menu: Sequence[TreeShape], stepwise: bool) -> StepCost:
        """Returns the costs that `to_json` gave, of the shapes of the menu. Raises ValueError for anything else.

        Corrections are of another day: new samples soon count for more.
        """
        cost = cls(menu, stepwise)
        try:
            if content["version"] != VERSION or content["stepwise"] is not stepwise:
                raise ValueError(f"expected version {VERSION}, stepwise {stepwise}")
            for numbers, batch, context, seconds in content["measured"]:
                if (shape := TreeShape(*map(_count, numbers))) in cost.menu:
                    cost.measured(shape, _count(batch, 1), _count(context), _positive(seconds))
            usual = cost._factors[1.0]
            for numbers, bucket, factor in content["corrections"]:
                if numbers is None:
                    usual.speed[_count(bucket)] = math.log(_positive(factor))
                elif (shape := TreeShape(*map(_count, numbers))) in cost.menu:
                    usual.own[shape, _count(bucket)] = math.log(_positive(factor)), -RECENT
        except (KeyError, TypeError) as error:
            raise ValueError(f"not what `to_json` gives: {error!r}") from None
        return cost

    def look_again(self, other: StepCost, instead: bool = False) -> bool:
        """Takes what another start has measured: of each step the least, for other programs only ever add to it; or
        `instead` of what was known. Returns whether both have measured every shape, and the same. Where a cost is
        another one now, what was learnt of the old ones in operation goes."""
        ratios, alike = self._ratios(other), self.agrees(other)
        for shape, batch, context, seconds in list(other.table.points()):
            known = self.table.at(shape, batch).get(context)
            self.measured(shape, batch, context, seconds if known is None or instead else min(known, seconds))
        if any(ratio > AGREE or (instead and ratio < 1 / AGREE) for _, ratio in ratios):
            self._factors = {1.0: _Factors()}
        return alike

    def agrees(self, other: StepCost) -> bool:
        """Returns whether both have measured every shape, and the same where both have measured."""
        ratios = self._ratios(other)
        alike = all(1 / AGREE < ratio < AGREE for _, ratio in ratios)
        return alike and {shape for shape, _ in ratios} >= set(self.menu)

    def _ratios(self, other: StepCost) -> list[tuple[TreeShape, float]]:
        """Of what both have measured: the shape, and this one's seconds over the other's."""
        return [
            (shape, known / seconds)
            for shape, batch, context, seconds in other.table.points()
            if (known := self.table.at(shape, batch).get(context)) is not None
        ]


def _count(value: Any, minimum: int = 0) -> int:
    if type(value) is not int or value < minimum:
        raise ValueError(f"expected a whole number from {minimum}, found {value!r}")
    return value


def _positive(value: Any) -> float:
    if not isinstance(value, float | int) or not 0 < value < 1e6:
        raise ValueError(f"expected a positive number, found {value!r}")
    return float(value)
