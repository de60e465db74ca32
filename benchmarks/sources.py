"""Tokens of a step of drafters alone and together, in trees of one size, by kind of text: counts, which no other
program disturbs.

    python benchmarks/sources.py KIND=FILE.jsonl ... --out counts.json [--drafters EAGLE3,SUFFIX,EAGLE3+SUFFIX]
        [--model smollm2] [--prompts 10] [--tokens 128] [--settings "temperature=0"] [--options '{"num_threads": 1}']

A line of a file has "messages", or "turns", of which the first is asked, or "prompt", all with the chat template.
Every drafter drafts its whole tree in every step (`--speculative-fixed-shape`) and knows nothing of other answers.
Texts have to be equal. The last columns are of those with a "+": tokens a step over those of the best of their parts
that were asked for, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftwing import LLM


class Kind(NamedTuple):
    name: str
    asked: list[list[dict[str, str]]]


def kind(word: str, count: int) -> Kind:
    """Evenly spread over a file."""
    name, _, file = word.partition("=")
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    rows = [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]
    return Kind(name, [messages(row) for row in rows])


def messages(row: dict[str, Any]) -> list[dict[str, str]]:
    if "messages" in row:
        return list(row["messages"])
    return [{"role": "user", "content": row["turns"][0] if "turns" in row else row["prompt"]}]


class Counted(NamedTuple):
    """Of one answer."""

    tokens: list[int]
    steps: int
    accepted: int


def run(model: str, drafter: str, kinds: Sequence[Kind], params: dict[str, Any], options: Any) -> list[list[Counted]]:
    """[kind][prompt]"""
    found = []
    with LLM(model, speculative_algorithm=drafter, speculative_fixed_shape=True, **options) as llm:
        for one in kinds:
            found.append([])
            for asked in one.asked:
                assert llm.engine.flush_cache()
                (answer,) = llm.chat(asked, params)
                meta = answer.meta_info
                found[-1].append(Counted(answer.token_ids, meta["spec_verify_ct"], meta["spec_num_correct_drafts"]))
    return found


def length(answers: Sequence[Counted]) -> float:
    """Tokens of a step."""
    steps = sum(one.steps for one in answers)
    return (steps + sum(one.accepted for one in answers)) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", metavar="KIND=FILE")
    parser.add_argument("--drafters", default="EAGLE3,SUFFIX,EAGLE3+SUFFIX")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--settings", default="temperature=0")
    parser.add_argument("--options", type=json.loads, default={}, help="of all engines, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kinds = [kind(word, args.prompts) for word in args.kinds]
    pairs = (one.partition("=") for one in args.settings.split(","))
    params = {name: json.loads(value) for name, _, value in pairs}
    params = {"max_new_tokens": args.tokens, "sampling_seed": 0, **params}
    drafters = args.drafters.split(",")
    counts = {name: run(args.model, name, kinds, params, args.options) for name in drafters}
    rows = []
    for number, one in enumerate(kinds):
        texts = [[answer.tokens for answer in counts[name][number]] for name in drafters]
        assert all(text == texts[0] for text in texts), "text differs between drafters"
        lengths = {name: length(counts[name][number]) for name in drafters}
        parts = {name: [part for part in name.split("+") if part in lengths] for name in drafters if "+" in name}
        best = {name: max(lengths[part] for part in some) for name, some in parts.items() if some}
        ratios = {f"{name} / its best": lengths[name] / best[name] for name in best}
        rows.append({"kind": one.name, "texts": len(one.asked), **lengths, **ratios})
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()) + " |")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
