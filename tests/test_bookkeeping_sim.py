"""The model of the bookkeeping rules holds, and notices when one of them is broken."""

import subprocess
import sys
from pathlib import Path

import pytest

SIM = Path(__file__).parents[1] / "tools" / "bookkeeping_sim.py"


def run(*args):
    return subprocess.run([sys.executable, str(SIM), *args], capture_output=True, text=True)


def test_no_mismatch_and_every_subject_exercised():
    done = run("120")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("rule", ["admission", "permute"])
def test_a_broken_rule_is_noticed(rule):
    assert run("120", "--break", rule).returncode == 1
