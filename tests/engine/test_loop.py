"""When the next step is planned, on a clock that only the device and the host move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftwing.config.trees import PLAIN, TreeShape
from draftwing.engine import loop as loop_module
from draftwing.engine.loop import RECENT, Loop, PageTableCheck
from draftwing.errors import DraftwingError


class Rig:
    """A device that takes `seconds` for each step, which is expected to take `expected`; the host takes `host` to plan
    and launch one. Stands in for the clock, the scheduler and the executor."""

    needs_results, idle, has_prompts = False, False, False
    tower_schedule = SimpleNamespace(next=None)
    unseen = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, host: float, expected: float) -> None:
        self.now, self.taken, self.host, self.expected = 0.0, seconds, host, expected
        self.free = self.lost = 0.0  # when the device has nothing more to do, and for how long it had nothing
        self.planned: list[float] = []  # how far the step in flight had come
        self.kv = SimpleNamespace(take_quarantined=lambda: None)
        monkeypatch.setattr(loop_module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.loop = Loop(self, self, True, lambda plan, result: None)  # type: ignore[arg-type]

    def run(self, turns: int) -> None:
        self.planned.clear()
        self.lost = 0.0
        for _ in range(turns):
            self.now += max(self.loop.slack, 0.0)
            self.loop.turn()

    # -- the scheduler ----------------------------------------------------------------------------------------------

    def plan(self) -> Any:
        self.planned.append(1 - (self.free - self.now) / self.taken)
        part = SimpleNamespace(chunks=[1] if self.has_prompts else [])
        return SimpleNamespace(parts=(part,))

    def seconds(self, plan: Any) -> float:
        return self.expected

    def guidance(self, part: Any) -> None: ...

    # -- the executor -----------------------------------------------------------------------------------------------

    def launch(self, plan: Any, guidance: None) -> Any:
        self.now += self.host
        self.lost += max(self.now - self.free, 0.0)
        self.free = max(self.now, self.free) + self.taken
        return plan

    def commit(self, plan: Any, *_: Any) -> Any:
        """Of both."""
        end = self.free

        def wait() -> None:
            self.now = max(self.now, end)

        flying = SimpleNamespace(plan=plan, wait=wait)
        flying.parts = (flying,)
        return flying


def test_a_step_is_planned_late_where_the_device_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.02, 0.001, 0.02)
    rig.run(RECENT + 2)
    rig.run(100)
    assert all(0.6 < at < 0.9 for at in rig.planned)
    assert not rig.lost


def test_a_prompt_that_is_launched_for_longer_does_not_hurry_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.02, 0.001, 0.02)
    rig.run(RECENT)
    for _ in range(4):
        rig.has_prompts, rig.host = True, 0.012
        rig.run(3)
        assert not rig.lost
        rig.has_prompts, rig.host = False, 0.001
        rig.run(3)
        assert rig.planned[-1] > 0.6


def test_nothing_waits_where_the_host_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.002, 0.003, 0.02)
    rig.run(RECENT + 2)
    rig.run(100)
    assert rig.lost == pytest.approx(100 * (0.003 - 0.002))


def test_expectations_that_are_too_long_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.01, 0.001, 0.03)
    rig.run(RECENT + 2)
    rig.run(20 * RECENT)
    assert rig.lost <= 21 * (0.8 * 0.03 - 0.01 + 0.001)


def test_nothing_is_expected_of_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, 0.01, 0.001, 0.0)
    rig.run(RECENT + 2)
    rig.run(10)
    assert all(at < 0.2 for at in rig.planned)


def loaded(h: Any, **how: Any) -> Any:
    """A rig with three requests."""
    rig = h.Rig(h.tiny_model(), **how)
    for i in range(3):
        rig.submit(str(i), [i + 1, 5, 6, 5, 6, 5], h.greedy(40))
    return rig


@pytest.mark.parametrize("harness", ["cpu"], indirect=True, scope="session")
@pytest.mark.parametrize("shape", [PLAIN, TreeShape(4, 3, 11)])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_row_that_was_permuted_otherwise_is_found(harness: Any, shape: TreeShape, lag: int) -> None:
    rig = loaded(harness, shapes=(shape,), drafter=None if shape == PLAIN else "ngram", lag=lag)

    def swap(turn: int) -> None:
        if turn == 12:
            row = min(rig.sched.kv.by_row)
            rig.slots.page_table[row, [2, 3]] = rig.slots.page_table[row, [3, 2]]

    with pytest.raises(DraftwingError, match=r"expected slot .* at position 2"):
        rig.run(between=swap)


@pytest.mark.parametrize("harness", ["cpu"], indirect=True, scope="session")
def test_rows_take_turns_and_most_steps_copy_nothing(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = loaded(harness, lag=1)
    rig.page_table_check = PageTableCheck(rig.sched, rig.slots, every=5)
    copied: list[str] = []
    compare = PageTableCheck._compare
    monkeypatch.setattr(PageTableCheck, "_compare", lambda self, copy: copied.append(copy.uid) or compare(self, copy))
    rig.run()
    assert {"0", "1", "2"} == set(copied) and 5 < len(copied) < 12
