"""Runs that are killed go on as if they had not been, and several processes are as one."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import fit_run
from reference.checkpoints import llama_target
from reference.fit_run import config, run

from draftwing.train import fit as fit_module
from draftwing.train.fit import STATE_FILE

pytestmark = pytest.mark.slow

PROGRAM = Path(fit_run.__file__)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return llama_target(0, num_hidden_layers=7).write(tmp_path_factory.mktemp("target"))


def same_run(one: Path, other: Path) -> None:
    """Rows of metrics are equal but for what the clock says."""
    rows = [list(csv.DictReader((out / "metrics.csv").open())) for out in (one, other)]
    for row in rows[0] + rows[1]:
        row.pop("tokens_per_second")
    assert rows[0] == rows[1] and len(rows[0]) > 3


def same_head(one: Any, other: Any) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


class Killed(BaseException):
    pass


@pytest.mark.further(accumulate=1)
@pytest.mark.further(algorithm="EAGLE3")  # the others draw more
@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "DSPARK"])  # EAGLE: with noise; DSPARK: with anchors
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_killed_run_goes_on_as_if_it_had_not_been(algorithm, accumulate, target, tmp_path, monkeypatch):
    """Killed in a step, before, in and after a save, and before the first: bit for bit the run that was not."""
    settings = config(algorithm, accumulate=accumulate)
    whole, report = run(target, tmp_path / "whole", settings, algorithm)
    step, save, replace = torch.optim.AdamW.step, torch.save, fit_module.replace_file
    moments = {"in step 2": (step, 2), "in step 8": (step, 8), "in a save": (save, 2), "after it": (replace, 3)}
    for moment, (killed, count) in moments.items():
        calls = Counter()

        def die(*args: Any, killed: Any = killed, count: int = count, calls: Any = calls, **kw: Any) -> Any:
            calls[killed] += 1
            if calls[killed] == count:
                if killed is save:
                    Path(args[1]).write_bytes(b"half a file")
                raise Killed
            return killed(*args, **kw)

        out = tmp_path / moment
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(torch.optim.AdamW, "step", die if killed is step else step)
            patch.setattr(torch, "save", die if killed is save else save)
            patch.setattr(fit_module, "replace_file", die if killed is replace else replace)
            run(target, out, settings, algorithm)
        assert (out / STATE_FILE).exists() == (moment != "in step 2")
        head, again = run(target, out, settings, algorithm)
        same_head(head, whole)
        same_run(out, tmp_path / "whole")
        assert (again.steps, again.tokens) == (report.steps, report.tokens)
    done, _ = run(target, out, settings, algorithm)  # one that has ended does nothing
    same_head(done, whole)


@pytest.mark.exhaustive  # the test above kills at each moment, in one process
def test_a_process_that_is_killed_goes_on_in_another(target, tmp_path):
    whole, _ = run(target, tmp_path / "whole", config("EAGLE3"))
    out = tmp_path / "killed" / "EAGLE3"
    with subprocess.Popen(
        [sys.executable, PROGRAM, target, out.parent, "0.03", "EAGLE3"],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])}, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        deadline = time.monotonic() + 60
        while not (out / STATE_FILE).exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        _, errors = child.communicate()
    assert child.returncode == -signal.SIGKILL, errors.decode()
    assert not (out / "params.pt").exists()
    head, _ = run(target, out, config("EAGLE3"))
    same_head(head, whole)
    same_run(out, tmp_path / "whole")


@pytest.fixture(scope="module")
def two(target, tmp_path_factory):
    """The folder of runs of both algorithms by two processes, which take long to start."""
    out = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, PROGRAM, target, out, "0", "EAGLE3", "DSPARK"],
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return out


@pytest.mark.exhaustive  # test_command.py trains EAGLE3 in two processes
@pytest.mark.parametrize("algorithm", ["EAGLE3", "DSPARK"])
def test_two_processes_are_one_that_takes_turns(algorithm, target, two, tmp_path):
    alone, _ = run(target, tmp_path, config(algorithm, accumulate=2), algorithm)
    params = torch.load(two / algorithm / "params.pt")
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(params[name], value, rtol=1e-3, atol=1e-4, msg=name)
    first, second = (list(csv.DictReader((out / "metrics.csv").open())) for out in (tmp_path, two / algorithm))
    for one, two in zip(first, second, strict=True):
        assert (one["step"], one["split"]) == (two["step"], two["split"])
        for column in ("loss", "accept_1", *(["gradient_norm"] if one["split"] == "train" else [])):
            assert float(one[column]) == pytest.approx(float(two[column]), rel=1e-3)
