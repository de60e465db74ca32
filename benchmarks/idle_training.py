"""Latencies of requests with and without a process that trains between them, as `serve --learn-while-idle` has it.

    python benchmarks/idle_training.py --from DIR --out RUN [--requests 40] [--tokens 48] [--pause 0.6] [--results FILE]

DIR: of `serve --learn`, with enough traffic. Each request comes after a pause; before every second one a head is being
trained, which stops when the request is there. RUN: where that training is left, to go on with. FILE: JSON of latencies
in seconds; those of earlier calls count, too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from draftwing import LLM
from draftwing.files import write_json
from draftwing.learn.idle import IdleTraining

IDLE = 0.1  # seconds without requests, after which it trains
PROMPT = "Explain in a few sentences what a hash table is."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pause", type=float, default=0.6, help="seconds between requests")
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    training = IdleTraining(asked.folder, ["--model", asked.model, "--num-threads", "1"], 8 << 30, IDLE)
    training.out = asked.out
    params = {"max_new_tokens": asked.tokens, "temperature": 0, "ignore_eos": True}
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    if asked.results is not None and asked.results.exists():
        seconds = json.loads(asked.results.read_text(encoding="utf-8"))
    with LLM(asked.model) as llm:
        llm.generate(PROMPT, params)
        training.start(str(llm.engine.options.speculative_draft_model_path))
        training.busy()
        for number in range(2 * asked.requests):
            trains = number % 2 == 1
            end = time.monotonic() + asked.pause
            while time.monotonic() < end:
                time.sleep(0.02)
                if trains:
                    training.look()
            assert training.active == trains, "the process has ended: its messages are above"
            start = time.perf_counter()
            training.busy()
            llm.generate(PROMPT, params)
            seconds["with" if trains else "without"].append(time.perf_counter() - start)
    training.close()
    if asked.results is not None:
        write_json(asked.results, seconds)
    draws = np.random.default_rng(0)
    ranks = np.array([50, 99])
    found = {name: np.percentile(one, ranks) for name, one in seconds.items()}
    drawn = {name: np.percentile(draws.choice(one, (2000, len(one))), ranks, axis=1) for name, one in seconds.items()}
    for name, (median, tail) in found.items():
        print(f"{name} training: median {1e3 * median:.1f} ms, 99th percentile {1e3 * tail:.1f} ms of "
              f"{len(seconds[name])} requests")  # fmt: skip
    ratios, errors = found["with"] / found["without"], (drawn["with"] / drawn["without"]).std(axis=1)
    for rank, ratio, error in zip(ranks, ratios, errors, strict=True):
        print(f"percentile {rank}: {ratio:.3f} ± {error:.3f} of without")


if __name__ == "__main__":
    main()
