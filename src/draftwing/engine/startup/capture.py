"""Captures graphs before the first request, and measures what steps of them cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from draftwing.core import TreeShape
from draftwing.engine.executor import Executor
from draftwing.engine.startup.measure_costs import GRAPH_SECONDS, experts_at_random, measure_graphs
from draftwing.kv.pool import KVPool
from draftwing.sched.policy.cost import StepCost

log = logging.getLogger("draftwing")


def capture(
    executor: Executor,
    pool: KVPool,
    menu: Sequence[TreeShape],
    costs: StepCost | None,
    known: StepCost | None = None,
    compiled: bool = False,
) -> None:
    """Captures the graphs of some batch sizes and leaves the others to `Executor.capture_next`; all of them of several
    ranks, and of compiled forwards, which may be compiled anew for another size: requests would wait for that.
    costs: to measure, None where they need not be.  known: as `measure_graphs` has it."""
    start, free = time.monotonic(), executor.device.free_memory()
    menu = executor.common_shapes(menu)
    some = executor.model.ranks.size == 1 and not compiled
    with experts_at_random(executor):
        captured = executor.run_on_all_ranks(Executor.capture, menu, some)
        if some:
            executor.prefills.drop_slow()
        took, bytes_taken = time.monotonic() - start, free - executor.device.free_memory()
        log.info("captured %d CUDA graphs in %.1f s, %.2f GB", executor.captured, took, bytes_taken / 1e9)
        log.debug("%d captures are left for when there is time", executor.later)
        if costs is not None:
            start = time.monotonic()
            measure_graphs(executor, pool, costs, captured, start + GRAPH_SECONDS, known)
            log.debug("start: %.2f s to measure what steps cost", time.monotonic() - start)
            executor.run_on_all_ranks(Executor.flush)
