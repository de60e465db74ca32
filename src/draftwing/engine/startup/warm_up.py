"""Steps before the first request: they make what is made once, and tell the policy what steps cost on this machine."""

from __future__ import annotations

import logging
import time

import numpy as np

from draftwing.core import NOBODY, PLAIN, Admission, Chunk, Plan, TreeShape
from draftwing.engine.executor import Executor
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.shapes import ShapePolicy

log = logging.getLogger("draftwing")

SECONDS = 0.3  # no step begins later; a large model is not kept from its first request
PROMPT = 32  # tokens
UNTIMED = 2  # steps of each shape: one makes constants, one is recorded (`RecordedStages`)
TIMED = 3  # as many as a policy would try itself, see `WorthDrafting.TRIES`


def warm_up(executor: Executor, policy: ShapePolicy) -> None:
    """Runs a short prompt, then steps of one row of every shape of the menu in turn, as a first request would, and lets
    the policy record those that are timed. Leaves no trace: the prompt is in the pool's dummy slot and in a row that
    its next request writes anew, the steps are of the row table's dummy."""
    started = time.monotonic()
    tokens = min(PROMPT, executor.table.length // 2)
    _run(executor, _prompt(tokens))
    menu = policy.menu if executor.drafter is not None else (PLAIN,)  # what no drafter makes is special
    nothing = np.zeros(1, np.int64)
    steps = 0
    for turn in range(UNTIMED + TIMED):
        for shape in menu:
            if time.monotonic() > started + SECONDS:
                break
            seconds = _run(executor, _step(executor.table.rows, shape, tokens))
            steps += 1
            if turn >= UNTIMED:
                policy.record(shape, nothing, nothing, seconds)
    if executor.drafter is not None:
        executor.drafter.flush()
    log.debug("%d steps before the first request: %.2f s", steps, time.monotonic() - started)


def _run(executor: Executor, plan: Plan) -> float:
    """-> seconds, counted as those of any step"""
    result, _ = executor.commit(executor.launch(plan)).wait(0.0)
    return result.seconds


def _prompt(tokens: int) -> Plan:
    """Of the first row, whose page table has nothing but the dummy slot."""
    row, request = np.zeros(1, np.int64), GenerationRequest("", [1] * tokens, SamplingParams())
    admits = (Admission(0, request.prompt_ids, NOBODY, request, seed=0),)
    return Plan(0, "prefill", row, row, PLAIN, tokens, admits, (), (Chunk(0, 0, tokens, True),))


def _step(row: int, shape: TreeShape, bound: int) -> Plan:
    """Of one row. bound: of its tokens, as that of a short text, though the dummy has none."""
    rows = np.array([row])
    return Plan(0, "tree", rows, rows, shape, bound)
