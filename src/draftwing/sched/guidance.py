"""Rows whose next tokens the host decides about: grammars and logit processors, on draft trees.

A `Guidance` lives from the planning of a step to its sampling. It fits the rows' trees to their grammars before the
target runs and makes the masks of all nodes while it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from draftwing.core import IntArray
from draftwing.errors import RequestError
from draftwing.grammar import GrammarState, Guided, guide

if TYPE_CHECKING:
    from draftwing.sched.req import Req

BoolArray = npt.NDArray[np.bool_]
Masks = npt.NDArray[np.uint32]
_ALL = np.uint32(0xFFFFFFFF)


class Processor(Protocol):
    """A logit processor with the parameters of its request."""

    def __call__(self, tokens: Sequence[int], logits: Any) -> Any:
        """tokens: the prompt, the answer and a node's path; logits: its tensor [V]. Raises RequestError."""
        ...


class Guidance:
    """The guided rows of one step, g of them. A row that fails goes on unguided and ends with the step's result."""

    def __init__(self, reqs: Sequence[Req], vocab: int) -> None:
        self._reqs = reqs
        self._words = -(-vocab // 32)
        self._trees: list[Guided | None] = [None] * len(reqs)
        self._drafted: tuple[IntArray, IntArray, BoolArray] | None = None
        self._roots: Masks | None = None  # once they were asked for

    @property
    def processed(self) -> list[int]:
        """Which of the rows have a logit processor."""
        return [i for i, req in enumerate(self._reqs) if req.processor is not None]

    def roots(self) -> Masks | None:
        """What may follow the newest token of each row, [g, W]; None where no row has a grammar."""
        if self._roots is not None or all(req.grammar is None for req in self._reqs):
            return self._roots
        masks = np.full((len(self._reqs), self._words), _ALL)
        for i, req in enumerate(self._reqs):
            if req.grammar is not None and req.failure is None:
                try:
                    masks[i] = req.grammar.mask()
                except RequestError as error:
                    req.failure = str(error)
        self._roots = masks
        return masks

    def fit(
        self, tokens: IntArray, parent: IntArray, alive: BoolArray, max_depth: int
    ) -> tuple[IntArray, IntArray, BoolArray]:
        """The rows' drafts [g, N] after their grammars: illegal nodes dead, forced text in free places."""
        tokens, parent, alive = tokens.copy(), parent.copy(), alive.copy()
        for i, req in enumerate(self._reqs):
            if req.grammar is None or req.failure is not None:
                continue
            depth = max_depth if req.limits is None else min(max_depth, req.limits.depth)
            try:
                tree = guide(req.grammar.fork(), tokens[i], parent[i], alive[i], depth)
            except RequestError:  # the grammar gave up on a draft: where the answer goes it need not
                alive[i, 1:] = False
                continue
            if req.limits is not None:
                tree.alive &= tree.alive.cumsum() <= req.limits.nodes
            self._trees[i] = tree
            tokens[i], parent[i], alive[i] = tree.tokens, tree.parent, tree.alive
        self._drafted = tokens, parent, alive
        return self._drafted

    def masks(self) -> Masks | None:
        """What may follow each node, [g, N, W]; None where no row has a grammar."""
        roots = self.roots()
        if roots is None or self._drafted is None:
            return None if roots is None else roots[:, None]
        nodes = self._drafted[0].shape[1]
        masks = np.repeat(roots[:, None], nodes, 1)
        for i, (req, tree) in enumerate(zip(self._reqs, self._trees, strict=True)):
            if tree is not None and req.failure is None:
                try:
                    tree.masks(masks[i])
                except RequestError:
                    self._masks_one_by_one(i, masks[i])
        return masks

    def _masks_one_by_one(self, row: int, masks: Masks) -> None:
        """Masks [N, W] of the live nodes of a row of which one is too much for its grammar: there nothing may follow,
        and the answer ends if it gets there."""
        grammar = self._reqs[row].grammar
        assert grammar is not None
        for node, path in self._paths(row, len(masks)):
            try:
                state = grammar.fork()
                state.run(path)
                state.mask(masks[node])
            except RequestError:
                masks[node] = 0

    def process(self, row: int, logits: Any) -> None:
        """Lets the processor of one of the rows change its logits [N, V], a tensor on the CPU, in place."""
        req = self._reqs[row]
        assert req.processor is not None
        req.failures = []
        for node, path in self._paths(row, len(logits)):
            try:
                logits[node] = req.processor([*req.tokens, *path], logits[node])
            except RequestError as error:  # it matters if the answer gets there, as it would without drafts
                req.failures.append((path, str(error)))

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


__all__ = ["GrammarState", "Guidance", "Processor"]
