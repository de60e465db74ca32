"""Tokens per second of an agent's work: files of a repository that are edited over several turns, and what is written
between the edits.

    python benchmarks/agent_edits.py --out edits.json [--drafters EAGLE3,SUFFIX,EAGLE3+SUFFIX] [--at-once 2]

Each session is about one file of this package. A turn shows its versions and asks two questions in the chat template
(MT-bench's, self-instruct's), and then for a name to be replaced by another one, of which two parts of the next version
are written: four answers of `--tokens`, or less where the model ends one. What is asked for an edit begins with the
right version, and the session goes on with it and without the questions, not with what the model wrote, so that every
engine has the same text before it. Edits are greedy.

How much of an agent's work is copied depends on the work, so the two kinds are timed apart, and the last table has
their mixtures: tokens per second by the share of tokens that are written freely, and of a pair of drafters how many
times that of the better of its two parts. `copied` is the share of runs of eight tokens that the prompt has, `repeated`
that of those that are earlier in the answer: written text with much of either is not what larger models write, and an
edit with little of the first is none.
"""

from __future__ import annotations

import argparse
import json
import keyword
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from load_runs import Job, add_arguments, drive, let_go, listed, machine, make_engine, name_of, sampling, watched
from load_texts import questions

CODE = Path(__file__).parents[1] / "src" / "draftwing"
GIVEN = 4  # first versions that are not asked for: a small model copies what it saw copied
SHOWN = 30  # tokens that an edit begins with
PARTS = 2  # answers of each kind in a turn
NAMES = 8  # of a file that can be renamed
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of tokens that are written freely
KINDS = ("written", "edited")


def files(tokens: int, encode: Any) -> list[str]:
    """Beginnings of the package's files, whole lines of about so many tokens."""
    found = []
    for path in sorted(CODE.rglob("*.py")):
        lines, size = [], 0
        for line in path.read_text(encoding="utf8").splitlines():
            size += len(encode(line + "\n"))
            if size > tokens:
                break
            lines.append(line)
        if size > tokens and len(names(lines)) >= NAMES:
            found.append("\n".join(lines) + "\n")
    return found


def names(lines: Sequence[str]) -> list[str]:
    """Names that occur several times, the most frequent first."""
    words = Counter(re.findall(r"\b[a-z_]{4,}\b", "\n".join(lines)))
    return [word for word, count in words.most_common() if count > 1 and not keyword.iskeyword(word)]


class Turn(NamedTuple):
    """What a session asks for, one answer: token ids. kind: of `KINDS`."""

    kind: str
    prompt: list[int]


def session(text: str, asked: Sequence[str], turns: int, tokens: int, tokenizer: Any, rng: random.Random) -> list[Turn]:
    """Questions and an edit for each turn, after the first `GIVEN` versions. asked: questions, `PARTS` a turn; tokens:
    of a part of an edit."""
    some = rng.sample(names(text.splitlines())[:NAMES], turns + GIVEN)
    said, found = f"# file.py, version 1\n```python\n{text}```\n", list[Turn]()
    for version, old in enumerate(some):
        new = f"{old}_{version + 2}"
        text = re.sub(rf"\b{old}\b", new, text)
        edit = f"{said}\n# file.py, version {version + 2}: the same file with `{old}` renamed to `{new}`\n```python\n"
        if version >= GIVEN:
            first = PARTS * (version - GIVEN)
            for question in asked[first : first + PARTS]:
                message = {"role": "user", "content": f"{said}\n{question}"}
                found.append(Turn("written", tokenizer.encode_chat([message])))
            prompt, right = tokenizer.encode(edit), tokenizer.encode(text, False)
            for part in range(PARTS):
                found.append(Turn("edited", prompt + right[: SHOWN + part * tokens]))
        said = f"{edit}{text}```\n"
    return found


def known(before: Sequence[int], answer: Sequence[int], length: int = 8) -> tuple[float, float]:
    """Shares of an answer's runs of so many tokens: that the text before has, and that are earlier in the answer."""
    copied = {tuple(before[i : i + length]) for i in range(len(before) - length + 1)}
    runs = [tuple(answer[i : i + length]) for i in range(len(answer) - length + 1)]
    if not runs:
        return 0.0, 0.0
    return sum(run in copied for run in runs) / len(runs), 1 - len(set(runs)) / len(runs)


def run(
    engine: Any, sessions: Sequence[list[Turn]], temperature: float, tokens: int, at_once: int = 1
) -> dict[str, dict[str, Any]]:
    """So many sessions at once, answer by answer; of each kind what it took. temperature: of what is written freely."""
    assert engine.flush_cache()
    seconds, written = defaultdict[str, float](float), Counter[str]()
    shares, trees = defaultdict[str, list[tuple[float, float]]](list), defaultdict[str, list[Any]](list)
    groups = (sessions[first : first + at_once] for first in range(0, len(sessions), at_once))
    for turn in (turn for group in groups for turn in zip(*group, strict=True)):
        kind = turn[0].kind
        heat = temperature if kind == "written" else 0.0
        params = [sampling(heat, tokens, number, may_end=True) for number in range(len(turn))]
        jobs = [Job(one.prompt, each) for one, each in zip(turn, params, strict=True)]
        with watched(engine) as steps:
            answers, took, _ = drive(engine, jobs, len(jobs))
        seconds[kind] += took
        written[kind] += sum(len(answer.tokens) for answer in answers)
        trees[kind] += [step for step in steps if step.kind == "tree"]
        shares[kind] += [known(job.prompt, answer.tokens) for job, answer in zip(jobs, answers, strict=True)]
    found = {}
    for kind in KINDS:
        copied, repeated = (sum(column) / len(column) for column in zip(*shares[kind], strict=True))
        shapes = Counter(name_of(step.shape) for step in trees[kind])
        found[kind] = {
            "tokens_per_s": written[kind] / seconds[kind],
            "accept_length": sum(step.tokens for step in trees[kind]) / sum(step.rows for step in trees[kind]),
            "copied": copied,
            "repeated": repeated,
            "shapes": dict(shapes.most_common()),
        }
    return found


Results = Mapping[str, Mapping[str, Any]]  # by drafter, and of each kind


def mixed(of_kinds: Mapping[str, Any], share: float) -> float:
    """Tokens per second where that share of the tokens is written freely."""
    written, edited = (of_kinds[kind]["tokens_per_s"] for kind in KINDS)
    return float(1 / (share / written + (1 - share) / edited))


def table(results: Results) -> str:
    lines = [
        "| drafter | text | tokens/s | accept length | copied | repeated | shapes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of_kinds in results.items():
        for kind, found in of_kinds.items():
            steps = sum(found["shapes"].values())
            shapes = ", ".join(f"{shape} {count / steps:.0%}" for shape, count in list(found["shapes"].items())[:4])
            rates = f"{found['tokens_per_s']:.0f} | {found['accept_length']:.2f}"
            lines.append(f"| {name} | {kind} | {rates} | {found['copied']:.2f} | {found['repeated']:.2f} | {shapes} |")
    return "\n".join(lines)


def mixtures(results: Results) -> str:
    """Tokens per second by share; of pairs also how many times that of their better part."""
    lines = ["| written freely | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |", "|---" * 6 + "|"]
    for name, of_kinds in results.items():
        rates = [mixed(of_kinds, share) for share in SHARES]
        lines.append(f"| {name} | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |")
        parts = [results[part] for part in name.split("+") if part != name and part in results]
        if len(parts) == 2:
            best = [max(mixed(part, share) for part in parts) for share in SHARES]
            times = " | ".join(f"{rate / most:.2f}x" for rate, most in zip(rates, best, strict=True))
            lines.append(f"| of the better part | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    pairs = ("EAGLE3+SUFFIX", "EAGLE3+NGRAM")
    parser.add_argument("--drafters", type=listed(str), default=("none", "EAGLE3", "NGRAM", "SUFFIX", *pairs))
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--file-tokens", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=120, help="of an answer")
    parser.add_argument("--temperatures", type=listed(float), default=(0.7, 1.0), help="of what is written freely")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[float, dict[str, dict[str, Any]]] = {temperature: {} for temperature in args.temperatures}
    for drafter in args.drafters:
        engine = make_engine(args, drafter)
        if engine is None:
            continue
        warm, *sessions = make_sessions(args, engine.tokenizer)
        for temperature in args.temperatures:
            run(engine, [warm[: 2 * PARTS]], temperature, args.tokens)
            runs = [run(engine, sessions, temperature, args.tokens, args.at_once) for _ in range(args.repeats)]
            best = {kind: max((one[kind] for one in runs), key=lambda found: found["tokens_per_s"]) for kind in KINDS}
            results[temperature][drafter] = best
            print(drafter, temperature, best, flush=True)
        if args.out:
            about = {"machine": machine(), "options": args.options, "date": time.strftime("%Y-%m-%d")}
            args.out.write_text(json.dumps(about | {"temperatures": results}, indent=1), encoding="utf8")
        let_go(engine)
    for temperature, found in results.items():
        print(f"\nWritten at temperature {temperature:g}, edits greedy\n\n{table(found)}\n\n{mixtures(found)}")


def make_sessions(args: Any, tokenizer: Any) -> list[list[Turn]]:
    """One to warm up, and those that are measured."""
    rng = random.Random(0)
    texts = rng.sample(files(args.file_tokens, tokenizer.encode), args.sessions + 1)
    asked = rng.sample(questions(), len(texts) * args.turns * PARTS)
    each = args.turns * PARTS
    return [
        session(text, asked[number * each : (number + 1) * each], args.turns, args.tokens, tokenizer, rng)
        for number, text in enumerate(texts)
    ]


if __name__ == "__main__":
    main()
