"""Lines of the log that clients' texts reach."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from datetime import datetime
from types import SimpleNamespace

import pytest

from draftwing import log
from draftwing.log import LineFormatter, LineHandler, configure_logging, current, progress_bar, visible

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


def test_json_has_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in ("draftwing", "uvicorn", "uvicorn.access")]
    before = [(one, one.handlers, one.level, one.propagate) for one in loggers]
    try:
        configure_logging("debug", "json")
        loggers[2].propagate, loggers[2].handlers = True, []  # a server of an earlier test may have set these
        loggers[2].setLevel(logging.NOTSET)
        logger = logging.getLogger("draftwing.some.module")
        logger.debug("a number %d\nand %s", 3, HOSTILE)
        token = current.set(SimpleNamespace(id="req-1"))
        args = ("10.0.0.1:5", "POST", "/v1/x?y", "1.1", 200)
        logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *args)
        current.reset(token)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("it failed")
    finally:
        for one, handlers, level, propagate in before:
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)
    text = capsys.readouterr().err
    plain, access, failed = (json.loads(line) for line in text.splitlines())
    assert all(line.isprintable() for line in text.splitlines())
    assert plain["message"] == f"a number 3\nand {HOSTILE}" and "request_id" not in plain
    assert (plain["level"], plain["logger"]) == ("debug", "draftwing.some.module")
    assert abs(datetime.fromisoformat(plain["time"]).timestamp() - time.time()) < 3600
    assert (access["method"], access["path"], access["status"]) == ("POST", "/v1/x?y", 200)
    assert access["client"] == "10.0.0.1:5" and access["request_id"] == "req-1" and "request_id" not in failed
    assert failed["level"] == "error" and "ValueError" in failed["exception"]
