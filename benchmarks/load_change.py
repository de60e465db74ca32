"""How fast the choice of drafts follows a change of load: requests from 1 to 64 and back, text from code to chat.

    python benchmarks/load_change.py --out load_change.json --plot docs/load_change.svg [--drafter EAGLE3]

First the engine chooses. Then each phase runs once more with each shape pinned that was chosen, and with those a user
can pin: that gives a shape's tokens per second under this load, and which is best. A phase is followed after the first
step from which on the shapes of a window of steps have on average `ENOUGH` of the best one's tokens per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from load_runs import (
    Step,
    add_arguments,
    check_pinned,
    fixed_shapes,
    let_go,
    listed,
    machine,
    make_engine,
    name_of,
    pinned,
    sampling,
    watched,
)
from load_texts import Texts
from svg_plot import Line, Panel, render

from draftwing.requests.request import GenerationRequest

WINDOW, ENOUGH, WITHIN = 20, 0.95, 50  # steps; of the best shape's tokens per second; steps after a change
WARM_UP = 1 / 3  # share of a pinned run that is not counted
SMOOTHED = 15  # steps of which a point of the plot is the mean


class Phase(NamedTuple):
    requests: int
    text: str
    steps: int

    @property
    def name(self) -> str:
        return f"{self.requests} x {self.text}"


class Load:
    """Keeps as many requests running as a phase says, each that ends followed by the next."""

    def __init__(self, engine: Any, texts: Texts, prompt: int, tokens: int, temperature: float) -> None:
        self._engine, self._texts = engine, texts
        self._prompt, self._tokens, self._temperature = prompt, tokens, temperature
        self._running: set[str] = set()
        self._number = 0

    def run(self, phase: Phase, steps: list[Step]) -> None:
        """Until `phase.steps` tree steps of all its requests were seen. What ran before is aborted."""
        self.stop()
        prompts = self._prompts(phase.text)
        begun, counted = len(steps), 0
        while counted < phase.steps:
            while len(self._running) < phase.requests:
                uid = uuid.uuid4().hex
                params = sampling(self._temperature, self._tokens, self._number)
                self._engine.submit(GenerationRequest(uid, next(prompts), params))
                self._running.add(uid)
            for output in self._engine.step():
                if output.finish_reason is not None:
                    self._running.discard(output.uid)
            counted += sum(full(step, phase) for step in steps[begun:])
            begun = len(steps)

    def _prompts(self, text: str) -> Iterator[list[int]]:
        while True:
            (prompt,) = self._texts.prompts(text, self._prompt, 1, self._number)
            self._number += 1
            yield prompt

    def stop(self) -> None:
        for uid in self._running:
            self._engine.abort(uid)
        self._running.clear()
        while not self._engine.idle():
            self._engine.step()

    def again(self) -> None:
        """The same prompts once more, with empty caches."""
        self.stop()
        self._number = 0
        assert self._engine.flush_cache()


def full(step: Step, phase: Phase) -> bool:
    """Whether it is a tree step of nearly all requests of the phase."""
    return step.kind == "tree" and step.rows >= 0.9 * phase.requests


def rate(steps: Sequence[Step]) -> float:
    """Tokens per second; of the median step, so that what stalls one does not count."""
    if not steps:
        return 0.0
    return statistics.fmean(step.tokens for step in steps) / statistics.median(step.seconds for step in steps)


def followed(shares: Sequence[float]) -> int | None:
    """Steps before the first window whose choices are worth `ENOUGH` of the best on average; None if there is none.
    shares: of each step's shape, of the best one's tokens per second. Steps whose shape was not pinned are left out."""
    for begin in range(len(shares) - WINDOW + 1):
        if statistics.fmean(shares[begin : begin + WINDOW]) >= ENOUGH:
            return begin
    return None


def pinned_rates(
    engine: Any, load: Load, phases: Sequence[Phase], chosen: Sequence[list[Step]]
) -> list[dict[str, float]]:
    """Tokens per second of each shape that ran more than now and then, in each phase."""
    found = []
    for phase, steps in zip(phases, chosen, strict=True):
        used = [step.shape for step in steps]
        shapes = dict.fromkeys([*fixed_shapes(engine), *(one for one in used if used.count(one) > 0.05 * len(used))])
        rates = {}
        for shape in shapes:
            load.again()
            with watched(engine) as seen, pinned(engine, shape):
                load.run(phase._replace(steps=min(phase.steps, 120)), seen)
            counted = [step for step in seen if full(step, phase)]
            check_pinned(seen, shape)
            rates[name_of(shape)] = rate(counted[int(len(counted) * WARM_UP) :])
        found.append(rates)
    return found


def report(
    phases: Sequence[Phase], chosen: Sequence[list[Step]], rates: Sequence[dict[str, float]]
) -> list[dict[str, Any]]:
    rows = []
    for phase, steps, known in zip(phases, chosen, rates, strict=True):
        best = max(known, key=lambda name: known[name])
        shares = [known[name] / known[best] for name in (name_of(step.shape) for step in steps) if name in known]
        settled = shares[WITHIN:] or shares
        after = followed(shares)
        rows.append(
            {
                "phase": phase.name,
                "best": best,
                "rates": known,
                "followed_after": after,
                "ok": after is not None and after <= WITHIN,
                "rate": rate(steps[WITHIN:] or steps),
                "of_best": statistics.fmean(settled) if settled else None,
            }
        )
    return rows


def plot(phases: Sequence[Phase], chosen: Sequence[list[Step]], rows: Sequence[dict[str, Any]]) -> str:
    """Step by step: batch, nodes a row, and tokens per second as a share of what the best shape gives."""
    steps = [step for some in chosen for step in some]
    starts = [sum(map(len, chosen[:i])) for i in range(len(chosen) + 1)]
    marks = [(float(start), phase.name) for start, phase in zip(starts, phases, strict=False)]
    nodes = [step.shape.queries for step in steps]
    most = max((step.rows for step in steps), default=1)
    measured: list[tuple[float, float]] = []
    worth: list[tuple[float, float]] = []
    for row, (begin, end) in zip(rows, pairwise(starts), strict=True):
        best = row["rates"][row["best"]]
        for i in range(begin, end):
            measured.append((i, rate(steps[max(begin, i - SMOOTHED + 1) : i + 1]) / best))
            if (known := row["rates"].get(name_of(steps[i].shape))) is not None:
                worth.append((i, known / best))
    panels = [
        Panel("requests in a step", [Line("requests", [(i, step.rows) for i, step in enumerate(steps)])], _ticks(most)),
        Panel(
            "nodes verified for a request", [Line("nodes", list(enumerate(nodes)), True)], _ticks(max(nodes, default=1))
        ),
        Panel(
            "tokens per second, share of the best pinned shape's",
            [Line("measured", measured), Line("by its shape", worth, True)],
            [(0.0, "0"), (0.5, "0.5"), (1.0, "1"), (1.25, "1.25")],
        ),
    ]
    return render(panels, max(len(steps), 1), marks, "step")


def _ticks(most: float) -> list[tuple[float, str]]:
    return [(share * most, f"{share * most:.0f}") for share in (0.0, 0.5, 1.0)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| phase | best | its tokens/s | chosen, tokens/s | choices, of the best | followed after | |",
        "|" + "---|" * 7,
    ]
    for row in rows:
        share = "" if row["of_best"] is None else f"{row['of_best']:.3f}"
        lines.append(
            f"| {row['phase']} | {row['best']} | {row['rates'][row['best']]:.0f} | {row['rate']:.0f} | "
            f"{share} | {row['followed_after']} steps | {'' if row['ok'] else '**late**'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--drafter", default="EAGLE3")
    parser.add_argument("--requests", type=listed(int), default=(1, 64, 64, 1, 1), help="of each phase")
    parser.add_argument("--texts", type=listed(str), default=("code", "code", "chat", "chat", "code"))
    parser.add_argument("--steps", type=int, default=250, help="of a phase")
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    engine = make_engine(args, args.drafter)
    assert engine is not None
    phases = [Phase(count, text, args.steps) for count, text in zip(args.requests, args.texts, strict=True)]
    load = Load(engine, Texts(engine.tokenizer, engine.info.vocab_size), args.prompt, args.tokens, args.temperature)
    chosen: list[list[Step]] = []
    with watched(engine) as seen:
        for phase in phases:
            begin = len(seen)
            load.run(phase, seen)
            first = next(i for i in range(begin, len(seen)) if full(seen[i], phase))
            chosen.append([step for step in seen[first:] if step.kind == "tree"])
    rates = pinned_rates(engine, load, phases, chosen)
    load.stop()
    rows = report(phases, chosen, rates)
    if args.out:
        steps = [[[name_of(step.shape), *step[2:3], *step[4:]] for step in some] for some in chosen]
        about = {"machine": machine(), "drafter": args.drafter, "date": time.strftime("%Y-%m-%d")}
        args.out.write_text(json.dumps(about | {"phases": rows, "steps": steps}), encoding="utf8")
    if args.plot:
        args.plot.write_text(plot(phases, chosen, rows), encoding="utf8")
    print(table(rows))
    let_go(engine)


if __name__ == "__main__":
    main()
