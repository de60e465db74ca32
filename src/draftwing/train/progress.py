"""Shows and writes a run's progress: a line in the terminal, metrics.csv, TensorBoard events and curves.png.

TensorBoard and matplotlib are optional: without them their files are not written.
"""

from __future__ import annotations

import csv
import importlib.util
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draftwing.files import replace_file
from draftwing.log import BAR_SECONDS

logger = logging.getLogger(__name__)

_MARKS = (0.1, 0.25, 0.5, 0.75)  # shares of the work at which `Remaining` says how much time is left

# One line of metrics.csv: step, split ("train" or "eval"), loss, ..., accept_length, accept_1, accept_2, ...
Row = Mapping[str, str | int | float]


class Progress:
    """Shows a run. history: rows of this run so far, which a run that goes on starts with; those after its step are not
    among them.

    shown: False where another process shows the same run; nothing is written then either.
    """

    def __init__(self, out: Path, total: int, step: int, history: Sequence[Row], shown: bool) -> None:
        self.out, self.history = out, list(history)
        self._shown = shown
        self._bar = tqdm(total=total, initial=step, unit="step", disable=None if shown else True, dynamic_ncols=True)
        self._first, self._start = step, time.monotonic()
        self._events: Any = None
        self._text = {"train": "", "eval": ""}
        if not shown:
            return
        for row in self.history:
            self._text[str(row["split"])] = summary(row)
        write_csv(self.out / "metrics.csv", self.history)
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1 if step else None)

    def advance(self) -> None:
        self._bar.update()

    def expect(self, total: int) -> None:
        """Expects another number of steps."""
        self._bar.total = total

    def add(self, row: Row) -> None:
        self.history.append(row)
        if not self._shown:
            return
        split = str(row["split"])
        self._text[split] = summary(row)
        held_out = f" | held out: {self._text['eval']}" if self._text["eval"] else ""
        self._bar.set_postfix_str(self._text["train"] + held_out)
        if self._bar.disable:  # no terminal: lines for a log file
            logger.info("step %s of %d, %s: %s%s", row["step"], self._bar.total, split, summary(row), self._left())
        write_csv(self.out / "metrics.csv", self.history)
        if self._events is not None:
            for key, value in row.items():
                if key not in ("step", "split"):
                    self._events.add_scalar(f"{split}/{key}", value, row["step"])
            self._events.flush()

    def _left(self) -> str:
        """Says how long the steps that are left take, at the pace of this process so far."""
        done, left = int(self.history[-1]["step"]) - self._first, self._bar.total - int(self.history[-1]["step"])
        pace = (time.monotonic() - self._start) / max(1, done)
        return f"; about {duration(pace * left)} left" if left > 0 else ""

    def close(self) -> None:
        self._bar.close()
        if self._events is not None:
            self._events.close()
        if self._shown:
            draw_curves(self.out / "curves.png", self.history)


class Remaining:
    """Logs at a few points of a long stage about how much time is left."""

    def __init__(self, name: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """total: of whatever is counted."""
        self._name, self._total, self._clock = name, total, clock
        self._start, self._marks = clock(), list(_MARKS)

    def update(self, done: int, note: str = "") -> None:
        """Shows that so many steps are `done`."""
        share = done / max(1, self._total)
        if not self._marks or share < self._marks[0]:
            return
        self._marks = [mark for mark in self._marks if mark > share]
        spent = self._clock() - self._start
        if share < 1 and spent > BAR_SECONDS:
            logger.info("%s: %.0f%%%s, about %s left", self._name, 100 * share, note, duration(spent / share - spent))


def duration(seconds: float) -> str:
    """Returns seconds, minutes or hours, whichever fits."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def summary(row: Row) -> str:
    """token_loss 2.345, loss 5.678, accept 0.71 0.48 0.31, length 2.5"""
    accept = " ".join(f"{row[name]:.2f}" for name in positions(row))
    token_loss = f"token_loss {row['token_loss']:.3f}, " if "token_loss" in row else ""
    return f"{token_loss}loss {row['loss']:.3f}, accept {accept}, length {row['accept_length']:.2f}"


def positions(row: Row) -> list[str]:
    """Returns the columns of acceptance per position, in order."""
    return sorted((key for key in row if key.startswith("accept_") and key[7:].isdigit()), key=lambda key: int(key[7:]))


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes all rows anew, so that the file is whole at any moment; train and eval rows have the same columns."""
    partial = path.with_name(f"{path.name}.partial")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    replace_file(partial, path)


def draw_curves(path: Path, rows: Sequence[Row]) -> bool:
    """Loss and acceptance over the steps; False where there is no matplotlib or nothing to draw."""
    if importlib.util.find_spec("matplotlib") is None:
        logger.info("curves.png is not drawn without matplotlib (pip install 'draftwing[train]'); see metrics.csv")
        return False
    if not rows:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accept = figure.subplots(1, 2)
    for split, style in (("train", "-"), ("eval", "o--")):
        some = [row for row in rows if row["split"] == split]
        steps = [row["step"] for row in some]
        loss.plot(steps, [row["loss"] for row in some], style, label="held out" if split == "eval" else split)
        if not some:
            continue
        for i, name in enumerate(positions(some[0])):
            label = f"draft {i + 1}" if split == "train" else None
            accept.plot(steps, [row[name] for row in some], style, color=f"C{i % 10}", label=label)
    loss.set(xlabel="step", ylabel="loss")
    accept.set(xlabel="step", ylabel="accepted", ylim=(0, 1))
    loss.legend()
    accept.legend(fontsize="small")
    partial = path.with_name(f"{path.name}.partial")
    figure.savefig(partial, format="png", dpi=120)
    replace_file(partial, path)
    return True
