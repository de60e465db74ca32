"""What decisions about learnt heads are worth where the truth is known: which candidates are served, and which heads
are swapped back. Prints the tables of docs/dev/learning.md.

    python benchmarks/sim/head_decisions.py [judge] [live] [clients]
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from draftwing.learn import live
from draftwing.train.judge import LEAST_KEPT

Floats = npt.NDArray[np.float64]
CANDIDATES = 4000
LENGTHS, TEXTS = 0.6, 0.07  # standard deviations of logarithms: of texts' lengths, of what a head gains on each
# Whether a head is refused for a client, by the gain on its texts and the standard error of that.
RULES: dict[str, Callable[[Floats, Floats], npt.NDArray[np.bool_]]] = {
    "mean": lambda gain, _: gain < LEAST_KEPT,
    "mean + 2 errors": lambda gain, error: gain + 2 * error < LEAST_KEPT,
    "mean - error, and mean < 1": lambda gain, error: (gain - error < LEAST_KEPT) & (gain < 1),
    "mean - 2 errors, and mean < 1": lambda gain, error: (gain - 2 * error < LEAST_KEPT) & (gain < 1),
}
CLIENTS = ((8, 0.9, 1), (8, 0.95, 1), (8, 1.0, 1), (8, 1.04, 1), (20, 0.95, 1), (20, 1.0, 1), (100, 0.95, 1),
           (100, 1.0, 1), (8, 1.08, 5), (20, 1.0, 5))  # fmt: skip
REQUESTS, SERVERS, EVERY = 1500, 40, 25  # after a swap, simulated, between two looks
CONSTANTS = ((50, 400, 3.0), (20, 400, 3.0), (100, 400, 3.0), (50, 100, 3.0), (50, 1600, 3.0), (50, 400, 2.0),
             (50, 400, 4.0))  # fmt: skip
KINDS = (0.4, 1.8)  # accepted drafts a step: of texts that can hardly be drafted, and of those that can
# Clients, and who asks after a swap: the same ones as before, others of them more than before, half of them new ones,
# or one alone whose texts can hardly be drafted any more.
LOADS = ((3, "others"), (20, "same"), (20, "others"), (20, "new"), (100, "others"), (4, "one"))
SPREAD = 1.0  # of clients' shares of requests: standard deviation of logarithms
OF_CLIENTS = ((2, 0.5), (4, 0.5), (8, 0.5), (16, 0.5), (32, 0.5), (8, 0.0), (8, 0.25), (8, 0.75))  # FEW, SHARED


def gains(texts: int, gain: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Returns the gain on so many texts of a client, and its standard error as `compare` has it, of each candidate."""
    before = np.exp(rng.normal(0, LENGTHS, (CANDIDATES, texts)))
    after = before / gain * np.exp(rng.normal(0, TEXTS, (CANDIDATES, texts)))
    found = before.sum(1) / after.sum(1)
    squares = ((before - found[:, None] * after) ** 2).sum(1) * texts / (texts - 1)
    return found, np.sqrt(squares) / after.sum(1)


def print_judged() -> None:
    print(f"share of candidates that are served\n| texts | true gain | clients | {' | '.join(RULES)} |")
    rng = np.random.default_rng(0)
    for texts, gain, count in CLIENTS:
        clients = [gains(texts, gain, rng) for _ in range(count)]
        shares = [1 - np.any([rule(*one) for one in clients], axis=0).mean() for rule in RULES.values()]
        print(f"| {texts} | {gain} | {count} | {' | '.join(f'{share:.2f}' for share in shares)} |")


def request(factor: float, rng: random.Random, kind: float | None = None) -> tuple[int, int]:
    """Returns drafts that a request accepts, and its steps. factor: of accepted drafts.  kind: None for either."""
    steps = max(4, round(rng.lognormvariate(3.4, 0.7)))
    drafts = steps * factor * (rng.choice(KINDS) if kind is None else kind) * rng.lognormvariate(0, 0.15)
    return max(round(rng.gauss(drafts, drafts**0.5)), 0), steps


def swapped_back(drop: float, seed: int) -> int | None:
    """Returns after how many requests a head is swapped back that gives so much fewer tokens a step."""
    rng, found = random.Random(seed), live.LiveAcceptance()
    for _ in range(live.WINDOW):
        found.add(0.0, *request(1.0, rng))
    found.swapped(1.0, 1)
    for number in range(1, REQUESTS + 1):
        found.add(2.0, *request((2.1 * (1 - drop) - 1) / 1.1, rng))
        if number % EVERY == 0 and found.fell:
            return number
    return None


def print_live() -> None:
    drops = (0.0, 0.03, 0.05, 0.1, 0.2)
    print("share of servers that swap back; after how many requests, median")
    print(f"| ENOUGH, WINDOW, ERRORS | {' | '.join(f'-{drop:.0%}' for drop in drops)} |")
    for live.ENOUGH, live.WINDOW, live.ERRORS in CONSTANTS:
        cells = []
        for drop in drops:
            back = [number for seed in range(SERVERS) if (number := swapped_back(drop, seed)) is not None]
            cells.append(f"{len(back) / SERVERS:.2f}" + (f"; {statistics.median(back):.0f}" if back else ""))
        print(f"| {live.ENOUGH}, {live.WINDOW}, {live.ERRORS:g} | {' | '.join(cells)} |", flush=True)


def swapped_back_among(count: int, later: str, drop: float, seed: int) -> bool:
    """Whether a head is swapped back that gives so much fewer tokens a step. Each client has texts of one kind."""
    rng, found = random.Random(seed), live.LiveAcceptance()
    kinds = [KINDS[i % 2] for i in range(2 * count)]

    def shares() -> list[float]:
        return [rng.lognormvariate(0, SPREAD) for _ in range(count)]

    before = shares()
    after = before if later == "same" else shares()
    for client in rng.choices(range(count), before, k=live.WINDOW):
        found.add(0.0, *request(1.0, rng, kinds[client]), f"{client}")
    found.swapped(1.0, 1)
    first = count // 2 if later == "new" else 0
    if later == "one":
        kinds[1], after = KINDS[0], [float(i == 1) for i in range(count)]
    for number, client in enumerate(rng.choices(range(first, first + count), after, k=REQUESTS), 1):
        kind = kinds[client]
        found.add(2.0, *request(((1 + kind) * (1 - drop) - 1) / kind, rng, kind), f"{client}")
        if number % (2 * EVERY) == 0 and found.fell:
            return True
    return False


def print_clients() -> None:
    drops = (0.0, 0.05, 0.1)
    print("share of servers that swap back a head that gives fewer tokens, by load (clients, who asks later)")
    print(f"| FEW, SHARED | {' | '.join(f'{count}, {later}: {drops}' for count, later in LOADS)} |")
    for live.FEW, live.SHARED in OF_CLIENTS:
        cells = [
            ", ".join(
                f"{statistics.fmean(swapped_back_among(*load, drop, seed) for seed in range(SERVERS)):.2f}"
                for drop in drops
            )
            for load in LOADS
        ]
        print(f"| {live.FEW}, {live.SHARED:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    asked = sys.argv[1:] or ["judge", "live", "clients"]
    for name, run in (("judge", print_judged), ("live", print_live), ("clients", print_clients)):
        if name in asked:
            run()
