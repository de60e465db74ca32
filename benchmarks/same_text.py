"""Answers with drafts against those without, one request at a time: how many are the same tokens?

    python benchmarks/same_text.py --model MODEL --prompts FILE [--drafters NEXTN,NGRAM] [--again] [--rate 60]
        [option=value ...]

FILE has a line {"prompt": ...} for each. Every other answer is drawn at temperature 0.8, with a seed. Each drafter is
asked in ways that differ in what else a step has: other requests, trees or chains, a pool in which requests are
preempted, an earlier part of the same prompt in the cache. With `--rate` requests come one by one at random, every
tenth with a prompt of `--long` tokens, so that parts of prompts share forwards with whoever decodes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from load_runs import Job, drive, listed, options_of, watched

from draftwing import LLM
from draftwing.requests.sampling_params import SamplingParams

CHAIN = {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}
TREE = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
FIXED = {"speculative_fixed_shape": True}
WITHOUT_MODEL = ("none", "NGRAM", "SUFFIX")


class Way(NamedTuple):
    """Of asking: requests at once and further options. rate: requests that come in a second, at random; 0: all come at
    once."""

    name: str
    drafter: str
    at_once: int
    options: dict[str, Any]
    rate: float = 0.0


def ways(drafter: str, pool: int, rate: float = 0.0) -> list[Way]:
    """pool: tokens of one that is too small.  rate: as of `Way`, in place of the other ways."""
    if rate:
        plain = Way(f"{drafter}, {rate:g} a second", drafter, 64, {}, rate)
        trees = plain._replace(name=f"{plain.name}, trees of 16", options=TREE | FIXED)
        return [plain] if drafter == "none" else [plain, trees]
    if drafter == "none":
        return [Way("none, 16 at once", "none", 16, {})]
    return [
        Way(f"{drafter}, 16 at once", drafter, 16, {}),
        Way(f"{drafter}, 16 at once, trees of 16", drafter, 16, TREE | FIXED),
        Way(f"{drafter}, 16 at once, chains of 5", drafter, 16, CHAIN | FIXED),
        Way(f"{drafter}, one at a time, trees of 16", drafter, 1, TREE | FIXED),
        Way(f"{drafter}, trees of 16, without overlap", drafter, 16, TREE | FIXED | {"disable_overlap_schedule": True}),
        Way(f"{drafter}, trees of 16, preempted", drafter, 16, TREE | FIXED | {"max_total_tokens": pool}),
    ]


def answers(args: argparse.Namespace, prompts: Sequence[str], way: Way) -> tuple[list[list[int]], str]:
    """The tokens of all answers, and what else is to be said of the run."""
    params = [
        {"temperature": 0.8 * (i % 2), "sampling_seed": i, "max_new_tokens": args.tokens, "ignore_eos": True}
        for i in range(len(prompts))
    ]
    given: dict[str, Any] = {"max_total_tokens": 16384, "max_running_requests": way.at_once, "random_seed": 1}
    given |= {"sampling_defaults": "openai", **args.options}  # those of `SamplingParams`, in both kinds of runs
    if args.draft and way.drafter not in WITHOUT_MODEL:
        given["speculative_draft_model_path"] = args.draft
    with LLM(args.model, speculative_algorithm=way.drafter, **(given | way.options)) as llm:
        if args.again:  # the first parts of prompts are in the cache then
            llm.generate([prompt[: len(prompt) // 2] for prompt in prompts], {"max_new_tokens": 1})
        if way.rate:
            rng, at, jobs = random.Random(1), 0.0, list[Job]()
            for prompt, one in zip(prompts, params, strict=True):
                jobs.append(Job(llm.engine.tokenizer.encode(prompt), SamplingParams(**one), at))
                at += rng.expovariate(way.rate)
            with watched(llm.engine) as steps:
                answered = drive(llm.engine, jobs).answers
            found = [(one.tokens, one.meta) for one in answered]
        else:
            steps = []
            found = [(list(one.token_ids), one.meta_info) for one in llm.generate(prompts, params)]
        accept_length = llm.engine.stats()["accept_length"]
    preempted = sum(meta["num_retractions"] for _, meta in found)
    cached = sum(meta["cached_tokens"] for _, meta in found)
    words = f"acceptance length {accept_length:.2f}, {preempted} preempted, {cached} tokens cached"
    if steps:
        words += f", {sum(step.mixed for step in steps)} of {len(steps)} forwards mixed"
    return [tokens for tokens, _ in found], words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=80, help="of prompts")
    parser.add_argument("--drafters", type=listed(str), default=["none", "NEXTN", "NGRAM"])
    parser.add_argument("--draft", metavar="FOLDER", help="draft model of all that draft with one")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--pool", type=int, default=2600, help="tokens of the pool in which requests are preempted")
    parser.add_argument("--only", default="", help="ways whose name has this")
    parser.add_argument("--again", action="store_true", help="half of each prompt is asked before")
    parser.add_argument("--rate", type=float, default=0.0, help="requests that come in a second, at random")
    parser.add_argument("--long", type=int, default=2000, help="tokens of every tenth prompt, with --rate; about")
    parser.add_argument("options", nargs="*", metavar="option=value", help="of all engines")
    args = parser.parse_args()
    args.options = options_of(args.options)
    lines = args.prompts.read_text(encoding="utf8").splitlines()[: args.count]
    prompts = [json.loads(line)["prompt"] for line in lines]
    if args.rate:
        every = "\n\n".join(prompts) * (1 + args.long // 100)
        prompts = [every[100 * i :][: 4 * args.long] if i % 10 == 5 else one for i, one in enumerate(prompts)]
    expected, words = answers(args, prompts, Way("", "none", 1, {}))
    print(f"{'none, one at a time':45s} {words}", flush=True)
    different = 0
    every_way = [way for drafter in args.drafters for way in ways(drafter, args.pool, args.rate)]
    for way in (way for way in every_way if args.only in way.name):
        texts, words = answers(args, prompts, way)
        same = sum(a == b for a, b in zip(texts, expected, strict=True))
        different += len(prompts) - same
        print(f"{way.name:45s} {same} of {len(prompts)} the same, {words}", flush=True)
    raise SystemExit(1 if different else 0)


if __name__ == "__main__":
    main()
