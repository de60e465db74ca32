"""Rows whose next tokens the host decides about: grammars and logits processors, on draft trees.

A `Guidance` lives from the planning of a step to its commit. It fits the rows' trees to their grammars before the
target runs and makes the masks of all nodes while it does. What fails on the way it reports to the scheduler.

Most grammars are quick. But a mask of an ambiguous grammar takes a tenth of a second and more, and all requests of a
step would wait for it. Such a request is slowed alone (`AsyncMask`): a thread works out its next mask, with less of a
processor than the engine gets. Its row takes part in no step before that is done, and has no drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from draftwing.core import IntArray
from draftwing.errors import RequestError
from draftwing.grammar.limits import give_way
from draftwing.grammar.state import GrammarState, Guided, Mask, guide
from draftwing.machine import processors
from draftwing.requests.request import SpecLimits

# Seconds of a processor.
STEP = 0.002  # of an answer's steps that its grammar may use for each token
SLOW_FROM = 0.02  # beyond that: then it is worked out while steps run
MAX_OVERSPENT = 0.1  # that is remembered
ALLOWANCE = 0.05  # for each token, in the long run
LIMIT = 2.0  # beyond that: then the answer ends
BoolArray = npt.NDArray[np.bool_]
Masks = npt.NDArray[np.uint32]
_ALL = np.uint32(0xFFFFFFFF)
# A logits processor with the parameters of its request: gets the prompt, the answer and a node's path, and the node's
# logits, a tensor [V]. Raises RequestError.
BoundProcessor = Callable[[Sequence[int], Any], Any]


class ComputedMask(NamedTuple):
    mask: Mask
    seconds: float


class Workers:
    """Threads for masks. The first mask of an answer has one of its own: it is not behind those that take long."""

    def __init__(self) -> None:
        threads = max(processors().threads // 4, 1)
        self.first = ThreadPoolExecutor(1, "draftwing-first-mask", initializer=give_way)
        self.slow = ThreadPoolExecutor(min(threads, 8), "draftwing-slow-masks", initializer=give_way)


class AsyncMask:
    """The grammar of one answer, and what it costs. Belongs to the scheduler's thread."""

    def __init__(self, grammar: GrammarState, workers: Workers) -> None:
        """grammar: before the first token. Begins to work out what that may be."""
        self.mask: Mask | None = None  # what may come next, if it was worked out while steps ran
        self._grammar, self._workers = grammar, workers
        self._overspent, self._left = SLOW_FROM / 2, LIMIT
        self._deferred: list[int] = []  # tokens that the grammar has not been given
        self._task: Future[ComputedMask] | None = workers.first.submit(self._work, ())

    @property
    def slow(self) -> bool:
        return self._overspent >= SLOW_FROM

    def charge(self, seconds: float) -> None:
        """Charges so many seconds of a processor."""
        self._overspent = min(self._overspent + seconds, MAX_OVERSPENT)
        self._left -= seconds

    def ready(self) -> bool:
        """Takes a mask that was worked out, or begins to work one out, and returns whether the next token can be drawn
        now. Raises RequestError when the grammar has become too complex, or has taken too long."""
        if self._task is not None:
            if not self._task.done():
                return False
            task, self._task = self._task, None
            self.mask, seconds = task.result()
            self.charge(seconds)
        if self._left < 0:
            raise RequestError(
                f"the grammar takes too long: more than {ALLOWANCE:g} s of a processor for each token, and {LIMIT:g} s "
                "beyond that",
                "grammar",
            )
        if self.slow and self.mask is None:
            tokens, self._deferred = tuple(self._deferred), []
            self._task = self._workers.slow.submit(self._work, tokens)
            return False
        return True

    def follow(self, token: int) -> bool:
        """Takes the newest token; False if it is illegal. Raises RequestError as `ready`."""
        mask, self.mask = self.mask, None
        self._overspent = max(self._overspent - STEP, 0.0)
        self._left = min(self._left + ALLOWANCE, LIMIT)
        if mask is not None and self.slow and self._grammar.ends_by_stop_id:
            self._deferred.append(token)  # that takes long, too
            return bool(mask[token // 32] >> (token % 32) & 1)
        begun = time.thread_time()
        legal = self._catch_up() and self._grammar.advance(token)
        self.charge(time.thread_time() - begun)
        return legal

    def pending(self) -> Future[ComputedMask] | None:
        """Returns what has to be done before it is ready."""
        return self._task

    def _catch_up(self) -> bool:
        tokens, self._deferred = self._deferred, []
        return self._grammar.run(tokens) == len(tokens)

    def _work(self, tokens: Collection[int]) -> ComputedMask:
        """On another thread. Nobody else uses the grammar meanwhile."""
        begun = time.thread_time()
        if self._grammar.run(tuple(tokens)) < len(tokens):
            raise RequestError("the grammar does not take what its mask allows", "grammar")
        mask = self._grammar.mask()
        return ComputedMask(mask, time.thread_time() - begun)


def await_any(pending: Collection[Future[ComputedMask]], seconds: float) -> None:
    """Waits until one of them is done, or so long."""
    if pending:
        wait(pending, seconds, FIRST_COMPLETED)


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
