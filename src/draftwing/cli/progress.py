"""Says on standard error how far a long command is."""

from __future__ import annotations

import sys
import time
from typing import TextIO

SECONDS = 10.0  # between two lines, where they do not replace each other


class Progress:
    """On a terminal one line that changes, and goes at the end of a `with` statement; else a new line now and then."""

    def __init__(self, file: TextIO | None = None) -> None:
        """file: standard error unless it is given."""
        self._file = file or sys.stderr
        self._terminal = self._file.isatty()
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Says where the work is."""
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=self._file, flush=True)
        elif time.monotonic() - self._last >= SECONDS:
            print(text, file=self._file, flush=True)
            self._last = time.monotonic()

    def clear(self) -> None:
        """Takes the line off a terminal, so that results can be printed."""
        if self._terminal:
            print("\r\x1b[K", end="", file=self._file, flush=True)
