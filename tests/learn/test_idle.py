"""The process that trains in idle time: when it runs, and what is left of it when it ends, however it does."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from draftwing.learn import idle
from draftwing.learn.history import HeadHistory
from draftwing.learn.idle import KILLS, NEW, RETRY_SECONDS, IdleTraining
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.machine import lacks_memory

IDLE = 5.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def count(training: IdleTraining) -> int:
    with suppress(OSError, ValueError):  # between two of its writes
        return int((training.out / "count").read_text())
    return 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def training(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleTraining]:
    monkeypatch.setattr(idle, "_MODULE", "idle_stub")
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    made = IdleTraining(tmp_path, ["--algorithm", "EAGLE3"], 1 << 33, IDLE, clock)
    yield made
    made.close()


def add(folder: Path, first: int, number: int) -> None:
    store = TrafficStore(folder, clock=lambda: 0.0)
    for at in range(first, first + number):
        assert store.add(Exchange(float(at), "a", None, [at, 1], [at, 2, 3, 4, 5], 0.0))
    store.close()


def test_it_stands_still_as_soon_as_there_is_a_request(training: IdleTraining, clock: Clock) -> None:
    training.start("", ["--init-head", "parent"])
    until(lambda: count(training) > 2)
    assert training.active
    clock.now += 100
    training.busy()
    assert not training.active
    until(lambda: state(training) == "T")
    seen = count(training)
    clock.now += IDLE - 1
    assert not training.look() and state(training) == "T"
    training.busy()
    clock.now += IDLE - 1
    assert not training.look() and state(training) == "T" and count(training) == seen
    clock.now += 1
    assert not training.look() and training.active
    until(lambda: count(training) > seen + 2)


def state(training: IdleTraining) -> str:
    assert training._process is not None
    return Path(f"/proc/{training._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def end(training: IdleTraining) -> bool:
    """Looks until the process has ended; returns what the last look said."""
    assert training._process is not None
    training._process.wait(20)
    found = training.look()
    training.tidy()
    return found


def test_a_run_that_is_complete_leaves_nothing_of_what_clients_sent(training: IdleTraining) -> None:
    training.start("", ["--init-head", "parent"])
    until(lambda: count(training) > 0)
    assert stat.S_IMODE(training.out.stat().st_mode) == 0o700, "whoever may read the folder"
    words = (training.out / "train.json").read_text()
    assert f"--from {training.folder} --out {training.out} --algorithm EAGLE3 --init-head parent" in words
    (training.out / "end").write_text("0")
    assert end(training) and not training.out.exists() and not training.active


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGRTMIN + 3, "failed"])
def test_a_run_that_was_killed_goes_on_and_one_that_failed_does_not(
    training: IdleTraining, clock: Clock, how: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    training.start("", ["--init-head", "parent"])
    until(lambda: count(training) > 0)
    if isinstance(how, int):
        assert training._process is not None
        training._process.send_signal(how)
    else:
        (training.out / "end").write_text("2")
    assert not end(training)
    assert (
        f"{'exit code 2' if how == 'failed' else f'signal {int(how)}'}; its messages are above. It may take 8,590 MB"
        in caplog.text
    )
    clock.now += IDLE
    assert not training.due(), "not at once"
    clock.now += RETRY_SECONDS
    assert training.due() and training.left() == (None if how == "failed" else "")
    assert training.out.exists() == (how != "failed")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT])
def test_a_run_that_is_killed_again_and_again_is_in_nobodys_way(
    training: IdleTraining, clock: Clock, how: signal.Signals
) -> None:
    """What finds no memory may be killed each time, and heads of others wait. The next run may be killed as often."""
    left = []
    for _ in range(KILLS + 2):
        training.start("", ["--init-head", "parent"])
        until(lambda: count(training) > 0)
        assert training._process is not None
        training._process.send_signal(how)
        assert not end(training)
        clock.now += IDLE + RETRY_SECONDS
        assert training.due()
        left.append(training.left())
    assert left == [*[""] * (KILLS - 1), None, "", ""]


def test_another_head_is_trained_when_enough_is_new(training: IdleTraining, clock: Clock, tmp_path: Path) -> None:
    assert not training.due(), "not idle for long enough"
    clock.now += IDLE
    assert training.due() and training.left() is None
    assert not training.due(), "looked a moment ago"
    add(tmp_path, 1, NEW - 1)
    assert training.next([""]) is None
    add(tmp_path, NEW, 1)
    assert training.next([""]) == ""
    head = tmp_path / "made"
    head.mkdir()
    (head / "config.json").write_text("{}")
    HeadHistory(tmp_path / "heads").add(head, {"data": {"until": 10.0}})
    assert training.next([""]) is None
    add(tmp_path, NEW + 1, 9)
    assert training.next([""]) == ""


@pytest.mark.slow
def test_it_gets_what_others_leave(tmp_path: Path) -> None:
    training = IdleTraining(tmp_path, [], 3 << 30)
    training.start("", ["--init-head", "parent"])
    assert training._process is not None
    pid = training._process.pid
    try:
        until(lambda: resource.prlimit(pid, resource.RLIMIT_DATA) == (3 << 30, 3 << 30))
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert os.sched_getscheduler(pid) in (os.SCHED_IDLE, os.SCHED_OTHER)
    finally:
        training.close()


def test_nothing_of_a_run_is_left_when_a_clients_traffic_is_deleted(tmp_path: Path) -> None:
    add(tmp_path, 1, 3)
    run = tmp_path / "training" / "features"
    run.mkdir(parents=True)
    (run / "shard").write_text("hidden states")
    store = TrafficStore(tmp_path, clock=lambda: 0.0)
    assert store.delete("a") == 3
    store.close()
    assert not run.parent.exists()


@pytest.mark.parametrize("megabytes", [1, 100, 200, 399])
def test_too_little_memory_is_said_in_a_sentence(tmp_path: Path, megabytes: int) -> None:
    limit = str(megabytes * 10**6)
    words = ["train", "--from", str(tmp_path), "--out", str(tmp_path / "out"), "--model", "smollm2"]
    found = subprocess.run(
        [sys.executable, "-P", "-m", "draftwing.learn.low_priority", str(os.getpid()), limit, *words],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert f"training needs more than the {megabytes} MB that it may take" in found.stderr


def test_other_faults_are_not_taken_for_a_lack_of_memory() -> None:
    assert not lacks_memory(ValueError("expected a head")) and lacks_memory(MemoryError())
    assert lacks_memory(SystemError("error return without exception set"))
    try:
        try:
            raise RuntimeError("can't start new thread")
        except RuntimeError as error:
            raise OSError("the loader has ended") from error
    except OSError as error:
        assert lacks_memory(error)


def test_heads_take_turns(training: IdleTraining, clock: Clock, tmp_path: Path) -> None:
    """Who has waited longest comes first, also where a run has left no head."""
    store = TrafficStore(tmp_path, clock=lambda: 0.0)
    for at, adapter in itertools.product(range(1, NEW + 1), ("", "d1", "d2")):
        assert store.add(Exchange(float(at), "a", None, [at, 1], [at, 2, 3, 4, 5], 0.0, adapter))
    store.close()
    seen = []
    for _ in range(7):
        whose = training.next(["", "d1", "d2"])
        assert whose is not None
        seen.append(whose)
        training.start(whose, ["--adapter", whose] if whose else [])
        assert training.whose == whose
        clock.now += 10
        training.drop()
        assert training.whose is None and not training.out.exists()
    assert sorted(seen[:3]) == ["", "d1", "d2"] and seen[3:6] == seen[:3] and seen[6] == seen[0]
    made = tmp_path / "made"
    made.mkdir()
    HeadHistory(tmp_path / "heads").add(made, {"adapter": "d1", "data": {"until": 1000.0}})
    assert {training.next([one]) for one in ("", "d1", "d2", "d3")} == {"", "d2", None}


def test_a_run_that_is_left_says_whose_it_is(training: IdleTraining) -> None:
    assert training.left() is None
    training.out.mkdir()
    for content, expected in (('{"adapter_digest": "d1"}', "d1"), ("{}", ""), ("[]", ""), ("{", "")):
        (training.out / "train.json").write_text(content)
        assert training.left() == expected, content
