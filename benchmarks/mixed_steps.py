"""Prompts beside rows that decode: in one forward (`--enable-mixed-chunk`) or in turn. One engine runs both ways.

    python benchmarks/mixed_steps.py --model FOLDER --draft EAGLE3=HEAD [--drafters none,EAGLE3] --out mixed.json
    python benchmarks/mixed_steps.py --cells 600x4 --rate 0 --drafters none,EAGLE3      # two CPU cores

A cell is a length of prompts (chat), or `mix` for those of `open_loop.py`, and how many requests run at once, `--waves`
times as many in all. With `--rate` requests come at random times, too. Each round has other prompts, and both ways have
the same. `steps` tells of the mixed ones: how many, with drafts, from graphs, mean tokens of prompts, milliseconds;
`ratio` is of tokens per second, mixed over in turn. Without `fast_numerics=true` all answers must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from load_runs import Answered, Driven, add_arguments, drive, jobs_of, let_go, listed, machine, make_engine
from load_texts import Texts
from open_loop import TEMPERATURE, arrivals, times

WAYS = ("in turn", "mixed")


def cell(text: str) -> tuple[str, int]:
    """4000x8: prompts of 4,000 tokens, 8 at once"""
    length, _, at_once = text.rpartition("x")
    return length, int(at_once)


def runs_of(texts: Texts, args: argparse.Namespace) -> dict[str, Callable[[Any, int], Driven]]:
    """By name: a run of an engine, of this round; round 0 is short, and makes what is made once."""

    def closed(length: str, at_once: int) -> Callable[[Any, int], Driven]:
        def run(engine: Any, turn: int) -> Driven:
            count = args.waves * at_once if turn else at_once
            tokens = args.tokens if turn else args.tokens // 8
            if length == "mix":
                return drive(engine, arrivals(texts, 1.0, count, tokens, turn + 1), at_once)
            prompts = texts.prompts("chat", int(length), count, turn * count)
            return drive(engine, jobs_of(prompts, args.temperature, tokens, args.spread, turn), at_once)

        return run

    def opened(engine: Any, turn: int) -> Driven:
        seconds = args.seconds if turn else args.seconds / 4
        return drive(engine, arrivals(texts, args.rate, seconds, 2 * args.tokens, turn + 1))

    found = {f"{length} x {at_once}": closed(length, at_once) for length, at_once in args.cells}
    return found | ({f"{args.rate:g}/s": opened} if args.rate else {})


def both_ways(engine: Any, run: Callable[[Any, int], Driven], rounds: int) -> dict[str, Any]:
    """Runs each way in each round, first one and then the other in front."""
    sched = engine.parts.sched
    mixing, rates = sched.config, {way: list[float]() for way in WAYS}
    answers: dict[str, list[Answered]] = {way: [] for way in WAYS}
    steps: list[tuple[bool, int, float]] = []  # mixed ones: with drafts, tokens of prompts, seconds
    prefills, graphs = engine.parts.executor.prefills, 0
    watch = engine._loop._watch

    def counted(plan: Any, result: Any) -> None:
        if turn and plan.mixed_prefill is not None:
            steps.append((plan.shape.depth > 0, sum(one.length for one in plan.mixed_prefill.chunks), result.seconds))
        watch(plan, result)

    engine._loop._watch = counted
    for turn in range(rounds + 1):
        for way in WAYS if turn % 2 else reversed(WAYS):
            sched.config = mixing if way == "mixed" else replace(mixing, mixes=None)
            assert engine.flush_cache()
            before = prefills.mixed_replays
            done = run(engine, turn)
            if not turn:
                continue
            graphs += prefills.mixed_replays - before
            rates[way].append(sum(len(one.tokens) for one in done.answers) / done.seconds)
            answers[way] += done.answers
    engine._loop._watch, sched.config = watch, mixing
    found: dict[str, Any] = {way: times(answers[way], 1.0) | {"tokens_per_s": rates[way]} for way in WAYS}
    count = max(len(steps), 1)
    drafted, tokens, seconds = map(sum, zip(*steps, strict=True)) if steps else (0, 0, 0.0)
    found["steps"] = {"mixed": len(steps), "with drafts": drafted, "from graphs": graphs,
                      "prompt tokens": tokens / count, "ms": 1e3 * seconds / count}  # fmt: skip
    found["ratio"] = statistics.median(b / a for a, b in zip(rates["in turn"], rates["mixed"], strict=True))
    same = [a.tokens == b.tokens for a, b in zip(answers["in turn"], answers["mixed"], strict=True)]
    found["same"] = f"{sum(same)} of {len(same)}"
    return found


def shown(name: str, drafter: str, found: dict[str, Any]) -> str:
    names = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "gap_p99")
    lines = []
    for way in WAYS:
        run = found[way]
        rate = statistics.mean(run["tokens_per_s"])
        values = " | ".join(f"{run[each]:.1f}" for each in names)
        lines.append(f"| {drafter} | {name} | {way} | {rate:.1f} | {values} |")
    steps = ", ".join(f"{value:.1f} {name}" for name, value in found["steps"].items())
    told = f"ratio {found['ratio']:.3f}, steps: {steps}, the same answers {found['same']}"
    return "\n".join([*lines, told])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--drafters", type=listed(str), default=("none", "EAGLE3"))
    parser.add_argument("--cells", type=listed(cell), default=(("4000", 8), ("2300", 32)))
    parser.add_argument("--rate", type=float, default=30.0, help="requests per second of the last cell; 0: without")
    parser.add_argument("--seconds", type=float, default=8.0, help="in which these come")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--spread", type=float, default=0.3, help="of the lengths of answers to prompts of one length")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    print("| drafter | cell | way | tokens/s | ttft_p50 | ttft_p99 | tpot_p50 | tpot_p99 | gap_p99 |", flush=True)
    for drafter in args.drafters:
        began = time.monotonic()
        engine = make_engine(args, drafter, enable_mixed_chunk=True)
        if engine is None:
            continue
        print(f"{drafter}: started in {time.monotonic() - began:.1f} s", flush=True)
        texts = Texts(engine.tokenizer, engine.info.vocab_size)
        drive(engine, jobs_of(texts.prompts("chat", 300, 8, 9000), TEMPERATURE, 32), 4)
        for name, run in runs_of(texts, args).items():
            results.setdefault(drafter, {})[name] = found = both_ways(engine, run, args.rounds)
            print(shown(name, drafter, found), flush=True)
        let_go(engine)
    if args.out:
        about = {"machine": machine(), "options": args.options, "date": time.strftime("%Y-%m-%d")}
        args.out.write_text(json.dumps(about | {"drafters": results}, indent=1), encoding="utf8")


if __name__ == "__main__":
    main()
