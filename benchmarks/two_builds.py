"""Speed of the engine on a CPU in two checkouts, in turn, run by run: rows of `engine_cpu.py` for each.

    python benchmarks/two_builds.py OLD NEW [--seconds 90] [--rows none:chat0,NGRAM:copy1,default:chat3]

OLD and NEW are folders of checkouts, each with its C extension built in place. Both load the default model, one after
the other, and whichever has no turn is stopped. A row is who drafts and what is asked: `chat0`, a question; `copy1`, a
text that is copied; `batch16`, so many questions at once; `prefill500`, a prompt of so many tokens.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROWS = "none:chat0,none:batch16,none:prefill500,NGRAM:copy0,NGRAM:copy1,NGRAM:copy2,NGRAM:chat2,default:chat1"
BUILD = """
import sys
root, rows, threads = sys.argv[1], sys.argv[2].split(","), int(sys.argv[3])
sys.path[:0] = [root + "/src", root + "/benchmarks"]
import draftwing, engine_cpu, torch
assert draftwing.__file__.startswith(root), draftwing.__file__
torch.set_num_threads(threads)
settings = {"num_threads": threads, "sampling_defaults": "openai"}
llms = {}
for name in dict.fromkeys(row.split(":")[0] for row in rows):
    drafter = {} if name == "default" else {"speculative_algorithm": name}
    llms[name] = draftwing.LLM("smollm2", **settings, **drafter)
some = next(iter(llms.values()))
chats = engine_cpu.questions(some, 80)
copies = [some.engine.tokenizer.encode(text) for text in engine_cpu.COPY_TASKS.values()]
print("ready", flush=True)
for line in sys.stdin:
    name, asked = line.strip().split(":")
    kind, number = asked.rstrip("0123456789"), int(asked.lstrip("abcdefghijklmnopqrstuvwxyz"))
    if kind == "prefill":
        run, tokens = engine_cpu.fresh(llms[name], [(chats[0] * number)[:number]], 1), number
        print(tokens * engine_cpu.timed(run), flush=True)
        continue
    prompts = chats[:number] if kind == "batch" else [(copies if kind == "copy" else chats)[number]]
    print(engine_cpu.timed(engine_cpu.fresh(llms[name], prompts, 128)), flush=True)
"""


class Build:
    """A process with the engines of a checkout, which runs when it is asked."""

    def __init__(self, root: Path, rows: str, threads: int) -> None:
        command = [sys.executable, "-c", BUILD, str(root.resolve()), rows, str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        self._root = root

    def __enter__(self) -> Build:
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"{self._root} does not start")
        self._process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()

    def rate(self, row: str) -> float:
        """Returns tokens per second."""
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(row + "\n")
        self._process.stdin.flush()
        found = float(self._process.stdout.readline())
        self._process.send_signal(signal.SIGSTOP)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    begun = time.monotonic()
    rates: dict[str, list[tuple[float, float]]] = {row: [] for row in args.rows.split(",")}
    took, turn = 0.0, 0
    with ExitStack() as started:  # what is stopped would stay if this ended before its time
        builds = [started.enter_context(Build(root, args.rows, args.threads)) for root in (args.old, args.new)]
        while not turn or time.monotonic() + took < begun + args.seconds:
            before = time.monotonic()
            for row, pairs in rates.items():
                first = turn % 2
                one, other = builds[first].rate(row), builds[1 - first].rate(row)
                pairs.append((other, one) if first else (one, other))
            took, turn = time.monotonic() - before, turn + 1
    print(f"| row | old | new | best / best | median of {turn} pairs |\n|---|---|---|---|---|")
    for row, pairs in rates.items():
        old, new = (max(side) for side in zip(*pairs, strict=True))
        print(f"| {row} | {old:.1f} | {new:.1f} | {new / old:.3f} | {statistics.median(b / a for a, b in pairs):.3f} |")


if __name__ == "__main__":
    main()
