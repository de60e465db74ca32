"""Tokens per second with a drafter against without, over a grid of loads: where is drafting slower than not drafting?

    python benchmarks/never_slower.py --out grid.json [--drafters EAGLE3,NGRAM] [--cells 60] [--fixed]

A cell is a number of requests, a length of prompt, a temperature, a kind of text and a drafter. Cells are chosen so
that every pair of values occurs, as far as it fits into the pool and the time. In a cell both engines do the same work
in turn, now one first and now the other, after one run of prompts like these that is not timed, so that the policy has
met the load. Times are those of whole runs, prompts included. Each round has other requests, and there are `--repeats`
of them, an even number: who is first takes turns. Where prompts take a third of the time, how they meet answers counts
for hundredths in a short run, so there are half as many rounds, twice as long. A round in which other programs took a
tenth of the time is asked again, but no more rounds than `--repeats`. `error` is the standard error of the
mean of their ratios.

`--cached` leaves prompts out: those of a cell begin alike, and are computed before its runs. So a CPU reaches contexts
of thousands of tokens in seconds. Engines take turns of some steps, and a step counts with the median time of its kind,
which a busy machine says little of; `resting` is the speed of its plain steps, and `of_plain` the speed beside them
alone: two engines without drafts differ by 3%, by where their memory lies. `--isa` holds a CPU to an instruction set.

Cells that `--out` has are not run again, so a grid can be run in pieces of `--most-seconds`. `--only
16:100:1:random,1:2000:0:code` runs these cells of the grid, requests:prompt:temperature:text, in this order.

`--fixed` also pins each shape of the drafter's menu in turn, with the last round's requests. `--tokens` sets lengths of
answers, else `--seconds` for a run decides. `same` is the number of answers that are equal, which all must be
without `fast_numerics=true`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from cell_runs import OWN, WAVES, Cell, Prompts, in_turn, report, typical
from chat_servers import SET_BY, run_with
from load_runs import (
    Step,
    add_arguments,
    check_pinned,
    drive,
    fixed_shapes,
    jobs_of,
    let_go,
    listed,
    machine,
    make_engine,
    name_of,
    pinned,
    watched,
)
from load_texts import Texts

from draftwing.engine.startup.measure_costs import BUSY, delays, since

REQUESTS, PROMPTS, TEMPERATURES = (1, 4, 16, 64, 128), (100, 4000, 16000), (0.0, 0.7, 1.0)
TEXTS = ("chat", "code", "copy", "random")
DRAFTERS = ("EAGLE3", "NGRAM", "SUFFIX", "STANDALONE", "EAGLE3+NGRAM")
MIN_RATIO = 0.98  # of the tokens per second without drafts
MAX_CHEAP_TOKENS = 80_000  # prompt tokens of all requests: a cell of more must bring a pair that has not occurred
LONG_PROMPT = 1000  # tokens: answers to longer prompts are half as long
ANSWER = (96, 256)  # fewest and most tokens
SPREAD = 0.5  # how much longer or shorter answers are
SHORT = 32  # tokens of an answer at least, where prompts are cached
MAX_PROMPT_SECONDS = 15.0  # a run whose prompts alone take longer is left out


def pairs(cell: Cell) -> list[tuple[Any, ...]]:
    return [
        (i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)
    ]  # fmt: skip


def cover(cells: Sequence[Cell], count: int, seed: int = 0) -> list[Cell]:
    """`count` of the cells, or more, such that each pair of values that occurs in any of them occurs.

    The next cell is the one with the most pairs that have not occurred, less what its prompts cost. When there are none
    left, it is the one whose pairs occurred least often, of those whose prompts cost little.
    """
    left = random.Random(seed).sample(cells, len(cells))
    wanted = {pair for cell in left for pair in pairs(cell)}
    seen: Counter[tuple[Any, ...]] = Counter()
    chosen: list[Cell] = []
    while len(seen) < len(wanted):
        new = {cell: sum(pair not in seen for pair in pairs(cell)) for cell in left}
        some = [cell for cell in left if new[cell]]
        best = max(some, key=lambda cell: new[cell] - cell.requests * cell.prompt / MAX_CHEAP_TOKENS)
        _choose(best, left, chosen, seen)
    left = [cell for cell in left if cell.requests * cell.prompt <= MAX_CHEAP_TOKENS]
    while left and len(chosen) < count:
        _choose(min(left, key=lambda cell: sum(seen[pair] for pair in pairs(cell))), left, chosen, seen)
    return chosen


def only(text: str) -> tuple[int, int, float, str]:
    """Reads a cell without its drafter."""
    requests, prompt, temperature, kind = text.split(":")
    return int(requests), int(prompt), float(temperature), kind


def _choose(cell: Cell, left: list[Cell], chosen: list[Cell], seen: Counter[tuple[Any, ...]]) -> None:
    left.remove(cell)
    chosen.append(cell)
    seen.update(pairs(cell))


class Work(NamedTuple):
    prompts: int
    tokens: int  # of each answer
    long: bool  # whether prompts take a third of the time


@dataclass
class Costs:
    """What the engine without drafts takes, so that the work of a cell fits its time."""

    prompt: float  # seconds a prompt token
    step: dict[int, float]  # by requests

    def work(self, cell: Cell, seconds: float) -> Work:
        """What takes about so long."""
        step, begin = self.step[cell.requests], self.prompt * cell.prompt * cell.requests
        longest = ANSWER[1] // (2 if cell.prompt > LONG_PROMPT else 1)
        tokens = int(min(max((seconds / WAVES - begin) / step, ANSWER[0]), longest))
        prompts = begin > tokens * step / 2
        waves = 2 * WAVES if prompts else WAVES
        rounds = max(waves, round(seconds / (begin + tokens * step)))
        return Work(cell.requests * rounds, tokens, prompts)


def measure_costs(engine: Any, texts: Texts, requests: Sequence[int]) -> Costs:
    steps = {}
    for count in requests:
        jobs = jobs_of(texts.prompts("chat", 100, count, 100000), 0.0, 24)
        for _ in range(2):  # the first makes what is made once
            engine.flush_cache()
            with watched(engine) as seen:
                drive(engine, jobs, count)
        trees = [step for step in seen if step.kind == "tree"]
        most = max((step.rows for step in trees), default=0)
        if most < count:
            print(f"of {count} requests only {most} were ever in one step, which counts as theirs", flush=True)
        if not trees:
            continue  # no cell of so many is possible
        steps[count] = statistics.median(step.seconds for step in trees if step.rows == most)
    engine.flush_cache()
    prompt = texts.prompts("random", min(2000, engine.info.context_length // 2), 1, 100000)
    _, seconds, _ = drive(engine, jobs_of(prompt, 0.0, 1), 1)
    return Costs(seconds / len(prompt[0]), steps)


def possible(cell: Cell, engine: Any, costs: Costs, cached: bool) -> bool:
    """Whether it fits into the engine's sizes and the time."""
    info, options = engine.info, engine.options
    longest = cell.prompt + ANSWER[1]
    prompts = cell.prompt + cell.requests * OWN if cached else cell.requests * cell.prompt
    return bool(
        cell.requests in costs.step
        and cell.requests <= options.max_running_requests
        and longest <= info.context_length
        and prompts + cell.requests * ANSWER[0] * 2 <= 0.95 * info.max_total_tokens
        and (cached or costs.prompt * prompts <= MAX_PROMPT_SECONDS)
    )


# ---- a cell ----------------------------------------------------------------------------------------------------------


def error(ratios: Sequence[float]) -> float | None:
    """Standard error of their mean; of one nothing is known."""
    return statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def run_cell(
    cell: Cell, none: Any, engine: Any, prompts: Prompts, costs: Costs, args: argparse.Namespace
) -> dict[str, Any]:
    count, tokens, long = costs.work(cell, args.seconds)
    tokens = args.tokens or tokens
    for each in (none, engine):
        prompts.settle(cell, each, tokens)
    rounds: list[tuple[float, float]] = []
    repeats = max(args.repeats // 2, 1) if long else args.repeats
    for turn in range(2 * repeats):
        asked = prompts.of(cell, cell.prompt, count, turn * count)
        jobs = jobs_of(asked, cell.temperature, tokens, SPREAD, turn)
        order = ((none, engine), (engine, none))[len(rounds) % 2]  # of the rounds that count
        runs = {id(each): prompts.timed(each, jobs, cell.requests) for each in order}
        if max(run.report["waited"] for run in runs.values()) > BUSY and turn < repeats:
            continue  # others ran: one round more
        (plain, expected, _), (drafted, found, reported) = runs[id(none)], runs[id(engine)]
        rounds.append((plain, drafted))
        if len(rounds) == repeats:
            break
    plain, drafted = (statistics.mean(each) for each in zip(*rounds, strict=True))
    ratios = [other / one for one, other in rounds]
    record = {
        **cell._asdict(), "prompts": count, "tokens": tokens, "none": plain, "drafts": drafted,
        "ratio": statistics.median(ratios), "ratios": ratios, "error": error(ratios), "same": same(expected, found),
        **reported,
    }  # fmt: skip
    if args.fixed:
        record["fixed"] = fixed_rates(cell, engine, prompts, jobs)
        best = max(record["fixed"].values())
        record |= {"best_fixed": best, "of_best_fixed": rounds[-1][1] / best}  # with the same requests
    return record


def run_cached(cell: Cell, none: Any, engine: Any, prompts: Prompts, args: argparse.Namespace) -> dict[str, Any]:
    """As `run_cell`, of prompts that are computed before; engines take turns within a round."""
    rate, _ = (prompts.settle(cell, each, args.tokens or SHORT) for each in (none, engine))
    tokens = args.tokens or int(min(max(rate * args.seconds / cell.requests, SHORT), ANSWER[1]))
    steps: tuple[list[list[Step]], list[list[Step]]] = [], []  # without drafts and with them
    equal, ratios, start, before = 0, [], time.monotonic(), delays()
    for turn in range(args.repeats):
        asked = prompts.of(cell, cell.prompt, cell.requests, turn * cell.requests)
        for each in (none, engine):
            prompts.compute(each, asked)
        order = ((none, engine), (engine, none))[turn % 2]
        runs = in_turn(order, jobs_of(asked, cell.temperature, tokens, 0.0, turn), cell.requests)
        mine = [runs[order.index(each)] for each in (none, engine)]
        one, other = (typical(run.steps, cell.requests).rate for run in mine)
        ratios.append(other / one)
        equal += same(mine[0].answers, mine[1].answers)
        for all_steps, run in zip(steps, mine, strict=True):
            all_steps += run.steps
    waited = max(since(before)) / (time.monotonic() - start)
    plain, drafted = (typical(each, cell.requests) for each in steps)
    return {
        **cell._asdict(), "prompts": args.repeats * cell.requests, "tokens": tokens, "none": plain.rate,
        "drafts": drafted.rate, "ratio": drafted.rate / plain.rate, "ratios": ratios, "error": error(ratios),
        "same": equal, **report(itertools.chain.from_iterable(steps[1])), "waited": waited,
        "resting": plain.plain / drafted.plain if plain.plain and drafted.plain else None,
        "of_plain": drafted.rate * drafted.plain / cell.requests if drafted.plain else None,
    }  # fmt: skip


def same(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Answers that are the same."""
    return sum(a.tokens == b.tokens for a, b in zip(one, other, strict=True))


def fixed_rates(cell: Cell, engine: Any, prompts: Prompts, jobs: Sequence[Any]) -> dict[str, float]:
    """Tokens per second with each shape of the menu."""
    rates = {}
    for shape in fixed_shapes(engine):
        with pinned(engine, shape), watched(engine) as steps:
            rates[name_of(shape)] = prompts.timed(engine, jobs, cell.requests).rate
        check_pinned(steps, shape)
    return rates


# ---- the report ------------------------------------------------------------------------------------------------------


def table(records: Sequence[dict[str, Any]]) -> str:
    """In Markdown, the worst cell first."""
    head = "| requests | prompt | temperature | text | drafter | none, tokens/s | drafts, tokens/s | ratio | error |"
    lines = [head + " accept length | resting | of plain | waited | shapes |", "|" + "---|" * 14]
    for one in sorted(records, key=lambda record: record["ratio"]):
        steps, known = sum(one["shapes"].values()), "" if one["error"] is None else f"{one['error']:.3f}"
        resting, own = ("" if one.get(name) is None else f"{one[name]:.3f}" for name in ("resting", "of_plain"))
        shapes = ", ".join(f"{name} {count / steps:.0%}" for name, count in list(one["shapes"].items())[:3])
        lines.append(
            f"| {one['requests']} | {one['prompt']} | {one['temperature']:g} | {one['text']} | {one['drafter']} | "
            f"{one['none']:.0f} | {one['drafts']:.0f} | {one['ratio']:.3f} | {known} | "
            f"{one['accept_length']:.2f} | {resting} | {own} | {one['waited']:.0%} | {shapes} |"
        )
    return "\n".join(lines)


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Cells, those that are slower than `MIN_RATIO`, the worst and the median ratio; of all and of each drafter."""

    def of(some: Sequence[dict[str, Any]]) -> dict[str, Any]:
        ratios = [one["ratio"] for one in some]
        shares = [one["of_best_fixed"] for one in some if "of_best_fixed" in one]
        return {
            "cells": len(some),
            "below": sum(ratio < MIN_RATIO for ratio in ratios),
            "worst": min(ratios),
            "median": statistics.median(ratios),
        } | ({"worst_of_best_fixed": min(shares)} if shares else {})

    if not records:
        return {}
    names = dict.fromkeys(one["drafter"] for one in records)
    return {"all": of(records)} | {name: of([one for one in records if one["drafter"] == name]) for name in names}


def cell_of(record: dict[str, Any]) -> Cell:
    return Cell(*(record[name] for name in Cell._fields))


def read(out: Path | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of a run before. Raises ValueError if it was of another model, other options or another machine."""
    if out is None or not out.exists():
        return []
    found = json.loads(out.read_text(encoding="utf8"))
    others = [name for name in about if name != "date" and found[name] != about[name]]
    if others:
        raise ValueError(f"{out} is of another {', '.join(others)}")
    return cast(list[dict[str, Any]], found["cells"])


def write(out: Path | None, records: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    if out is not None:
        found = {**about, "summary": summary(records), "cells": list(records)}
        out.write_text(json.dumps(found, indent=1), encoding="utf8")
        out.with_suffix(".md").write_text(table(records) + "\n", encoding="utf8")


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--drafters", type=listed(str), default=DRAFTERS, help="whose cells of the grid to run")
    parser.add_argument("--all-drafters", type=listed(str), default=DRAFTERS, help="of the grid")
    parser.add_argument("--requests", type=listed(int), default=REQUESTS)
    parser.add_argument("--prompts", type=listed(int), default=PROMPTS)
    parser.add_argument("--temperatures", type=listed(float), default=TEMPERATURES)
    parser.add_argument("--texts", type=listed(str), default=TEXTS)
    parser.add_argument("--cells", type=int, default=60)
    parser.add_argument("--only", type=listed(only), help="these cells")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of cells")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a run without drafts, about")
    parser.add_argument("--tokens", type=int, help="of each answer")
    parser.add_argument("--repeats", type=int, default=4, help="rounds of a cell")
    parser.add_argument("--cached", action="store_true", help="prompts are computed before, and asked again and again")
    parser.add_argument("--isa", choices=SET_BY, default="native", help="of a CPU")
    parser.add_argument("--fixed", action="store_true", help="also pin each shape of the menu")
    parser.add_argument("--most-seconds", type=float, default=1e9, help="no cell begins later")
    parser.add_argument("--list", action="store_true", help="print the cells that would run, and end")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main() -> None:
    args = parsed()
    assert not (args.fixed and args.cached), "shapes are pinned in runs with prompts alone"
    run_with(args.isa)
    start = time.monotonic()
    none = make_engine(args, "none")
    assert none is not None
    texts = Texts(none.tokenizer, none.info.vocab_size)
    costs = Costs(0.0, dict.fromkeys(args.requests, 0.0)) if args.cached else measure_costs(none, texts, args.requests)
    print(f"none: {time.monotonic() - start:.1f} s to start, {costs}", flush=True)
    grid = itertools.product(args.requests, args.prompts, args.temperatures, args.texts, args.all_drafters)
    fit = [cell for cell in map(Cell._make, grid) if possible(cell, none, costs, args.cached)]
    if args.only:
        cells = sorted((cell for cell in fit if cell[:4] in args.only), key=lambda cell: args.only.index(cell[:4]))
    else:
        # Those with the same text and length after each other, for what is cached.
        cells = sorted(cover(fit, args.cells, args.seed), key=lambda cell: (cell.prompt, cell.text))
    about = {
        "machine": machine(),
        "isa": args.isa,
        "model": args.model,
        "options": args.options,
        "date": time.strftime("%Y-%m-%d"),
    }
    records = read(args.out, about)
    done = {cell_of(record) for record in records}
    cells = [cell for cell in cells if cell not in done]
    for drafter in args.drafters:
        mine = [cell for cell in cells if cell.drafter == drafter]
        print(f"{drafter}: {len(mine)} cells", flush=True)
        if args.list or not mine or time.monotonic() - start > args.most_seconds:
            print(*mine, sep="\n")
            continue
        begun = time.monotonic()
        engine = make_engine(args, drafter)
        if engine is None:
            continue
        print(f"{drafter}: {time.monotonic() - begun:.1f} s to start", flush=True)
        for cell in mine:
            if time.monotonic() - start > args.most_seconds:
                print(f"left out for want of time: {cell}", flush=True)
                continue
            prompts = Prompts(texts, args.cached)
            if args.cached:
                records.append(run_cached(cell, none, engine, prompts, args))
            else:
                records.append(run_cell(cell, none, engine, prompts, costs, args))
            print(table(records[-1:]).splitlines()[-1], flush=True)
            write(args.out, records, about)
        let_go(engine)
    print(table(records))
    for name, one in summary(records).items():
        print(name, one)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
