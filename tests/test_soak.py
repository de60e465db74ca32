"""tools/soak.py for two minutes, on a tiny model; `make soak` runs it for longer."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoint import write_checkpoint

TOOL = Path(__file__).parents[1] / "tools" / "soak.py"


@pytest.mark.slow
@pytest.mark.parametrize("clients", [3, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_a_short_soak(tmp_path: Path, clients: int) -> None:
    """With every fault: slots and rows come back, memory stays, streams end, the log has no traceback, a sample of
    answers is that of a fresh server. Three clients leave most of a core to the tests beside it."""
    folder = write_checkpoint(tmp_path / "tiny")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    serve = ["--max-total-tokens", "8192", "--num-threads", "1", "--speculative-algorithm", "SUFFIX"]
    serve += ["--speculative-suffix-capacity", "8192"]  # full by the time that memory is judged
    done = subprocess.run(
        [sys.executable, TOOL, "--model", folder, "--minutes", "2", "--longest", "60", "--port", str(port),
         "--clients", str(clients), "--", *serve],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for event in ("engine: ", "killed: 1", "stopped: 1", "stopped for a moment: 1", "compared"):
        assert event in done.stdout, done.stdout
