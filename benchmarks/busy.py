"""Speed of the engine on a CPU beside programs that keep processors busy: one thread, all of them, and the team, which
goes on with fewer while one of its threads cannot run.

    python benchmarks/busy.py [--cases 0,1,1:10,2,3:10] [--seconds 1.5] [--rounds 4] [--out busy.json] [option=value]

A case is a number of programs, each one loop in Python, and how nice they are. The three take turns on one engine, and
all have to write the same text. `other` is what still other programs took of the machine meanwhile, in processors: a
machine that is not idle tells little. Gaps are those between two outputs, in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from load_runs import add_arguments, given_options, listed

from draftwing import LLM, SamplingParams
from draftwing.ops.cpu.ops import CpuOps
from draftwing.ops.cpu.workers import Workers

PROMPT = "The harbour town wakes before the sun. Fishermen push their boats off the stone ramp, and"
LONGEST = 4000  # tokens
BUSY = "import os\nos.nice({})\nwhile True: pass"


class Case(NamedTuple):
    programs: int
    nice: int = 0


def case(text: str) -> Case:
    return Case(*map(int, text.split(":")))


@dataclass
class Found:
    """What one way to run has made in all of its turns."""

    tokens: int = 0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def row(self) -> list[float]:
        """Tokens per second, median and 99th percentile of the gaps in ms."""
        high = statistics.quantiles(self.gaps, n=100)[98]
        return [round(x, 1) for x in (self.tokens / self.seconds, statistics.median(self.gaps) * 1e3, high * 1e3)]


@contextmanager
def beside(programs: int, nice: int) -> Iterator[list[int]]:
    """Programs that are busy meanwhile: their process ids."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY.format(nice)]) for _ in range(programs)]
    time.sleep(0.3)  # until they are
    try:
        yield [one.pid for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


def others(pids: Sequence[int]) -> float:
    """Seconds that processors have been busy with what is neither this process nor one of these."""
    tick = os.sysconf("SC_CLK_TCK")
    times = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
    mine = sum(sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[11:13])) for pid in pids)
    return (sum(times) - times[3] - times[4] - mine) / tick - time.process_time()


def turn(llm: LLM, seconds: float, found: Found) -> list[int]:
    """Writes for so long, and returns what."""
    assert llm.engine.flush_cache()
    stream = llm.stream(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=LONGEST, ignore_eos=True))
    tokens: list[int] = []
    start = last = None
    for piece in stream:
        now = time.perf_counter()
        if start is None or last is None:
            start = now
        else:
            found.gaps.append(now - last)
            found.tokens += len(piece.token_ids)
        tokens += piece.token_ids
        last = now
        if now - start > seconds:
            break
    stream.close()
    assert start is not None and last is not None
    found.seconds += last - start
    return tokens


def run(llm: LLM, workers: Workers, one: Case, seconds: float, rounds: int) -> dict[str, Any]:
    ways = {"one thread": 1, "all threads": workers.most, "team": None}
    found, text = {name: Found() for name in ways}, []
    with beside(*one) as pids:
        busy, start = others(pids), time.perf_counter()
        for number in range(rounds):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                workers.hold(ways[name])
                written = turn(llm, seconds, found[name])
                size = min(len(written), len(text))
                assert written[:size] == text[:size], f"{name} beside {one}: another text"
                text = max(text, written, key=len)
        busy = (others(pids) - busy) / (time.perf_counter() - start)
    rows = {name: each.row() for name, each in found.items()}
    ratio = rows["team"][0] / rows["one thread"][0]
    return {"programs": one.programs, "nice": one.nice, **rows, "ratio": round(ratio, 2), "other": round(busy, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--cases", type=listed(case), default=[Case(0), Case(1), Case(1, 10), Case(2), Case(3, 10)])
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    llm = LLM(**given_options(args, "none"))
    ops = llm.engine.parts.executor.device.ops
    assert isinstance(ops, CpuOps), "the C extension is not here"
    turn(llm, 1.0, Found())
    results = []
    for one in args.cases:
        results.append(run(llm, ops.workers, one, args.seconds, args.rounds))
        print(json.dumps(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"threads": torch.get_num_threads(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
