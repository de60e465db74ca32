"""What a drafter costs while nothing is drafted: none against drafters whose policy is held at plain decoding.

    python benchmarks/off_is_free.py [--drafters EAGLE3,NGRAM] [--batches 1,4,16] [--pairs 15] [--cpu-time]
        [--draft EAGLE3=FOLDER] [option=value ...]

Greedy, on the device that there is. Competitors take turns in short runs, and what is reported is the median of their
ratios and its quartiles: a shared machine disturbs neighbours alike. Where it is busy, `--cpu-time` counts the time of
one thread's processor.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine_cpu import generate, questions
from load_runs import add_arguments, check_pinned, given_options, listed, pinned, watched

from draftwing import LLM
from draftwing.config.trees import PLAIN

Clock = Callable[[], float]


def seconds(llm: LLM, prompts: list[list[int]], tokens: int, clock: Clock) -> float:
    """Of a run on an empty prefix cache."""
    assert llm.engine.flush_cache()
    start = clock()
    generate(llm, prompts, tokens)()
    return clock() - start


def ratios(plain: LLM, other: LLM, prompts: list[list[int]], tokens: int, pairs: int, clock: Clock) -> list[float]:
    """Speed of the other, held at plain decoding, as a share of plain's, pair by pair; who begins takes turns."""
    found = []
    with pinned(other.engine, PLAIN):
        with watched(other.engine) as steps:  # one run more: to watch costs time
            seconds(other, prompts, tokens, clock)
        check_pinned(steps, PLAIN)
        for pair in range(pairs):
            order: Sequence[LLM] = (plain, other) if pair % 2 else (other, plain)
            spent = {id(llm): seconds(llm, prompts, tokens, clock) for llm in order}
            found.append(spent[id(plain)] / spent[id(other)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--drafters", type=listed(str), default=("EAGLE3", "NGRAM"))
    parser.add_argument("--batches", type=listed(int), default=(1, 4, 16))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread")
    args = parser.parse_args()
    more: dict[str, Any] = {}
    clock: Clock = time.perf_counter
    if args.cpu_time:
        more["num_threads"], clock = 1, time.process_time
    plain = LLM(**given_options(args, "none"), **more)
    for name in args.drafters:
        other = LLM(**given_options(args, name), **more)
        for size in args.batches:
            prompts = questions(plain, size)
            ratios(plain, other, prompts, args.tokens, 2, clock)  # what is made once
            found = sorted(ratios(plain, other, prompts, args.tokens, args.pairs, clock))
            low, middle, high = statistics.quantiles(found, n=4)
            print(f"{name:12s} {size:3d} requests: {middle:.4f} of none ({low:.4f} .. {high:.4f})", flush=True)
        del other
        gc.collect()


if __name__ == "__main__":
    main()
