"""Helpers for notebooks and scripts that start a server, ask it and end it."""

from __future__ import annotations

import argparse
import html
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

Process = subprocess.Popen[bytes]
START_SECONDS = 600.0  # for a server to load its model and compile kernels
STOP_SECONDS = 45.0  # for a server to end, after which it is killed
_MODULES = re.compile(r"\b(?:sglang|draftwing)\.launch_server\b")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_PYTHONS = ("python", "python3")


def launch_server_cmd(command: str, host: str = "127.0.0.1", port: int | None = None) -> tuple[Process, int]:
    """Starts a server and returns its process and its port, a free one unless it is given.

    command: as typed in a shell, `NAME=value` before it and backslashes at the ends of lines included. `python`
    means the interpreter that runs, and `sglang.launch_server` means `draftwing.launch_server`.
    """
    words = shlex.split(command.replace("\\\n", " "))
    environ = dict(os.environ)
    while words and _ASSIGNMENT.fullmatch(words[0]):
        name, _, environ[name] = words.pop(0).partition("=")
    if not words:
        raise ValueError(f"expected a command such as 'python -m draftwing.launch_server ...'; found {command!r}")
    words = [_MODULES.sub("draftwing.launch_server", word) for word in words]
    if words[0] in _PYTHONS:
        words[0] = sys.executable
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--port", "--host"):
        parser.add_argument(name)
    given, _ = parser.parse_known_args(words)
    if given.port is None:
        given.port = port or free_port(host)
        words += ["--port", str(given.port)]
    if given.host is None:
        words += ["--host", host]
    # A group of its own: Ctrl-C in a notebook interrupts the cell, not the server.
    return subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, start_new_session=True), int(given.port)


def wait_for_server(base_url: str, timeout: float | None = START_SECONDS, process: Process | None = None) -> None:
    """Returns when the server answers.

    Raises TimeoutError after `timeout` seconds, and RuntimeError when `process` ended before.
    """
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(f"{base_url.rstrip('/')}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode} before it was ready")
        if end is not None and time.monotonic() > end:
            raise TimeoutError(f"no server answered at {base_url} within {timeout:g} seconds")
        time.sleep(0.2)


def terminate_process(process: Process, timeout: float = STOP_SECONDS) -> None:
    """Ends a server that `launch_server_cmd` started, in an orderly way if it does so within `timeout` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            # The group is the server's own, and the engine's process ends with the server.
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def print_highlight(content: object) -> None:
    """Prints so that it stands out: as HTML in a notebook, else in bold where there is a terminal."""
    if "ipykernel" in sys.modules:
        from IPython.display import HTML, display

        display(HTML(f"<strong style='color: #00008B'>{html.escape(str(content))}</strong>"))
    elif sys.stdout.isatty():
        print(f"\033[1m{content}\033[0m")
    else:
        print(content)


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port that nothing listens on now; another program may take it before it is used."""
    with socket.create_server((host, 0)) as sock:
        return int(sock.getsockname()[1])
