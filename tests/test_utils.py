"""Helpers of notebooks, with a server that needs no model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from draftwing.test.doc_patch import launch_server_cmd
from draftwing.utils import terminate_process, wait_for_server

# Stands for the package in the launched process: it answers every GET with its arguments and one variable.
STAND_IN = """
import http.server, json, os, sys, time
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps([sys.argv[1:], os.environ.get("SGLANG_ENABLE_SPEC_V2")]).encode())
    def log_message(self, *args): pass
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if options.get("--fail"): sys.exit(3)
time.sleep(0.3)
http.server.HTTPServer((options["--host"], int(options["--port"])), Echo).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draftwing").mkdir()
    (tmp_path / "draftwing" / "__init__.py").touch()
    (tmp_path / "draftwing" / "launch_server.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)  # `python -m` looks there first


COMMAND = """
    SGLANG_ENABLE_SPEC_V2=True python3 -m sglang.launch_server --model "Qwen/Qwen2.5 7B" \\
        --host 127.0.0.1 \\
            --log-level warning
"""


def test_a_notebooks_life(stand_in: None) -> None:
    process, port = launch_server_cmd(COMMAND)
    try:
        wait_for_server(f"http://localhost:{port}")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
            argv, variable = json.load(answer)
        assert variable == "True" and "SGLANG_ENABLE_SPEC_V2" not in os.environ
        assert argv == ["--model", "Qwen/Qwen2.5 7B", "--host", "127.0.0.1", "--log-level", "warning",
                        "--port", str(port)]  # fmt: skip
        assert isinstance(process, subprocess.Popen) and process.args[0] == sys.executable  # type: ignore[index]
    finally:
        terminate_process(process)
    assert process.returncode is not None
    terminate_process(process)  # twice does no harm


def test_what_never_answers(stand_in: None) -> None:
    process, port = launch_server_cmd("python -m draftwing.launch_server --fail 1")
    with pytest.raises(RuntimeError, match="exit code 3"):
        wait_for_server(f"http://127.0.0.1:{port}", process=process)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.3 seconds"):
        wait_for_server(f"http://127.0.0.1:{port}", timeout=0.3)
    assert time.monotonic() - began < 5
    with pytest.raises(ValueError, match="expected a command"):
        launch_server_cmd("A=1")


@pytest.mark.slow
def test_a_process_that_ignores_terminate_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline()
    terminate_process(process, timeout=0.3)
    assert process.returncode == -9
