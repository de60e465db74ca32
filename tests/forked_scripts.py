"""Scripts that run in forks of one process, which has imported what takes seconds for all of them, and interprets no
kernels of Triton, as the tests' own processes do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE

PARENT = """
import os, pickle, sys
from io import BytesIO, TextIOWrapper
import torch._dynamo
import triton
from draftwing.engine import build
from draftwing.engine.startup import precompile
from draftwing.ops.triton import ops
while True:
    script, given, words, folder, environ = pickle.load(sys.stdin.buffer)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ |= environ
    sys.argv[1:], sys.stdin = words, TextIOWrapper(BytesIO(given))
    exec(script, {})
    sys.exit()
"""


class Forks:
    """The process, which has no GPU but kernels for one."""

    def __init__(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-c", PARENT]
        env["DRAFTWING_NATIVE"] = "1"
        self.process = subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)

    def run(self, script: str, folder: Path, *words: str, given: bytes = b"", cache: str) -> list[str]:
        """Runs a script with these words behind its name, and bytes on its standard input -> what it prints, in lines.
        folder: of its output.  cache: Triton's folder."""
        assert self.process.stdin is not None and self.process.stdout is not None
        pickle.dump((script, given, words, str(folder), {"TRITON_CACHE_DIR": cache}), self.process.stdin)
        self.process.stdin.flush()
        status = self.process.stdout.readline()
        assert status == b"0\n", (folder / "out").read_text() + (folder / "errors").read_text()[-2000:]
        return (folder / "out").read_text().splitlines()
