"""A program in a terminal, as somebody at the keyboard uses it: tmux has its screen, and the clipboard is that of an X
server of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL

NEEDED = "Xvfb", "xclip", "tmux"
COLUMNS, LINES = "120", "50"


def missing() -> list[str]:
    """Returns which of NEEDED are not installed."""
    return [name for name in NEEDED if not shutil.which(name)]


@contextlib.contextmanager
def clipboard(picture: bytes) -> Iterator[str]:
    """Starts an X server whose clipboard holds a PNG file; gives its display."""
    reading, writing = os.pipe()
    command = ["Xvfb", "-displayfd", str(writing), "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[writing], stdout=DEVNULL, stderr=DEVNULL)
    os.close(writing)
    try:
        with open(reading) as told:
            display = f":{told.readline().strip()}"
        copy = ["xclip", "-display", display, "-selection", "clipboard", "-t", "image/png"]
        subprocess.run(copy, input=picture, check=True, stdout=DEVNULL, stderr=DEVNULL)
        yield display
    finally:
        server.terminate()
        server.wait()


def inside(command: list[str]) -> list[str]:
    """Returns the words that start a command in a terminal, and end at once."""
    return ["tmux", "-u", "-f", "/dev/null", "new-session", "-d", "-x", COLUMNS, "-y", LINES, *command]


class Terminal:
    """The terminal of tmux's server in a folder, which the command's own TMUX_TMPDIR named."""

    def __init__(self, folder: Path) -> None:
        self._environ = {**os.environ, "TMUX_TMPDIR": str(folder)}
        self._environ.pop("TMUX", None)

    def screen(self) -> str:
        """Returns what stands on it; nothing once the command has ended."""
        return self._run("capture-pane", "-p")

    def press(self, key: str) -> None:
        """Presses a key by tmux's name, e.g. C-v."""
        self._run("send-keys", key)

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)

    def _run(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-u", *words], env=self._environ, capture_output=True, text=True, check=False)
        return done.stdout
