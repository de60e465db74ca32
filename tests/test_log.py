"""Lines of the log that clients' texts reach."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from draftwing import log
from draftwing.log import LineFormatter, LineHandler, progress_bar, visible

HOSTILE = "a\x1b[2J\x9b1m\x7f\u2028\u202e\u2066\x85\r\x00\ud800\U000e0041 é日😀"


def test_what_does_not_print_is_escaped() -> None:
    assert visible("plain é日😀") == "plain é日😀"
    shown = visible(HOSTILE)
    assert shown.isprintable() and shown.endswith(" é日😀") and "\\u001b[2J\\u009b1m\\u007f\\u2028\\u202e" in shown
    assert shown.encode()  # a lone surrogate is none any more


@pytest.mark.parametrize("text", [HOSTILE, "a\n[2026-11-21 10:00:00] the operator was here", "b\r\n[x"])
def test_no_text_makes_a_line_of_its_own(text: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("[time] %(message)s"))
    record = logging.LogRecord("x", logging.INFO, "", 1, "a model %s", (text,), None)
    handler.emit(record)
    try:
        raise ValueError(text)
    except ValueError:
        record.exc_info = sys.exc_info()
    handler.emit(record)
    lines = stream.getvalue().removesuffix("\n").split("\n")
    assert all(line.startswith(("[time] a model", "    ")) and line.isprintable() for line in lines)
    assert sum(line.startswith("[time]") for line in lines) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_are_for_terminals_and_for_work_that_lasts(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar(total=3, desc="working") as bar:
        bar.update()
    assert not stream.getvalue().strip()
    monkeypatch.setattr(log, "BAR_SECONDS", 0.0)
    with progress_bar(total=3, desc="working", mininterval=0) as bar:
        bar.update()
        assert ("working" in stream.getvalue()) == terminal
    with progress_bar(total=3, desc="none", disable=True) as bar:
        bar.update()
    assert "none" not in stream.getvalue()


def test_a_line_does_not_follow_a_bar_in_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(log, "BAR_SECONDS", 0.0)
    handler = LineHandler(stream)
    with progress_bar(total=3, desc="working", mininterval=0) as bar:
        bar.update()
        handler.emit(logging.LogRecord("x", logging.INFO, "", 1, "a message", (), None))
    shown = [line.rpartition("\r")[2] for line in stream.getvalue().split("\n")]
    assert "a message" in shown
