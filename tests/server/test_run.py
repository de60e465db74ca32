"""How a server begins and ends as a process: its standard files, its signals, what is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_process import engines
from tiny_checkpoint import write_checkpoint

from draftwing.server.run import terminable
from draftwing.utils import free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@contextlib.contextmanager
def served(model: Path, port: int, files: str = "", before: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """files: redirections of a shell.  before: what it does first."""
    command = [sys.executable, "-m", "draftwing.launch_server", "--model", str(model), "--port", str(port)]
    command += ["--num-threads", "1", "--max-total-tokens", "4096", "--drain-timeout", "20"]
    process = subprocess.Popen(["bash", "-c", f"{before} exec {shlex.join(command)} {files}"])
    try:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                    break
            time.sleep(0.1)
        assert process.poll() is None, f"it ended with {process.returncode}"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.further(files=["2>&-", ">/dev/full 2>&1", "2>/dev/full"])
@pytest.mark.parametrize("files", ["2>/dev/full", "2>&-", ">/dev/full 2>&1", "<&- >&- 2>&-"])
def test_a_server_begins_whatever_becomes_of_what_it_says(model: Path, files: str) -> None:
    port = free_port()
    with served(model, port, files) as process:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 3}}
        assert httpx.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=60).status_code == 200
        process.terminate()
        assert process.wait(30) == 0


def test_answers_that_run_come_to_their_end(model: Path) -> None:
    """When a terminal is closed its shell sends SIGHUP once more."""
    port = free_port()
    with served(model, port) as process:
        sampling = {"max_new_tokens": 300, "ignore_eos": True}
        events: list[str] = []
        begun = threading.Event()

        def ask() -> None:
            body = {"text": "a", "sampling_params": sampling, "stream": True}
            with httpx.stream("POST", f"http://127.0.0.1:{port}/generate", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    events.extend([line] if line else [])
                    begun.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(60)
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        asking.join(60)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["meta_info"]["completion_tokens"] == 300
        assert process.wait(30) == 0


def test_an_engine_that_is_stopped_does_not_outlive_its_server(model: Path) -> None:
    with served(model, free_port()) as process:
        (engine,) = engines(process.pid)
        os.kill(engine, signal.SIGSTOP)
        process.kill()
        process.wait()
        end = time.monotonic() + 10
        while Path(f"/proc/{engine}").exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                    return  # nobody has waited for it
            time.sleep(0.02)
        assert not Path(f"/proc/{engine}").exists()


def test_a_server_under_nohup_stays(model: Path) -> None:
    """Also where nobody reads what it says."""
    port = free_port()
    with served(model, port, "2> >(exec true)", "trap '' HUP;") as process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """As Python has it; it is ignored where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_whatever_runs(ctrl_c: None, number: int) -> None:
    """Python 3.11 makes a RuntimeError of what is raised in `__set_name__`; a library may raise its own error after it
    caught everything."""

    class Named:
        def __set_name__(self, owner: object, name: str) -> None:
            signal.raise_signal(number)

    def caught() -> None:
        try:
            signal.raise_signal(number)
        except BaseException:
            raise OSError("interrupted") from None

    before = signal.getsignal(number)
    for block in (lambda: type("Owner", (), {"named": Named()}), caught):
        with pytest.raises((KeyboardInterrupt, SystemExit)) as ended, terminable():
            block()
        assert isinstance(ended.value, KeyboardInterrupt) == (number == signal.SIGINT)
        assert number == signal.SIGINT or ended.value.code == 128 + number
    assert signal.getsignal(number) is before
    with pytest.raises(ValueError), terminable():
        raise ValueError("no signal")
