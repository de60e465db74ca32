"""What the log says while a run goes on: as metrics.csv has it, and how long it still takes."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from draftwing.train.progress import Progress, Remaining, duration


def test_the_log_has_the_loss_per_token_of_the_csv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(tmp_path, 40, 0, [], True)
    with caplog.at_level("INFO", "draftwing.train"):
        for step, loss in ((20, 9.25), (40, 6.5)):
            row = {"token_loss": loss, "loss": 4 * loss, "accept_length": 1.25, "accept_1": 0.25}
            progress.add({"step": step, "split": "train", **row})
    lines = [record.getMessage() for record in caplog.records]
    shown = [re.search(r"train: token_loss ([0-9.]+), loss ([0-9.]+)", line) for line in lines]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    found = [tuple(map(float, match.groups())) for match in shown if match]
    assert found == [(float(row["token_loss"]), float(row["loss"])) for row in rows] == [(9.25, 37), (6.5, 26)]
    assert ["left" in line for line in lines] == [True, False]


def test_time_that_is_left(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    remaining = Remaining("work", 100, lambda: now[0])
    with caplog.at_level("INFO", "draftwing.train"):
        for done in range(1, 101):
            now[0] += 6.0
            remaining.update(done)
    said = [record.getMessage() for record in caplog.records]
    assert [one.split("about ")[1] for one in said] == ["9 min left", "8 min left", "5 min left", "2 min left"]


def test_durations() -> None:
    assert [duration(s) for s in (0.2, 89, 120, 5399, 7200)] == ["1 s", "89 s", "2 min", "90 min", "2.0 h"]
