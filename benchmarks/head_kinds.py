"""Kinds of draft heads with equal data and equal time: tokens a step of their chains and trees, and tokens/s.

    python benchmarks/head_kinds.py TARGET PROMPTS.jsonl HELD_OUT.jsonl OUT [--seconds 60] [--together]
        [--kinds DFLASH causal DFLASH2 DSPARK EAGLE3 MTP] [--shapes 3,1,4 7,1,8 7,4,16] [--timed 7,1,8 7,4,16]

TARGET: a small model, such as tools/train_small_hybrid.py makes. It answers the prompts, half of them greedily; each
head is trained on the answers for so many seconds, one after the other, or all at once (--together). "causal": DFLASH
whose rows see none after them, as JetSpec trains it. Tokens a step are of `draftwing train eval`. For tokens/s all
engines of one process, each head's in each of the timed shapes and one without a head, take turns at each prompt.
OUT/table.md has the tables; what is in OUT is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from draftwing import LLM
from draftwing.config.drafters import TRAINED

TREE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def command(stage: str, out: Path, target: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a stage of `draftwing train`; its log lies in its folder."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{stage}.log").open("ab") as log:
        line = [sys.executable, "-m", "draftwing", "train", stage, "--out", str(out), "--model", target, *words]
        # A pool that leaves room for the others.
        return subprocess.Popen([*line, "--max-total-tokens", "40000"], stdout=log, stderr=subprocess.STDOUT)


def finished(name: str, *started: subprocess.Popen[bytes]) -> None:
    for one in started:
        if one.wait():
            print(f"{name} failed: see its log", file=sys.stderr)


def algorithm(kind: str) -> str:
    return "DFLASH" if kind == "causal" else kind


def fit_words(kind: str, args: argparse.Namespace) -> list[str]:
    """What a kind is trained with; blocks have layers of about the parameters of the others' one."""
    words = ["--data", str(args.out / "answers"), "--online", "--algorithm", algorithm(kind)]
    words += ["--minutes", str(args.seconds / 60), "--batch-tokens", str(args.batch_tokens), "--lr", str(args.lr)]
    words += ["--save-every", "1000000", "--eval-every", "1000000", "--optimizer", args.optimizer]
    if kind in ("DFLASH", "causal", "DFLASH2", "DSPARK"):
        words += ["--block-steps", "7", "--draft-layers", "2", "--block-loss", "lk_hybrid", "--anchors", "0.5"]
    if kind in ("DFLASH2", "DSPARK"):
        words += ["--markov-rank", "64"]
    return words + (["--causal-block"] if kind == "causal" else [])


def run(kinds: Sequence[str], stage: str, args: argparse.Namespace, together: bool, made: str) -> None:
    """Runs a stage for each kind whose folder lacks what it makes."""
    left = [kind for kind in kinds if not (args.out / kind / made).exists()]
    started = []
    for kind in left:
        words = fit_words(kind, args)
        if stage == "eval":
            words += ["--eval-prompts", str(args.held_out), "--shapes", *args.shapes, "--eval-temperatures", "0", "0.8"]
            words += ["--eval-tokens", str(args.tokens), "--eval-count", str(args.count)]
        started.append(command(stage, args.out / kind, args.target, words))
        if not together:
            finished(f"{stage} of {kind}", started.pop())
    finished(stage, *started)


def engines(kinds: Sequence[str], args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and options."""
    yield "none", {"speculative_algorithm": "none"}
    for kind in kinds:
        for shape in args.timed:
            tree = dict(zip(TREE, map(int, shape.split(",")), strict=True)) | {"speculative_fixed_shape": True}
            head = {"speculative_draft_model_path": str(args.out / kind / "head")}
            yield f"{kind} {shape}", {"speculative_algorithm": TRAINED[algorithm(kind)].name, **head, **tree}


def timed(kinds: Sequence[str], args: argparse.Namespace) -> dict[str, dict[float, float]]:
    """tokens/s of each engine by temperature, one request at a time; texts have to be equal."""
    lines = args.held_out.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines][: args.timed_count]
    rates: dict[str, dict[float, float]] = {}
    with ExitStack() as stack:
        options = {"max_total_tokens": 4096, "max_running_requests": 1}
        llms = {
            name: stack.enter_context(LLM(args.target, **options, **own)) for name, own in engines(kinds, args)
        }  # fmt: skip
        for temperature in (0.0, 0.8):
            spent, tokens = dict.fromkeys(llms, 0.0), 0
            for number, text in enumerate([texts[0], *texts]):
                params = {"temperature": temperature, "sampling_seed": number, "max_new_tokens": args.tokens}
                found = set()
                for name, llm in llms.items():
                    begun = time.perf_counter()
                    (answer,) = llm.generate([text], params)
                    if number:  # the first settles caches
                        spent[name] += time.perf_counter() - begun
                    found.add(tuple(answer.token_ids))
                (ids,) = found
                tokens += len(ids) if number else 0
            for name, seconds in spent.items():
                rates.setdefault(name, {})[temperature] = tokens / seconds
    return rates


def tables(kinds: Sequence[str], args: argparse.Namespace) -> Iterator[str]:
    yield "| head | steps | " + " | ".join(f"({shape})" for shape in args.shapes) + " |"
    yield "|---|---|" + "---|" * len(args.shapes)
    for kind in kinds:
        report = args.out / kind / "eval.json"
        if not report.exists():
            continue
        records = json.loads(report.read_text())["records"]
        shape = [[int(part) for part in one.split(",")] for one in args.shapes]
        cells = [" / ".join(f"{r['accept_length']:.2f}" for r in records if r["shape"] == one) for one in shape]
        yield f"| {kind} | {json.loads((args.out / kind / 'fit.json').read_text())['steps']} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kinds", nargs="+", default=["DFLASH", "causal", "DFLASH2", "DSPARK", "EAGLE3", "MTP"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=["3,1,4", "7,1,8", "7,4,16"])
    parser.add_argument("--timed", nargs="+", default=["7,1,8", "7,4,16"])
    parser.add_argument("--tokens", type=int, default=64, help="of an answer that is measured")
    parser.add_argument("--count", type=int, default=60, help="held-out prompts")
    parser.add_argument("--timed-count", type=int, default=12)
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--batch-tokens", type=int, default=1536)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--lr", type=float, default=0.003)
    args = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    answers = args.out / "answers"
    if not (answers / "responses.jsonl").exists():
        words = ["--prompts", str(args.prompts), "--max-tokens", str(args.answer_tokens)]
        words += ["--eval-prompts", str(args.held_out), "--algorithm", "DFLASH"]
        finished("generate", command("generate", answers, args.target, words))
    run(args.kinds, "fit", args, args.together, "head/config.json")
    run(args.kinds, "eval", args, args.together, "eval.json")
    kinds = [kind for kind in args.kinds if (args.out / kind / "head" / "config.json").exists()]
    lines = ["Tokens a step, greedy / 0.8:", "", *tables(kinds, args)]
    (args.out / "table.md").write_text("\n".join(lines) + "\n")
    lines += ["", "tokens/s, greedy / 0.8:", ""]
    lines += [f"- {name}: " + " / ".join(f"{x:.0f}" for x in r.values()) for name, r in timed(kinds, args).items()]
    (args.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
