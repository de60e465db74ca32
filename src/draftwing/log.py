"""How a server's processes log."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str) -> None:
    """One line per message on standard error, for the engine and uvicorn alike."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    for name in ("draftwing", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(level.upper())
        log.propagate = False
