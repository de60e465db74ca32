"""Lines of the log that clients' texts reach."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from draftwing.log import LineFormatter, visible

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
