"""The command line, from --help to a server that answers and drains."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from engine_process import engines

import draftwing
from draftwing.cli.main import main
from draftwing.utils import free_port, wait_for_server

# The real command, but for the model: no weights, a tokenizer of bytes, and the worker of fake_engine.py.
# A test runner in the background hands an ignored SIGINT on to its children.
SERVER = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from functools import partial
from pathlib import Path
sys.path[:0] = {folders!r}
import draftwing.server.run as run
import draftwing.text.tokenizer as tokenizer
from fake_engine import byte_tokenizer
run.EngineLink = partial(run.EngineLink, module={worker!r})
run.resolve_model = lambda *args, **options: Path()
tokenizer.load_tokenizer = lambda *args: byte_tokenizer()
from draftwing.cli.main import main
sys.exit(main(["serve", "--random_seed=5", "--speculative-algorithm=none", *{argv!r}]))
"""


def script(*argv: str, worker: str = "fake_engine") -> str:
    tests = Path(__file__).parents[1]
    argv = argv if "--port" in argv else ("--port", "0", *argv)
    return SERVER.format(folders=[str(tests / "server"), str(tests)], argv=list(argv), worker=worker)


ABSENT = "/no/such/model"


@pytest.mark.parametrize("command", ["serve", "chat", "run", "bench"])
def test_a_model_may_stand_without_its_option(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (
        [ABSENT],
        ["--port", "0", ABSENT],
        [ABSENT, "--model", ABSENT],
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("a question"))
        assert main([command, *argv]) == 2
        assert "does not exist" in capsys.readouterr().err
    assert main([command, "a", "--model", "b"]) == 2
    assert "found 'a' and 'b'" in capsys.readouterr().err


def test_a_port_in_use_is_known_before_weights_load(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # Loading this model would fail with another message.
        assert main(["serve", "--port", str(port), "--model", ABSENT]) == 2
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err


# Ctrl-C when some module of the command's is looked for: at once, or from where Python drops what is raised.
INTERRUPTED = """
import runpy, signal, sys, time, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)

class Target:
    pass

class Finder:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            if not {dropped!r}:
                signal.raise_signal(signal.SIGINT)
            one = Target()
            reference = weakref.ref(one, lambda _: signal.raise_signal(signal.SIGINT))
            del one
            time.sleep(10)

sys.meta_path.insert(0, Finder())
sys.argv = ["draftwing", "list"]
runpy.run_module({module!r}, run_name="__main__")
"""


@pytest.mark.parametrize("module", ["draftwing", "draftwing.launch_server"])
@pytest.mark.parametrize("name", ["draftwing.cli.main", "draftwing.config.options", "draftwing.train.settings"])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.covering
def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_word(module: str, name: str, dropped: bool) -> None:
    code = INTERRUPTED.format(module=module, name=name, dropped=dropped)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["draftwing", "draftwing.launch_server"])
def test_modules_are_the_command(module: str) -> None:
    argv = ["serve"] if module == "draftwing" else []
    run = subprocess.run(
        [sys.executable, "-m", module, *argv, "--port", "-1"], capture_output=True, text=True, timeout=30
    )
    assert run.returncode == 2 and run.stderr == "draftwing: error: --port must be at least 0; found -1\n"


def logged(process: subprocess.Popen[str], last: str) -> list[str]:
    """What it logs, up to the line with `last` in it or, without one, to its end."""
    assert process.stderr is not None
    log = [""]
    for line in process.stderr:
        log.append(line)
        if last in line:
            break
    return log


@pytest.mark.slow
def test_serve_says_where_it_is_answers_and_ends_by_ctrl_c() -> None:
    """The key is in no line of the log."""
    key = "it's $secret"  # which a shell has to quote
    code = script("--api-key", key)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        log = logged(process, "OpenAI API: ")
        (engine,) = engines(process.pid)
        first, *_, page, last = log[1:]
        assert f"draftwing {draftwing.__version__}: model smollm2, device auto" in first
        url = last.split()[-1]
        assert url.startswith("http://127.0.0.1:") and url == f"{page.split()[-1]}/v1"
        assert "secret" not in "".join(log)
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]})
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/chat/completions", body.encode(), headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            assert json.load(response)["choices"][0]["message"]["content"] == "user:Hello\n"
        maps = Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text(), "it takes 2 s, and 200 MB"
        for path in ("health", "readiness", "health_generate", "metrics", "metrics?x=1"):
            urllib.request.urlopen(urllib.request.Request(f"{url[:-3]}/{path}", headers=headers), timeout=10).close()
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        (line,) = process.stderr.read().splitlines()  # of the one request that is none of a probe
        assert '"POST /v1/chat/completions HTTP/1.1" 200' in line
        assert process.wait(60) == 130 and gone(engine)
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(*argv: str, pause: float = 0.0005, deaths: int = 5) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with a fake engine, whose steps take `pause` seconds, and its URL. Afterwards neither of them is left.
    After so many `deaths` and one more the engine is not replaced.

    A long pause is for answers that must not be complete before the test goes on, however busy the machine is.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", f"import draftwing.server.supervision as s; s.DEATHS = {deaths}\n" + script(*argv)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "FAKE_ENGINE_PAUSE": str(pause)},
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "OpenAI API: " in line:
                break
        yield process, line.split()[-1].removesuffix("/v1")
    finally:
        process.kill()
        process.communicate()


def gone(pid: int, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while (there := alive(pid)) and time.monotonic() < end:
        time.sleep(0.01)
    return not there


def alive(pid: int) -> bool:
    """A process whose parent is gone may wait for ever to be reaped where process 1 does not care: that counts not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Streamed(threading.Thread):
    """A client of an answer that takes a while. `text`: what came until the stream ended; `error`: how it broke."""

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.body = {"prompt": "abc", "ignore_eos": True, "max_tokens": tokens, "stream": True}
        self.url, self.text, self.began = url, "", threading.Event()
        self.error: Exception | None = None
        self.start()
        assert self.began.wait(30)

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=30) as response:
                for part in response.iter_text():
                    self.text += part
                    self.began.set()
        except httpx.HTTPError as error:
            self.error = error


@pytest.mark.slow
@pytest.mark.further(number=signal.SIGTERM)  # with which other servers here end, too
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_running_requests_end(hangups: None, number: int) -> None:
    """When a terminal is closed its shell sends SIGHUP once more."""
    with serving(pause=0.001) as (process, url):
        (engine,) = engines(process.pid)
        client = Streamed(url, 1500)
        process.send_signal(number)
        if number == signal.SIGHUP:
            assert "are running" in logged(process, "they have")[-1]  # two at once would be one
            process.send_signal(number)
        client.join(30)
        assert process.wait(60) == 0 and gone(engine)
    assert '"finish_reason":"length"' in client.text and client.text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
def test_a_signal_reads_keys_again_while_an_answer_runs(hangups: None, tmp_path: Path) -> None:
    """A server with a file of keys ends by SIGTERM; wrong keys change nothing."""
    file = tmp_path / "keys.toml"
    file.write_text("[a]\nkey = 'one'")
    ask = lambda url, key: httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code  # noqa: E731
    with serving("--api-key-file", str(file), pause=0.001) as (process, url):
        for text, said, statuses in (
            ("[a]\nkey = 'two'", "changed: a", (401, 200)), ("[a", "not valid TOML", (401, 200)),
            ("[a]\nkey = 'one'\n[b]\nkey = 'two'", "new: b; changed: a", (200, 200)),
        ):  # fmt: skip
            file.write_text(text)
            process.send_signal(signal.SIGHUP)
            assert said in logged(process, "keys were read again")[-1]
            assert (ask(url, "one"), ask(url, "two")) == statuses
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_the_drain_ends_although_the_engine_is_slow() -> None:
    """Neither a stream nor an answer waits for the end of a step, which lasts longer than the connections are given
    after the drain."""
    with serving("--drain-timeout", "0.5", pause=4) as (process, url), ThreadPoolExecutor() as pool:
        client = Streamed(url, 1900)
        body = client.body | {"stream": False}
        whole = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        end = time.monotonic() + 60
        with httpx.stream("GET", f"{url}/ui/engine", timeout=30) as looks:
            for line in looks.iter_lines():
                if '"unfinished":2' in line:
                    break
                assert time.monotonic() < end, line
        process.send_signal(signal.SIGTERM)
        client.join(30)
        answer = whole.result()
        _, log = process.communicate(timeout=30)
        assert process.returncode == 0
    assert '"finish_reason":"abort"' in client.text and client.text.endswith("data: [DONE]\n\n")
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert "Traceback" not in log and "Error" not in log


@pytest.mark.slow
def test_the_second_signal_ends_at_once() -> None:
    with serving(pause=0.05) as (process, url):
        (engine,) = engines(process.pid)
        client = Streamed(url, 1900)
        process.send_signal(signal.SIGTERM)
        assert "are running" in logged(process, "they have")[-1]  # two at once would be one
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM and gone(engine)  # the answer takes 95 s
        client.join(30)
    assert client.error is not None


@pytest.mark.slow
@pytest.mark.further(files=["2>&-", ">/dev/full 2>&1", "2>/dev/full", "2> >(exec true)"])
@pytest.mark.parametrize("files", ["2>/dev/full", "2>&-", ">/dev/full 2>&1", "2> >(exec true)", "<&- >&- 2>&-"])
def test_a_server_under_nohup_stays_whatever_becomes_of_what_it_says(files: str) -> None:
    """Started by a shell with these redirections."""
    port = free_port()
    command, url = shlex.join([sys.executable, "-c", script("--port", str(port))]), f"http://127.0.0.1:{port}"
    process = subprocess.Popen(["bash", "-c", f"trap '' HUP; exec {command} {files}"])
    try:
        wait_for_server(url, timeout=60, process=process)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert httpx.post(f"{url}/generate", json={"text": "ab"}, timeout=60).json()["text"] == "ab"
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_server_ends_when_its_engine_died_too_often() -> None:
    with serving(pause=0.05, deaths=1) as (process, url):
        for deaths in (1, 2):
            (engine,) = engines(process.pid)
            client = Streamed(url, 1900)
            os.kill(engine, signal.SIGKILL)
            client.join(30)
            assert "killed by SIGKILL" in client.text and client.text.endswith("data: [DONE]\n\n")
            assert ("it is not restarted" in client.text) == (deaths == 2)
            end = time.monotonic() + 60
            while deaths == 1 and httpx.get(f"{url}/health").status_code != 200:
                assert time.monotonic() < end
                time.sleep(0.02)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 1
    assert "is not restarted again: the server ends" in log and "Traceback" not in log


@pytest.mark.slow
def test_ctrl_c_while_the_engine_loads() -> None:
    code = script(worker="endless_start")
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        end = time.monotonic() + 60
        while not (found := engines(process.pid)) and time.monotonic() < end:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 130, log
        assert gone(found[0]) and "Traceback" not in log
    finally:
        process.kill()
        process.wait()
