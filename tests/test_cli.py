"""The command line, from --help to a server that answers and drains."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from draftwing.cli import main

SERVER = """
import sys
sys.path.insert(0, {folder!r})
import draftwing.engine.engine as home
from fake_engine import FakeEngine
home.Engine = FakeEngine
from draftwing.cli import main
sys.exit(main(["serve", "--port", "0", "--random_seed=5"]))
"""


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["serve", "--help"])
    assert info.value.code == 0
    text = capsys.readouterr().out
    for part in ("model:", "server:", "memory and scheduling:", "speculation:", "--speculative-ngram-capacity"):
        assert part in text
    assert main([]) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--speculative-algorithm", "EAGLE"], "EAGLE is not in this version"),
        (["--speculative_algorithm", "NGRAM", "--speculative_num_draft_tokens", "1"], "at least 2"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--host", "no such host"], "is not an address"),
    ],
)
def test_errors_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("draftwing: error: ") and message in error and "Traceback" not in error


def test_unknown_and_abbreviated_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--bogus", "--spec"):
        with pytest.raises(SystemExit) as info:
            main(["serve", flag, "1"])
        assert info.value.code == 2 and flag in capsys.readouterr().err


def test_a_port_in_use_is_known_before_weights_load(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # Loading this model would fail with another message.
        assert main(["serve", "--port", str(port), "--model", "/no/such/model"]) == 2
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["draftwing", "draftwing.launch_server"])
def test_modules_are_the_command(module: str) -> None:
    argv = ["serve"] if module == "draftwing" else []
    run = subprocess.run(
        [sys.executable, "-m", module, *argv, "--port", "-1"], capture_output=True, text=True, timeout=30
    )
    assert run.returncode == 2 and run.stderr == "draftwing: error: port must be at least 0; found -1\n"


def test_serve_says_where_it_is_answers_and_ends() -> None:
    code = SERVER.format(folder=str(Path(__file__).parent / "server"))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        log = []
        for line in process.stderr:
            log.append(line)
            if "try: curl" in line:
                break
        ready = next((line for line in log if "ready: " in line), None)
        assert ready is not None, "".join(log)
        url = ready.split("ready: ")[1].strip()
        assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
        body = line.split("-d '")[1].rstrip().removesuffix("'")  # what the log says to try
        request = urllib.request.Request(f"{url}/chat/completions", body.encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            assert json.load(response)["choices"][0]["message"]["content"] == "user:Hello\n"
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(15) in (0, -signal.SIGTERM)  # uvicorn raises the signal again once it has drained
    finally:
        process.kill()
        process.wait()
