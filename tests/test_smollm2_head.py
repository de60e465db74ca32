"""tools/smollm2_head.sh with a stand-in for `draftwing`: what it starts, in which order, and that a failure ends it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "smollm2_head.sh"
STAND_IN = """#!/usr/bin/env bash
echo "$RANK $CUDA_VISIBLE_DEVICES $*" >> {calls}
[ "$1 $2" != "{pauses}" ] || exec sleep 30
[ "$1 $2" != "{fails}" ] || {{ echo "it says why"; exit 2; }}
while [ $# -gt 0 ]; do [ "$1" != --out ] || [ "${{2%.jsonl}}" = "$2" ] || echo '{{}}' > "$2"; shift; done
"""
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def run(
    folder: Path, fails: str = "", pauses: str = "", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    calls, command = folder / "calls", folder / "draftwing"
    calls.write_text("")
    command.write_text(STAND_IN.format(calls=calls, fails=fails, pauses=pauses))
    command.chmod(0o755)
    given = {**os.environ, "DRAFTWING": str(command), "GPUS": "2", "ENGINES": "2", "OWN": "10", **variables}
    words = ["bash", str(TOOL), str(folder / "run"), "prompts.jsonl"]
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=False, timeout=60)
    return done, calls.read_text().splitlines()


def test_each_engine_writes_and_answers_its_part(tmp_path: Path) -> None:
    done, calls = run(tmp_path)
    assert done.returncode == 0, done.stderr
    own, answers, rest = calls[:4], calls[4:8], calls[8:]
    assert {line.split()[:3][1] + line.split()[0] for line in own} == {"00", "11", "02", "13"}, "two on each GPU"
    assert all("write-prompts" in line and "--count 3 " in line for line in own), "ten are shared by four"
    assert all("train generate" in line and line.count("own-") == 4 for line in answers)
    assert "train fit" in rest[0] and "--minutes 18" in rest[0] and "--gpus 2" in rest[0] and "train eval" in rest[1]
    _, again = run(tmp_path)
    assert not any("write-prompts" in line for line in again), "they are there"


def test_a_stage_that_fails_is_the_last(tmp_path: Path) -> None:
    done, calls = run(tmp_path, fails="train generate")
    assert done.returncode == 1 and "it says why" in done.stdout + done.stderr
    assert not any("train fit" in line for line in calls)


def test_answers_may_take_so_long(tmp_path: Path) -> None:
    """What is there then is trained on."""
    done, calls = run(tmp_path, ANSWERING="1", pauses="train generate")
    assert done.returncode == 0, done.stderr
    assert "train fit" in calls[-2] and "train eval" in calls[-1]


def test_it_begins_where_it_is_told_to(tmp_path: Path) -> None:
    _, calls = run(tmp_path, FIRST="fit", GPUS="0")
    assert [line.split()[-1] for line in calls if "train fit" in line] == ["1"] and len(calls) == 2
    done, calls = run(tmp_path, FIRST="fitt")
    assert done.returncode == 2 and "expected own, generate, fit or eval, found fitt" in done.stderr and not calls
