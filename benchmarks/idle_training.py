"""Latencies of requests with and without a process that trains between them, as `serve --learn-while-idle` has it.

    python benchmarks/idle_training.py --from DIR --out RUN [--requests 40] [--tokens 48] [--pause 0.6]

DIR: of `serve --learn`, with enough traffic. Each request comes after a pause; before every second one a head is being
trained, which stops when the request is there. RUN: where that training is left, to go on with.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from draftwing import LLM
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
    asked = parser.parse_args()
    training = IdleTraining(asked.folder, ["--model", asked.model, "--num-threads", "1"], 8 << 30, IDLE)
    training.out = asked.out
    params = {"max_new_tokens": asked.tokens, "temperature": 0, "ignore_eos": True}
    seconds: dict[bool, list[float]] = {False: [], True: []}
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
            seconds[trains].append(time.perf_counter() - start)
    training.close()
    for trains, found in seconds.items():
        ranked = sorted(found)
        tail = ranked[min(round(0.99 * len(ranked)), len(ranked) - 1)]
        print(f"{'with' if trains else 'without'} training: median {1e3 * statistics.median(found):.1f} ms, "
              f"99th percentile {1e3 * tail:.1f} ms of {len(found)} requests")  # fmt: skip
    without, with_ = seconds[False], seconds[True]
    print(f"median {statistics.median(with_) / statistics.median(without):.3f} of without")


if __name__ == "__main__":
    main()
