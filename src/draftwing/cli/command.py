"""The command itself, which Ctrl-C ends without a word, also while its modules are imported."""

from __future__ import annotations

import sys

from draftwing.server.signals import never_dropped


def main(*before: str) -> int:
    """Runs a command, of these words and what was typed behind them; returns the exit code."""
    try:
        with never_dropped():
            from draftwing.cli.main import main as run

            return run([*before, *sys.argv[1:]])
    except KeyboardInterrupt:
        return 130
