"""How many drafts of a row each shape of a menu has accepted, by the drafter's confidence.

It is learnt from the trees that were drafted: every node comes back with its calibrated survival
(`core.StepResult.survival`), so one tree shows what all smaller options would have brought, verified or not. Larger
options change as chains do whose levels are as often right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from draftwing.config.trees import BOTH, LOOKUP, LOOKUP_ALONE, MAX_CONFIDENCE, TreeShape
from draftwing.core import FEW_MARKS, MARK_DEPTH, MARK_ONE, MARK_SOURCE, MARK_SOURCES, MARK_SURVIVAL, StepResult
from draftwing.sched.policy.cost import RATE, RECENT

# What is right as long as nothing is known: of a model's drafts of a level this share, of a lookup's the square of it,
# in drafts, for each step of its confidence.
HIT = 0.5


class Acceptance:
    """Expected drafts by option and confidence, in the order of the menu. Steps are numbered by whoever asks."""

    def __init__(self, menu: Sequence[TreeShape], base: int = MAX_CONFIDENCE) -> None:
        """base: confidence of a drafter that can always propose something, 0 of one that only copies; what is above
        it speaks of copies."""
        self._menu, self._base = tuple(menu), base
        values = range(MAX_CONFIDENCE + 1)
        # [option][confidence]: drafts that are accepted of a row, the rows that this is known from, and the last step.
        self._drafts = [[_first_guess(shape, confidence, base) for confidence in values] for shape in menu]
        self._rows = [[0 for _ in values] for _ in menu]
        self._last = [[0 for _ in values] for _ in menu]
        # Of all options of the same proposers: drafts that were expected to be accepted, and those that were.
        promises = {shape.proposer: [float(RECENT), float(RECENT)] for shape in menu}
        self._promised = [promises[shape.proposer] for shape in menu]
        self._smaller = [[i for i, other in enumerate(menu) if _is_part(other, shape)] for shape in menu]
        self._larger = [
            [
                i
                for i, other in enumerate(menu)
                if other.depth and other.proposer == shape.proposer and i not in self._smaller[at]
            ]
            for at, shape in enumerate(menu)
        ]
        self._newest = [0] * len(self._menu)  # the last step that was learnt from
        self._recalled = False

    def like(self) -> Acceptance:
        """Returns another one, whose first guesses are what is known here."""
        other = Acceptance(self._menu, self._base)
        other._drafts = [list(drafts) for drafts in self._drafts]
        return other

    @property
    def known(self) -> bool:
        """Returns whether anything was measured yet."""
        return self._recalled or any(self._newest)

    def learnt(self) -> dict[str, Any]:
        """Returns what is known, in numbers and lists, for the next engine to `recall`."""
        return {
            "menu": [list(shape) for shape in self._menu],
            "drafts": [list(drafts) for drafts in self._drafts],
            "rows": [list(rows) for rows in self._rows],
            "promised": [list(promised) for promised in self._promised],
        }

    def recall(self, learnt: Mapping[str, Any]) -> None:
        """Takes over what another one had learnt, if that was of the same menu."""
        mine = self.learnt()
        sizes = [[len(part) for part in found.get("drafts", ())] for found in (mine, learnt)]
        if learnt.get("menu") != mine["menu"] or sizes[0] != sizes[1]:
            return
        self._drafts, self._rows = learnt["drafts"], learnt["rows"]
        for promised, found in zip(self._promised, learnt["promised"], strict=True):
            promised[:] = found
        self._recalled = any(map(any, self._rows))

    def expected(self, index: int, counts: Mapping[int, int]) -> float:
        """Returns the drafts that an option will have accepted; counts: rows by confidence. What was chosen because it
        looked best is a little less good than it looked, so promises are held against what came of them."""
        promised, found = self._promised[index]
        drafts = self._drafts[index]
        total = sum([drafts[confidence] * count for confidence, count in counts.items()])
        return total * found / promised if found < promised else total

    def last_observed(self, index: int, confidences: Iterable[int]) -> int:
        """Returns the last step that observed an option, at that of these confidences of which least is known."""
        last = self._last[index]
        return min([last[confidence] for confidence in confidences])

    def observe(self, index: int, confidences: Sequence[int], result: StepResult, step: int, alone: bool) -> None:
        """Learns from a step of an option. confidences: of its rows, 0 where a row says nothing. alone: whether no
        other step shows such text, because nothing else is drafted; else what is well known is looked at in every
        second step, for that costs the host time."""
        if (
            not alone
            and step - self._newest[index] < 2
            and min(self._rows[index][c] or RECENT for c in confidences) >= RECENT
        ):
            return
        self._newest[index] = step
        rows_of: dict[int, list[int]] = {}
        for row, confidence in enumerate(confidences):
            if confidence:
                rows_of.setdefault(confidence, []).append(row)
        self._compare(index, rows_of, result)
        before = {confidence: self._drafts[index][confidence] for confidence in rows_of}
        smaller = self._smaller[index]
        for i, drafts in zip(smaller, drafts_by_row(result, [self._menu[i] for i in smaller]), strict=True):
            self._learn(i, rows_of, drafts, step, alone)
        self._carry_over(index, before)

    def _compare(self, index: int, rows_of: Mapping[int, Sequence[int]], result: StepResult) -> None:
        """Holds what was expected of a step against what came of it."""
        drafts, promised, count = self._drafts[index], self._promised[index], result.count.tolist()
        expected = sum([drafts[confidence] * len(rows) for confidence, rows in rows_of.items()])
        found = sum([count[row] - 1 for rows in rows_of.values() for row in rows])
        for at, new in enumerate((expected, found)):
            promised[at] += new + 1 - promised[at] / RECENT  # at rest both are RECENT

    def _learn(
        self, index: int, rows_of: Mapping[int, Sequence[int]], drafts: Sequence[float], step: int, alone: bool
    ) -> None:
        known, counts, last = self._drafts[index], self._rows[index], self._last[index]
        for confidence, rows in rows_of.items():
            longest = RECENT // 2  # it may have been another text
            age = longest if alone else min(max(step - last[confidence], 1), longest)
            last[confidence], count = step, len(rows)
            counts[confidence] += count
            mean = sum([drafts[row] for row in rows]) / count
            weight = max(1 - (1 - RATE) ** (count * age), count / counts[confidence])
            known[confidence] += weight * (mean - known[confidence])

    def _carry_over(self, index: int, before: Mapping[int, float]) -> None:
        """Changes options that the step did not observe: text that is easy, or hard, is so for all that the same
        drafters make, and the more so the deeper they are. What a lookup finds says nothing of what a model guesses."""
        part, little = self._menu[index], 1 / RECENT  # drafts of a row
        for confidence, old in before.items():
            new = self._drafts[index][confidence]
            hits = hit_rate(part.depth, old), hit_rate(part.depth, new)
            for i in self._larger[index]:
                drafts, shape = self._drafts[i], self._menu[i]
                was, now = (chain_drafts(shape.depth, hit) + little for hit in hits)
                inside = index in self._smaller[i] and part.queries <= shape.queries and part.nodes <= shape.nodes
                drafts[confidence] = min(max(drafts[confidence] * now / was, new if inside else 0.0), max_drafts(shape))


class AdapterAcceptance:
    """What is known of drafts for rows with adapters, of each adapter by itself: a drafter was made for the model."""

    def __init__(self, plain: Acceptance, most: int = 64) -> None:
        """plain: of rows without adapters, and of those whose adapter was never seen.  most: adapters to remember."""
        self._plain, self._most = plain, most
        self._adapted: OrderedDict[str, Acceptance] = OrderedDict()  # by digest, what was seen last at the end

    def rows(self, confidences: Sequence[int], adapters: Sequence[str]) -> list[tuple[Acceptance, Counter[int]]]:
        """Returns rows by confidence, without those of 0, each with what is known of them. adapters: of each row, ""
        where it has none; empty: no row has any."""
        if not adapters:
            return [(self._plain, +Counter(confidence for confidence in confidences if confidence))]
        counts: dict[str, Counter[int]] = {}
        for confidence, adapter in zip(confidences, adapters, strict=True):
            if confidence:
                counts.setdefault(adapter, Counter())[confidence] += 1
        return [(self._adapted.get(adapter, self._plain), found) for adapter, found in counts.items()]

    def observe(
        self,
        index: int,
        confidences: Sequence[int],
        adapters: Sequence[str],
        result: StepResult,
        step: int,
        alone: bool,
    ) -> None:
        """Learns from a step as `Acceptance.observe`, of each adapter by its own rows."""
        if not adapters:
            self._plain.observe(index, confidences, result, step, alone)
            return
        for adapter in dict.fromkeys(adapters):
            own = [one if name == adapter else 0 for one, name in zip(confidences, adapters, strict=True)]
            if any(own):
                self._of(adapter).observe(index, own, result, step, alone)

    def _of(self, adapter: str) -> Acceptance:
        if not adapter:
            return self._plain
        found = self._adapted.pop(adapter, None) or self._plain.like()
        self._adapted[adapter] = found
        if len(self._adapted) > self._most:
            self._adapted.popitem(last=False)
        return found


def chain_drafts(depth: int, hit: float) -> float:
    """Returns the drafts of a row that are accepted where each level is right with probability `hit`."""
    return float(depth) if hit == 1 else hit * (1 - hit**depth) / (1 - hit)


@cache
def _chain_table(depth: int) -> list[float]:
    return [chain_drafts(depth, i / _HITS) for i in range(_HITS + 1)]


def hit_rate(depth: int, drafts: float) -> float:
    """Returns the probability by which a level is right where so many drafts of a row are accepted; the inverse of
    `chain_drafts`, by a table."""
    table = _chain_table(depth)
    at = min(bisect_right(table, drafts), _HITS)
    low, high = table[at - 1], table[at]
    return min((at - 1 + (drafts - low) / (high - low)) / _HITS, 1.0)


_HITS = 64  # steps of the table


def max_drafts(shape: TreeShape) -> int:
    """Returns the drafts of a row that are accepted if all are right."""
    return min(shape.depth, shape.queries - 1)


def drafts_by_row(result: StepResult, options: Sequence[TreeShape]) -> list[list[float]]:
    """Returns what each row of a step was expected to have accepted, had it been a step of one of these options, which
    are parts of its own: [option][row]."""
    if result.mark.size <= FEW_MARKS:
        return _few_drafts(result, options)
    survival, depth = np.where(result.depth > 0, result.survival, 0.0), result.depth
    rows = len(depth)
    found = []
    for shape in options:
        worth = np.where(depth <= shape.depth, survival, 0.0)
        if shape.proposer == LOOKUP_ALONE:
            of_models = (result.source > 0) & (result.source & LOOKUP == 0)
            worth = np.where(of_models, 0.0, worth)
        spare = rows * (shape.queries - 1)
        if spare < worth.size:
            cutoff = np.partition(worth, worth.size - spare, axis=None)[worth.size - spare] if spare else np.inf
            over, ties = worth > cutoff, worth == cutoff  # of those that tie only so many are verified
            share = (spare - int(over.sum())) / max(int(ties.sum()), 1)
            worth = np.where(over, worth, np.where(ties, worth * share, 0.0))
        found.append(worth.sum(axis=1).tolist())
    return found


def _few_drafts(result: StepResult, options: Sequence[TreeShape]) -> list[list[float]]:
    """Returns the same in plain Python, from the node that survives most probably down."""
    nodes = sorted(
        ((mark >> MARK_SURVIVAL, mark & MARK_DEPTH, row, (mark >> MARK_SOURCE) & MARK_SOURCES)
         for row, marks in enumerate(result.mark.tolist()) for mark in marks if mark & MARK_DEPTH),
        reverse=True,
    )  # fmt: skip
    rows, found = len(result.mark), []
    for shape in options:
        drafts, spare, depth, alone = (
            [0] * rows,
            rows * (shape.queries - 1),
            shape.depth,
            shape.proposer == LOOKUP_ALONE,
        )
        for value, level, row, source in nodes:
            if level <= depth and not (alone and source and not source & LOOKUP):
                drafts[row] += value
                spare -= 1
                if not spare:
                    break
        found.append([value / MARK_ONE for value in drafts])
    return found


def _is_part(part: TreeShape, whole: TreeShape) -> bool:
    """Returns whether a tree of shape `whole` shows what one of shape `part` would have brought. One that two drafters
    made shows what the lookup alone would have."""
    if not part.depth or (part.proposer, whole.proposer) not in ((part.proposer, part.proposer), (LOOKUP_ALONE, BOTH)):
        return False
    return part.depth <= whole.depth and part.topk <= whole.topk and part.queries <= whole.nodes


def _first_guess(shape: TreeShape, confidence: int, base: int) -> float:
    """Returns drafts of a row that are accepted, before anything is known; base: as of `Acceptance`."""
    copied = HIT**2 * max(confidence - base, 0)
    grown = sum(HIT ** (level + 1) for level in range(shape.depth)) if base and shape.proposer != LOOKUP_ALONE else 0.0
    return min(max_drafts(shape), max(copied, grown))
