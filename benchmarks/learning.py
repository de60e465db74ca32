"""What a head gains by traffic of one kind: acceptance length and tokens per second on later requests of that kind, and
on general chat, before and after.

    python benchmarks/learning.py --prompts shell.jsonl --later shell_later.jsonl --out runs/shell [--requests 300] \
        [--train "--epochs 4"] [--options "--num-threads 1"] [--result FILE]

Prompts are JSON lines with `turns`, as `draftwing train --prompts` takes them. Half of the requests are greedy, half at
0.8, without the penalties that a model may have by default. Each part is skipped where its result is in --out already:
traffic, training, measurements. --train: further words for `draftwing train`; --options: for it and for the engines.
--result: JSON with all figures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

from draftwing import LLM
from draftwing.cli.main import main as draftwing
from draftwing.config.options import Options
from draftwing.core import TreeShape
from draftwing.files import write_json
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.train.evaluate import Trial, evaluate

GENERAL = Path(__file__).parent / "data" / "mt_bench.jsonl"
TEMPERATURES = (0.0, 0.8)
PLAIN = {"repetition_penalty": 1.0, "min_p": 0.0, "top_p": 1.0, "top_k": -1}  # as `evaluate` samples


def texts(file: Path, count: int) -> list[str]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)["turns"][0] for line in lines][:count]


def serve(asked: argparse.Namespace, engine: dict[str, Any], folder: Path) -> None:
    """Answers the prompts and keeps them as traffic, one a second."""
    prompts = texts(asked.prompts, asked.requests)
    params = [
        {**PLAIN, "max_new_tokens": asked.tokens, "temperature": TEMPERATURES[i % 2]} for i, _ in enumerate(prompts)
    ]
    with LLM(asked.model, **engine) as llm:
        ids = [llm.engine.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        answers = llm.generate(ids, params)
    store, start = TrafficStore(folder), time.time() - len(prompts)
    for i, (prompt, answer) in enumerate(zip(ids, answers, strict=True)):
        store.add(Exchange(start + i, "client", None, prompt, list(answer.token_ids), TEMPERATURES[i % 2]))
    store.close()


def measure(asked: argparse.Namespace, engine: dict[str, Any], head: str, name: str) -> list[dict[str, Any]]:
    sets = {asked.later.stem: texts(asked.later, asked.measured), "general chat": texts(GENERAL, asked.general)}
    options = {**engine, "model": asked.model, "speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head}
    shapes = [TreeShape(*map(int, shape.split(","))) for shape in asked.shapes]
    return evaluate(options, sets, Trial(shapes, TEMPERATURES, asked.tokens, asked.concurrency), asked.out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--later", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--traffic", type=Path, help="folder of traffic that is there already (default: OUT/traffic)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--head", help="that it starts from (default: the model's own)")
    parser.add_argument("--measured", type=int, default=60, help="later prompts")
    parser.add_argument("--general", type=int, default=60, help="prompts of general chat")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--shapes", nargs="+", default=["4,1,5"])
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--train", default="")
    parser.add_argument("--options", default="")
    parser.add_argument("--result", type=Path)
    asked = parser.parse_args()
    words = shlex.split(asked.options)
    engine: dict[str, Any] = {
        name.removeprefix("--"): int(value) if value.isdecimal() else value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    folder = asked.traffic or asked.out / "traffic"
    if not (folder / "traffic.json").exists():
        serve(asked, engine, folder)
    history = HeadHistory(folder / "heads")
    served = asked.head or Options.from_kwargs(model=asked.model).resolve().speculative_draft_model_path
    if served is None:
        parser.error(f"{asked.model} has no head of its own: name one as --head")
    if not history.list():
        run = ["--from", str(folder), "--out", str(asked.out / "run"), "--model", asked.model, "--init-head", served]
        if draftwing(["train", *run, *words, *shlex.split(asked.train)]):
            raise SystemExit(1)
    newest = history.list()[-1]
    before, after = (measure(asked, engine, str(head), f"{name}.json")
                     for name, head in (("before", served), ("after", newest.folder)))  # fmt: skip
    if asked.result is not None:
        fit = json.loads((asked.out / "run" / "fit.json").read_text(encoding="utf-8"))
        learnt = {name: fit[name] for name in ("steps", "tokens", "seconds", "used")}
        write_json(asked.result, {"learnt": learnt, "judged": newest.figures, "before": before, "after": after})
    print("| prompts | temperature | tree | acceptance length | | tokens per second | |")
    for old, new in zip(before, after, strict=True):
        cells = [old["set"], f"{old['temperature']:g}", str(tuple(old["shape"]))]
        for field, form in (("accept_length", ".2f"), ("throughput", ".1f")):
            cells += [f"{old[field]:{form}} to {new[field]:{form}}", f"{new[field] / old[field]:.2f}x"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
