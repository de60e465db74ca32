"""How a server's processes log."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

current: ContextVar[Any] = ContextVar("draftwing_http_request", default=None)
"""The HTTP request that is served, as `server.telemetry.observer` records it; None where there is none."""

_ACCESS = ("client", "method", "path", "http_version", "status")  # what uvicorn says of a request
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


class JsonFormatter(logging.Formatter):
    """One JSON object for each message. Uvicorn's lines about requests have their parts as fields, too."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := current.get()) is not None and request.id:
            line["request_id"] = request.id
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            line |= dict(zip(_ACCESS, record.args, strict=False))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return visible(json.dumps(line, ensure_ascii=False))


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


def configure_logging(level: str, form: str = "text") -> None:
    """Writes one line per message to standard error, for the engine and uvicorn alike. form: `text` or `json`."""
    handler = LineHandler(sys.stderr)
    lines = LineFormatter("[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    handler.setFormatter(JsonFormatter() if form == "json" else lines)
    for name in ("draftwing", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(level.upper())
        log.propagate = False
