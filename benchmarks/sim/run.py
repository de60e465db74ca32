"""Runs the simulated loads and says what changed since the stored figures: `baseline.json`, next to this file.

    python benchmarks/sim/run.py [--cells steady,text] [--store] [--plot docs/policy.svg]

`before` are the figures of the policy that this one replaced (seven modules, 86 constants), `now` those that are stored
of this one. A figure that is worse by more than 2%, or 10% of a gap or of steps, is marked. The plot has a load that
changes, before and now, and the share of the best shape of each load that stays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from cells import BASELINE, CELLS, Figures, possible, worse
from timeline import PHASES, STEPS, shares
from worlds import MACHINES, TREE

from draftwing.sched.policy.shape_policy import TreePolicy
from draftwing.spec.drafter import tree_menu

sys.path.append(str(Path(__file__).parents[1]))
from svg_plot import Line, Panel, render


def timelines() -> dict[str, list[float]]:
    """Returns `timeline.shares` on two machines."""
    found = {}
    for machine in ("gpu", "small machine"):
        world = MACHINES[machine](tree_menu(TREE))
        policy = TreePolicy(world.menu, world.cost())
        found[machine] = shares(world, policy, lambda rows, world=world: possible(world, rows))
    return found


def table(found: Mapping[str, Figures], stored: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    lines = ["| load | figure | before | stored | now | |", "|---|---|---|---|---|---|"]
    for cell, figures in found.items():
        for name, figure in figures.items():
            before, known = (stored[key].get(cell, {}).get(name) for key in ("before", "now"))
            marks = [f"**worse than {key}**" for key, one in (("before", before), ("stored", known))
                     if one is not None and worse(name, figure, one)]  # fmt: skip
            numbers = ["" if one is None else f"{one:.3f}" for one in (before, known, figure)]
            lines.append(f"| {cell} | {name} | {' | '.join(numbers)} | {', '.join(marks)} |")
    return lines


def plot(stored: Mapping[str, Mapping[str, Figures]], lines: Mapping[str, Mapping[str, list[float]]]) -> str:
    end = len(PHASES) * STEPS
    marks = [(float(i * STEPS), f"{rows} x {hit}") for i, (rows, hit) in enumerate(PHASES)]
    ticks = [(0.0, "0"), (0.5, "0.5"), (1.0, "1")]
    panels = [
        Panel(f"share of the best shape's tokens per second: {machine}",
              [Line(key, list(enumerate(lines[key][machine]))) for key in ("before", "now")], ticks)
        for machine in lines["now"]
    ]  # fmt: skip
    for figure, title in (("none", "tokens/s vs no speculation, loads in order"), ("gap", "p99 gap vs no speculation")):
        cells = sorted((one for one in stored["before"] if figure in stored["now"][one]),
                       key=lambda one: stored["before"][one][figure])  # fmt: skip
        places = [end * (i + 0.5) / len(cells) for i in range(len(cells))]
        dots = [Line(key, [(at, stored[key][one][figure]) for at, one in zip(places, cells, strict=True)], True)
                for key in ("before", "now")]  # fmt: skip
        top = max(value for line in dots for _, value in line.points)
        panels.append(Panel(title, dots, [(0.0, "0"), (1.0, "1"), (top, f"{top:.1f}")]))
    return render(panels, end, marks, "step; requests x survival of a draft above each phase")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="", help="parts of names, with commas between them")
    parser.add_argument("--store", action="store_true", help="keep the figures as those of now")
    parser.add_argument("--plot", type=Path, help="draw what is stored")
    args = parser.parse_args()
    content = json.loads(BASELINE.read_text(encoding="utf-8"))
    found = {name: run() for name, run in CELLS.items() if any(part in name for part in args.cells.split(","))}
    print("\n".join(table(found, content["figures"])))
    if args.store:
        content["figures"]["now"] |= {
            cell: {name: round(one, 4) for name, one in figures.items()} for cell, figures in found.items()
        }
        content["timelines"]["now"] = timelines()
        BASELINE.write_text(json.dumps(content, indent=0), encoding="utf-8")
    if args.plot:
        args.plot.write_text(plot(content["figures"], content["timelines"]), encoding="utf-8")


if __name__ == "__main__":
    main()
