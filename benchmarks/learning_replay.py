"""What a head gains and forgets by traffic, for several ways of training it: seconds each, on a GPU.

    python benchmarks/learning_replay.py answers --prompts DIR --out RUN [--kinds french rust]
    python benchmarks/learning_replay.py features --out RUN
    python benchmarks/learning_replay.py fit --out RUN --name a [--kind french] [--epochs 4] [--frozen] [...]

DIR has `KIND.jsonl` and `KIND_later.jsonl` for each kind of traffic, and `own.jsonl`, which the model itself has
written (`draftwing write-prompts`): JSON lines with `turns`. Answers of the model, half of them greedy and half at
0.8, are replayed (`train.judge`), the same text for all heads, so that differences of 1% are seen with some 80 of
them. MT-bench and the prompts that a server judges by are never trained on. Text with the repetition penalty of 1.1,
which `smollm2` has by default, is a set of its own (`french_penalty`, by `--kind`). RUN/results.jsonl gets a line for
each head.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwing import LLM
from draftwing.config.options import Options
from draftwing.models.hub import resolve_model
from draftwing.train import heads
from draftwing.train.capture import FeatureModel, capture
from draftwing.train.draft_vocabulary import renewed
from draftwing.train.fit import Fit
from draftwing.train.fit_config import FitConfig
from draftwing.train.judge import Drafted, Temperatures, compare, draft_along
from draftwing.train.merge import input_moments, merge
from draftwing.train.store import FeatureStore, Part, Tokens
from draftwing.train.traffic import general_prompts
from draftwing.train.ttt import Loss

MT_BENCH = Path(__file__).parent / "data" / "mt_bench.jsonl"
GENERAL = ("mt_bench", "mt_bench_penalty", "general", "own")
PLAIN = {"repetition_penalty": 1.0, "min_p": 0.0, "top_p": 1.0}
PENALTY = {**PLAIN, "repetition_penalty": 1.1}
TEMPERATURES = (0.0, 0.8)
DEPTH = 4  # of chains
TEXTS = 100  # of each kind, along which inputs are looked at
ENDING = (0, 2)  # SmolLM2's tokens that end an answer


def texts(file: Path, count: int) -> list[str]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)["turns"][0] for line in lines][:count]


def answers(asked: argparse.Namespace) -> None:
    """Writes RUN/SET.json: prompt, answer, temperature, and whether it is to be learnt."""
    jobs: list[tuple[str, str, float, int, dict[str, float], bool]] = []

    def both(name: str, found: Sequence[str], tokens: int, more: dict[str, float]) -> None:
        jobs.extend((name, text, heat, tokens, more, False) for heat in TEMPERATURES for text in found[: asked.judged])

    def half(name: str, found: Sequence[str], tokens: int, more: dict[str, float], learnt: int) -> None:
        jobs.extend((name, text, TEMPERATURES[i % 2], tokens, more, i < learnt) for i, text in enumerate(found))

    both("mt_bench", texts(MT_BENCH, asked.judged), 128, PLAIN)
    both("mt_bench_penalty", texts(MT_BENCH, asked.judged), 128, PENALTY)
    both("general", [prompt.turns[0] for prompt in general_prompts()], 128, PLAIN)
    own = texts(asked.prompts / "own.jsonl", asked.own)
    half("own", own, 160, PLAIN, len(own) * 4 // 5)
    for kind in asked.kinds:
        learn = texts(asked.prompts / f"{kind}.jsonl", asked.requests)
        every = learn + texts(asked.prompts / f"{kind}_later.jsonl", asked.judged)
        half(kind, every, asked.tokens, PLAIN, len(learn))
        if kind == asked.kinds[0]:
            half(f"{kind}_penalty", every, asked.tokens, PENALTY, len(learn))
    pool = {"max_total_tokens": 150_000, "max_running_requests": 256} if asked.device == "cuda" else {}
    start = time.time()
    with LLM(asked.model, device=asked.device, speculative_algorithm="none", random_seed=3, **pool) as llm:
        ids = [llm.engine.tokenizer.encode_chat([{"role": "user", "content": job[1]}]) for job in jobs]
        params = [{"max_new_tokens": job[3], "temperature": job[2], **job[4]} for job in jobs]
        found = llm.generate(ids, params)
    sets: dict[str, list[dict[str, Any]]] = {}
    for job, prompt, answer in zip(jobs, ids, found, strict=True):
        line = {"prompt": prompt, "answer": list(answer.token_ids), "temperature": job[2], "learnt": job[5]}
        sets.setdefault(job[0], []).append(line)
    for name, lines in sets.items():
        (asked.out / f"{name}.json").write_text(json.dumps(lines), encoding="utf-8")
        print(name, len(lines), "answers", sum(len(line["answer"]) for line in lines), "tokens")
    print(f"{time.time() - start:.0f} s")


def sequences(folder: Path, name: str) -> list[Tokens]:
    """Keys are set/learnt or later/g for greedy or s for sampled/number."""
    found = []
    for i, line in enumerate(json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))):
        ids = np.array([*line["prompt"], *line["answer"]], np.int32)
        part, heat = ("learnt" if line["learnt"] else "later"), ("s" if line["temperature"] else "g")
        found.append(Tokens(ids, np.arange(len(ids)) >= len(line["prompt"]), f"{name}/{part}/{heat}/{i:05d}"))
    return [one for one in found if one.loss_mask.sum() > 3]


def features(asked: argparse.Namespace) -> None:
    target = FeatureModel.load(resolve_model(asked.model, None), "EAGLE3", asked.device)
    store = FeatureStore.create(asked.out / "features", target.meta(asked.model, "EAGLE3"))
    sets = sorted(file.stem for file in asked.out.glob("*.json"))
    capture(target, store, [one for name in sets for one in sequences(asked.out, name)])
    print(len(store), "sequences", store.tokens, "tokens")


def chosen(store: FeatureStore, keys: set[str]) -> Part:
    return Part(store, sorted((i for i, key in enumerate(store.order) if key in keys), key=lambda i: store.order[i]))


def table(before: dict[str, Drafted], after: dict[str, Drafted]) -> dict[str, dict[str, float]]:
    found = {}
    for name in sorted({key.rsplit("/", 1)[0] for key in before}):
        keys = [key for key in before if key.startswith(f"{name}/")]
        one = compare({key: before[key] for key in keys}, after, [1.0] * DEPTH)
        lengths = {"before": one.length_before, "after": one.length_after}
        found[name.replace("/later", "")] = {**lengths, "gain": one.gain, "error": one.error, "texts": one.texts}
    return found


def fit(asked: argparse.Namespace) -> None:
    store = FeatureStore(asked.out / "features")
    target = heads.load_target_ends(resolve_model(asked.model, None), torch.bfloat16, asked.device)
    base, parent, head, merged = (heads.load_head(asked.head, target, "EAGLE3") for _ in range(4))
    every = [one for name in (asked.kind, "own") for one in sequences(asked.out, name)]
    by_set = [[one for one in every if one.key.startswith(f"{name}/learnt")] for name in (asked.kind, "own")]
    learnt = [*by_set[0][: asked.requests], *by_set[1][: asked.own]]
    ids = renewed(head.target_ids.tolist(), learnt, target.config.vocab_size, ENDING)
    for one in (head, merged):
        heads.renew_vocabulary(one, ids)
    head.lm_head.requires_grad_(not asked.frozen)
    loss = Loss(steps=DEPTH, temperature=asked.target_temperature, text=asked.text_share)
    config = FitConfig(
        loss=loss, epochs=asked.epochs, tokens=2048, optimizer="muon", lr=asked.lr, warmup=0.1, save_every=10**9,
        eval_every=10**9,
    )  # fmt: skip
    none = Part(store, [])
    run = Fit(head, heads.TargetHead(target), chosen(store, {one.key for one in learnt}), none, config,
              asked.out / "runs" / asked.name)  # fmt: skip
    report, start = run.run(), time.time()
    judged = {key for key in store.order if "/later/" in key and key.split("/")[0].startswith((*GENERAL, asked.kind))}
    drawn = Temperatures({key: TEMPERATURES[1] for key in judged if "/s/" in key}, heads.TargetHead(target))
    before = draft_along(base, chosen(store, judged), DEPTH, config.max_length, drawn)
    inputs = [chosen(store, {one.key for one in part[:TEXTS]}) for part in (by_set[0][: asked.requests], by_set[1])]
    moments = [input_moments(head, part, DEPTH, config.max_length) for part in inputs]
    for weight in asked.weights:
        merged.load_state_dict(head.state_dict())
        if weight:
            merge(merged, parent, *moments, weight)
        found = table(before, draft_along(merged, chosen(store, judged), DEPTH, config.max_length, drawn))
        settings = {name: getattr(asked, name) for name in ("kind", "requests", "own", "epochs", "lr", "frozen",
                                                            "target_temperature", "text_share")}  # fmt: skip
        counts = {"learnt": len(learnt), "steps": report.steps, "tokens": report.tokens, "seconds": report.seconds}
        with (asked.out / "results.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"name": asked.name, "weight": weight, **settings, **counts, "sets": found}) + "\n")
        shown = ", ".join(f"{name} {one['before']:.2f} to {one['after']:.2f} x{one['gain']:.3f} ± {one['error']:.3f}"
                          for name, one in found.items())  # fmt: skip
        print(f"{asked.name} {weight}: {report.steps} steps, {report.tokens} tokens, {report.seconds:.0f} s + "
              f"{time.time() - start:.0f} s; {shown}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("answers", "features", "fit"))
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--head", help="the parent (default: the model's own)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", nargs="+", default=["french"])
    parser.add_argument("--judged", type=int, default=80, help="most prompts of a set that heads are judged by")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=72)
    parser.add_argument("--own", type=int, default=200)
    parser.add_argument("--name", default="head")
    parser.add_argument("--kind", default="french")
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--lr", type=float, default=0.9 / 576)
    parser.add_argument("--frozen", action="store_true", help="leave the head's lm_head as it is")
    parser.add_argument("--target-temperature", type=float, default=1.0)
    parser.add_argument("--text-share", type=float, default=0.0)
    parser.add_argument("--weights", nargs="+", type=float, default=[4.0], help="of merging; 0: as it was trained")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.head = asked.head or Options.from_kwargs(model=asked.model).resolve().speculative_draft_model_path
    {"answers": answers, "features": features, "fit": fit}[asked.stage](asked)


if __name__ == "__main__":
    main()
