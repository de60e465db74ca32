"""What is reported of a step, from a result that is written by hand."""

from __future__ import annotations

import numpy as np
from step_marks import marks_of

from draftwing.core import MARK_ONE, MARK_SOURCE, MARK_SURVIVAL, MARK_VERIFIED, DraftTokens, StepResult, TracedNode
from draftwing.sched.results import traced_step

#   0 (root) - 1 - 3
#            - 2 - 4 (not verified);  5 was not proposed.  Accepted: 1, 3.
DEPTH = [0, 1, 1, 2, 2, 0]


def result(count: int = 3) -> StepResult:
    mark = marks_of([DEPTH, DEPTH])
    mark[1, 4] -= MARK_VERIFIED
    mark[1, 1] += (1 << MARK_SOURCE) + (MARK_ONE << MARK_SURVIVAL)
    mark[1, 2] += 3 << MARK_SOURCE
    tokens = np.asarray([[0, 0, 0], [11, 13, 20]])
    return StepResult(
        tokens, np.asarray([1, count]), np.asarray([range(6), [0, 1, 3, 2, 4, 5]]), mark, np.zeros(2, np.int64), 0.25,
        drafts=DraftTokens(np.asarray([[9, 11, 12, 13, 14, 1]]), np.asarray([[0, 0, 0, 1, 2, 0]])),
    )  # fmt: skip


def test_nodes_in_their_order() -> None:
    step = traced_step(result(), 1, 0, 7, 2, [11, 13, 20])
    assert (step.number, step.seconds, step.requests, step.tokens) == (7, 0.25, 2, [11, 13, 20])
    assert step.nodes == [
        TracedNode(None, 11, 1, 1.0, True, True),
        TracedNode(None, 12, 3, 0.0, True, False),
        TracedNode(0, 13, 0, 0.0, True, True),
        TracedNode(1, 14, 0, 0.0, False, False),
    ]


def test_drafts_past_a_stop_do_not_count() -> None:
    assert [node.accepted for node in traced_step(result(), 1, 0, 7, 2, [11]).nodes] == [True, False, False, False]
    assert not any(node.accepted for node in traced_step(result(count=1), 1, 0, 7, 2, [20]).nodes)
