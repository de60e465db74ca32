"""What an engine does while there is nothing to compute, or not yet, and that a request ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

from draftwing import LLM
from draftwing.engine.captures import Captures
from draftwing.engine.engine import Engine
from draftwing.engine.graphs import CAPTURE_SHARE
from draftwing.engine.loop import Loop
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams

SECONDS = 20.0  # after which a test gives up


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with LLM(str(write_checkpoint(tmp_path / "tiny")), speculative_algorithm="none", max_total_tokens=1024) as llm:
        yield llm.engine


def submit(engine: Engine, uid: str) -> None:
    engine.submit(GenerationRequest(uid, [1, 2, 3], SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)))


def test_how_fast_memory_is_read_is_measured_once_when_nothing_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def read_rate() -> float:
        measured.append(engine.idle())
        return 1e6

    monkeypatch.setattr(engine.parts.executor.device, "read_rate", read_rate)
    assert engine.stats()["read_rate"] == 0
    with ThreadPoolExecutor(1) as thread:
        for uid in "ab":
            step, until = thread.submit(engine.step, True), time.monotonic() + SECONDS
            while not measured and time.monotonic() < until:
                time.sleep(0.01)
            submit(engine, uid)
            step.result(SECONDS)
            while not engine.idle():
                engine.step()
    assert engine.stats()["read_rate"] == engine.info.read_rate == 1e6 and measured == [True]


def test_the_next_step_is_planned_with_who_comes_while_the_device_is_busy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(engine, "a")
    engine.step()
    monkeypatch.setattr(Loop, "slack", SECONDS)
    started = time.monotonic()
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(engine.step)
        time.sleep(0.1)
        submit(engine, "b")
        step.result(SECONDS)
    sched = engine.parts.sched
    assert len(sched.running) + len(sched.waiting) == 2 and time.monotonic() - started < SECONDS / 2


@pytest.mark.slow
def test_captures_that_steps_want_leave_time_for_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of 20 ms is not followed by another one in the next 0.6 s, though there is one that is wanted."""
    captured: list[float] = []

    def capture(captures: Captures) -> None:
        time.sleep(0.02)
        captured.append(time.monotonic())

    monkeypatch.setattr(Captures, "wanted", True)
    monkeypatch.setattr(Captures, "capture_next", capture)
    params = SamplingParams(max_new_tokens=600, temperature=0.0, ignore_eos=True)
    engine.submit(GenerationRequest("a", [1, 2, 3], params))
    until = time.monotonic() + SECONDS
    while len(captured) < 2 and time.monotonic() < until:
        if engine.idle():
            engine.submit(GenerationRequest("a", [1, 2, 3], params))
        engine.step()
    assert captured[1] - captured[0] >= 0.02 / CAPTURE_SHARE
