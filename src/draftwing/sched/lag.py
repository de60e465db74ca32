"""When a drafter with KV catches up with what it has not seen (`engine.lag`): the host knows bounds of its lag.

Before a step that drafts with the model all rows of the step do. Else a row does before it is too far behind, together
with others that are nearly as far, and when it is released: what it gave to the radix tree must be complete for whoever
uses it first, and that is a plan to come. A plan's catch-up runs before its uploads, so slots and page tables are those
of the plan before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from draftwing.core import LAG, CatchUp, TreeShape
from draftwing.sched.req import Req

ROWS = 16  # as many catch up at once if nobody has to: a decode gap is then not much longer than others


class CatchUps:
    def __init__(self, lagging: Collection[TreeShape], most: int = LAG) -> None:
        """lagging: shapes whose steps the drafter does not see; most: positions that it may lack of a row."""
        assert all(shape.max_commit <= most for shape in lagging)
        self._lagging, self._most = frozenset(lagging), most
        self._next: list[tuple[int, int, int]] = []  # of the next plan: row, behind, upper bound of kv_len

    def plan(self, step: int, shape: TreeShape, reqs: Sequence[Req]) -> None:
        """A tree step of this number is planned for these requests; `Req.bound` does not count it yet."""
        if not self._lagging:
            return
        lags = shape in self._lagging
        for req in self._due(reqs, shape.max_commit) if lags else reqs:
            self._add(req)
            req.caught_up = step
        if lags:
            for req in reqs:
                req.behind += shape.max_commit

    def commit(self, step: int, shape: TreeShape, req: Req, count: int) -> None:
        """The step of this number has committed `count` tokens of the request."""
        if step >= req.caught_up and shape in self._lagging:
            req.behind -= shape.max_commit - count

    def release(self, req: Req, cached: bool) -> None:
        """The request gives its row away. cached: whether others may use its KV."""
        if cached:
            self._add(req)
        req.behind = 0

    def take(self) -> CatchUp | None:
        """Those of the next plan."""
        if not self._next:
            return None
        rows, behind, bound = (np.asarray(part, np.int64) for part in zip(*self._next, strict=True))
        self._next = []
        return CatchUp(rows, int(behind.max()), int(bound.max()))

    def clear(self) -> None:
        """Nobody will use what has been released."""
        self._next = []

    def _due(self, reqs: Sequence[Req], commit: int) -> list[Req]:
        """Who must catch up before a step that commits so many tokens at most, and who joins. Where many are far behind
        some begin early, so that they do not all have to at once."""
        near = max(commit, self._most // 4)
        must = sum(req.behind + commit > self._most for req in reqs)
        far = sorted((req for req in reqs if req.behind + near > self._most), key=lambda req: -req.behind)
        return far[: max(must, ROWS)] if must or self._next or len(far) > ROWS else []

    def _add(self, req: Req) -> None:
        if req.behind:
            self._next.append((req.row, req.behind, req.bound))
            req.behind = 0
