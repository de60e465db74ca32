"""What each thing that a request may ask for costs, at batch 1 and 16, with and without speculation.

    python benchmarks/features_cpu.py --threads 2

The default model in bfloat16 on MT-bench prompts, greedy, answers of a fixed length. A figure is the tokens per second
with the feature over those without, the median of runs in turn. Where the feature changes the text, and with it how
many drafts are accepted, the ratio tells both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from load_texts import mt_bench

from draftwing import LLM

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "maxLength": 40},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "email", "likes"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 30, "maxItems": 30}
ASK = "Write a JSON array of thirty people with name, age, email and likes."

# name -> (sampling parameters, what else the request has)
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frequency and presence penalty": ({"frequency_penalty": 0.01, "presence_penalty": 0.01}, {}),
    "repetition penalty": ({"repetition_penalty": 1.01}, {}),
    "logit bias (100 tokens)": ({"logit_bias": {str(i): 0.01 for i in range(1000, 1100)}}, {}),
    "allowed token ids (all but 100)": ({"allowed_token_ids": list(range(100, 49152))}, {}),
    "bad words (10)": ({"bad_words": [f"zyx{i}" for i in range(10)]}, {}),
    "stop regex": ({"stop_regex": r"zyx\d+zyx"}, {}),
    "log probabilities, top 5": ({}, {"return_logprob": True, "top_logprobs_num": 5}),
    "speculation off": ({}, {"speculative": "off"}),
}


def run(llm: LLM, batch: int, tokens: int, params: dict[str, Any], wishes: dict[str, Any], ask: list[Any]) -> float:
    """Tokens per second, prefill included."""
    llm.engine.flush_cache()
    wanted = {"max_new_tokens": tokens, "temperature": 0.0, **params}
    if not any(name in params for name in ("json_schema", "regex")):
        wanted["ignore_eos"] = True
    begin = time.perf_counter()
    done = llm.chat(ask[:batch], wanted, **wishes)
    return sum(len(one.token_ids) for one in done) / (time.perf_counter() - begin)


def ratio(llm: LLM, batch: int, args: argparse.Namespace, ask: list[Any], feature: tuple[dict, dict]) -> float:
    ratios = []
    for _ in range(args.repeats):
        without = run(llm, batch, args.tokens, {}, {}, ask)
        ratios.append(run(llm, batch, args.tokens, *feature, ask) / without)
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--algorithms", default="none,NGRAM")
    parser.add_argument("--batches", default="1,16")
    args = parser.parse_args()
    turns = [[{"role": "user", "content": turn}] for turn in mt_bench(16)]
    people = [[{"role": "user", "content": f"{ASK} Number {i}."}] for i in range(16)]
    for algorithm in args.algorithms.split(","):
        llm = LLM(
            "smollm2", speculative_algorithm=algorithm, num_threads=args.threads, max_total_tokens=40000,
            sampling_defaults="openai",
        )  # fmt: skip
        run(llm, 1, 8, {}, {}, turns)
        for batch in map(int, args.batches.split(",")):
            rows = [(name, turns, feature) for name, feature in FEATURES.items()]
            rows.append(("JSON schema", people, ({"json_schema": SCHEMA}, {})))
            rows.append(("regular expression", turns, ({"regex": r"[a-z ]{2000,}"}, {})))
            for name, ask, feature in rows:
                if name != "speculation off" or algorithm != "none":
                    share = ratio(llm, batch, args, ask, feature)
                    print(f"{algorithm:6s} batch {batch:2d} {name:34s} {share:6.2f}", flush=True)
        llm.close()


if __name__ == "__main__":
    main()
