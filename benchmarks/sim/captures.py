"""When are the graphs that the start leaves out captured? A simulation with the engine's own count of steps.

    python benchmarks/sim/captures.py [--step MS] [--row MS] [--capture MS]

Requests come at random and write answers of 8 to 512 tokens; a step takes `--step` and `--row` for each row, padding
included. share: time that steps with too few graphs, and captures, take beyond that of steps with all graphs, in the
first minute of each load.  captures: in that minute.  `never` is what is left out for good, `at once` what is captured
when it is wanted first. Then `IDLE_SECONDS`: how long a request that comes to an idle engine waits for a capture.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import torch

from draftwing.core import PLAIN
from draftwing.engine.devices.cpu import CpuDevice
from draftwing.engine.graphs import cuda
from draftwing.engine.graphs.cuda import GraphCache, Key, first_sizes

VALUES = (1, 4, 16, 64, 256, 1 << 30)  # of WANTED
IDLE = (0.05, 0.1, 0.2, 0.5, 1.0)  # of IDLE_SECONDS
LOADS = (0.5, 2.0, 8.0, 24.0)  # requests a second
MINUTE = 60.0


def minute(rate: float, wanted: int, step: float, row: float, capture: float) -> tuple[float, int]:
    """Returns the share of the time that is lost, and captures."""
    cuda.WANTED, rng = wanted, random.Random(int(1000 * rate))
    graphs = GraphCache(CpuDevice(), 64, 64)
    first = first_sizes(graphs.sizes)
    graphs.later = {Key(PLAIN, size): 0 for size in graphs.sizes if size not in first}
    for size in first:
        graphs.finish(Key(PLAIN, size))
    now, lost, captures, following = 0.0, 0.0, 0, rng.expovariate(rate)
    left: list[int] = []  # tokens that each request has still to write
    while now < MINUTE:
        while following <= now and len(left) < 64:
            left.append(rng.randint(8, 512))
            following += rng.expovariate(rate)
        if not left:
            now = following
            continue
        key, best = graphs.key(PLAIN, len(left)), next(size for size in graphs.sizes if size >= len(left))
        assert key is not None
        graphs.count(PLAIN, len(left))
        now, lost = now + step + row * key.size, lost + row * (key.size - best)
        left = [tokens - 1 for tokens in left if tokens > 1]
        if graphs.wanted >= 1:
            most = max(graphs.later, key=graphs.later.__getitem__)
            del graphs.later[most]
            graphs.finish(most)
            now, lost, captures = now + capture, lost + capture, captures + 1
    return lost / now, captures


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
    asked = parser.parse_args()
    seconds = asked.step / 1000, asked.row / 1000, asked.capture / 1000
    rows: list[tuple[object, Sequence[str]]] = []
    for wanted in VALUES:
        found = [minute(rate, wanted, *seconds) for rate in LOADS]
        rows.append((wanted if wanted < 1 << 30 else "never", [f"{share:.2%}, {number}" for share, number in found]))
    table("`WANTED`, requests a second: share, captures", LOADS, rows)
    print()
    capture, keys = seconds[2], len(cuda.batch_sizes(64)) - len(first_sizes(cuda.batch_sizes(64)))
    table(
        "`IDLE_SECONDS`", ("mean wait of a request, ms", f"seconds until {keys} are captured"),
        [(idle, [f"{500 * capture**2 / (idle + capture):.1f}", f"{keys * (idle + capture):.1f}"]) for idle in IDLE],
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
