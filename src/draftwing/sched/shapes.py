"""Which tree shape a step runs: the menu, and a policy that weighs tokens expected against seconds measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from draftwing.core import MAX_CONFIDENCE, PLAIN, IntArray, TreeShape


class ShapePolicy(Protocol):
    """menu: all shapes, the largest first.

    sees_predictions: whether a confidence tells what a predicted output is worth. If not, it gets the largest shape.
    """

    menu: tuple[TreeShape, ...]
    sees_predictions: bool

    def choose(self, confidences: Sequence[int]) -> TreeShape:
        """Returns the shape for a batch whose rows have these confidences (0: nothing can be proposed)."""
        ...

    def record(self, shape: TreeShape, confidences: IntArray, accepted: IntArray, seconds: float) -> None:
        """Learns what a step of `shape` gave: accepted drafts of each row, and how long the step took."""
        ...


def shape_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns the user's shape, halves of it, and plain decoding, largest first."""
    menu = [shape]
    while menu[-1].nodes > 3:
        nodes = menu[-1].nodes // 2
        menu.append(TreeShape(min(shape.depth, nodes - 1), min(shape.topk, nodes - 1), nodes))
    return (*menu, PLAIN) if shape != PLAIN else (PLAIN,)


class FixedShape:
    """Chooses always the same shape; plain decoding when no row has anything to propose."""

    sees_predictions = True

    def __init__(self, shape: TreeShape) -> None:
        self.menu: tuple[TreeShape, ...] = (shape,) if shape == PLAIN else (shape, PLAIN)

    def choose(self, confidences: Sequence[int]) -> TreeShape:
        return self.menu[0] if any(confidences) else PLAIN

    def record(self, shape: TreeShape, confidences: IntArray, accepted: IntArray, seconds: float) -> None:
        pass


def chain_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns the user's shape, half of it where it is a chain, and plain decoding, largest first."""
    half = shape.depth // 2
    shorter = (TreeShape(half, 1, half + 1),) if shape.topk == 1 and half else ()
    return (shape, *shorter, PLAIN)


def tree_menu(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Returns the user's shape, the chain as deep as it, half of that, and plain decoding, largest first."""
    return (*((shape,) if shape.topk > 1 else ()), *chain_menu(TreeShape(shape.depth, 1, shape.depth + 1)))


class WorthDrafting:
    """Chooses the shape with the most expected tokens per second, for drafters that can always propose something.

    That is plain decoding where verification costs more than drafts save: in large batches, or on text that is hard to
    predict. Two exponential averages decide: how often a draft of each depth is accepted, and how long steps take at
    each batch size. Every shape is tried at every batch size, and again in turn, because drafts that are not made
    teach nothing, and because the machine's load changes.
    """

    sees_predictions = False

    RATE = 0.02  # of acceptance, per row; until 1 / RATE rows are known, their mean counts for more
    PRIOR = 8  # rows that the first guess of acceptance counts for
    TIME_RATE = 0.1
    TRIES = 3  # of each shape; the first pays for caches and allocations
    PROBE_EVERY, PROBE = 128, 4  # steps; a shape that looks half as good as the best has every RARELY-th of its turns
    RARELY = 4
    MARGIN = 1.03  # by which another shape has to be better

    def __init__(self, menu: Sequence[TreeShape]) -> None:
        self.menu = tuple(menu)
        # survival[s][k]: share of rows whose first k + 1 drafts are accepted in a step of shape s
        self._survival = [[0.7 ** (k + 1) for k in range(shape.depth)] for shape in self.menu]
        self._rows = [[self.PRIOR] * shape.depth for shape in self.menu]  # that each share is known from
        self._seconds: dict[tuple[int, int], float] = {}  # (shape index, batch bucket) -> seconds
        self._tried: dict[tuple[int, int], int] = {}  # the same -> steps
        self._chosen: dict[int, int] = {}  # batch bucket -> shape index
        self._steps = 0

    def choose(self, confidences: Sequence[int]) -> TreeShape:
        drafting = sum(1 for confidence in confidences if confidence)
        if not drafting:
            return PLAIN
        self._steps += 1
        bucket = len(confidences).bit_length()
        tries = [self._tried.get((i, bucket), 0) for i in range(len(self.menu))]
        if min(tries) < self.TRIES:
            return self.menu[tries.index(min(tries))]
        rates = [(len(confidences) + drafting * sum(survival)) / self._seconds[i, bucket]
                 for i, survival in enumerate(self._survival)]  # fmt: skip
        turn, place = divmod(self._steps, self.PROBE_EVERY)
        if place < self.PROBE:
            turn, probed = divmod(turn, len(self.menu))
            if 2 * rates[probed] > max(rates) or turn % self.RARELY == 0:
                return self.menu[probed]
        best, now = rates.index(max(rates)), self._chosen.get(bucket)
        if now is None or rates[best] > self.MARGIN * rates[now]:
            self._chosen[bucket] = now = best
        return self.menu[now]

    def record(self, shape: TreeShape, confidences: IntArray, accepted: IntArray, seconds: float) -> None:
        index = self.menu.index(shape)
        key = (index, len(confidences).bit_length())
        if seconds > 0:
            self._tried[key] = self._tried.get(key, 0) + 1
            old = self._seconds.get(key)
            # What stalls a step once says nothing of the next; the first steps are slower than those to come.
            early = old is not None and self._tried[key] <= self.TRIES
            if old is None or early:
                self._seconds[key] = seconds if old is None else min(old, seconds)
            else:
                self._seconds[key] = old + self.TIME_RATE * (min(seconds, 2 * old) - old)
        if not shape.depth:
            return
        # Lists: to start an operation of numpy takes longer than all of this, and it is a part of every step.
        drafts = [
            count for confidence, count in zip(confidences.tolist(), accepted.tolist(), strict=True) if confidence
        ]
        if not drafts:
            return
        reached = [sum(count > k for count in drafts) / len(drafts) for k in range(shape.depth)]
        lasting = 1 - (1 - self.RATE) ** len(drafts)
        for i, other in enumerate(self.menu):
            # A chain is the beginning of a longer one; of other trees only their own steps tell.
            if i == index or other.topk == shape.topk == 1:
                survival, rows = self._survival[i], self._rows[i]
                for k in range(min(other.depth, shape.depth)):
                    rows[k] += len(drafts)
                    survival[k] += max(lasting, len(drafts) / rows[k]) * (reached[k] - survival[k])  # a mean at first


class ExpectedGain:
    """Maximises expected tokens per second, sum over rows of E[tokens | shape, confidence] / seconds[shape, batch].

    Both factors are exponential averages of what steps gave. A shape not timed yet is taken to cost `ROW_COST` of a
    plain step for each row beyond the first; confidences not met yet start from a moderate guess. Rarely, a step
    tries the largest shape against the estimate, so that an estimate cannot stay wrong for ever.
    """

    sees_predictions = True
    RATE = 0.15
    ROW_COST = 0.05
    PROBE_EVERY = 128

    def __init__(self, menu: Sequence[TreeShape]) -> None:
        self.menu = tuple(menu)
        confidence = np.arange(MAX_CONFIDENCE + 1, dtype=np.float64)
        # accepted[s, c]: drafts that shape s is expected to have accepted at confidence c
        self._accepted = np.stack([np.minimum(shape.depth, 0.25 * confidence) for shape in self.menu])
        self._seconds: dict[tuple[int, int], float] = {}  # (shape index, batch bucket) -> seconds
        self._steps = 0

    def choose(self, confidences: Sequence[int]) -> TreeShape:
        if not any(confidences):
            return PLAIN
        self._steps += 1
        if self._steps % self.PROBE_EVERY == 0:
            return self.menu[0]
        bucket = len(confidences).bit_length()
        tokens = len(confidences) + self._accepted[:, list(confidences)].sum(axis=1)
        rates = [tokens[i] / self._cost(i, bucket, len(confidences)) for i in range(len(self.menu))]
        return self.menu[int(np.argmax(rates))]

    def record(self, shape: TreeShape, confidences: IntArray, accepted: IntArray, seconds: float) -> None:
        index = self.menu.index(shape)
        key = (index, len(confidences).bit_length())
        # A first step pays for caches and allocations: the smaller of the two is nearer to the truth.
        old = self._seconds.get(key)
        if seconds > 0:
            self._seconds[key] = seconds if old is None else old + self.RATE * (min(seconds, 3 * old) - old)
        for confidence, drafts in zip(confidences.tolist(), accepted.tolist(), strict=True):
            if confidence and shape.depth:
                self._learn(index, confidence, drafts)

    def _learn(self, index: int, confidence: int, drafts: int) -> None:
        """`drafts` were accepted at this confidence. A smaller tree would have got as many as fit into it, a larger one
        at least as many; where the tree was accepted to its full depth, the larger one is given credit for more."""
        for i, shape in enumerate(self.menu):
            old = float(self._accepted[i, confidence])
            got = float(min(drafts, shape.depth))
            if i < index:
                full = drafts == self.menu[index].depth
                got = max(old, float(min(2 * drafts + 1, shape.depth)) if full else got)
            self._accepted[i, confidence] = old + self.RATE * (got - old)

    def _cost(self, index: int, bucket: int, batch: int) -> float:
        """Seconds of a step; for a shape not timed yet scaled from one that was, or relative where none was."""
        known = self._seconds.get((index, bucket))
        if known is not None:
            return known
        timed = [(i, t) for (i, b), t in self._seconds.items() if b == bucket]
        plain = min((t / self._relative(i, batch) for i, t in timed), default=1.0)
        return plain * self._relative(index, batch)

    def _relative(self, index: int, batch: int) -> float:
        return 1 + self.ROW_COST * (self.menu[index].nodes - 1) * batch
