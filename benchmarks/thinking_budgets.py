"""Answers with thinking budgets: those with drafts against those without, one request at a time.

    python benchmarks/thinking_budgets.py [--model MODEL] [--prompts 80] [--tokens 96] [--only EAGLE3]

The first turns of MT-bench with budgets of several sizes, half of them at temperature 0.8. The model is taken to reason
from the first token on; the marker that ends it may be several tokens. For each way of drafting it prints how many
answers are the same tokens, and how often reasoning was ended by force, where the budget says.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from load_texts import mt_bench
from same_text import FIXED, TREE, Way
from same_text import ways as of_drafter

from draftwing import LLM

BUDGETS = 0, 1, 5, 12, 30, 60, -1


def ways(pool: int) -> list[Way]:
    """pool: tokens of one that is too small."""
    ngram = (
        Way("NGRAM, one at a time", "NGRAM", 1, {}),
        Way("NGRAM, 16 at once, trees of 16", "NGRAM", 16, TREE | FIXED),
    )
    return [*of_drafter("none", pool), *ngram, *of_drafter("EAGLE3", pool), *of_drafter("EAGLE3+NGRAM", pool)[:1]]


def answers(args: argparse.Namespace, way: Way) -> tuple[list[list[int]], str]:
    """The tokens of all answers, and what else is to be said of the run."""
    asked = [[{"role": "user", "content": turn}] for turn in mt_bench(args.prompts)]
    params = [
        {"temperature": 0.8 * (i % 2), "sampling_seed": i, "max_new_tokens": args.tokens, "ignore_eos": True,
         "thinking_budget": BUDGETS[i % len(BUDGETS)]}
        for i in range(len(asked))
    ]  # fmt: skip
    options = {"max_total_tokens": 16384, "max_running_requests": way.at_once, "random_seed": 1} | way.options
    with LLM(
        args.model, reasoning_parser="deepseek-r1", speculative_algorithm=way.drafter,
        **options,
    ) as llm:  # fmt: skip
        marker = llm.engine.tokenizer.encode("</think>", add_special_tokens=False)
        found = llm.chat(asked, params)
        reported = f"acceptance length {llm.engine.stats()['accept_length']:.2f}"
    texts = [list(one.token_ids) for one in found]
    retracted = sum(one.meta_info["num_retractions"] for one in found)
    reported += f", {retracted} preempted, {forced(texts, marker)} ended where the budget says"
    return texts, reported


def forced(texts: Sequence[Sequence[int]], marker: Sequence[int]) -> int:
    """How many answers have the marker right after their budget. Raises AssertionError for one that goes on."""
    count = 0
    for i, text in enumerate(texts):
        tokens = BUDGETS[i % len(BUDGETS)]
        where = [at for at in range(len(text)) if list(text[at : at + len(marker)]) == list(marker)]
        if 0 <= tokens <= len(text) - len(marker):
            assert where and where[0] <= tokens, f"answer {i} reasons beyond its budget of {tokens}: {where}"
            count += where[0] == tokens
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--pool", type=int, default=2600, help="tokens of the pool in which requests are preempted")
    parser.add_argument("--only", default="", help="ways whose name has this")
    args = parser.parse_args()
    expected, reported = answers(args, Way("", "none", 1, {}))
    print(f"{'none, one at a time':40s} {reported}", flush=True)
    for way in ways(args.pool):
        if args.only in way.name:
            texts, reported = answers(args, way)
            same = sum(a == b for a, b in zip(texts, expected, strict=True))
            print(f"{way.name:40s} {same} of {len(expected)} the same, {reported}", flush=True)


if __name__ == "__main__":
    main()
