"""Engines that are killed while they read, write and remove prefixes on the disk: the next one starts, and its texts
are those of one without a disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from reference.checkpoints import eagle3_head
from reference.learnable import write_target
from restarted import OF, ask, once, opened, tokens, write_hybrid
from tiny_checkpoint import VOCAB

PATH = os.pathsep.join(sys.path)
CONVERSATIONS = [(900, 0), (500, 1), (700, 2), (260, 3), (600, 0)]  # tokens and seed: the last begins as the first one
# Each engine is a process of its own, forked from one that has imported all.
ENGINES = """
import json, os, sys
from pathlib import Path
from restarted import ask, opened, tokens

def serve(model, folder, more, asked):
    engine = opened(Path(model), Path(folder), **more)
    print(os.getpid(), "begins", flush=True)
    for one in asked:
        ask(engine, tokens(*one))
    print(os.getpid(), "closes", flush=True)
    engine.close()
    print(os.getpid(), "closed", flush=True)

for line in sys.stdin:
    if os.fork() == 0:
        serve(*json.loads(line))
        os._exit(0)
    os.wait()
"""


class Engines:
    """Starts engines, one at a time."""

    def __init__(self, commands: IO[str], said: IO[str]) -> None:
        self._commands, self._said = commands, said

    def start(self, *what: Any) -> int:
        """Returns its process, when it begins."""
        self._commands.write(json.dumps(what) + "\n")
        self._commands.flush()
        while (said := self._said.readline().split())[1] != "begins":
            pass  # what the one before said while it was killed
        return int(said[0])

    def wait(self, word: str) -> float:
        """Returns when it says so."""
        assert self._said.readline().split()[1] == word
        return time.monotonic()


@contextmanager
def engines() -> Iterator[Engines]:
    command, env = [sys.executable, "-c", ENGINES], {**os.environ, "PYTHONPATH": PATH}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        yield Engines(parent.stdin, parent.stdout)
        parent.stdin.close()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.further(kind="llama")
@pytest.mark.parametrize("kills", [1, pytest.param(100, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
def test_the_next_engine_starts_and_writes_the_same(tmp_path: Path, kind: str, kills: int) -> None:
    rng, folder, model = random.Random(0), tmp_path / "kept", tmp_path / kind
    more: dict[str, Any] = {"speculative_fixed_shape": True}
    if kind == "llama":
        write_target(model, plain=OF)
        head = eagle3_head(OF, vocab_size=VOCAB).write(tmp_path / "head")
        more |= {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(head)}
    else:
        write_hybrid(model, kind)
        more |= {"speculative_algorithm": "NEXTN"}
    expected = [once(model, None, tokens(*one)).tokens for one in CONVERSATIONS]
    found, seen = Counter[str](), Counter[str]()
    with engines() as run:
        run.start(str(model), str(folder), more, CONVERSATIONS)
        times = [time.monotonic(), run.wait("closes"), run.wait("closed")]
        # all do not fit: files are removed while others are written
        more["prefix_cache_size"] = max(0.6e-9 * sum(path.stat().st_size for path in folder.rglob("*.kv")), 1e-3)
        for _ in range(kills):
            one, other = rng.sample(range(len(CONVERSATIONS)), 2)
            pid = run.start(str(model), str(folder), more, [CONVERSATIONS[one], CONVERSATIONS[other]])
            if rng.random() < 0.25:  # while it reads back, or computes
                time.sleep(rng.random() * (times[1] - times[0]) * 2 / len(CONVERSATIONS))
            else:  # while it writes and removes
                run.wait("closes")
                time.sleep(rng.random() * (times[2] - times[1]))
            beside = rng.random() < 0.3  # two engines have the folder for a while
            if not beside:
                kill(pid)
            seen["half written"] += len(list(folder.rglob("*.partial")))
            seen["killed"] += 1
            engine = opened(model, folder, **more)
            for at in (one, other):
                reply = ask(engine, tokens(*CONVERSATIONS[at]))
                assert reply.tokens == expected[at], f"after {seen['killed']} kills"
                found["read back" if reply.cached else "computed"] += 1
            if beside:
                kill(pid)
            if rng.random() < 0.5:
                engine.close()
            else:
                engine.parts.executor.close()  # what it has is not written
            files = sorted(folder.rglob("*.kv"))
            for path in rng.sample(files, len(files) // 4):
                path.unlink()
    print(dict(found), dict(seen), flush=True)
    assert kills < 100 or (found["read back"] and found["computed"] and seen["half written"])
    for cached in (False, True):  # and what is left is of use
        reply = once(model, folder, tokens(*CONVERSATIONS[0]), **more)
        assert reply.tokens == expected[0] and (reply.cached > 0 or not cached)
