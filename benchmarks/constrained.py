"""Answers of the default model under many schemas and expressions, checked by libraries that know nothing of how they
were made: `jsonschema`, and Python's `re`.

    python benchmarks/constrained.py SCHEMAS.tar.gz REGEXES.txt [--shape 6,4,12] [--temperature 0.8]

Files as for benchmarks/grammars.py. Answers that the length cuts off cannot be complete and are counted apart.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from draftwing import LLM
from draftwing.errors import RequestError
from draftwing.grammar.compiler import GrammarCompiler
from draftwing.requests.sampling_params import SamplingParams

BATCH = 16


def schemas(archive: Path) -> Iterator[Any]:
    """From an archive of MaskBench files, or from a file of them line by line."""
    if archive.suffix == ".jsonl":
        for line in archive.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["schema"]
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(".json"):
                file = tar.extractfile(member)
                assert file is not None
                yield json.load(file)["schema"]


def check(compiler: GrammarCompiler, kind: str, wish: Any) -> None:
    """Raises RequestError for what a server refuses."""
    grammar = SamplingParams.read({kind: wish}).grammar
    assert grammar is not None
    compiler.compile(grammar)


def judge(kind: str, wanted: Any, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(wanted, text) is not None
    jsonschema.validators.validator_for(wanted)(wanted).validate(json.loads(text))
    return True


def answer(llm: LLM, kind: str, every: list[Any], args: argparse.Namespace, count: Counter[str]) -> None:
    ask = [{"role": "user", "content": "Give me an example." if kind == "regex" else "Write an example in JSON."}]
    params = [
        {"max_new_tokens": args.tokens, "temperature": args.temperature, "sampling_seed": i, kind: wanted}
        for i, wanted in enumerate(every)
    ]
    for wanted, done in zip(every, llm.chat([ask] * len(every), params), strict=True):
        if done.finish_reason["type"] != "stop":
            count[f"{kind}: {done.finish_reason['type']} {done.finish_reason.get('message', '')}".strip()] += 1
            continue
        try:
            good = judge(kind, wanted, done.text)
        except (ValueError, jsonschema.ValidationError, jsonschema.SchemaError, re.error) as error:
            good = False
            print("  ", type(error).__name__, str(error).split("\n")[0][:100])
        count[f"{kind}: {'good' if good else 'BAD'}"] += 1
        if not good:
            print(f"BAD {kind} {str(wanted)[:300]!r} -> {done.text[:300]!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("schemas", type=Path)
    parser.add_argument("regexes", type=Path)
    parser.add_argument("--shape", default="6,4,12", help="depth, topk, draft tokens of NGRAM; topk 1 is a chain")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--every", type=int, default=1, help="of the regexes, take every n-th")
    args = parser.parse_args()
    depth, topk, nodes = map(int, args.shape.split(","))
    llm = LLM(
        "smollm2", speculative_algorithm="NGRAM", speculative_num_steps=depth, speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes, speculative_fixed_shape=True,
        max_total_tokens=40000, constrained_json_disable_any_whitespace=True,
    )  # fmt: skip
    info = llm.engine.info
    compiler = GrammarCompiler.of(info.options, llm.engine.tokenizer, info.vocab_size, info.stop_ids)
    count: Counter[str] = Counter()
    lines = [line for line in args.regexes.read_text(encoding="utf-8").splitlines() if line][:: args.every]
    for kind, wishes in (("json_schema", list(schemas(args.schemas))), ("regex", lines)):
        usable = []
        for wish in wishes:
            try:
                check(compiler, kind, wish)
                usable.append(wish)
            except RequestError:
                count[f"{kind}: refused"] += 1
        for i in range(0, len(usable), BATCH):
            answer(llm, kind, usable[i : i + BATCH], args, count)
            print(f"{kind}: {min(i + BATCH, len(usable))} of {len(usable)}", end="\r", file=sys.stderr, flush=True)
    accepted = llm.engine.stats()["accept_length"]
    print(f"shape {args.shape}, temperature {args.temperature}, acceptance length {accepted:.2f}")
    for name, times in sorted(count.items()):
        print(f"{name:60s} {times}")
    llm.close()


if __name__ == "__main__":
    main()
