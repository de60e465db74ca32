"""Tokens of a step of a head's drafts near the beginning of a context and near its end: counts, which no other program
disturbs.

    python benchmarks/late_positions.py PROMPTS.jsonl QUESTIONS.jsonl [--model smollm2] [--drafters EAGLE3,NEXTN]
        [--behind 500,7500] [--settings temperature=0 temperature=0.8,min_p=0,dry_multiplier=0] [--questions 6]
        [--tokens 160] [--tree 4,2,8] [--options '{"num_threads": 1}'] [--out rows.json]

Before a question stand so many tokens of earlier turns: PROMPTS with the model's own answers at temperature 0.8. Two
texts are measured. Its own: what the model says with each of the settings, which are other texts at other places. The
same: what the greedy model says behind the fewest tokens, with a repetition penalty so that it does not loop, and is
made to say behind the others. A line of a file has "turns", of which the first is asked, or "prompt".
The last column is the last place over the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sources import counted, length, saying

from draftwing import LLM
from draftwing.config.trees import TREE

Message = dict[str, str]


def texts(file: Path, count: int) -> list[str]:
    """Evenly spread over a file."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


def pasts(llm: LLM, prompts: Sequence[str], behind: Sequence[int]) -> dict[int, list[Message]]:
    """Earlier turns of about as many tokens as each of `behind`, ascending; the shorter ones begin the longer ones."""
    found: dict[int, list[Message]] = {}
    said: list[Message] = []
    for number, prompt in enumerate(prompts):
        while len(found) < len(behind) and len(llm.engine.tokenizer.encode_chat(said)) >= behind[len(found)]:
            found[behind[len(found)]] = list(said)
        if len(found) == len(behind):
            return found
        asked = [{"role": "user", "content": prompt}]
        (answer,) = llm.chat(asked, {"temperature": 0.8, "sampling_seed": number, "max_new_tokens": 300})
        said = [*said, *asked, {"role": "assistant", "content": answer.text}]
    raise SystemExit(f"{len(prompts)} prompts give {len(llm.engine.tokenizer.encode_chat(said))} tokens: give more")


def rows(
    llm: LLM, drafter: str, past: dict[int, list[Message]], questions: Sequence[str], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """What one drafter has in each text."""
    encode = llm.engine.tokenizer.encode_chat
    ids = {
        place: [encode([*said, {"role": "user", "content": one}]) for one in questions] for place, said in past.items()
    }
    for setting in args.settings:
        pairs = (one.partition("=") for one in setting.split(","))
        params = {"max_new_tokens": args.tokens, **{name: json.loads(value) for name, _, value in pairs}}
        own = {
            place: [llm.generate([one], {**params, "sampling_seed": i})[0] for i, one in enumerate(some)]
            for place, some in ids.items()
        }
        yield row("its own", drafter, setting, own)
    greedy = {"temperature": 0.0, "repetition_penalty": 1.2, "max_new_tokens": args.tokens}
    given = [llm.generate([one], greedy)[0].token_ids for one in ids[min(ids)]]
    same: dict[int, list[Any]] = {}
    for place, some in ids.items():
        forced = [saying({"temperature": 0.0}, text, len(one)) for one, text in zip(some, given, strict=True)]
        same[place] = [llm.generate([one], params)[0] for one, params in zip(some, forced, strict=True)]
    assert all([one.token_ids for one in answers] == given for answers in same.values()), "another text"
    yield row("the same", drafter, "temperature=0", same)


def row(text: str, drafter: str, setting: str, answers: dict[int, list[Any]]) -> dict[str, Any]:
    found = {place: length([counted(one) for one in some]) for place, some in answers.items()}
    columns: dict[str, Any] = {str(place): value for place, value in found.items()}
    ratio = found[max(found)] / found[min(found)]
    return {"text": text, "drafter": drafter, "setting": setting, **columns, "last / first": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("asked", type=Path, metavar="questions")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafters", default="EAGLE3,NEXTN")
    parser.add_argument("--behind", default="500,7500")
    parser.add_argument("--settings", nargs="+", default=["temperature=0", "temperature=0.8,min_p=0,dry_multiplier=0"])
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--tree", type=lambda text: dict(zip(TREE, map(int, text.split(",")), strict=True)),
                        default=dict(zip(TREE, (4, 2, 8), strict=True)))  # fmt: skip
    parser.add_argument("--options", type=json.loads, default={}, help="of all engines, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    behind, past = sorted(map(int, args.behind.split(","))), None
    kept: list[dict[str, Any]] = []
    questions = texts(args.asked, args.questions)
    for drafter in args.drafters.split(","):
        options = {"logit_processor": "sources:say", "speculative_fixed_shape": True, **args.tree, **args.options}
        with LLM(args.model, speculative_algorithm=drafter, **options) as llm:
            past = past or pasts(llm, texts(args.prompts, 80), behind)
            for one in rows(llm, drafter, past, questions, args):
                if not kept:
                    print("| " + " | ".join(map(str, one)) + " |\n|" + "---|" * len(one))
                kept.append(one)
                cells = (f"{x:.3f}" if isinstance(x, float) else str(x) for x in one.values())
                print("| " + " | ".join(cells) + " |", flush=True)
                if args.out is not None:
                    args.out.write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
