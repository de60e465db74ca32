"""What heads gain by traffic of several kinds: acceptance length and tokens per second on later requests of each kind,
and on general chat, before and after.

    python benchmarks/learning.py --prompts DIR --kinds shell support --out RUN [--requests 600] [--concurrency 8] \
        [--train "--epochs 4"] [--at-once 2] [--options "--num-threads 1"] [--general-text DIR]

DIR has KIND.jsonl and KIND_later.jsonl for each kind: JSON lines with `turns`, of which the first is asked, or
`messages`, pairs of a role and a text. One engine answers, half of the requests greedily and half at 0.8, without the
penalties that a model may have by default; then `draftwing train --from RUN/KIND/traffic` runs for each; and the same
engine measures with each head in turn, swapped as a server swaps it. What is there already is not made again: traffic,
and heads. --heads names others to measure in their place. --train: further words for `draftwing train`; --options: for
it and for the engine. --general-text: a folder whose general text is used, as DIR/general of an earlier run.
RUN/results.json has all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftwing.config.drafters import TRAINED
from draftwing.config.options import Options
from draftwing.config.trees import TREE
from draftwing.engine.engine import Engine
from draftwing.engine.session import Session
from draftwing.files import write_json
from draftwing.learn.history import HeadHistory, HeadRecord
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.train.judge import Drafted, compare

GENERAL = Path(__file__).parent / "data" / "mt_bench.jsonl"
GENERAL_TOKENS = 96  # of an answer in general chat
TEMPERATURES = (0.0, 0.8)
PLAIN = {"repetition_penalty": 1.0, "min_p": 0.0, "top_p": 1.0, "top_k": -1}
AT_ONCE = 128  # requests that become traffic


class Answered(NamedTuple):
    """answers: token ids of each.  drafted: the tokens of each but for the first, and the steps [1] that these took."""

    answers: list[list[int]]
    drafted: dict[str, Drafted]
    seconds: float

    @property
    def rate(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def questions(engine: Engine, file: Path, count: int) -> list[list[int]]:
    """Returns the ids of the first `count` prompts of a file."""
    with file.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines][:count]
    chats = [one.get("messages") or [("user", one["turns"][0])] for one in found]
    return [engine.tokenizer.encode_chat([{"role": role, "content": text} for role, text in chat]) for chat in chats]


def ask(
    engine: Engine, prompts: Sequence[list[int]], temperatures: Sequence[float], tokens: int, at_once: int
) -> Answered:
    """Answers prompts, each with a seed of its own, so that an answer is the same whatever head drafts it."""
    engine.flush_cache()
    asked = [SamplingParams.read({**PLAIN, "max_new_tokens": tokens, "temperature": heat, "sampling_seed": i})
             for i, heat in enumerate(temperatures)]  # fmt: skip
    answers: list[list[int]] = [[] for _ in prompts]
    drafted, start = dict[str, Drafted](), time.perf_counter()
    requests = (GenerationRequest(str(i), prompt, asked[i]) for i, prompt in enumerate(prompts))
    for output in Session(engine).run(requests, at_once):
        answer = answers[int(output.uid)]
        answer += output.token_ids
        if output.finish_reason is not None:
            steps = np.array([output.meta.get("spec_verify_ct", len(answer) - 1)], np.int64)
            drafted[output.uid] = Drafted(len(answer) - 1, steps)
    return Answered(answers, drafted, time.perf_counter() - start)


def keep_traffic(engine: Engine, asked: argparse.Namespace, kind: str) -> None:
    """Answers a kind's prompts, and keeps them as if one had come each second."""
    folder = asked.out / kind / "traffic"
    if (folder / "traffic.json").exists():
        return
    prompts = questions(engine, asked.prompts / f"{kind}.jsonl", asked.requests)
    heats = [TEMPERATURES[i % 2] for i in range(len(prompts))]
    found = ask(engine, prompts, heats, asked.tokens, AT_ONCE)
    with closing(TrafficStore(folder)) as store:
        for i, (prompt, answer, heat) in enumerate(zip(prompts, found.answers, heats, strict=True)):
            store.add(Exchange(time.time() - len(prompts) + i, "client", None, prompt, answer, heat))
    if asked.general_text is not None:
        shutil.copytree(asked.general_text, folder / "general")
    print(f"{kind}: {len(prompts)} answers, {found.rate:.0f} tokens/s, {found.seconds:.1f} s", flush=True)


def train(asked: argparse.Namespace, words: Sequence[str]) -> dict[str, Path]:
    """Learns from --at-once kinds at a time. Returns the newest head of each, as it was trained where none was
    judged."""

    # Several share a GPU: none may keep what it does not use.
    env = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

    def learn(kind: str) -> None:
        folder = asked.out / kind
        run = ["--from", str(folder / "traffic"), "--out", str(folder / "run"), "--model", asked.model]
        run += ["--algorithm", asked.algorithm, "--init-head", asked.head]
        command = [sys.executable, "-m", "draftwing", "train", *run, *words]
        start = time.perf_counter()
        with (folder / "train.log").open("w", encoding="utf-8") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env).returncode
        print(f"{kind}: {'it failed: see ' + log.name if code else 'learnt'}, {time.perf_counter() - start:.0f} s",
              flush=True)  # fmt: skip

    def judged(kind: str) -> Sequence[HeadRecord]:
        return HeadHistory(asked.out / kind / "traffic" / "heads").list()

    for at_once in (asked.at_once, 1):  # what had no room beside others is tried alone
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(learn, [kind for kind in asked.kinds if not judged(kind)]))
    heads = {
        kind: found[-1].folder if (found := judged(kind)) else asked.out / kind / "run" / "head" for kind in asked.kinds
    }
    return {kind: folder for kind, folder in heads.items() if folder.exists()}


class Meter:
    """Measures with one head after the other, each in turn with the first one, and writes what is known after each."""

    def __init__(self, engine: Engine, asked: argparse.Namespace) -> None:
        self.engine, self.asked = engine, asked
        self.rows: list[dict[str, Any]] = []
        self.general = questions(engine, GENERAL, asked.general)

    def measure(self, heads: Mapping[str, Path]) -> None:
        later = {kind: questions(self.engine, self.asked.prompts / f"{kind}_later.jsonl", self.asked.measured)
                 for kind in heads}  # fmt: skip
        for found in (self.general, *later.values()):
            self._answer(found[: self.asked.concurrency], 0.8, 32)  # first use of everything
        for kind, folder in heads.items():
            chat = {"general chat": (self.general, GENERAL_TOKENS)} if self.general else {}
            sets = {kind: (later[kind], self.asked.tokens), **chat}
            every: dict[tuple[str, float], list[list[Answered]]] = {
                (name, heat): [[], []] for name in sets for heat in TEMPERATURES
            }
            for _ in range(self.asked.repeats):
                for after, head in enumerate((None, folder)):
                    self.engine.swap_draft(head)
                    for (name, heat), found in every.items():
                        found[after].append(self._answer(sets[name][0], heat, sets[name][1]))
            for (name, heat), found in every.items():
                self._add(kind, name, heat, *(min(one, key=lambda each: each.seconds) for one in found))
        self.engine.swap_draft(None)

    def _answer(self, prompts: Sequence[list[int]], heat: float, tokens: int) -> Answered:
        return ask(self.engine, prompts, [heat] * len(prompts), tokens, self.asked.concurrency)

    def _add(self, head: str, prompts: str, heat: float, before: Answered, after: Answered) -> None:
        length = compare(before.drafted, after.drafted, [1.0])
        same = sum(old == new for old, new in zip(before.answers, after.answers, strict=True))
        self.rows.append({
            "head": head, "prompts": prompts, "temperature": heat, "texts": len(before.answers), "same": same,
            "length": [length.length_before, length.length_after], "gain": length.gain, "error": length.error,
            "tokens_per_second": [before.rate, after.rate], "speedup": after.rate / before.rate,
        })  # fmt: skip
        settings = {name: str(value) for name, value in vars(self.asked).items()}
        write_json(self.asked.out / "results.json", {"settings": settings, "rows": self.rows})
        cells = [head, prompts, f"{heat:g}", f"{length.length_before:.2f} to {length.length_after:.2f}",
                 f"{length.gain:.3f}x ± {length.error:.3f}", f"{before.rate:.1f} to {after.rate:.1f}",
                 f"{after.rate / before.rate:.3f}x", f"{same} of {len(before.answers)}"]  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--algorithm", default="EAGLE3", choices=TRAINED, help="of draftwing train")
    parser.add_argument("--head", help="that all start from (default: the model's own)")
    parser.add_argument("--heads", nargs="+", type=Path, help="to be measured, one of each kind: nothing is learnt")
    parser.add_argument("--requests", type=int, default=600, help="of each kind")
    parser.add_argument("--measured", type=int, default=60, help="later requests of each kind")
    parser.add_argument("--general", type=int, default=60, help="prompts of general chat")
    parser.add_argument("--general-text", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--shape", help="of all drafts, as 4,1,5 (default: as a server chooses them)")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at once, when measured")
    parser.add_argument("--repeats", type=int, default=1, help="of each measurement, of which the shortest counts")
    parser.add_argument("--at-once", type=int, default=1, help="kinds that are learnt at a time")
    parser.add_argument("--train", default="")
    parser.add_argument("--options", default="")
    asked = parser.parse_args()
    words = shlex.split(asked.options)
    options: dict[str, Any] = {
        name.removeprefix("--").replace("-", "_"): int(value) if value.isdecimal() else value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    asked.head = asked.head or Options.from_kwargs(model=asked.model).resolve().speculative_draft_model_path
    if asked.head is None:
        parser.error(f"{asked.model} has no head of its own: name one as --head")
    drafter = {"speculative_algorithm": TRAINED[asked.algorithm].name, "speculative_draft_model_path": asked.head}
    if asked.shape:
        tree = dict(zip(TREE, map(int, asked.shape.split(",")), strict=False))
        drafter |= {**tree, "speculative_fixed_shape": True}
    asked.out.mkdir(parents=True, exist_ok=True)
    with closing(Engine(Options.from_kwargs(model=asked.model, **drafter, **options))) as engine:
        meter = Meter(engine, asked)
        if asked.heads:
            heads = dict(zip(asked.kinds, asked.heads, strict=True))
        else:
            for kind in asked.kinds:
                keep_traffic(engine, asked, kind)
            heads = train(asked, [*words, *shlex.split(asked.train)])
        print("| head | prompts | temperature | acceptance length | | tokens per second | | same texts |", flush=True)
        meter.measure(heads)


if __name__ == "__main__":
    main()
