"""Time per token when requests come at random times, with drafters and without.

    python benchmarks/open_loop.py --out open_loop.json [--rates 12,30,45] [--drafters EAGLE3,NGRAM]

Requests of mixed length and text arrive as a Poisson process, the same ones for every engine, several times.
Milliseconds: `tpot` is the time of an answer after its first token over its further tokens, a gap is the time between
two outputs of an answer, as a client sees them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_runs import (
    Answered,
    Job,
    add_arguments,
    drive,
    jobs_of,
    let_go,
    listed,
    machine,
    make_engine,
    quantile,
    sampling,
)
from load_texts import Texts

MIX = (("chat", 60), ("chat", 600), ("code", 200), ("chat", 250), ("copy", 500))  # text and tokens of prompts
TEMPERATURE = 0.7
MAX_RATIOS = {"tpot_p50": 1.05, "tpot_p99": 1.05, "gap_p99": 1.1}  # times what it is without drafts


def arrivals(texts: Texts, rate: float, seconds: float, tokens: int, seed: int = 1) -> list[Job]:
    """`rate * seconds` requests of `MIX`, others for another seed."""
    rng, jobs, at, count = random.Random(seed), list[Job](), 0.0, max(1, round(rate * seconds))
    for number in range(count):
        text, length = MIX[number % len(MIX)]
        (prompt,) = texts.prompts(text, length, 1, (seed - 1) * count + number)
        jobs.append(Job(prompt, sampling(TEMPERATURE, tokens, number), at))
        at += rng.expovariate(rate)
    return jobs


def times(answers: Sequence[Answered], seconds: float) -> dict[str, float]:
    """Tokens per second of all answers; milliseconds: median and 99th percentile."""
    found = {
        "ttft": [one.first - one.came for one in answers],
        "tpot": [(one.end - one.first) / (len(one.tokens) - 1) for one in answers if len(one.tokens) > 1],
        "gap": [gap for one in answers for gap in one.gaps],
    }
    spread = {
        f"{name}_p{share:.0f}": 1e3 * quantile(values, share / 100)
        for name, values in found.items()
        for share in (50.0, 99.0)
    }
    return {"requests": len(answers), "tokens_per_s": sum(len(one.tokens) for one in answers) / seconds, **spread}


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """results: of each rate, of each drafter. In Markdown, with what is more than it may be marked."""
    names = ("tokens_per_s", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "gap_p50", "gap_p99")
    lines = ["| requests/s | drafter | " + " | ".join(names) + " |", "|" + "---|" * (2 + len(names))]
    for rate, runs in results.items():
        for drafter, run in runs.items():
            shown = []
            for name in names:
                limit = MAX_RATIOS.get(name, float("inf")) * runs["none"][name] if "none" in runs else float("inf")
                shown.append(f"**{run[name]:.2f}**" if run[name] > limit else f"{run[name]:.2f}")
            lines.append(f"| {rate} | {drafter} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--drafters", type=listed(str), default=("EAGLE3",))
    parser.add_argument("--rates", type=listed(float), default=(12, 30, 45), help="requests per second")
    parser.add_argument("--seconds", type=float, default=8, help="in which requests arrive")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3, help="runs with other arrivals, whose times are joined")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, Any]]] = {f"{rate:g}": {} for rate in args.rates}
    for drafter in ("none", *args.drafters):
        engine = make_engine(args, drafter)
        if engine is None:
            continue
        texts = Texts(engine.tokenizer, engine.info.vocab_size)
        for rate in args.rates:
            drive(engine, jobs_of(texts.prompts("chat", 100, 8, 9000), TEMPERATURE, 64), 8)
            runs = []
            for seed in range(1, args.repeats + 1):
                assert engine.flush_cache()
                runs.append(drive(engine, arrivals(texts, rate, args.seconds, args.tokens, seed)))
            answers = [answer for run in runs for answer in run.answers]
            results[f"{rate:g}"][drafter] = times(answers, sum(run.seconds for run in runs))
            results[f"{rate:g}"][drafter]["gap_p99_of_runs"] = [times(*run[:2])["gap_p99"] for run in runs]
            print(table({f"{rate:g}": results[f"{rate:g}"]}).splitlines()[-1], flush=True)
            if args.out:
                about: dict[str, Any] = {
                    "machine": machine(),
                    "options": args.options,
                    "date": time.strftime("%Y-%m-%d"),
                }
                args.out.write_text(json.dumps(about | {"rates": results}, indent=1), encoding="utf8")
        let_go(engine)
    print(table(results))


if __name__ == "__main__":
    main()
