"""Runs the commands of a page as they are written: `python tools/readme_commands.py [README.md]`.

Those that need a network, a GPU or a clone are named with the reason and not run. `draftwing serve` goes on until the
last command has run, so its port must be free. `draftwing` and `python` are the first ones on PATH, as for a reader.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ADDRESS = "http://127.0.0.1:30000"
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NEEDS = {
    "pip": "a package index", "uv": "a package index", "uvx": "a package index", "hf": "a network",
    "docker": "Docker and a network", "make": "a clone",
}  # fmt: skip


class Example(NamedTuple):
    """A command of a ```bash block as a shell takes it, or a whole ```python block."""

    language: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def needs(self) -> str:
        """What it takes beside an installed draftwing and the default model; empty where nothing is missing."""
        if self.language == "python":
            return ""
        program, *arguments = self.words
        if program == "draftwing":
            named = arguments[1] if len(arguments) > 1 else "smollm2"
            other = named != "smollm2" and not named.startswith("-") and " " not in named  # not a question
            return "a model of the hub" if other or any(map(_HUB_ID.fullmatch, arguments)) else ""
        return _NEEDS.get(program, "")


class Outcome(NamedTuple):
    example: Example
    code: int
    output: str
    errors: str
    seconds: float


def examples(text: str) -> list[Example]:
    """Of a page, in its order. A command ends with its line, unless that ends in a backslash or inside quotes."""
    found = []
    for language, block in _BLOCK.findall(text):
        if language == "python":
            found.append(Example(language, block))
            continue
        command = ""
        for line in block.replace("\\\n", " ").splitlines():
            command += line + "\n"
            if command.count("'") % 2 == 0:
                example, command = Example(language, command.strip()), ""
                if example.words:
                    found.append(example)
        if command:
            raise ValueError(f"a quotation does not end in {block!r}")
    return found


def run_all(found: list[Example], folder: Path, limit: float = 300) -> Iterator[Outcome]:
    """Runs those that need nothing else, one after the other. limit: seconds for each. Ends what it started."""
    with contextlib.ExitStack() as stack:
        for example in found:
            if example.needs:
                continue
            began = time.monotonic()
            if example.language == "bash" and example.words[:2] == ["draftwing", "serve"]:
                stack.enter_context(_served(example, folder, limit))
                yield Outcome(example, 0, "", "", time.monotonic() - began)
                continue
            words = ["python", "-c", example.text] if example.language == "python" else ["bash", "-c", example.text]
            done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit)
            texts = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
            yield Outcome(example, done.returncode, *texts, time.monotonic() - began)


@contextlib.contextmanager
def _served(example: Example, folder: Path, limit: float) -> Iterator[None]:
    """A server, from when it answers. Raises RuntimeError for one that ends before, or that does not end well."""
    process = subprocess.Popen(example.words, cwd=folder, stdin=subprocess.DEVNULL)
    try:
        until = time.monotonic() + limit
        while not _answers():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{example.text}: no server at {ADDRESS}, exit code {process.poll()}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
    if process.wait() != 0:
        raise RuntimeError(f"{example.text}: exit code {process.returncode}")


def _answers() -> bool:
    try:
        with urllib.request.urlopen(f"{ADDRESS}/readiness", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # URLError is one
        return False


def main() -> int:
    """Returns 1 where a command failed."""
    page = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "README.md")
    found, failed = examples(page.read_text(encoding="utf-8")), 0
    for example in found:
        if example.needs:
            print(f"not run, needs {example.needs}: {example.text}", flush=True)
    for one in run_all(found, Path.cwd()):
        failed += one.code != 0
        print(f"$ {one.example.text}\n{one.output}{one.errors}exit code {one.code}, {one.seconds:.1f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
