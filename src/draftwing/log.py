"""How a server's processes log."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

BAR_SECONDS = 2.0  # that work lasts before it gets a bar


def visible(text: str) -> str:
    """Returns text with escapes in place of what does not print: controls of terminals, ends of lines, marks of
    direction."""
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


class LineFormatter(logging.Formatter):
    """Clients' texts reach the log, in messages and in exceptions. Further lines of one message are indented, so that
    no line looks like a message of its own."""

    def format(self, record: logging.LogRecord) -> str:
        lines = super().format(record).split("\n")
        return "\n    ".join(visible(line.replace("\t", "    ")) for line in lines)


class LineHandler(logging.StreamHandler[Any]):
    """Writes lines. A progress bar that stands in the terminal's last line goes away before, until its next update."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if getattr(tqdm, "_instances", None):
            with tqdm.get_lock():
                for bar in tqdm._instances:
                    bar.clear(nolock=True)
        super().emit(record)


class Forgiving:
    """A text file that may be full, closed or none at all: then what is written to it is lost, and nothing else."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file

    def write(self, text: str) -> int:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._file.flush()

    def isatty(self) -> bool:
        try:
            return self._file is not None and self._file.isatty()
        except (OSError, ValueError):
            return False


def progress_bar(**settings: Any) -> tqdm[Any]:
    """Returns a bar on standard error, if that is a terminal, of work that takes more than `BAR_SECONDS`. settings:
    tqdm's."""
    from tqdm import tqdm  # late: the command line needs none

    file = Forgiving(sys.stderr)
    if not file.isatty():  # else it is for the caller and TQDM_DISABLE to say
        settings["disable"] = True
    return tqdm(file=file, leave=False, delay=BAR_SECONDS, **settings)


def configure_logging(level: str) -> None:
    """Writes one line per message to standard error, for the engine and uvicorn alike."""
    handler = LineHandler(sys.stderr)
    handler.setFormatter(LineFormatter("[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    for name in ("draftwing", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(level.upper())
        log.propagate = False
