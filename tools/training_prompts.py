"""The prompts that the shipped draft heads were trained on, from the public sets they are made of.

    python tools/training_prompts.py DATA OUT.jsonl [--count 8000] [--seed 0] [--widen]

DATA has a folder for each set (gsm8k, prompts_karma_mix, dolly_partial, gpteacher, awesome_chatgpt_prompts, clinc_oos,
banking77, nl2bash, self_instruct, text_corpora, mbxp) with the files as their authors publish them, gzipped. `SHARES`
says how much of the mix each set is; short requests of one line, which those sets have most of, are kept few.
A tenth of the general prompts get a second question, so that a head sees a conversation go on.
--widen adds what the mix leaves of the chat, code and arithmetic sets, and tasks made of general prompts, and a second
question to a fifth of the chats.
Overlap with evaluation prompts is not looked for here: `draftwing train --eval-prompts` drops what shares 13 words.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Shares of the mix, in parts. A set with fewer prompts than its part gives what it has.
SHARES = {
    "karma": 380, "dolly": 160, "gpteacher": 130, "gsm8k": 90, "mbxp": 60, "corpora": 70,
    "self_instruct": 40, "awesome": 20, "clinc": 20, "banking": 10, "nl2bash": 20,
}  # fmt: skip
# Of the general mix, the personal questions of one domain and the adversarial ones are thinned out.
_THINNED = {"buddhist": 0.15, "counselchat": 0.4, "anthropic_harmless": 0.3}
_FOLLOW_UPS = (
    "Now say the same in two sentences.",
    "Rewrite your answer for a ten-year-old.",
    "Give three examples.",
    "What could go wrong with that?",
    "Turn your answer into a bulleted list.",
    "Explain the second point in more detail.",
    "Can you make it shorter and add a title?",
    "How would you check that this is right?",
)
_PASSAGE_TASKS = (
    "Summarize the following text.\n\n{}",
    "{}\n\nSummarize the above in three sentences.",
    "Write a headline and a short summary for this article:\n\n{}",
    "Continue this text:\n\n{}",
    "Explain what this passage is about:\n\n{}",
    "List the main points of the following text.\n\n{}",
)
# --widen: what is asked about a general prompt, and second questions.
_TASKS = (
    "Write a detailed blog post that answers this question: {}",
    "Write a short story inspired by this: {}",
    "Explain to a beginner, step by step: {}",
    "Write a professional email to a colleague about this topic: {}",
    "Compare different points of view on the following: {}",
    "Give me a well structured essay outline, then the first two paragraphs, on: {}",
    "Answer as an expert in the field would, with examples: {}",
    "Make a list of ten ideas related to this: {}",
)
_SECOND = (
    "Rewrite your previous response in simpler words.",
    "Summarize your answer in three bullet points.",
    "Can you give me a concrete example?",
    "Now write it as a formal letter.",
    "Explain why, step by step.",
    "What are the limits of what you said?",
    "Rewrite your answer as a short poem.",
    "Continue with more detail.",
    "Now explain it to a ten year old child.",
    "What would someone who disagrees say?",
)
_CODE_TASKS = ("Complete the code I provided.\n{}", "Complete the following function.\n\n{}", "{}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--widen", action="store_true")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    chosen: list[dict[str, Any]] = []
    for name, share in SHARES.items():
        found = list(dict.fromkeys(text.strip() for text in READERS[name](args.data, rng) if text.strip()))
        rng.shuffle(found)
        part = found[: round(args.count * share / sum(SHARES.values()))]
        print(f"{name:14s} {len(part):6d} of {len(found)}")
        chosen += [_entry(text, name, rng) for text in part]
    rng.shuffle(chosen)
    if args.widen:
        chosen = _widened(chosen, args.data, random.Random(args.seed + 7))
    with args.out.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in chosen)


def _entry(text: str, name: str, rng: random.Random) -> dict[str, Any]:
    turns = [text]
    if name in ("karma", "dolly") and rng.random() < 0.1:
        turns.append(rng.choice(_FOLLOW_UPS))
    return {"turns": turns, "set": name}


def _widened(chosen: list[dict[str, Any]], data: Path, rng: random.Random) -> list[dict[str, Any]]:
    known = {entry["turns"][0].strip() for entry in chosen}
    more: list[dict[str, Any]] = []
    for name, texts in _whole_sets(data):
        for text in map(str.strip, texts):
            if 8 <= len(text) <= 3000 and text not in known:
                known.add(text)
                more.append({"turns": [text], "set": name})
    print(f"{'widened':14s} {len(more):6d}")
    general = [
        entry
        for entry in chosen + more
        if entry["set"] in ("karma", "dolly", "self_instruct")
        and len(entry["turns"]) == 1
        and 15 < len(entry["turns"][0]) < 200
    ]
    for entry in rng.sample(general, min(6000, len(general))):
        more.append({"turns": [rng.choice(_TASKS).format(entry["turns"][0])], "set": entry["set"]})
    chats = ("karma", "dolly", "self_instruct", "gpteacher", "awesome")
    found = []
    for entry in chosen + more:
        if len(entry["turns"]) == 1 and entry["set"] in chats and rng.random() < 0.2:
            entry = entry | {"turns": [*entry["turns"], rng.choice(_SECOND)]}
        found.append(entry)
    rng.shuffle(found)
    return found


def _whole_sets(data: Path) -> Iterator[tuple[str, list[str]]]:
    yield "karma", [entry["prompt"] for entry in _lines(data / "prompts_karma_mix" / "rl-prompts-v1.jsonl.gz")]
    for entries in _dolly_files(data):
        yield "dolly", entries
    for name in ("codegen-instruct", "roleplay-simple-deduped-roleplay-instruct", "toolformer-similarity-0.6-dataset"):
        entries = json.loads(_text(data / "gpteacher" / f"{name}.json.gz"))
        yield "gpteacher", ["\n\n".join(map(str.strip, _instruction_parts(entry))) for entry in entries]
    yield "gsm8k", [entry["question"] for entry in _lines(data / "gsm8k" / "train.jsonl.gz")]


# ---- sets ------------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode("utf-8")


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in _text(path).splitlines() if line.strip()]


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(_text(path), newline="")))


def _instruction(entry: dict[str, Any]) -> str:
    return "\n\n".join(_instruction_parts(entry))


def _instruction_parts(entry: dict[str, Any]) -> list[str]:
    return [part for part in (entry["instruction"], entry.get("input") or "") if part.strip()]


def _karma(data: Path, rng: random.Random) -> list[str]:
    entries = _lines(data / "prompts_karma_mix" / "rl-prompts-v1.jsonl.gz")
    return [e["prompt"] for e in entries
            if rng.random() < _THINNED.get(e["source"], 1.0) and "AWSAccessKeyId" not in e["prompt"]]  # fmt: skip


def _dolly(data: Path, rng: random.Random) -> list[str]:
    whole, bare = _dolly_files(data)
    return whole + rng.sample(bare, len(whole))


def _dolly_files(data: Path) -> tuple[list[str], list[str]]:
    """Prompts with their passages, and prompts alone."""
    folder = data / "dolly_partial"
    whole = [_instruction(e) for e in json.loads(_text(folder / "dolly_3k.json.gz"))]
    return whole, [e["instruction"] for e in _lines(folder / "google_flan-t5-small_decode_output.jsonl.gz")]


def _gpteacher(data: Path, rng: random.Random) -> list[str]:
    files = sorted((data / "gpteacher").glob("*.json.gz"))
    assert len(files) == 3, f"expected code, role play and toolformer in {data / 'gpteacher'}, found {files}"
    found = []
    for path in files:
        entries = [_instruction(e) for e in json.loads(_text(path))]
        found += rng.sample(entries, len(entries) // 6) if "toolformer" in path.name else entries
    return found


def _gsm8k(data: Path, rng: random.Random) -> list[str]:
    return [e["question"] for e in _lines(data / "gsm8k" / "train.jsonl.gz")]


def _mbxp(data: Path, rng: random.Random) -> list[str]:
    found = []
    for path in sorted((data / "mbxp").glob("*.jsonl.gz")):
        entries = [e["prompt"].strip() for e in _lines(path)]
        # Python is what most people ask for.
        found += entries if "mbpp" in path.name else rng.sample(entries, len(entries) // 5)
    return [rng.choice(_CODE_TASKS).format(text) for text in found]


def _corpora(data: Path, rng: random.Random) -> list[str]:
    folder = data / "text_corpora"
    texts = [e["text"] for e in _lines(folder / "c4_demo.jsonl.gz")]
    texts += _text(folder / "wiki_demo.txt.gz").splitlines()
    texts += re.split(r"<\|endoftext\|>|\n\s*\n", _text(folder / "tinystories_10k.txt.gz"))[:400]
    for name in ("gutenberg_1342_pride_and_prejudice", "gutenberg_1661_sherlock_holmes", "gutenberg_84_frankenstein"):
        texts.append(_text(folder / f"{name}.txt.gz"))
    found = []
    for text in texts:
        words = text.split()
        size = rng.randrange(80, 420)
        # A few passages of a long text, none of a scrap.
        starts = range(0, len(words) - 60, max(len(words) // 40, size))
        found += [" ".join(words[start : start + size]) for start in starts]
    return [rng.choice(_PASSAGE_TASKS).format(passage) for passage in found]


def _self_instruct(data: Path, rng: random.Random) -> list[str]:
    found = []
    for path in sorted((data / "self_instruct").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found.append(_instruction({**entry, "input": entry["instances"][0]["input"]}))
    return found


def _awesome(data: Path, rng: random.Random) -> list[str]:
    csv.field_size_limit(2**24)
    return [row["prompt"] for row in _rows(data / "awesome_chatgpt_prompts" / "prompts.csv.gz")]


def _clinc(data: Path, rng: random.Random) -> list[str]:
    splits = json.loads(_text(data / "clinc_oos" / "data_full.json.gz"))
    return [text for name in ("train", "oos_train") for text, _ in splits[name]]


def _banking(data: Path, rng: random.Random) -> list[str]:
    return [row["text"] for row in _rows(data / "banking77" / "train.csv.gz")]


def _nl2bash(data: Path, rng: random.Random) -> list[str]:
    wishes = _text(data / "nl2bash" / "all.nl.gz").splitlines()
    return [f"Write a shell command for this: {wish}" for wish in wishes]


READERS: dict[str, Callable[[Path, random.Random], list[str]]] = {
    "karma": _karma, "dolly": _dolly, "gpteacher": _gpteacher, "gsm8k": _gsm8k, "mbxp": _mbxp, "corpora": _corpora,
    "self_instruct": _self_instruct, "awesome": _awesome, "clinc": _clinc, "banking": _banking, "nl2bash": _nl2bash,
}  # fmt: skip


if __name__ == "__main__":
    main()
