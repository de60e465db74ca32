"""Lines of the terminal, with a history."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

READLINE: ModuleType | None
try:
    import readline as READLINE
except ImportError:  # some builds of Python have none
    READLINE = None

QUOTES = '"""'
MAX_LINES = 1000  # lines of the history


class LineReader:
    """Reads from the terminal; use it in a `with` statement, whose end writes the history.

    history: its file, read and written where readline is there.  words: what Tab completes at the beginning of a line.
    """

    def __init__(self, history: Path, words: Sequence[str] = ()) -> None:
        self._history, self._words = history, words

    def __enter__(self) -> LineReader:
        if READLINE is not None:
            with contextlib.suppress(OSError):  # there is none yet
                READLINE.read_history_file(self._history)
            READLINE.set_history_length(MAX_LINES)
            READLINE.set_completer_delims("\n")
            READLINE.set_completer(self._complete)
            READLINE.parse_and_bind("tab: complete")
        return self

    def __exit__(self, *error: object) -> None:
        if READLINE is not None:
            with contextlib.suppress(OSError):
                self._history.parent.mkdir(parents=True, exist_ok=True)
                self._history.touch(mode=0o600)
                READLINE.write_history_file(self._history)
            READLINE.set_completer(None)

    def read(self) -> str:
        """Returns a text: a line, lines up to one that does not end with a backslash, or what stands between triple
        quotes. Raises EOFError at the end of input, and KeyboardInterrupt."""
        line = input(">>> ")
        if line.lstrip().startswith(QUOTES):
            text = line.lstrip().removeprefix(QUOTES)
            while not text.rstrip().endswith(QUOTES):
                text += "\n" + input("... ")
            return text.rstrip().removesuffix(QUOTES)
        text = line
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input("... ")
        return text

    def _complete(self, text: str, state: int) -> str | None:
        found = [word for word in self._words if text and word.startswith(text)]
        return found[state] if state < len(found) else None
