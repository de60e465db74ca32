"""Measures what steps cost on this machine, before the first request: `sched.policy.cost` is what they are written to.
Works on rows that no request has yet, and leaves them as they were.

Other programs run, too: how long this process was kept waiting for a processor meanwhile is measured as well."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import torch

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.core import NOBODY, Plan, StepResult
from draftwing.engine.executor import Executor
from draftwing.engine.graphs import Key
from draftwing.sched.policy.cost import StepCost

BUSY = 0.1  # share of a measurement's time that threads waited, all together, from which on it is not believed
MAX_DELAY_RATIO = 8  # of the time that passed, one part in so many is own whatever the system reports
GRAPH_SECONDS = 4.0  # for replays of graphs
REPLAYS = 3  # of a step with graphs, whose median counts
# Tokens of each row. On an H200 the first two alone made a key cost a single row three times what it does with 16,000.
CONTEXTS = (1024, 4096, 16384)
CONTEXT_SIZES = (1, 8, 32)  # batches that are measured with them, beside the largest
# Tokens of a single row, in which a key costs less behind long contexts: it has few programs. Eight rows with the
# longest of the others have twice as many together.
LONG_CONTEXT = 65536
STEPS = 3  # without graphs, or turns of them, of each kind: the first one makes constants and memory, see `_typical`
SIZES = (4, 16)  # batches beside that of one row
CPU_CONTEXT = 1024  # tokens: the one context that a start on a CPU measures each shape with


def delays() -> dict[str, float]:
    """Returns by thread of this process the seconds in which it could have run and others did. Empty where the system
    does not tell: it is Linux that does."""
    found: dict[str, float] = {}
    with suppress(OSError):  # another system
        for thread in os.listdir("/proc/self/task"):
            # A thread that ended; of the others what they have waited so far must not count as new.
            with (
                suppress(OSError, ValueError, IndexError),
                open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as numbers,
            ):
                found[thread] = int(numbers.read().split()[1]) / 1e9
    return found


def since(before: Mapping[str, float]) -> list[float]:
    """Returns seconds that each thread has waited since `delays` gave this."""
    return [seconds - before.get(thread, 0.0) for thread, seconds in delays().items()]


def own_delay() -> float:
    """Returns the seconds in which the calling thread could have run and others did, 0 where the system does not tell.

    What it waited between two calls it waited between them. Another thread's wait is told when it ends, and most of it
    may lie before: what is kept waiting for something else would make a step look as if it took nothing.
    """
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as numbers:
            return int(numbers.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # another system
        return 0.0


def own(seconds: float, before: float) -> float:
    """Returns what of so many seconds, which began when `own_delay` gave this, other programs did not take from the
    calling thread."""
    return max(seconds - (own_delay() - before), seconds / MAX_DELAY_RATIO)


@contextmanager
def experts_at_random(executor: Executor) -> Iterator[None]:
    """The rows that steps are measured on are all alike. Of a mixture of experts they would read the same few, and a
    tree would seem to cost what a token does; here they choose as if they had nothing in common, which is the most that
    a step may cost. What it does cost corrects that."""
    executor.run_on_all_ranks(Executor.scatter_routes, True)
    try:
        yield
    finally:
        executor.run_on_all_ranks(Executor.scatter_routes, False)


# ---- with graphs -----------------------------------------------------------------------------------------------------


def measure_graphs(
    executor: Executor,
    costs: StepCost,
    captured: Collection[Key],
    until: float,
    known: StepCost | None = None,
) -> None:
    """Replays captured steps, without context first, then with contexts of some lengths. until: monotonic; no
    measurement begins later.  known: of an earlier start; where few batch sizes without context agree with them, no
    others are measured."""
    largest = max((key.size for key in captured), default=0)
    few = [size for size in sorted({*CONTEXT_SIZES, largest}) if size <= largest]
    rest = sorted({key.size for key in captured} - set(few))
    others = [*((context, few) for context in CONTEXTS), (LONG_CONTEXT, [size for size in few if size == 1])]
    for turn, (context, sizes) in enumerate(((0, few), (0, rest), *others)):
        if turn == 1 and known is not None and known.agrees(costs):
            break
        for size in sizes:
            keys = [key for key in captured if key.size == size]
            if keys and time.monotonic() < until:
                _measure_keys(executor, costs, keys, context)
    executor.run_on_all_ranks(Executor.set_rows, NOBODY, largest)


def _measure_keys(executor: Executor, costs: StepCost, keys: Sequence[Key], context: int) -> None:
    """Of one batch size. Does nothing where the pool or the table has no room for so many tokens."""
    size, table = keys[0].size, executor.table
    if not context:
        executor.run_on_all_ranks(Executor.set_rows, NOBODY, size)
        for key in keys:
            _measure_key(executor, costs, key, 0)
    elif size <= table.rows and _fits(executor, size, context, room(keys)):
        with filled(executor, size, context, room(keys)):
            executor.run_on_all_ranks(Executor.set_rows, np.arange(size), size)
            for key in keys:
                executor.run_on_all_ranks(set_context, size, context)
                _measure_key(executor, costs, key, context)


def replay(executor: Executor, key: Key) -> None:
    """Runs the graphs of a step, on the rows that are set."""
    executor.steps.replay(key)


def _measure_key(executor: Executor, costs: StepCost, key: Key, context: int) -> None:
    seconds = executor.device.timed(lambda: executor.run_on_all_ranks(replay, key), REPLAYS)
    costs.measured(key.shape, key.size, key.size * context, statistics.median(seconds))


# ---- without graphs --------------------------------------------------------------------------------------------------


def measure_steps(executor: Executor, costs: StepCost, until: float, batches: Collection[int] = SIZES) -> None:
    """Runs steps: of one row of every shape, then plain steps of more rows and of a long row, then all others, as long
    as there is time. until: monotonic; no step begins that would probably end later. batches: more rows than one.
    """
    menu = sorted(costs.menu, key=lambda shape: shape.nodes)
    sizes = [size for size in batches if 1 < size <= executor.table.rows]
    runs: dict[TreeShape, list[Timed]] = {}
    for turn in range(STEPS):  # in turn, so that what slows the machine down slows all of them
        for shape in menu:
            # A CPU's step behind one of another shape finds the caches full of other things, and takes longer than
            # while one shape goes on: the second one shows that.
            for _ in range(min(turn + 1, 2)):
                if time.monotonic() < until:
                    runs.setdefault(shape, []).append(_run(executor, shape, 1, 0))
    for shape, found in runs.items():
        costs.measured(shape, 1, 0, _typical(found))
    for size in sizes:
        _measure_step(executor, costs, PLAIN, size, until)
    _measure_context(executor, costs, menu, until)
    for size in sizes:
        for shape in menu:
            if shape != PLAIN:
                _measure_step(executor, costs, shape, size, until)


class Timed(NamedTuple):
    """A step that was run. seconds: about what it would take all threads of a machine that has nothing else to do.
    threads: the share of them that ran, as of `StepResult`."""

    seconds: float
    threads: float


def _typical(runs: Sequence[Timed]) -> float:
    """Returns the least but one of those that ran in the most threads, of one or two the least. In fewer threads a step
    seems shorter than it is in all; where they came and went meanwhile it may look as if it took half; and the first
    ones of a kind take longer than they will."""
    most = max(run.threads for run in runs)
    seconds = sorted(run.seconds for run in runs if run.threads == most)
    return seconds[min(1, (len(seconds) - 1) // 2)]


def _measure_step(executor: Executor, costs: StepCost, shape: TreeShape, size: int, until: float) -> None:
    expected = costs.seconds(shape, size, 0)
    if expected is not None and time.monotonic() + STEPS * expected < until:
        costs.measured(shape, size, 0, _typical([_run(executor, shape, size, 0) for _ in range(STEPS)]))


def _measure_context(executor: Executor, costs: StepCost, menu: Sequence[TreeShape], until: float) -> None:
    """Of one long row."""
    shapes = [shape for shape in (PLAIN, menu[-1], *menu[1:-1]) if shape in menu]
    space = STEPS * max(shape.nodes + shape.max_commit for shape in menu)
    if not _fits(executor, 1, CPU_CONTEXT, space):
        return
    with filled(executor, 1, CPU_CONTEXT, space, touched=True):
        for shape in dict.fromkeys(shapes):
            expected = costs.seconds(shape, 1, CPU_CONTEXT)
            if expected is not None and time.monotonic() + STEPS * expected < until:
                runs = []
                for _ in range(STEPS):
                    executor.run_on_all_ranks(set_context, 1, CPU_CONTEXT)
                    runs.append(_run(executor, shape, 1, CPU_CONTEXT))
                costs.measured(shape, 1, CPU_CONTEXT, _typical(runs))


def _run(executor: Executor, shape: TreeShape, size: int, context: int) -> Timed:
    """Without context the rows are the row table's dummy."""
    rows = np.arange(size) if context else np.full(size, executor.table.rows)
    return timed_step(executor, Plan(0, "tree", rows, rows, shape, context or 1))[1]


def timed_step(executor: Executor, plan: Plan) -> tuple[StepResult, Timed]:
    """Returns the result of a step, and what it took. Where the number of threads changes meanwhile, it counts as if
    the most had run throughout: rather too long than too short. Nor does it count for less than all threads together
    have computed: others go on while the calling thread waits, and some of what that waited was before the step."""
    threads, before, computed = executor.device.active_threads, own_delay(), time.process_time()
    result = executor.commit(executor.launch(plan)).wait()
    threads = max(threads, result.threads)
    computed = (time.process_time() - computed) / executor.device.threads
    seconds = max(own(result.seconds, before) * threads, min(computed, result.seconds * threads))
    return result, Timed(seconds, threads)


# ---- rows with a context ---------------------------------------------------------------------------------------------


def room(keys: Sequence[Key]) -> int:
    """Returns entries of a row past its context that replays of these steps may reach."""
    return REPLAYS * max(key.shape.nodes + key.shape.max_commit for key in keys)


def _fits(executor: Executor, rows: int, context: int, space: int) -> bool:
    length = context + space
    return length < executor.table.length and rows * length <= executor.attn.pool.slots


@contextmanager
def filled(executor: Executor, rows: int, context: int, space: int, touched: bool = False) -> Iterator[None]:
    """Makes the first rows look as if they held so many tokens, each in slots of its own that nobody has yet.

    space: further entries that have slots.  touched: write to the slots, where memory that was never written to is not
    there and costs nothing to read.
    """
    executor.run_on_all_ranks(_fill, rows, context, space, touched)
    try:
        yield
    finally:
        executor.run_on_all_ranks(_empty, rows)


@torch.inference_mode()
def _fill(executor: Executor, rows: int, context: int, space: int, touched: bool) -> None:
    executor.keep_calibration()
    table, length = executor.table, context + space
    slots = torch.arange(1, rows * length + 1, device=table.page_table.device).view(rows, length)
    if touched:
        for layer in executor.attn.pool.tensors:
            layer[1 : rows * length + 1] = 0
    table.page_table[:rows, :length] = slots
    set_context(executor, rows, context)


@torch.inference_mode()
def set_context(executor: Executor, rows: int, context: int) -> None:
    """Gives the first rows this context, as if nothing had been committed since."""
    executor.table.kv_len[:rows] = context
    if executor.table.states is not None:
        executor.table.states.length[:rows] = context


@torch.inference_mode()
def _empty(executor: Executor, rows: int) -> None:
    table = executor.table
    for state in (table.page_table, table.tokens, table.kv_len, table.last):
        state[:rows] = 0
    if table.states is not None:
        table.states.read[:rows] = table.states.write[:rows] = table.states.dummy
    executor.restore_calibration()
