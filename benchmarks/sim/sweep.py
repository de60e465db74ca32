"""What each constant of the policy is worth: runs simulated loads with several of its values and prints a table.

    python benchmarks/sim/sweep.py [--constants RECENT,RATE] [--cells steady,text]

least none, least best: the lowest tokens per second of any load, over those without drafts and those of the best
fixed shape.  best: their mean.  steps: the mean until a change of load is followed.  gap: the mean 99th percentile of
gaps over that without drafts.  served: the mean tokens per second of whole schedulers over those without drafts.
crowd: the speed of a crowd's prompts over that of all prompts first.  longest: the longest gap of a crowd, in ms.
us: microseconds of a choice.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from statistics import fmean

from cells import CELLS, Figures, long_prompts

POLICY = ("cost", "acceptance", "shape_policy", "prefill_budget", "choice")
MODULES = (
    *(f"draftwing.sched.policy.{name}" for name in POLICY),
    "draftwing.engine.target",
    "worlds",
    "served",
)
CHOICE = (
    "steady / gpu / 1 ", "steady / small machine / 4", "2.5 x too slow / the best", "not measured", "trees become",
    "text becomes", "lookup", "far behind / 1 ",
)  # fmt: skip
PREFILL = ("open loop", "wait at every", "closed loop", "crowd", "long prompts")
VALUES: dict[str, tuple[Sequence[float], Sequence[str]]] = {
    "ROW_COST": ((0.05, 0.1, 0.2, 0.5), ("not measured",)),
    "RECENT": ((16, 32, 64), CHOICE + PREFILL),
    "RATE": ((0.03, 0.06, 0.12), CHOICE),
    "OUTDATED": ((64, 128, 512), CHOICE + PREFILL),
    "AGREE": ((1.1, 1.25, 1.5), CHOICE),
    "DOUBT": ((2, 3, 4), CHOICE),
    "HIT": ((0.3, 0.5, 0.7), CHOICE),
    "EXPLORE": ((0.005, 0.01, 0.02), CHOICE),
    "MARGIN": ((1.0, 1.02, 1.05), CHOICE),
    "MAX_QUERIES": ((256, 1024, 4096), ("steady / gpu / 64", "steady / drafts cost nothing / 64", "draft model / 128")),
    "HOLD": ((1, 2, 4, 8), (*CHOICE, "host")),
    "FAR": ((100, 300, 1000, 3000), ("key's price",)),
    "CONTEXT": ((60, 250, 1000), PREFILL),
    "PART": ((2.0, 3.0, 4.0), PREFILL),
    "UNNOTICED_GAP": ((0.006, 0.012, 0.024), PREFILL),
    "LONG": ((8.0, 16.0, 32.0), PREFILL),
    "CROWD_GAP": ((0.03, 0.045, 0.06), PREFILL),
    "UNNOTICED_WAIT": ((0.08, 0.16, 0.32), PREFILL),
    "CROWD": ((4, 8, 16), PREFILL),
    "PRIOR": ((0.03, 0.1, 0.3, 1.0), PREFILL),
    "MIXED_NODES": ((64, 128, 256), ("beside prompts",)),
    "MIXED_QUERIES": ((64, 256, 512), ("beside prompts",)),
}


def run(constants: Mapping[str, float], cells: Sequence[str]) -> dict[str, Figures]:
    """Returns the figures of the cells whose names have one of these parts."""
    modules = [importlib.import_module(name) for name in MODULES]
    before = [
        (module, name, getattr(module, name)) for module in modules for name in constants if hasattr(module, name)
    ]
    long_prompts.cache_clear()
    try:
        for module, name, _ in before:
            setattr(module, name, constants[name])
        return {name: cell() for name, cell in CELLS.items() if any(part in name for part in cells)}
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def summary(found: Mapping[str, Figures]) -> list[str]:
    """Returns a row of the table."""

    def of(key: str, *parts: str) -> list[float]:
        return [figures[key] for name, figures in found.items()
                if key in figures and (not parts or any(part in name for part in parts))]  # fmt: skip

    loads = ("loop", "wait at every", "draft model")
    columns = (
        (min, of("none"), 3), (min, of("best"), 3), (fmean, of("best"), 4), (fmean, of("steps"), 1),
        (fmean, of("gap"), 3), (fmean, of("none", *loads), 3), (fmean, of("share"), 3),
        (max, [1e3 * one for one in of("seconds", "crowd")], 0), (max, of("us"), 0),
    )  # fmt: skip
    return [f"{join(values):.{digits}f}" if values else "" for join, values, digits in columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constants", default=",".join(VALUES))
    parser.add_argument("--cells", help="parts of names of cells, in place of those that a constant matters for")
    args = parser.parse_args()
    head = ("constant", "value", "least none", "least best", "best", "steps", "gap", "served", "crowd", "longest", "us")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name in args.constants.split(","):
        values, cells = VALUES[name]
        for value in values:
            found = run({name: value}, args.cells.split(",") if args.cells else cells)
            print(f"| {name} | {value} | {' | '.join(summary(found))} |", flush=True)


if __name__ == "__main__":
    main()
