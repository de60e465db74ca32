"""What drafts gain with the sampling that requests get which set little, a model's own defaults among it.

    python benchmarks/default_sampling.py FILE.jsonl ... [--model smollm2] [--prompts 20] [--tokens 128] [--rounds 2]
        [--settings "" "temperature=0" "temperature=0.7"] [--options '{"num_threads": 2}'] [--json FILE]

Two engines of one process, one by default and one without speculation, take turns at each prompt; nobody always comes
second. Prompts are every n-th of a file's lines, their "prompt" or first of "turns", with the chat template. "" sets
nothing. Texts of both have to be equal. Columns: tokens/s of both over all answers, their ratio, the median of the
prompts' ratios, and tokens of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwing import LLM
from draftwing.llm import Completion


class Answer(NamedTuple):
    """seconds: from the call to the end of the answer."""

    seconds: float
    completion: Completion


def prompts(file: Path, count: int) -> list[str]:
    """Evenly spread over the file."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    count = min(count, len(texts))
    return [texts[i * len(texts) // count] for i in range(count)]


def ask(llm: LLM, text: str, params: dict[str, Any]) -> Answer:
    begun = time.perf_counter()
    (completion,) = llm.chat([{"role": "user", "content": text}], params)
    return Answer(time.perf_counter() - begun, completion)


def in_turn(engines: Sequence[LLM], texts: Sequence[str], params: dict[str, Any], rounds: int) -> list[list[Answer]]:
    """The best of some rounds of each engine for each text."""
    found = []
    for number, text in enumerate(texts):
        best: list[Answer | None] = [None] * len(engines)
        for turn in range(rounds):
            for place in range(len(engines)):
                which = (place + number + turn) % len(engines)
                one, before = ask(engines[which], text, params), best[which]
                best[which] = one if before is None or one.seconds < before.seconds else before
        found.append([one for one in best if one is not None])
    return found


def row(name: str, answers: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """A line of the table, of answers [prompts, (by default, none)]."""
    for drafted, plain in answers:
        assert drafted.completion.token_ids == plain.completion.token_ids, "text differs with speculation"
    counts = [len(plain.completion.token_ids) for _, plain in answers]
    rates = [sum(counts) / sum(one[which].seconds for one in answers) for which in (0, 1)]
    steps = sum(drafted.completion.meta_info["spec_verify_ct"] for drafted, _ in answers)
    return {
        "setting": name or "(nothing)",
        "default": round(rates[0], 1),
        "none": round(rates[1], 1),
        "ratio": round(rates[0] / rates[1], 3),
        "median": round(statistics.median(plain.seconds / drafted.seconds for drafted, plain in answers), 3),
        "length": round((sum(counts) - len(counts)) / steps, 2),
        "tokens": sum(counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--settings", nargs="+", default=["", "temperature=0", "temperature=0.7"])
    parser.add_argument("--options", type=json.loads, default={}, help="of both engines, as JSON")
    parser.add_argument("--json", type=Path, help="rows go to this file, too")
    args = parser.parse_args()
    kept = []
    print("| prompts | setting | default, tokens/s | none | ratio | median ratio | tokens of a step | tokens |")
    print("|---|---|---|---|---|---|---|---|")
    plain = {**args.options, "speculative_algorithm": "none"}
    with LLM(args.model, **args.options) as drafting, LLM(args.model, **plain) as alone:
        for file in args.files:
            texts = prompts(file, args.prompts)
            for setting in args.settings:
                pairs = (one.partition("=") for one in setting.split(",") if one)
                params = {name: json.loads(value) for name, _, value in pairs}
                params = {"max_new_tokens": args.tokens, "sampling_seed": 0, **params}
                in_turn((drafting, alone), texts[:2], params, 1)  # policies and caches settle
                found = row(setting, in_turn((drafting, alone), texts, params, args.rounds))
                print(f"| {file.parent.name}/{file.stem} | " + " | ".join(map(str, found.values())) + " |", flush=True)
                kept.append({"prompts": str(file), **found})
    if args.json is not None:
        args.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
