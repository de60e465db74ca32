"""The README's commands run as they are written, with what an installed draftwing and the default model can do."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import script

ROOT = Path(__file__).parent.parent
runner = script(ROOT / "tools" / "readme_commands.py")
FOUND = runner.examples((ROOT / "README.md").read_text(encoding="utf8"))
PAGES = (ROOT / "docs" / "constrained.md", ROOT / "docs" / "speculative_decoding.md")
ELSEWHERE = [one for page in PAGES for one in runner.examples(page.read_text(encoding="utf8"))]
NOT_RUN = {  # by their first words
    "pip install": "a package index",
    "hf auth": "a network",
    "draftwing serve meta-llama/Llama-3.1-8B-Instruct": "a model of the hub",
    "docker build": "Docker and a network",
    "docker run": "Docker and a network",
    "make serve": "a clone",
    "make test": "a clone",
}


def test_what_is_not_run() -> None:
    """These and no others, each for its reason. tests/test_docs.py looks at their options."""
    left_out = {" ".join(one.words): one.needs for one in FOUND if one.needs}
    assert len(left_out) == len(NOT_RUN)
    for command, reason in left_out.items():
        (expected,) = [NOT_RUN[start] for start in NOT_RUN if command.startswith(start)]
        assert reason == expected, command


@pytest.mark.slow
def test_the_commands_run(smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's order, the server with those after it. Answers end, and the streamed one keeps to its limit."""
    with socket.socket() as sock:
        if sock.connect_ex(("127.0.0.1", 30000)) == 0:
            pytest.skip("another program listens on port 30000, which the commands name")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    outputs: dict[str, str] = {}
    with contextlib.closing(runner.run_all(FOUND, tmp_path)) as outcomes:  # which ends the server
        for outcome in outcomes:
            assert outcome.code == 0, f"{outcome.example.text}\n{outcome.errors}"
            program = "python" if outcome.example.language == "python" else shlex.join(outcome.example.words[:2])
            outputs[program] = outcome.output
            if program == "curl -N":  # the server runs, so what other pages ask is answered, too
                for words in (one.words for one in ELSEWHERE if one.language == "bash" and one.words[0] == "curl"):
                    asked = [*words, "--silent", "--fail-with-body"]
                    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
                    assert done.returncode == 0, done.stdout
    assert list(outputs) == ["draftwing chat", "draftwing serve", "curl -N", "python"]
    assert len(outputs["draftwing chat"].split()) > 3
    events = [line.removeprefix("data: ") for line in outputs["curl -N"].splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    answer: list[Any] = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert answer[-1]["finish_reason"] in ("stop", "length")
    assert sum(bool(choice["delta"].get("content")) for choice in answer) <= 200
    assert float(outputs["python"].split()[-1]) >= 1  # tokens a step
