"""tools/soak.py for a minute, on a tiny model; `make soak` runs it for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts import script
from tiny_checkpoint import write_checkpoint

from draftwing.utils import free_port

TOOL = Path(__file__).parents[1] / "tools" / "soak.py"


LOG = """\
[2026-01-02 10:00:00] ready
[2026-01-02 10:05:01] prefill batch
[2026-01-02 10:05:59] a request has
    Traceback (most recent call last)
    ValueError: 1
[2026-01-02 10:06:01] decode batch
Exception in thread Thread-1:
  File "a.py", line 1
KeyError: 2
[2026-01-02 10:06:20] decode batch
[2026-01-02 11:00:00] the end
"""


def test_the_log_before_a_bug_is_kept_with_whole_traces() -> None:
    soak = script(TOOL)
    problems, minutes = soak.bugs(LOG)
    assert problems == ["\n".join(LOG.splitlines()[2:5]), "\n".join(LOG.splitlines()[5:9])]
    assert minutes == ["\n".join(LOG.splitlines()[1:9])]
    assert soak.bugs("[2026-01-02 10:00:00] ready") == ([], [])
    assert soak.bugs("no time\nTraceback") == (["no time\nTraceback"], [])


@pytest.mark.parametrize(
    ("megabytes", "seconds", "problems"),
    [
        ((700, 700, 700), 3600, 0),
        ((700, 712, 713), 3600, 0),  # 1.9%
        ((700, 718, 720), 3600, 4),  # since the first third
        ((700, 690, 713), 3600, 0),
        ((851, 873, 921), 1260, 4),
        ((600, 700, 713), 300, 0),  # a shorter one is judged by its last third
        ((600, 700, 729), 300, 0),
        ((600, 700, 760), 300, 4),
    ],
)
def test_memory_may_grow_by_two_percent(megabytes: tuple[int, ...], seconds: float, problems: int) -> None:
    """By as many MB at the ends of the thirds, in equal steps between them, of what is allocated; what is resident is
    100 MB more now and then."""
    soak = script(TOOL)
    points = (megabytes[0], *megabytes)
    rows = []
    for at in range(301):
        third, share = divmod(at / 100, 1)
        low, high = points[int(third)], points[min(int(third) + 1, 3)]
        allocated = int((low + share * (high - low)) * 1e6)
        size = soak.Size(1, allocated + int(at % 7 * 15e6), allocated, 8, 4)
        rows.append((at / 300 * seconds, size, size))
    out = soak.Outcome()
    soak.judge_memory(rows, 0.0, seconds, out)
    assert len(out.problems) == problems, out.problems


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--num-threads", "1"], ["--num-threads", "1"]),
        (["--speculative-algorithm", "SUFFIX", "--num-threads", "1"], ["--num-threads", "1"]),
        (["--speculative-fixed-shape", "--num-threads", "1"], ["--num-threads", "1"]),
        (["--num-threads", "1", "--speculative-num-steps=3", "--speculative-eagle-topk", "2"], ["--num-threads", "1"]),
    ],
)
def test_answers_are_compared_with_those_without_drafts(options: list[str], expected: list[str]) -> None:
    assert script(TOOL).without_drafts(options) == [*expected, "--speculative-algorithm", "none"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("minutes", "clients"), [("1", "3"), ("3", "8")])
def test_a_short_soak(tmp_path: Path, minutes: str, clients: str) -> None:
    """With every fault: slots and rows come back, descriptors and threads stay (of three minutes memory, too), streams
    end, the log has no traceback, a sample of answers is that of a fresh server. Three clients leave most of a core to
    other tests."""
    folder = write_checkpoint(tmp_path / "tiny")
    serve = ["--max-total-tokens", "8192", "--num-threads", "1", "--speculative-algorithm", "SUFFIX"]
    serve += ["--speculative-suffix-capacity", "8192"]  # full by the time that memory is judged
    done = subprocess.run(
        [sys.executable, TOOL, "--model", folder, "--minutes", minutes, "--longest", "60", "--port", str(free_port()),
         "--clients", clients, "--by-kind", "4", "--", *serve],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for event in (
        "engine: ",
        "killed: 1",
        "stopped: 1",
        "stopped for a moment: 1",
        "compared",
        "recordings",
        "schemas",
    ):
        assert event in done.stdout, done.stdout
