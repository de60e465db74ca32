"""What may come next in answers that have a grammar, worked out while steps run where it takes long.

Most grammars are quick: their masks are made while the target runs, for whole draft trees. But a mask of an ambiguous
grammar takes a tenth of a second and more, and all requests of a step would wait for it. Such a request is slowed
alone: a thread works out its next mask, with less of a processor than the engine gets. Its row takes part in no step
before that is done, and has no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from draftwing.errors import RequestError
from draftwing.grammar import GrammarState
from draftwing.grammar.limits import give_way
from draftwing.grammar.state import Mask
from draftwing.machine import processors

# Seconds of a processor.
STEP = 0.002  # of an answer's steps that its grammar may use for each token
SLOW_FROM = 0.02  # beyond that: then it is worked out while steps run
MAX_OVERSPENT = 0.1  # that is remembered
ALLOWANCE = 0.05  # for each token, in the long run
LIMIT = 2.0  # beyond that: then the answer ends


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
