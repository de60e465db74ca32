"""Which sampling parameters let a small model's answers end, without loops.

    python benchmarks/sampling_quality.py [--model smollm2] [--prompts 50] [--tokens 1024] [--json FILE]
        [SETTING ...]

A setting is a list such as `temperature=0.2,top_p=0.9`; without one, a grid is measured. The prompts are every n-th of
`benchmarks/data/mt_bench.jsonl` and `self_instruct.jsonl`, half of each, with the chat template and seed 0. Columns:

    ended     share of the answers that the model ended itself, within half of --tokens and within --tokens
    tokens    median length
    distinct  distinct 4-grams of token ids as a share of all, the mean over answers
    looped    share of the answers with a loop: LOOP tokens in a row that are those of some period before
    loop      longest such stretch, in tokens
    logprob   mean log probability per token that the model itself, at temperature 1, gives the answers without a loop
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftwing import LLM
from draftwing.llm import Completion

DATA = Path(__file__).parent / "data"
FILES = ("mt_bench.jsonl", "self_instruct.jsonl")
LOOP = 48  # tokens
PERIODS = range(1, 129)  # tokens
GRID = (
    "temperature=1",
    "temperature=0",
    "temperature=0.2,top_p=0.9",
    "temperature=0.2,top_p=0.9,repetition_penalty=1.05",
    "temperature=0.2,top_p=0.9,repetition_penalty=1.1",
    "temperature=0.5,top_p=0.9",
    "temperature=0.5,top_p=0.9,repetition_penalty=1.05",
    "temperature=0.5,top_p=0.9,repetition_penalty=1.1",
    "temperature=0.7,min_p=0.1",
    "temperature=0.7,min_p=0.1,repetition_penalty=1.05",
)


@dataclass(frozen=True)
class Quality:
    """A row of the table; see the module's text."""

    setting: str
    ended_half: float
    ended: float
    tokens: float
    distinct: float
    looped: float
    loop: int
    logprob: float


def prompts(count: int) -> list[str]:
    """First turns, evenly spread over the files."""
    found = []
    for file, name in enumerate(FILES):
        rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
        texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
        share = (count + len(FILES) - 1 - file) // len(FILES)  # of an odd count the first file has one more
        found += [texts[i * len(texts) // share] for i in range(share)]
    return found


def longest_loop(ids: Sequence[int]) -> int:
    """Tokens of the longest stretch that repeats what stands one period, of at most 128 tokens, before it."""
    tokens, longest = np.array(ids), 0
    for period in PERIODS:
        other = np.flatnonzero(tokens[period:] != tokens[:-period])
        ends = np.concatenate(([-1], other, [max(len(tokens) - period, 0)]))
        longest = max(longest, int(np.diff(ends).max()) - 1)
    return longest


def distinct(ids: Sequence[int], size: int = 4) -> float:
    """Share of the n-grams that are different."""
    grams = list(zip(*(ids[i:] for i in range(size)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def measured(llm: LLM, setting: str, texts: Sequence[str], tokens: int) -> tuple[Quality, list[Completion]]:
    given: dict[str, Any] = {
        name: json.loads(value) for name, _, value in (s.partition("=") for s in setting.split(","))
    }
    params = {**given, "max_new_tokens": tokens, "sampling_seed": 0}
    # Explicit neutral values, so that defaults of the model do not come in.
    params = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "dry_multiplier": 0.0, **params}
    chats = [[{"role": "user", "content": text}] for text in texts]
    answers = llm.chat(chats, params, return_logprob=True)
    lengths = [len(answer.token_ids) for answer in answers]
    ends = [answer.finish_reason["type"] == "stop" for answer in answers]
    loops = [longest_loop(answer.token_ids) for answer in answers]
    without = [answer for answer, loop in zip(answers, loops, strict=True) if loop < LOOP]
    own = [entry[0] for answer in without for entry in answer.meta_info["output_token_logprobs"]]
    return Quality(
        setting,
        statistics.mean(end and n <= tokens // 2 for end, n in zip(ends, lengths, strict=True)),
        statistics.mean(ends),
        statistics.median(lengths),
        statistics.mean(distinct(answer.token_ids) for answer in answers),
        statistics.mean(loop >= LOOP for loop in loops),
        max(loops),
        statistics.mean(own) if own else float("nan"),
    ), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=GRID, metavar="SETTING")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="rows and texts go to this file, too")
    args = parser.parse_args()
    if args.prompts < 1:
        parser.error("--prompts: expected one at least")
    texts, kept = prompts(args.prompts), []
    print("| setting | ended in half | ended | tokens | distinct | looped | loop | logprob |")
    print("|---|---|---|---|---|---|---|---|")
    # All at once, and without drafts, which change no text.
    with LLM(args.model, max_running_requests=args.prompts, speculative_algorithm="none") as llm:
        for setting in args.settings:
            row, answers = measured(llm, setting, texts, args.tokens)
            print(
                f"| {row.setting} | {row.ended_half:.0%} | {row.ended:.0%} | {row.tokens:.0f} | {row.distinct:.3f} "
                f"| {row.looped:.0%} | {row.loop} | {row.logprob:.2f} |",
                flush=True,
            )
            kept.append(asdict(row) | {"texts": [answer.text for answer in answers]})
    if args.json is not None:
        args.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
