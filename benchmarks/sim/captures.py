"""When are the graphs that the start leaves out captured? A simulation with the engine's own count of steps.

    python benchmarks/sim/captures.py [--step MS] [--row MS] [--capture MS] [--turn MS]

Requests come at random and write answers of 8 to 512 tokens; a step takes `--step` and `--row` for each row, padding
included. A request's prompt wants one of 40 graphs of both, some more often than others, without which its step takes
`--turn` more. lost: time that steps with too few graphs, and captures, take beyond that of steps with all graphs, in
the first minute of each load.  captures: in that minute.  gaps, waits: 99th percentile of the time between two tokens
of an answer, and of the time that a request waits until a step can take it.  `never` is what is left out for good. Then
`IDLE_SECONDS`: how long a request that comes to an idle engine waits for a capture.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwing.config.trees import PLAIN
from draftwing.engine import graphs as engine_graphs
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.graphs import CAPTURE_SHARE, WANTED, GraphCache, Key, first_sizes

VALUES = (1, 4, 16, 64, 256, 1 << 30)  # of WANTED
SHARES = (1.0, 0.1, 0.03, 0.01, 0.003)  # of CAPTURE_SHARE
IDLE = (0.05, 0.1, 0.2, 0.5, 1.0)  # of IDLE_SECONDS
LOADS = (0.5, 2.0, 8.0, 24.0)  # requests a second
MINUTE = 60.0
BOTH = 40  # graphs of steps with parts of prompts


class Times(NamedTuple):
    """Seconds: of a step without rows, of each row, of a capture, and of a turn that prompts take on their own."""

    step: float
    row: float
    capture: float
    turn: float


class Lost(NamedTuple):
    """share: of the time.  gaps, waits: seconds, the 99th percentile."""

    share: float
    captures: int
    gaps: float
    waits: float


def minute(rate: float, wanted: int, share: float, times: Times) -> Lost:
    """wanted, share: in place of `WANTED` and `CAPTURE_SHARE`"""
    engine_graphs.WANTED, rng = wanted, random.Random(int(1000 * rate))
    graphs = GraphCache(CpuDevice(), 64, 64)
    first = first_sizes(graphs.sizes)
    graphs.later = {Key(PLAIN, size): 0 for size in graphs.sizes if size not in first}
    for size in first:
        graphs.finish(Key(PLAIN, size))
    both, often = dict.fromkeys(range(BOTH), 0), [1 / (1 + number) for number in range(BOTH)]
    now, lost, captures, following, allowed = 0.0, 0.0, 0, rng.expovariate(rate), 0.0
    left: list[int] = []  # tokens that each request has still to write
    gaps, waits = list[float](), list[float]()
    while now < MINUTE:
        started, came = now, list[float]()
        while following <= now and len(left) < 64:
            left.append(rng.randint(8, 512))
            came.append(following)
            following += rng.expovariate(rate)
        if not left:
            now = following
            continue
        for one in rng.choices(range(BOTH), often, k=len(came)):
            if one in both:
                both[one] += 1
                now, lost = now + times.turn, lost + times.turn
        key, best = graphs.key(PLAIN, len(left)), next(size for size in graphs.sizes if size >= len(left))
        assert key is not None
        graphs.count(PLAIN, len(left))
        now, lost = now + times.step + times.row * key.size, lost + times.row * (key.size - best)
        if max(graphs.wanted, max(both.values(), default=0) / wanted) >= 1 and now >= allowed:
            most = max(graphs.later, key=graphs.later.__getitem__, default=None)
            if most is not None and graphs.later[most] >= max(both.values(), default=0):
                del graphs.later[most]
                graphs.finish(most)
            else:
                del both[max(both, key=both.__getitem__)]
            now, lost, captures = now + times.capture, lost + times.capture, captures + 1
            allowed = now + times.capture / share
        waits += [started - at for at in came]
        gaps += [now - started] * len(left)
        left = [tokens - 1 for tokens in left if tokens > 1]
    return Lost(lost / now, captures, quantile(gaps), quantile(waits))


def quantile(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def cell(found: Lost) -> str:
    return f"{found.share:.2%}, {found.captures}, {1e3 * found.gaps:.1f}, {1e3 * found.waits:.1f}"


def table(title: str, columns: Sequence[object], rows: Sequence[tuple[object, Sequence[str]]]) -> None:
    print(f"| {title} |", " | ".join(map(str, columns)), "|")
    print("|---" * (len(columns) + 1) + "|")
    for name, cells in rows:
        print(f"| {name} |", " | ".join(cells), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=float, default=4.2, help="ms of a step without rows")
    parser.add_argument("--row", type=float, default=0.045, help="ms of each row")
    parser.add_argument("--capture", type=float, default=70.0, help="ms of a capture, of all stages of a step")
    parser.add_argument("--turn", type=float, default=6.0, help="ms of prompts in a forward of their own, beyond")
    asked = parser.parse_args()
    times = Times(*(ms / 1000 for ms in (asked.step, asked.row, asked.capture, asked.turn)))
    head = "requests a second: lost, captures, gaps and waits 99%, ms"
    rows: list[tuple[object, Sequence[str]]] = []
    for wanted in VALUES:
        name = wanted if wanted < 1 << 30 else "never"
        rows.append((name, [cell(minute(rate, wanted, CAPTURE_SHARE, times)) for rate in LOADS]))
    table(f"`WANTED`, {head}", LOADS, rows)
    print()
    table(
        f"`CAPTURE_SHARE`, {head}", LOADS,
        [(share, [cell(minute(rate, WANTED, share, times)) for rate in LOADS]) for share in SHARES],
    )  # fmt: skip
    print()
    capture, keys = times.capture, len(engine_graphs.batch_sizes(64)) - len(first_sizes(engine_graphs.batch_sizes(64)))
    table(
        "`IDLE_SECONDS`", ("mean wait of a request, ms", f"seconds until {keys} are captured"),
        [(idle, [f"{500 * capture**2 / (idle + capture):.1f}", f"{keys * (idle + capture):.1f}"]) for idle in IDLE],
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
