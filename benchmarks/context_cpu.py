"""Speed on a CPU by tokens of context: prompts of each length, and decoding behind them.

    python benchmarks/context_cpu.py --out result.json [--contexts 100,1900,3800,7100] [--types bfloat16,int8]
        [--algorithms none,EAGLE3] [--model smollm2] [--rounds 3]

One request, greedy, 64 tokens. All engines take turns, and the best of their rounds counts: a shared machine only ever
makes one slower. A prompt is computed once in a round without its prefix in the cache; the decoding goes on from what
it left there. "memory" is what a thread of each core reads of a large array in the same run, in GB/s, and "floor" the
rate at which that would read what a step without drafts needs: keys and values, and the weights.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from draftwing import LLM, SamplingParams

TOKENS = 64


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)


def seconds(llm: LLM, ids: list[int], tokens: int) -> float:
    start = time.perf_counter()
    llm.generate([ids], greedy(tokens))
    return time.perf_counter() - start


def read_rate(array: torch.Tensor) -> float:
    """GB/s of all cores."""
    start = time.perf_counter()
    array.sum()
    return array.nbytes / (time.perf_counter() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", default="100,1900,3800,7100")
    parser.add_argument("--types", default="bfloat16,int8")
    parser.add_argument("--algorithms", default="none")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    contexts = [int(text) for text in args.contexts.split(",")]
    engines = {}
    for algorithm in args.algorithms.split(","):
        for kind in args.types.split(","):
            drafts = {} if algorithm == "default" else {"speculative_algorithm": algorithm}
            engines[f"{algorithm}, {kind}"] = LLM(args.model, kv_cache_dtype=kind, max_running_requests=1, **drafts)
    vocab = next(iter(engines.values())).engine.parts.executor.model.config.vocab_size
    rng, large = random.Random(1), torch.ones(64 << 20)
    best: dict[str, dict[str, Any]] = {}
    for context in contexts:
        for _ in range(args.rounds):
            ids = [rng.randrange(100, vocab - 100) for _ in range(context)]
            memory = max(read_rate(large) for _ in range(3))
            for name, llm in engines.items():
                prompt = seconds(llm, ids, 1)
                short, long = seconds(llm, ids, 1), seconds(llm, ids, TOKENS + 1)
                found = best.setdefault(f"{name}, {context}", {"prompt": 0.0, "decode": 0.0, "memory": 0.0})
                found["prompt"] = max(found["prompt"], context / prompt)
                found["decode"] = max(found["decode"], TOKENS / (long - short))
                found["memory"] = max(found["memory"], memory)
        for name in engines:
            print(f"{name}, {context}", {k: round(v, 1) for k, v in best[f"{name}, {context}"].items()}, flush=True)
    args.out.write_text(json.dumps(best, indent=1) + "\n")


if __name__ == "__main__":
    main()
