"""How long this process waited for a processor."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwing.core import PLAIN
from draftwing.engine.startup import measure_costs, quiet

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
        before, began, computed = quiet.delays(), time.perf_counter(), time.thread_time()
        while time.perf_counter() < began + 0.3:
            pass
        waited, passed = max(quiet.since(before)), time.perf_counter() - began
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
    expected = quiet.delays()
    monkeypatch.setattr(os, "listdir", lambda path: ["0", *listed(path)])
    assert expected.keys() <= quiet.delays().keys()


@linux_only
def test_other_threads_waits_are_none_of_the_callers() -> None:
    """A thread that waits for long is told of when it gets a processor: then it was kept waiting in many steps."""
    assert quiet.own_delay() == pytest.approx(quiet.delays()[str(threading.get_native_id())], abs=0.05)
    found: list[float] = []
    fresh = threading.Thread(target=lambda: found.append(quiet.own_delay()))
    fresh.start()
    fresh.join()
    assert 0 <= found[0] < 0.05


@pytest.mark.parametrize(
    ("waited", "threads", "left"),
    [
        (0.0, (1.0, 1.0), 0.8),  # nothing is reported
        (0.2, (1.0, 1.0), 0.6),
        (4.0, (1.0, 1.0), 0.1),  # some of the time was the step's own
        (0.0, (0.5, 0.5), 0.4),
        (0.0, (1.0, 0.5), 0.8),  # they were fewer for a part of it
        (0.0, (0.5, 1.0), 0.8),
    ],
)
def test_what_others_took_is_no_price(
    monkeypatch: pytest.MonkeyPatch, waited: float, threads: tuple[float, float], left: float
) -> None:
    told = iter([5.0, 5.0 + waited])
    monkeypatch.setattr(measure_costs, "own_delay", lambda: next(told))
    monkeypatch.setattr(quiet, "own_delay", lambda: next(told))
    result = SimpleNamespace(seconds=0.8, threads=threads[1])
    executor: Any = SimpleNamespace(
        device=SimpleNamespace(active_threads=threads[0]),
        table=SimpleNamespace(rows=2),
        launch=lambda plan: plan,
        commit=lambda plan: SimpleNamespace(wait=lambda: result),
    )
    found = measure_costs._run(executor, PLAIN, 1, 0)
    assert found.seconds == pytest.approx(left) and found.threads == max(threads)
