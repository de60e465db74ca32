"""Speed of the engine on a CPU beside programs that keep processors busy: one thread, all of them, and the team, which
goes on with fewer while one of its threads cannot run.

    python benchmarks/busy.py [--cases 0,1,1:10,2,3:10] [--seconds 1.5] [--rounds 4] [--out busy.json] [option=value]

A case is a number of programs, each one loop in Python, how nice they are, and the percentage of the time in which they
are busy, 10 ms at a time: `1:0:5` has one that takes a processor for a moment every 0.2 s. The three take turns on one
engine, and all have to write the same text. `other` is what still other programs took of the machine meanwhile, in
processors: a machine that is not idle tells little. Gaps are those between two outputs, in ms.

`share` is the part of the time in which the thread that makes the calls had a processor. Which programs share one is
the scheduler's choice, in each turn another one: `ratio`, of the team to one thread, has this luck in it, as `error`,
the standard error of the rounds' ratios, tells; `of_share` is the ratio of what they make in a second of a processor.
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
BUSY = """
import os, time
os.nice({nice})
while True:
    end = time.process_time() + 0.01
    while time.process_time() < end:
        pass
    time.sleep(0.01 * (100 / {percent} - 1))
"""


class Case(NamedTuple):
    programs: int
    nice: int = 0
    percent: int = 100


def case(text: str) -> Case:
    return Case(*map(int, text.split(":")))


@dataclass
class Found:
    """What one way to run has made, of each of its turns. ran: seconds with a processor, of the thread that calls."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ran: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def share(self) -> float:
        return sum(self.ran) / sum(self.seconds)

    def row(self) -> list[float]:
        """Tokens per second, median and 99th percentile of the gaps in ms, share of a processor."""
        high = statistics.quantiles(self.gaps, n=100)[98]
        shown = [round(x, 1) for x in (self.rate, statistics.median(self.gaps) * 1e3, high * 1e3)]
        return [*shown, round(self.share, 2)]


def compared(team: Found, one: Found) -> dict[str, float | None]:
    """Their rates; turns of the same number were made after each other."""
    each = [a / b * d / c for a, b, c, d in zip(team.tokens, one.tokens, team.seconds, one.seconds, strict=True)]
    error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else None
    ratio = team.rate / one.rate
    found = {"ratio": ratio, "error": error, "of_share": ratio * one.share / team.share}
    return {name: None if value is None else round(value, 2) for name, value in found.items()}


@contextmanager
def beside(one: Case) -> Iterator[list[int]]:
    """Programs that are busy meanwhile: their process ids."""
    code = BUSY.format(**one._asdict())
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(one.programs)]
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
    start = last = ran = 0.0
    first = 0
    for piece in stream:
        now = time.perf_counter()
        if not tokens:
            start, ran, first = now, time.thread_time(), len(piece.token_ids)
        else:
            found.gaps.append(now - last)
        tokens += piece.token_ids
        last = now
        if now - start > seconds:
            break
    found.ran.append(time.thread_time() - ran)
    stream.close()
    found.seconds.append(last - start)
    found.tokens.append(len(tokens) - first)
    return tokens


def run(llm: LLM, workers: Workers, one: Case, args: argparse.Namespace) -> dict[str, Any]:
    ways = {"one thread": 1, "all threads": workers.most, "team": None}
    found, text = {name: Found() for name in ways}, []
    with beside(one) as pids:
        busy, start = others(pids), time.perf_counter()
        for number in range(args.rounds):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                workers.hold(ways[name])
                written = turn(llm, args.seconds, found[name])
                size = min(len(written), len(text))
                assert written[:size] == text[:size], f"{name} beside {one}: another text"
                text = max(text, written, key=len)
        busy = (others(pids) - busy) / (time.perf_counter() - start)
    rows = {name: each.row() for name, each in found.items()}
    ratios = compared(found["team"], found["one thread"])
    return {**one._asdict(), **rows, **ratios, "other": round(busy, 2)}


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
        results.append(run(llm, ops.workers, one, args))
        print(json.dumps(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"threads": torch.get_num_threads(), "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
