"""What decisions about learnt heads are worth where the truth is known: which candidates are served, and which heads
are swapped back. Prints the tables of docs/dev/learning.md.

    python benchmarks/sim/head_decisions.py [judge] [many] [domains] [live] [clients]
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from draftwing.learn import live
from draftwing.train.judge import CHANCE, ERRORS, FEW, LEAST_GAIN, LEAST_KEPT, SMALL

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
# Of several clients: their texts and true gains, and how many there are of each.
CROWDS: dict[str, Sequence[tuple[int, float, int]]] = {
    "5 of 8, none": [(8, 1.0, 5)],
    "10 of 8, none": [(8, 1.0, 10)],
    "20 of 8, none": [(8, 1.0, 20)],
    "20 of 8, +5%": [(8, 1.05, 20)],
    "20 of 8, -5%": [(8, 0.95, 20)],
    "1 of 20, -5%; 1 of 1,000, +10%": [(20, 0.95, 1), (1000, 1.1, 1)],
    "1 of 20, -5%; 9 of 20, +10%": [(20, 0.95, 1), (20, 1.1, 9)],
    "1 of 20, -5%; 20 of 20, +10%": [(20, 0.95, 1), (20, 1.1, 20)],
    "1 of 8, -5%; 5 of 20, +10%": [(8, 0.95, 1), (20, 1.1, 5)],
    "1 of 8, -5%; 10 of 20, +10%": [(8, 0.95, 1), (20, 1.1, 10)],
}
# Of one client's domains: their texts and true gains.
DOMAINS: dict[str, Sequence[tuple[int, float]]] = {
    "60, +15%; 20, -10%": [(60, 1.15), (20, 0.9)],
    "60, +15%; 20, -5%": [(60, 1.15), (20, 0.95)],
    "60, +15%; 20, none": [(60, 1.15), (20, 1.0)],
    "60, +15%; 8, -10%": [(60, 1.15), (8, 0.9)],
    "40, +15%; 40, none": [(40, 1.15), (40, 1.0)],
    "5 of 16, none; 80, +15%": [(80, 1.15), *[(16, 1.0)] * 5],
    "4 of 20, +10%": [(20, 1.1)] * 4,
}
REQUESTS, SERVERS, EVERY = 1500, 40, 25  # after a swap, simulated, between two looks
CONSTANTS = ((50, 400, 3.0), (20, 400, 3.0), (100, 400, 3.0), (50, 100, 3.0), (50, 1600, 3.0), (50, 400, 2.0),
             (50, 400, 4.0))  # fmt: skip
KINDS = (0.4, 1.8)  # accepted drafts a step: of texts that can hardly be drafted, and of those that can
# Clients, and who asks after a swap: the same ones as before, others of them more than before, half of them new ones,
# or one alone whose texts can hardly be drafted any more.
LOADS = ((3, "others"), (20, "same"), (20, "others"), (20, "new"), (100, "others"), (4, "one"))
SPREAD = 1.0  # of clients' shares of requests: standard deviation of logarithms
OF_CLIENTS = ((2, 0.5), (4, 0.5), (8, 0.5), (16, 0.5), (4, 0.0), (4, 0.25), (4, 0.75))  # FEW, SHARED


def times(texts: int, gain: float, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Returns what so many texts of a client take before and after, [CANDIDATES, texts] each."""
    before = np.exp(rng.normal(0, LENGTHS, (CANDIDATES, texts)))
    return before, before / gain * np.exp(rng.normal(0, TEXTS, (CANDIDATES, texts)))


def gains(before: Floats, after: Floats) -> tuple[Floats, Floats]:
    """Returns the gain on these texts, and its standard error as `compare` has it, of each candidate."""
    texts, found = before.shape[1], before.sum(1) / after.sum(1)
    squares = ((before - found[:, None] * after) ** 2).sum(1) * texts / (texts - 1)
    return found, np.sqrt(squares) / after.sum(1)


def print_judged() -> None:
    print(f"share of candidates that are served\n| texts | true gain | clients | {' | '.join(RULES)} |")
    rng = np.random.default_rng(0)
    for texts, gain, count in CLIENTS:
        clients = [gains(*times(texts, gain, rng)) for _ in range(count)]
        shares = [1 - np.any([rule(*one) for one in clients], axis=0).mean() for rule in RULES.values()]
        print(f"| {texts} | {gain} | {count} | {' | '.join(f'{share:.2f}' for share in shares)} |")


def served(crowd: Sequence[tuple[int, float, int]], small: float, chance: float) -> float:
    """Returns which share of candidates is served where clients with less than `small` of the texts are judged
    together, and noise refuses a head with about this chance; 1: a client's mean alone decides."""
    rng = np.random.default_rng(0)
    clients = [times(texts, gain, rng) for texts, gain, count in crowd for _ in range(count)]
    counts = [before.shape[1] for before, _ in clients]
    least = small * min(sum(counts), 2 * (sum(counts) - max(counts)))
    alone = [one for one, count in zip(clients, counts, strict=True) if count >= max(FEW, least)]
    rest = [one for one, count in zip(clients, counts, strict=True) if count < max(FEW, least)]
    groups = alone + ([tuple(np.concatenate(each, 1) for each in zip(*rest, strict=True))] if rest else [])
    errors = 0.0 if chance == 1 else -NormalDist().inv_cdf(chance / len(groups))
    refused = [(gain < LEAST_KEPT) & (gain + errors * error <= 1) for gain, error in (gains(*one) for one in groups)]
    return float(1 - np.any(refused, axis=0).mean())


def print_many() -> None:
    rules = ((0.0, 1.0), (0.0, CHANCE), (SMALL, 1.0), (SMALL, CHANCE))
    print("share of candidates that are served\n| clients | " + " | ".join(map(str, rules)) + " |")
    for name, crowd in CROWDS.items():
        print(f"| {name} | {' | '.join(f'{served(crowd, *rule):.2f}' for rule in rules)} |", flush=True)


def print_domains() -> None:
    """Of a client alone, judged by its sum, and by its domains, too: a client's domains are as clients are."""
    print("share of candidates that are served\n| domains | by the sum | by domain, too |")
    for name, parts in DOMAINS.items():
        rng = np.random.default_rng(0)
        drawn = [times(texts, gain, rng) for texts, gain in parts]
        whole = gains(*(np.concatenate(each, 1) for each in zip(*drawn, strict=True)))
        better = (whole[0] >= LEAST_GAIN) & (whole[0] - ERRORS * whole[1] > 1)
        errors = -NormalDist().inv_cdf(CHANCE / len(parts))
        each = [gains(*one) for one in drawn]
        harmed = np.any([(gain < LEAST_KEPT) & (gain + errors * error <= 1) for gain, error in each], axis=0)
        print(f"| {name} | {better.mean():.2f} | {(better & ~harmed).mean():.2f} |", flush=True)


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
    runs = {"judge": print_judged, "many": print_many, "domains": print_domains, "live": print_live,
            "clients": print_clients}  # fmt: skip
    for name in sys.argv[1:] or runs:
        runs[name]()
