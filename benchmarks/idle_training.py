"""Latencies of requests with and without a process that trains between them, as `serve --learn-while-idle` has it.

    python benchmarks/idle_training.py --from DIR --out RUN [--requests 40 | --seconds 200] [--tokens 48] [--pause 0.6]
        [--idle 0.1] [--results FILE]

DIR: of `serve --learn`, with enough traffic. Each request comes after a pause; before one of each two, by chance, a
head is being trained, which stops when the request is there. --idle: seconds without requests, after which it trains.
RUN: where that training is left, to go on with. FILE: JSON of latencies in seconds; those of earlier calls count, too.

Errors are by drawing stretches of `BLOCK` pairs anew, for neighbours in time share what disturbs the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from draftwing import LLM
from draftwing.files import write_json
from draftwing.learn.idle import IdleTraining

BLOCK = 10  # pairs of requests
DRAWS = 2000
WARM = 15.0  # seconds that training has for itself at first, to load what it needs
PROMPT = "Explain in a few sentences what a hash table is."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pause", type=float, default=0.6, help="seconds between requests")
    parser.add_argument("--idle", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=0.0, help="of requests, in place of their number")
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    training = IdleTraining(asked.folder, ["--model", asked.model, "--num-threads", "1"], 8 << 30, asked.idle)
    training.out = asked.out
    params = {"max_new_tokens": asked.tokens, "temperature": 0, "ignore_eos": True}
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    if asked.results is not None and asked.results.exists():
        seconds = json.loads(asked.results.read_text(encoding="utf-8"))
    order, pairs = random.Random(len(seconds["with"])), 0
    with LLM(asked.model) as llm:
        llm.generate(PROMPT, params)
        training.start("", ["--init-head", str(llm.engine.options.speculative_draft_model_path)])
        until = time.monotonic() + WARM
        while time.monotonic() < until:
            time.sleep(0.1)
            training.look()
        training.busy()
        until = time.monotonic() + asked.seconds
        while time.monotonic() < until if asked.seconds else pairs < asked.requests:
            for trains in order.sample((False, True), 2):
                seconds["with" if trains else "without"].append(request(llm, training, trains, asked.pause, params))
            pairs += 1
            if asked.results is not None and pairs % 100 == 0:
                write_json(asked.results, seconds)
    training.close()
    if asked.results is not None:
        write_json(asked.results, seconds)
    report(seconds)


def request(llm: LLM, training: IdleTraining, trains: bool, pause: float, params: dict[str, Any]) -> float:
    """Returns the seconds of a request that comes after a pause, in which a head may be trained."""
    end = time.monotonic() + pause
    while time.monotonic() < end:
        time.sleep(0.005)
        if trains:
            training.look()
    assert training.active == trains, "the process has ended: its messages are above"
    start = time.perf_counter()
    training.busy()
    llm.generate(PROMPT, params)
    return time.perf_counter() - start


def report(seconds: dict[str, list[float]]) -> None:
    draws, ranks = np.random.default_rng(0), np.array([50, 90, 99])
    pairs = np.array([seconds["without"], seconds["with"]])  # [2, pairs]
    size = min(BLOCK, pairs.shape[1])
    blocks = pairs[:, : pairs.shape[1] // size * size].reshape(2, -1, size)
    found = np.percentile(pairs, ranks, axis=1)  # [ranks, 2]
    ratios = []
    for _ in range(DRAWS):
        drawn = blocks[:, draws.integers(blocks.shape[1], size=blocks.shape[1])].reshape(2, -1)
        before, after = np.percentile(drawn, ranks, axis=1).T
        ratios.append(after / before)
    errors = np.std(ratios, axis=0)
    for rank, (without, beside), error in zip(ranks, found, errors, strict=True):
        print(f"percentile {rank} of {pairs.shape[1]} requests each: {1e3 * without:.1f} ms without training, "
              f"{1e3 * beside:.1f} with: {beside / without:.3f} ± {error:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
