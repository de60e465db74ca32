"""Installs wheels and source distributions from files, where there is no compiler, and uses what was installed.

    python tools/check_wheel.py dist/* --torch torch==2.13.0

Each goes into a virtual environment of its own and runs with an empty PATH: `draftwing --version`, the C kernels (which
a source distribution cannot have there, and must say so), the heads, `serve` with the default model, a streamed answer,
the page, and `chat`. Exits with 1 at the first thing that is not as it should be. The default model comes from the
cache of `draftwing pull`; other packages, torch among them, from where pip is configured to look.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTION = "Why is the sky blue?"
MODEL = "smollm2"
START_SECONDS = 120.0  # a server that is not ready by then hangs
KERNELS = "from draftwing.ops.cpu.extension import chosen_isa as c; print(c().name if c() else 'torch')"
OTHERS = "import importlib.metadata as m; print(m.version('torch'))"


class Failed(Exception):
    """Something of a package is not as it should be."""


def expect(true: object, what: str, found: object = "") -> None:
    if not true:
        raise Failed(f"expected {what}, found {found}")


class Installed:
    """A package in a virtual environment of its own, `folder`, whose programs find no others."""

    def __init__(self, folder: Path, package: Path, torch: str) -> None:
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        empty = folder / "empty"
        empty.mkdir()
        unwanted = ("PYTHON", "DRAFTWING", "CC", "VIRTUAL_ENV")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        self.environ["PATH"] = str(empty)
        self.folder = folder
        self.pip(torch)
        before = self.output("python", "-c", OTHERS)
        self.pip(str(package.resolve()))
        expect(self.output("python", "-c", OTHERS) == before, f"torch to stay {before}")
        self.pip_check()

    def pip(self, package: str) -> None:
        self.output("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)

    def pip_check(self) -> None:
        self.output("python", "-m", "pip", "check")

    def output(self, program: str, *arguments: str, stdin: str = "") -> str:
        """What it prints. Raises Failed with that, where it does not exit with 0."""
        command = [self.bin / program, *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=self.environ, cwd=self.folder, check=False
        )
        expect(done.returncode == 0, f"{program} {' '.join(arguments)} to exit with 0", done.stdout + done.stderr)
        return done.stdout.strip()

    @contextlib.contextmanager
    def server(self) -> Iterator[tuple[str, Path]]:
        """Runs `draftwing serve` with the default model: its address and its log."""
        port, log = free_port(), self.folder / "log"
        command = [self.bin / "draftwing", "serve", "--model", MODEL, "--port", str(port)]
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=self.environ, cwd=self.folder)
        try:
            yield ready(f"http://127.0.0.1:{port}", process, log), log
        finally:
            process.terminate()
            process.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ready(url: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits until the server takes requests; returns its address."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        expect(process.poll() is None, "a server that starts", log.read_text())
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/readiness").close()
            return url
        time.sleep(0.2)
    raise Failed(f"expected a server within {START_SECONDS:.0f} s, found {log.read_text()}")


def fetch(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read().decode())


def streamed(url: str) -> tuple[str, int]:
    """An answer, and how many events it came in."""
    message = {"role": "user", "content": QUESTION}
    body = {"model": MODEL, "messages": [message], "stream": True, "temperature": 0, "max_tokens": 48}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as response:
        lines = [line.decode().strip() for line in response]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    expect(data and data[-1] == "[DONE]", "a stream that ends with [DONE]", lines[-3:])
    events = [json.loads(event) for event in data[:-1]]
    pieces = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return "".join(pieces), len([piece for piece in pieces if piece])


def check_server(url: str, log: Path, native: bool) -> str:
    """The answer that was streamed. Raises Failed."""
    info: dict[str, Any] = json.loads(fetch(f"{url}/server_info"))
    expect(info["speculative_algorithm"] == "EAGLE3", "the head of the package", info["speculative_algorithm"])
    expect("site-packages/draftwing/heads" in str(info["speculative_draft_model_path"]), "its folder", info)
    page = fetch(f"{url}/")
    for asset in re.findall(r'(?:src|href)="(/?[\w./-]+\.(?:js|css|svg))"', page):
        expect(fetch(f"{url}/{asset.lstrip('/')}"), f"{asset} of the page")
    text, pieces = streamed(url)
    expect(len(set(text.split())) > 8 and pieces > 4, "words in several pieces", text)
    warned = "the C extension is not here" in log.read_text()
    expect(warned != native, "a log that says so where the C extension is missing", log.read_text())
    return text


def check(package: Path, torch: str) -> None:
    """Raises Failed."""
    native = package.suffix == ".whl"
    with tempfile.TemporaryDirectory() as folder:
        installed = Installed(Path(folder), package, torch)
        version = package.name.removesuffix(".tar.gz").split("-")[1]
        found = installed.output("draftwing", "--version")
        expect(found == f"draftwing {version}", f"version {version}", found)
        kernels = installed.output("python", "-c", KERNELS)
        expect((kernels != "torch") == native, "C kernels from a wheel, and torch's without a compiler", kernels)
        with installed.server() as (url, log):
            answer = check_server(url, log, native)
        words = ("--max-tokens", "48", "--temperature", "0")
        text = installed.output("draftwing", "chat", "--model", MODEL, *words, stdin=QUESTION + "\n")
        expect(answer.strip() in text, f"{answer!r} from `draftwing chat`, too", text)
    print(f"{package.name}: kernels {kernels}; {answer!r}", flush=True)


def torch_wanted() -> str:
    """What pyproject.toml asks for."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf8"))["project"]
    return next(str(requirement) for requirement in project["dependencies"] if requirement.startswith("torch"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, nargs="+", metavar="FILE", help=".whl or .tar.gz")
    parser.add_argument("--torch", default=torch_wanted(), metavar="REQUIREMENT", help="of pip; installed first")
    args = parser.parse_args()
    for package in args.packages:
        try:
            check(package, args.torch)
        except Failed as error:
            sys.exit(f"{package.name}: {error}")


if __name__ == "__main__":
    main()
