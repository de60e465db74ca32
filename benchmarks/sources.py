"""Tokens of a step of drafters alone and together, in trees of one size, by kind of text: counts, which no other
program disturbs.

    python benchmarks/sources.py KIND=FILE.jsonl ... --out counts.json [--drafters EAGLE3,SUFFIX,EAGLE3+SUFFIX]
        [--model smollm2] [--prompts 10] [--tokens 128] [--settings "temperature=0"] [--options '{"num_threads": 1}']
        [--tree 5,4,16] [--longest 5000]

A line of a file has "messages", or "turns", of which the first is asked, or "prompt", all with the chat template.
Messages that end with the assistant's are a conversation of another model: each of its answers is given in turn, its
first `--tokens`, behind what was said before, and the target is made to say it: `data/agents_*.jsonl` and
`data/edits_*.jsonl`. A longer past than `--longest` tokens lacks what comes after the first messages.
Every drafter drafts its whole tree in every step (`--speculative-fixed-shape`) and knows nothing of other lines.
`--tree` is that of heads; a lookup alone has its own of as many nodes.
Texts have to be equal. The last columns are of those with a "+": tokens a step over those of the best of their parts
that were asked for, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from draftwing import LLM
from draftwing.config.drafters import find_drafter
from draftwing.config.trees import TREE
from draftwing.llm import Completion

SURE = 1e6  # added to a logit that is to be the largest; nothing is banned, or drafters would know


class Asked(NamedTuple):
    """messages, and the answer that is given to them; None: what the model says."""

    messages: list[dict[str, str]]
    given: str | None = None


class Kind(NamedTuple):
    """asked: of each line."""

    name: str
    asked: list[list[Asked]]


def kind(word: str, count: int) -> Kind:
    """Evenly spread over a file."""
    name, _, file = word.partition("=")
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    rows = [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]
    return Kind(name, [asked(row) for row in rows])


def asked(row: dict[str, Any]) -> list[Asked]:
    if "messages" not in row:
        return [Asked([{"role": "user", "content": row["turns"][0] if "turns" in row else row["prompt"]}])]
    said = list(row["messages"])
    if said[-1]["role"] != "assistant":
        return [Asked(said)]
    return [Asked(said[:i], one["content"]) for i, one in enumerate(said) if one["role"] == "assistant"]


def prompt(tokenizer: Any, messages: list[dict[str, str]], longest: int) -> list[int]:
    """Returns token ids, at most `longest` while there are messages to leave out after the first ones."""
    first = 1 + (messages[0]["role"] == "system")
    while len(ids := list(tokenizer.encode_chat(messages))) > longest and len(messages) > first + 2:
        messages = messages[:first] + messages[first + 2 :]
    return ids


def say(tokens: Sequence[int], logits: Tensor, params: dict[str, Any]) -> Tensor:
    """A logits processor: what follows is the given answer."""
    at = len(tokens) - params["first"]
    if at < len(params["given"]):
        logits[params["given"][at]] += SURE
    return logits


def saying(params: dict[str, Any], given: Sequence[int], first: int) -> dict[str, Any]:
    """Returns the parameters with which a request says what is given, behind `first` tokens."""
    own = {"custom_logit_processor": "say", "custom_params": {"given": list(given), "first": first}}
    return {**params, **own, "max_new_tokens": len(given), "ignore_eos": True}


class Counted(NamedTuple):
    """Of one answer."""

    tokens: list[int]
    steps: int
    accepted: int


def run(
    model: str, drafter: str, kinds: Sequence[Kind], params: dict[str, Any], longest: int, options: Any
) -> list[list[Counted]]:
    """[kind][answer]"""
    options = {"logit_processor": "sources:say", **options}
    if find_drafter(drafter).matched:
        options = {name: value for name, value in options.items() if name not in TREE[:2]}
    found: list[list[Counted]] = []
    with LLM(model, speculative_algorithm=drafter, speculative_fixed_shape=True, **options) as llm:
        tokenizer = llm.engine.tokenizer
        for one in kinds:
            found.append([])
            for row in one.asked:
                assert llm.engine.flush_cache()
                for messages, text in row:
                    ids, own = prompt(tokenizer, messages, longest), params
                    if text is not None:
                        given = tokenizer.encode(text, False)[: params["max_new_tokens"]]
                        own = saying(params, given, len(ids))
                    (answer,) = llm.generate([ids], own)
                    assert text is None or answer.token_ids == given, "another answer than the given one"
                    found[-1].append(counted(answer))
    return found


def counted(answer: Completion) -> Counted:
    meta = answer.meta_info
    return Counted(answer.token_ids, meta["spec_verify_ct"], meta["spec_num_correct_drafts"])


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
    parser.add_argument("--tree", type=lambda text: dict(zip(TREE, map(int, text.split(",")), strict=True)), default={})
    parser.add_argument("--longest", type=int, default=5000, help="tokens of a prompt")
    parser.add_argument("--settings", default="temperature=0")
    parser.add_argument("--options", type=json.loads, default={}, help="of all engines, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kinds = [kind(word, args.prompts) for word in args.kinds]
    pairs = (one.partition("=") for one in args.settings.split(","))
    params = {name: json.loads(value) for name, _, value in pairs}
    params = {"max_new_tokens": args.tokens, "sampling_seed": 0, **params}
    drafters = args.drafters.split(",")
    counts = {name: run(args.model, name, kinds, params, args.longest, args.tree | args.options) for name in drafters}
    rows = []
    for number, one in enumerate(kinds):
        texts = [[answer.tokens for answer in counts[name][number]] for name in drafters]
        assert all(text == texts[0] for text in texts), "text differs between drafters"
        lengths = {name: length(counts[name][number]) for name in drafters}
        parts = {name: [part for part in name.split("+") if part in lengths] for name in drafters if "+" in name}
        best = {name: max(lengths[part] for part in some) for name, some in parts.items() if some}
        ratios = {f"{name} / its best": lengths[name] / best[name] for name in best}
        rows.append({"kind": one.name, "texts": len(texts[0]), **lengths, **ratios})
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()) + " |")
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
