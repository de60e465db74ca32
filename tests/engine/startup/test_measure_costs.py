"""Measurements before the first request: what is run, for how long, and that rows are left as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine.startup import measure_costs
from draftwing.engine.startup import measure_costs as measuring
from draftwing.engine.startup.measure_costs import Timed, filled, measure_graphs, measure_steps
from draftwing.sched.policy.cost import StepCost
from draftwing.sched.policy.shape_policy import ShapePolicy

TREE = TreeShape(3, 2, 6)
MENU = (TREE, PLAIN)
LONG, LONGER = 40, 70  # tokens
KINDS = ((1, 0), (1, LONG), (4, 0))  # rows and context that a start measures


class Both(ShapePolicy):
    """A menu of two."""

    menu = MENU
    sees_predictions = True

    def choose(self, confidences: Any) -> TreeShape:
        return TREE if any(confidences) else PLAIN

    def record(self, *step: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "CPU_CONTEXT", LONG)
    monkeypatch.setattr(measuring, "CONTEXTS", (16, LONG, 10_000))  # for the last there is no room
    monkeypatch.setattr(measuring, "LONG_CONTEXT", LONGER)


def state(rig: Any) -> list[torch.Tensor]:
    """What the first rows hold, the dummy's length, and what is known of drafts."""
    table = rig.slots
    parts = table.page_table[:-1], table.kv_len, table.tokens[:-1], table.last[:-1], *rig.executor.calibration
    return [part.clone() for part in parts]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def case(harness: Any) -> Any:
    model, prompts = harness.tiny_model(), harness.prompts_for(5)
    params = [harness.greedy(30)] * len(prompts)
    return model, prompts, params, harness.plain_answers(model, prompts, params).tokens


def answers(rig: Any, case: Any) -> dict[str, list[int]]:
    _, prompts, params, _ = case
    return rig.answer(prompts, params).tokens


@pytest.mark.slow
@pytest.mark.parametrize("graph_size", [1, 5])
def test_graphs_are_measured_without_and_with_contexts(harness: Any, case: Any, graph_size: int) -> None:
    rig = harness.Rig(case[0], drafter="ngram", policy=Both(), graph_size=graph_size, device=harness.device)
    before, costs = state(rig), StepCost(MENU, True)
    measure_graphs(rig.executor, costs, rig.captured, time.monotonic() + 600)
    found = Counter((shape, size, context // size) for shape, size, context, _ in costs.table.points())
    few = {1, graph_size}  # of the sizes with contexts, these were captured
    assert found == Counter((key.shape, key.size, 0) for key in rig.captured) + Counter(
        (shape, size, context) for shape in MENU for size in few for context in (16, LONG, *[LONGER] * (size == 1))
    )
    assert same(before, state(rig)), "rows are as they were"
    rig.drafter.flush()
    assert answers(rig, case) == case[3]


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_few_graphs_are_measured_again_where_they_cost_what_they_did(
    harness: Any, case: Any, monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    rig = harness.Rig(case[0], drafter="ngram", policy=Both(), graph_size=5, device=harness.device)
    monkeypatch.setattr(rig.executor.device, "timed", lambda fn, times: [0.01] * times)
    costs, known = StepCost(MENU, True), StepCost(MENU, True)
    for key in rig.captured:
        known.measured(key.shape, key.size, 0, 0.01 * slower)
    measure_graphs(rig.executor, costs, rig.captured, time.monotonic() + 600, known)
    few = {(shape, size, 0) for shape in MENU for size in (1, 5)}
    found = {point[:3] for point in costs.table.points()}
    assert found == few if slower == 1 else found > few | {(key.shape, key.size, 0) for key in rig.captured}
    assert costs.complete


def test_graphs_are_not_measured_where_there_is_no_time(harness: Any, case: Any) -> None:
    rig = harness.Rig(case[0], drafter="ngram", policy=Both(), graph_size=4, device=harness.device)
    costs = StepCost(MENU, True)
    measure_graphs(rig.executor, costs, rig.captured, time.monotonic())
    assert not list(costs.table.points())


def test_steps_are_measured_for_one_row_and_for_more(harness: Any, case: Any) -> None:
    rig = harness.Rig(case[0], drafter="ngram", policy=Both(), device=harness.device)
    before, costs = state(rig), StepCost(MENU, False)
    measure_steps(rig.executor, costs, time.monotonic() + 600)
    points = {point[:3] for point in costs.table.points()}
    assert points == {(shape, size, 0) for shape in MENU for size in (1, 4)} | {(shape, 1, LONG) for shape in MENU}
    assert same(before, state(rig))
    rig.drafter.flush()
    assert answers(rig, case) == case[3]


def test_steps_end_in_time(harness: Any, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = harness.Rig(case[0], drafter="ngram", policy=Both(), device=harness.device)
    costs = StepCost(MENU, False)
    measure_steps(rig.executor, costs, time.monotonic())
    assert not list(costs.table.points())
    long = Timed(1000.0, 1.0)  # of a large model: there is no time for more rows
    monkeypatch.setattr(measuring, "_run", lambda *step: long)
    measure_steps(rig.executor, costs, time.monotonic() + 600)
    assert {point[:3] for point in costs.table.points()} == {(shape, 1, 0) for shape in MENU}


@pytest.mark.parametrize("wrong", [None, 0, 7, 11, 14, 18, 20])  # of one row, more rows, a long row
def test_a_shape_costs_what_it_takes_behind_its_like(
    wrong: int | None, harness: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind another shape's step the caches are full of other things. One step that seems to take half is not
    believed. wrong: which."""
    rig, ran = harness.Rig(case[0], drafter="ngram", policy=Both(), device=harness.device), list[TreeShape]()

    def run(executor: Any, shape: TreeShape, size: int, context: int) -> Timed:
        changed, seems = ran[-1:] != [shape], 0.5 if len(ran) == wrong else 1.0
        ran.append(shape)
        return Timed(shape.nodes * (1.25 if changed else 1.0) * seems, 1.0)

    monkeypatch.setattr(measuring, "_run", run)
    assert measured(rig) == {(shape, *kind): shape.nodes for shape in MENU for kind in KINDS}


@pytest.mark.parametrize("least", [0.5, 0.7, 2.0])
def test_steps_in_the_most_threads_count(
    least: float, harness: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind some run in half of the threads, and seem to take `least` of what they take in all."""
    rig, ran = harness.Rig(case[0], drafter="ngram", policy=Both(), device=harness.device), list[TreeShape]()
    fewer = {*range(6), 11, 14, 17, 20}  # of ten of one row; then threes of more rows, a long row, more rows again

    def run(executor: Any, shape: TreeShape, size: int, context: int) -> Timed:
        ran.append(shape)
        return Timed(shape.nodes * least, 0.5) if len(ran) - 1 in fewer else Timed(shape.nodes, 1.0)

    monkeypatch.setattr(measuring, "_run", run)
    assert measured(rig) == {(shape, *kind): shape.nodes for shape in MENU for kind in KINDS}
    assert len(ran) == 22


def measured(rig: Any) -> dict[tuple[TreeShape, int, int], float]:
    costs = StepCost(MENU, False)
    measure_steps(rig.executor, costs, time.monotonic() + 600)
    return {point[:3]: point[3] for point in costs.table.points()}


def test_filled_rows_have_slots_of_their_own(harness: Any, case: Any) -> None:
    rig = harness.Rig(case[0], drafter="ngram", policy=Both(), device=harness.device)
    rig.pool.kv[0].fill_(1)
    with filled(rig.executor, 3, LONG, 7, touched=True):
        slots = rig.slots.page_table[:3, : LONG + 7]
        assert slots.unique().numel() == slots.numel() and int(slots.min()) == 1
        assert rig.slots.kv_len.tolist()[:4] == [LONG, LONG, LONG, 0]
        assert not rig.pool.kv[0][slots.flatten()].any()
    assert not rig.slots.kv_len.any() and not rig.slots.page_table.any()


linux_only = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell")


@pytest.mark.timing
@linux_only
def test_two_programs_on_one_processor_wait_for_each_other() -> None:
    """Of the time that passes, what is waited and what is computed are all there is."""
    here = os.sched_getaffinity(0)
    only = min(here)
    spin = f"import os; os.sched_setaffinity(0, [{only}]); print(flush=True)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(0, [only])
        assert other.stdout is not None and other.stdout.readline()
        before, began, computed = measure_costs.delays(), time.perf_counter(), time.thread_time()
        while time.perf_counter() < began + 0.3:
            pass
        waited, passed = max(measure_costs.since(before)), time.perf_counter() - began
        computed = time.thread_time() - computed
    finally:
        os.sched_setaffinity(0, here)
        other.kill()
        other.wait()
        other.stdout.close()
    assert waited > 0.05 and waited + computed == pytest.approx(passed, abs=0.05)


@linux_only
def test_a_thread_that_ends_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others have waited since they began would else seem to be of the step that is measured."""
    listed = os.listdir
    expected = measure_costs.delays()
    monkeypatch.setattr(os, "listdir", lambda path: ["0", *listed(path)])
    assert expected.keys() <= measure_costs.delays().keys()


@linux_only
def test_other_threads_waits_are_none_of_the_callers() -> None:
    """A thread that waits for long is told of when it gets a processor: then it was kept waiting in many steps."""
    assert measure_costs.own_delay() == pytest.approx(measure_costs.delays()[str(threading.get_native_id())], abs=0.05)
    found: list[float] = []
    fresh = threading.Thread(target=lambda: found.append(measure_costs.own_delay()))
    fresh.start()
    fresh.join()
    assert 0 <= found[0] < 0.05


@pytest.mark.parametrize(
    ("waited", "computed", "threads", "left"),
    [
        (0.0, 1.6, (1.0, 1.0), 0.8),  # nothing is reported
        (0.2, 1.2, (1.0, 1.0), 0.6),
        (4.0, 0.0, (1.0, 1.0), 0.1),  # some of the time was the step's own
        (0.0, 0.8, (0.5, 0.5), 0.4),
        (0.0, 1.6, (1.0, 0.5), 0.8),  # they were fewer for a part of it
        (0.0, 1.6, (0.5, 1.0), 0.8),
        (0.6, 1.0, (1.0, 1.0), 0.5),  # the other thread went on
        (4.0, 0.9, (1.0, 0.5), 0.45),  # most of the waiting was before the step
        (4.0, 0.6, (0.5, 0.5), 0.3),
        (4.0, 9.0, (0.5, 0.5), 0.4),  # what else the process computes is none of the step
    ],
)
def test_what_others_took_is_no_price(
    monkeypatch: pytest.MonkeyPatch, waited: float, computed: float, threads: tuple[float, float], left: float
) -> None:
    """Of a step of 0.8 s in two threads; computed: seconds of all threads together."""
    told, all_told = iter([5.0, 5.0 + waited]), iter([3.0, 3.0 + computed])
    monkeypatch.setattr(measure_costs, "own_delay", lambda: next(told))
    monkeypatch.setattr(measure_costs.time, "process_time", lambda: next(all_told))
    result = SimpleNamespace(seconds=0.8, threads=threads[1])
    executor: Any = SimpleNamespace(
        device=SimpleNamespace(active_threads=threads[0], threads=2),
        table=SimpleNamespace(rows=2),
        launch=lambda plan: plan,
        commit=lambda plan: SimpleNamespace(wait=lambda: result),
    )
    found = measure_costs._run(executor, PLAIN, 1, 0)
    assert found.seconds == pytest.approx(left) and found.threads == max(threads)
