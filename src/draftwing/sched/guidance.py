"""Rows whose next tokens the host decides about: grammars and logits processors, on draft trees.

A `Guidance` lives from the planning of a step to its commit. It fits the rows' trees to their grammars before the
target runs and makes the masks of all nodes while it does. What fails on the way it reports to the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from draftwing.core import IntArray
from draftwing.errors import RequestError
from draftwing.grammar import GrammarState, Guided, guide
from draftwing.grammar.state import Mask
from draftwing.requests.request import SpecLimits
from draftwing.sched.async_mask import AsyncMask

BoolArray = npt.NDArray[np.bool_]
Masks = npt.NDArray[np.uint32]
_ALL = np.uint32(0xFFFFFFFF)


# A logits processor with the parameters of its request: gets the prompt, the answer and a node's path, and the node's
# logits, a tensor [V]. Raises RequestError.
BoundProcessor = Callable[[Sequence[int], Any], Any]


class GuidedRow(NamedTuple):
    """What the host decides by. Nothing of it changes while the step runs."""

    tokens: Sequence[int]  # prompt and answer so far
    grammar: GrammarState | None  # after the newest token
    processor: BoundProcessor | None
    limits: SpecLimits | None
    async_mask: AsyncMask | None = None  # of the grammar


class Guides(Protocol):
    """What a step asks of its `Guidance`."""

    @property
    def processed(self) -> list[int]: ...

    def roots(self) -> Masks | None: ...

    def fit(
        self, tokens: IntArray, parent: IntArray, alive: BoolArray, max_depth: int
    ) -> tuple[IntArray, IntArray, BoolArray]: ...

    def masks(self) -> Masks | None: ...

    def process(self, row: int, logits: Any) -> None: ...


@contextmanager
def _charged(row: GuidedRow) -> Iterator[None]:
    """Tells what the row's grammar costs the step."""
    begun = time.thread_time()
    try:
        yield
    finally:
        if row.async_mask is not None:
            row.async_mask.charge(time.thread_time() - begun)


class Guidance:
    """The guided rows of one step, g of them. A row that fails goes on unguided and ends with the step's result."""

    def __init__(self, rows: Sequence[GuidedRow], batch: Sequence[int], vocab: int) -> None:
        """batch: the rows' batch indices in the plan."""
        self._rows = rows
        self._of_batch = {index: row for row, index in enumerate(batch)}
        self._words = -(-vocab // 32)
        self._trees: list[Guided | None] = [None] * len(rows)
        self._drafted: tuple[IntArray, IntArray, BoolArray] | None = None
        self._roots: Masks | None = None  # once they were asked for
        self._failed: dict[int, str] = {}  # rows that cannot go on, and why
        self._failed_after: dict[int, list[tuple[list[int], str]]] = {}  # after which drafts rows do, and why

    @property
    def processed(self) -> list[int]:
        """Returns which of the rows have a logits processor."""
        return [i for i, row in enumerate(self._rows) if row.processor is not None]

    def until_failure(self, batch: int, new: list[int]) -> tuple[list[int], str | None]:
        """Returns what the step gave to a row of the plan, up to where it failed, and why it did; all of it for rows
        that did not fail or are not guided."""
        row = self._of_batch.get(batch, -1)
        if row in self._failed:
            return [], self._failed[row]
        failed = self._failed_after.get(row, ())
        reached = [(len(path), why) for path, why in failed if len(path) < len(new) and new[: len(path)] == path]
        if not reached:
            return new, None
        length, why = min(reached)
        return new[:length], why

    def roots(self) -> Masks | None:
        """Returns what may follow the newest token of each row, [g, W]; None where no row has a grammar."""
        if self._roots is not None or all(row.grammar is None for row in self._rows):
            return self._roots
        masks = np.full((len(self._rows), self._words), _ALL)
        for i, row in enumerate(self._rows):
            if row.grammar is not None and i not in self._failed:
                try:
                    masks[i] = self._root(row, row.grammar)
                except RequestError as error:
                    self._failed[i] = str(error)
        self._roots = masks
        return masks

    @staticmethod
    def _root(row: GuidedRow, grammar: GrammarState) -> Mask:
        if row.async_mask is not None and row.async_mask.mask is not None:
            return row.async_mask.mask
        with _charged(row):
            return grammar.mask()

    def fit(
        self, tokens: IntArray, parent: IntArray, alive: BoolArray, max_depth: int
    ) -> tuple[IntArray, IntArray, BoolArray]:
        """Returns the rows' drafts [g, N] after their grammars: illegal nodes dead, forced text in free places."""
        tokens, parent, alive = tokens.copy(), parent.copy(), alive.copy()
        for i, row in enumerate(self._rows):
            if row.grammar is None or i in self._failed:
                continue
            if row.async_mask is not None and row.async_mask.mask is not None:
                alive[i, 1:] = False  # its masks take too long, and nobody uses the grammar now
                continue
            depth = max_depth if row.limits is None else min(max_depth, row.limits.depth)
            try:
                with _charged(row):
                    tree = guide(row.grammar.fork(), tokens[i], parent[i], alive[i], depth)
            except RequestError:  # the grammar gave up on a draft: where the answer goes it need not
                alive[i, 1:] = False
                continue
            if row.limits is not None:
                tree.alive &= tree.alive.cumsum() <= row.limits.nodes
            self._trees[i] = tree
            tokens[i], parent[i], alive[i] = tree.tokens, tree.parent, tree.alive
        self._drafted = tokens, parent, alive
        return self._drafted

    def masks(self) -> Masks | None:
        """Returns what may follow each node, [g, N, W]; None where no row has a grammar."""
        roots = self.roots()
        if roots is None or self._drafted is None:
            return None if roots is None else roots[:, None]
        nodes = self._drafted[0].shape[1]
        masks = np.repeat(roots[:, None], nodes, 1)
        for i, tree in enumerate(self._trees):
            if tree is not None and i not in self._failed:
                with _charged(self._rows[i]):
                    try:
                        tree.masks(masks[i])
                    except RequestError:
                        self._masks_one_by_one(i, masks[i])
        return masks

    def _masks_one_by_one(self, row: int, masks: Masks) -> None:
        """Masks [N, W] of the live nodes of a row of which one is too much for its grammar: there nothing may follow,
        and the answer ends if it gets there."""
        grammar = self._rows[row].grammar
        assert grammar is not None
        for node, path in self._paths(row, len(masks)):
            try:
                state = grammar.fork()
                state.run(path)
                state.mask(masks[node])
            except RequestError as error:
                masks[node] = 0
                self._failed_after.setdefault(row, []).append((path, str(error)))

    def process(self, row: int, logits: Any) -> None:
        """Lets the processor of one of the rows change its logits [N, V], a tensor on the CPU, in place."""
        guided = self._rows[row]
        assert guided.processor is not None
        failed = self._failed_after.setdefault(row, [])
        for node, path in self._paths(row, len(logits)):
            try:
                logits[node] = guided.processor([*guided.tokens, *path], logits[node])
            except RequestError as error:  # it matters if the answer gets there, as it would without drafts
                failed.append((path, str(error)))

    def _paths(self, row: int, nodes: int) -> list[tuple[int, list[int]]]:
        """Live nodes and the drafts from the root's child down to them."""
        if self._drafted is None:
            assert nodes == 1
            return [(0, [])]
        tokens, parent, alive = (part[row].tolist() for part in self._drafted)
        paths: dict[int, list[int]] = {0: []}
        for node in range(1, nodes):
            if alive[node]:
                paths[node] = [*paths[parent[node]], tokens[node]]
        return list(paths.items())
