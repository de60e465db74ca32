"""Tokens per second on copy-heavy, agent-like text: files of a repository that are edited over several turns.

    python benchmarks/agent_edits.py --out edits.json [--drafters EAGLE3,SUFFIX,EAGLE3+SUFFIX] [--sessions 4]

Each session has one file of this package and a few renamings of names in it. A turn shows what was said so far and asks
for something to be written about the file, a test or a review, and then for its next version. What the session goes on
with is the right version, not what the model wrote, so that every engine has the same text before it. Prompts grow by
what the prefix cache has. `--written 0` leaves out what is not copied.
"""

from __future__ import annotations

import argparse
import json
import keyword
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from load_runs import Job, add_arguments, drive, let_go, listed, machine, make_engine, name_of, sampling, watched

CODE = Path(__file__).parents[1] / "src" / "draftwing"
WRITTEN = 120  # tokens of an answer that is written freely
GIVEN = 3  # first versions that are not asked for: a small model copies what it saw copied
FEWEST_NAMES = 8  # that can be renamed in a file
ASKED = (  # in turn, before an edit
    "# test_file.py, for version {}, with pytest\n```python\nimport pytest\n",
    "# What version {} of file.py is for, and how it does it, in plain words:\n",
    "# A new function that version {} of file.py lacks\n```python\ndef ",
    "# A review of version {} of file.py: what can go wrong, and what should be simpler?\n",
)


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
        if size > tokens and len(names(lines)) >= FEWEST_NAMES:
            found.append("\n".join(lines) + "\n")
    return found


def names(lines: Sequence[str]) -> list[str]:
    """Names that occur several times, the most frequent first."""
    words = Counter(re.findall(r"\b[a-z_]{4,}\b", "\n".join(lines)))
    return [word for word, count in words.most_common() if count > 1 and not keyword.iskeyword(word)]


class Turn(NamedTuple):
    """What a session asks for. answer: the right one, as long as the model's; None where it writes freely."""

    prompt: str
    answer: str | None


def session(text: str, turns: int, rng: random.Random) -> list[Turn]:
    """An answer that is written freely and an edit for each turn, after the first `GIVEN` versions."""
    some = rng.sample(names(text.splitlines())[:FEWEST_NAMES], turns + GIVEN)
    said, found = f"# file.py, version 1\n```python\n{text}```\n", list[Turn]()
    for turn, old in enumerate(some):
        new = f"{old}_{turn + 2}"
        text = re.sub(rf"\b{old}\b", new, text)
        first, rest = text.split("\n", 1)
        asked = Turn(f"{said}\n{ASKED[turn % len(ASKED)].format(turn + 1)}", None)
        said += f"\n# file.py, version {turn + 2}: the same file with `{old}` renamed to `{new}`\n```python\n{first}\n"
        found += [asked, Turn(said, rest)]
        said += rest + "```\n"
    return found[2 * GIVEN :]


def copied(prompt: Sequence[int], answer: Sequence[int], length: int = 8) -> float:
    """Share of an answer's runs of so many tokens that its prompt has, too."""
    known = {tuple(prompt[i : i + length]) for i in range(len(prompt) - length + 1)}
    runs = [tuple(answer[i : i + length]) for i in range(len(answer) - length + 1)]
    return sum(run in known for run in runs) / len(runs) if runs else 0.0


def run(engine: Any, sessions: Sequence[list[Turn]], temperature: float, written: int = WRITTEN) -> dict[str, Any]:
    """All sessions at once, turn by turn. temperature: of what is written freely, edits are greedy; written: tokens of
    such an answer, 0 to leave these out."""
    assert engine.flush_cache()
    encode, seconds, tokens, shares = engine.tokenizer.encode, 0.0, 0, list[float]()
    with watched(engine) as steps:
        for turn in zip(*sessions, strict=True):
            sizes = [written if one.answer is None else len(encode(one.answer)) for one in turn]
            if not all(sizes):
                continue
            jobs = [
                Job(encode(one.prompt), sampling(temperature if one.answer is None else 0.0, size, number))
                for number, (one, size) in enumerate(zip(turn, sizes, strict=True))
            ]
            answers, took, _ = drive(engine, jobs, len(jobs))
            seconds += took
            tokens += sum(len(answer.tokens) for answer in answers)
            shares += [copied(job.prompt, answer.tokens) for job, answer in zip(jobs, answers, strict=True)]
    trees = [step for step in steps if step.kind == "tree"]
    shapes = Counter(name_of(step.shape) for step in trees)
    return {
        "tokens_per_s": tokens / seconds,
        "accept_length": sum(step.tokens for step in trees) / sum(step.rows for step in trees),
        "copied": sum(shares) / len(shares),
        "shapes": dict(shapes.most_common()),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| drafter | tokens/s | accept length | copied | shapes |", "|---|---|---|---|---|"]
    for name, runs in results.items():
        best = max(runs, key=lambda one: one["tokens_per_s"])
        steps = sum(best["shapes"].values())
        shapes = ", ".join(f"{shape} {count / steps:.0%}" for shape, count in list(best["shapes"].items())[:4])
        rates = f"{best['tokens_per_s']:.0f} | {best['accept_length']:.2f} | {best['copied']:.2f}"
        lines.append(f"| {name} | {rates} | {shapes} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    pairs = ("EAGLE3+SUFFIX", "EAGLE3+NGRAM")
    parser.add_argument("--drafters", type=listed(str), default=("none", "EAGLE3", "NGRAM", "SUFFIX", *pairs))
    parser.add_argument("--sessions", type=int, default=1, help="at once")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--file-tokens", type=int, default=300)
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens of an answer that is written freely")
    parser.add_argument("--temperature", type=float, default=0.7, help="of such an answer; edits are greedy")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for drafter in args.drafters:
        engine = make_engine(args, drafter)
        if engine is None:
            continue
        rng = random.Random(0)
        texts = rng.sample(files(args.file_tokens, engine.tokenizer.encode), args.sessions + 1)
        warm, *sessions = [session(text, args.turns, rng) for text in texts]
        run(engine, [warm[:2]], args.temperature, args.written)
        results[drafter] = [run(engine, sessions, args.temperature, args.written) for _ in range(args.repeats)]
        print(drafter, results[drafter][-1], flush=True)
        if args.out:
            about = {"machine": machine(), "options": args.options, "date": time.strftime("%Y-%m-%d")}
            args.out.write_text(json.dumps(about | {"drafters": results}, indent=1), encoding="utf8")
        let_go(engine)
    print(table(results))


if __name__ == "__main__":
    main()
