"""NGRAM and SUFFIX side by side, without a target: recorded texts are replayed, each step with the drafts of a lookup.

    python benchmarks/lookups.py record --out answers.json        # once: the model's own answers, two minutes
    python benchmarks/lookups.py compare --answers answers.json [--times] [--out lookups.json]

`compare` says the same at each run, microseconds apart. Of each cell it says the tokens per step where every step
verifies the whole tree, and the tokens per plain step's time where each step verifies as much as has paid so far at the
confidence that the lookup gave: none, a quarter, half or all of the tree. For that a node costs a share of a plain step
(`COSTS`): a large model on a GPU, a small one on a CPU, or many requests at once. So it shows what a confidence is
worth. In brackets is the share of the first lookup's of a group.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from agent_edits import PARTS, files, session
from load_runs import Job, drive, let_go, machine, make_engine, sampling
from load_texts import Texts, questions
from torch import Tensor

from draftwing.config.drafters import MATCHES, SUFFIXES
from draftwing.config.trees import TreeShape
from draftwing.ops import make_ops
from draftwing.ops.assign.spec import new_calibration
from draftwing.ops.attention.batch import Batch, ChunkSpan
from draftwing.spec.drafter import Drafter, DraftStep, SeenTokens
from draftwing.spec.lookup_drafter import NGramDrafter, SuffixDrafter

COSTS = {"cheap": 0.01, "middle": 0.06, "dear": 0.2}  # of a verified node, in plain steps
TOKENS = 160  # of an answer
RECORDED = (  # kind, tokens of the prompt, temperature, answers
    ("chat", 100, 0.0, 16), ("chat", 100, 1.0, 12), ("code", 300, 0.0, 12), ("code", 300, 0.7, 12),
    ("copy", 600, 0.0, 8), ("copy", 600, 0.7, 12), ("random", 100, 1.0, 8),
)  # fmt: skip
PRIOR = 4.0  # steps that a first guess counts for, when it is learnt what a confidence is worth
ROWS = (1, 8, 64)  # that are timed
NONE = torch.empty(0, dtype=torch.int64)

Text = tuple[list[int], list[int]]  # prompt and answer, token ids
Lookups = dict[str, tuple[Callable[[int], Drafter], TreeShape]]  # by name: what makes one for so many rows, its tree


class Slots(NamedTuple):
    """What lookups read of a row table."""

    tokens: Tensor
    kv_len: Tensor
    last: Tensor
    salt: Tensor


# -- the texts ---------------------------------------------------------------------------------------------------------


def record(args: Any) -> dict[str, list[Text]]:
    """The model's answers, without drafts."""
    engine = make_engine(args, "none")
    assert engine is not None
    texts, found = Texts(engine.tokenizer, engine.tokenizer.vocab_size), dict[str, list[Text]]()
    for kind, length, heat, count in RECORDED:
        prompts = texts.prompts(kind, length, count)
        jobs = [Job(prompt, sampling(heat, TOKENS, number, may_end=True)) for number, prompt in enumerate(prompts)]
        answers = drive(engine, jobs, 8).answers
        found[f"{kind}, {heat:g}"] = [(job.prompt, one.tokens) for job, one in zip(jobs, answers, strict=True)]
    found.update(edits(engine.tokenizer))
    found["records"] = records(engine.tokenizer, random.Random(0))
    let_go(engine)
    return found


def edits(tokenizer: Any) -> dict[str, list[Text]]:
    """Parts of files in which a name was replaced, after their earlier versions: 300 and 1,000 tokens a version."""
    found = {}
    for size, sessions in ((300, 12), (1000, 6)):
        rng = random.Random(size)
        some = rng.sample(files(size, lambda text: tokenizer.encode(text, False)), sessions)
        asked = rng.sample(questions(), 2 * PARTS)
        turns = [turn for text in some for turn in session(text, asked, 2, TOKENS, tokenizer, rng)]
        edited = [turn.prompt for turn in turns if turn.kind == "edited"]
        pairs = zip(edited[::PARTS], edited[1::PARTS], strict=True)  # the second one begins with the first's answer
        found[f"edits of {size}"] = [(first, second[len(first) :]) for first, second in pairs]
    return found


def records(tokenizer: Any, rng: random.Random) -> list[Text]:
    """JSON lists whose objects have the same keys and other values; the prompt has a few of them."""
    found = []
    for _ in range(8):
        keys = rng.sample(["name", "id", "price", "in_stock", "category", "rating", "created", "owner", "tags"], 5)
        rows = [{key: _value(key, rng) for key in keys} for _ in range(30)]
        ids = tokenizer.encode(json.dumps(rows, indent=2), False)
        found.append((ids[:200], ids[200 : 200 + 2 * TOKENS]))
    return found


def _value(key: str, rng: random.Random) -> Any:
    words = ["alpha", "bravo", "red", "green", "oak", "pine", "north", "south", "steel", "glass"]
    if key in ("id", "price", "rating"):
        return round(rng.uniform(1, 1000), 2) if key == "price" else rng.randrange(1, 1000)
    if key == "in_stock":
        return rng.random() < 0.7
    if key == "tags":
        return rng.sample(words, 2)
    return " ".join(rng.sample(words, 2))


def cells(recorded: Mapping[str, list[Text]]) -> dict[str, list[Text]]:
    """What was recorded, and what only earlier answers can tell: the same answers after other prompts."""
    found = dict(recorded)
    again = [text for texts in recorded.values() for text in texts[:2]]
    found["asked again"] = [(prompt[:20], answer) for prompt, answer in 2 * again]
    return found


# -- the replay --------------------------------------------------------------------------------------------------------


class Replay:
    """A lookup over texts, one after the other, which share what it remembers."""

    def __init__(self, drafter: Drafter, shape: TreeShape, longest: int) -> None:
        zeros = torch.zeros(2, dtype=torch.int64)
        self.slots = Slots(torch.zeros(2, longest + 2, dtype=torch.int64), zeros, zeros.clone(), zeros.clone())
        self.drafter, self.shape, self.rows = drafter, shape, torch.zeros(1, dtype=torch.int64)

    def begin(self, prompt: Sequence[int], first: int) -> int:
        """The prompt is in the KV and its first token is drawn; returns the confidence."""
        text, slots = torch.tensor([*prompt, first]), self.slots
        slots.tokens[0, : len(text)] = text
        slots.kv_len[0], slots.last[0] = len(prompt), first
        chunks = (ChunkSpan(0, 0, 0, len(prompt), True),)
        batch = _batch(self.rows, torch.zeros(1, dtype=torch.int64))._replace(chunks=chunks)
        self.drafter.extend(SeenTokens(slots, batch, None, text[:-1], None, NONE))
        return self._confidence()

    def draft(self) -> list[list[int]]:
        """Nodes after the root: number, token, parent and grade of each."""
        draft = self.drafter.propose(DraftStep(self.slots, self.rows, self.shape, int(self.slots.kv_len[0]), NONE))
        assert draft.grade is not None
        columns = [x[0].tolist() for x in (draft.alive, draft.tokens, draft.parent, draft.grade)]
        return [[n, *node[1:]] for n, node in enumerate(zip(*columns, strict=True)) if n and node[0]]

    def commit(self, tokens: Sequence[int]) -> int:
        """These are the newest tokens; returns the confidence."""
        slots, before = self.slots, self.slots.kv_len[:1].clone()
        here, count = int(before), torch.tensor([len(tokens)])
        slots.tokens[0, here + 1 : here + 1 + len(tokens)] = torch.tensor(tokens)
        slots.kv_len[0] += len(tokens)
        slots.last[0] = tokens[-1]
        ids = torch.zeros(self.shape.depth + 1, dtype=torch.int64)
        self.drafter.extend(SeenTokens(slots, _batch(self.rows, before), None, ids, count, NONE))
        return self._confidence()

    def _confidence(self) -> int:
        return int(self.drafter.confidence(self.slots, self.rows, int(self.slots.kv_len[0])))


def _batch(rows: Tensor, prefix_len: Tensor) -> Batch:
    none = rows[:0]
    return Batch(rows, none, none, none, none, prefix_len)


class Calibration:
    """How often nodes of a grade and depth were right, as `ops.assign.spec` counts them."""

    def __init__(self) -> None:
        seen, accepted = new_calibration(torch.device("cpu"))
        self.seen, self.accepted = seen.tolist(), accepted.tolist()

    def best(self, nodes: list[list[int]]) -> list[int]:
        """Numbers of the nodes, those first that are expected to be accepted most often."""
        survival, depth = {0: 1.0}, {0: 0}
        for n, _, parent, grade in nodes:
            depth[n] = depth[parent] + 1
            level = min(depth[n], 15)
            survival[n] = survival[parent] * min(self.accepted[grade][level] / self.seen[grade][level], 0.995)
        return sorted((n for n, *_ in nodes), key=lambda n: (-survival[n], n))

    def learn(self, nodes: list[list[int]], right: set[int]) -> None:
        depth = {0: 0}
        for n, _, parent, grade in nodes:
            depth[n] = depth[parent] + 1
            if parent in right:
                level = min(depth[n], 15)
                self.seen[grade][level] += 1
                self.accepted[grade][level] += n in right


def right_path(nodes: list[list[int]], following: Sequence[int]) -> list[int]:
    """Numbers of the nodes that the text goes through, from the first level on."""
    path, at = [], 0
    for token in following:
        found = [n for n, one, parent, _ in nodes if parent == at and one == token]
        if not found:
            break
        at = found[0]
        path.append(at)
    return path


class Measured(NamedTuple):
    length: float  # tokens per step, the whole tree
    rates: dict[str, float]  # by cost: tokens per plain step's time


def measure(make: Callable[[], Drafter], shape: TreeShape, texts: Sequence[Text]) -> Measured:
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    steps = tokens = 0
    replay = Replay(make(), shape, longest)
    for prompt, answer in texts:
        confidence, at = replay.begin(prompt, answer[0]), 1
        while at < len(answer):
            nodes = replay.draft() if confidence else []
            count = len(right_path(nodes, answer[at:-1])) + 1
            confidence = replay.commit(answer[at : at + count])
            at, steps, tokens = at + count, steps + 1, tokens + count
    rates = {name: _rate(make, shape, texts, cost, longest) for name, cost in COSTS.items()}
    return Measured(tokens / steps, rates)


def _rate(make: Callable[[], Drafter], shape: TreeShape, texts: Sequence[Text], cost: float, longest: int) -> float:
    """Tokens per plain step's time where each step takes the option with the most expected of them."""
    options = [1, *(n for n in (shape.nodes // 4, shape.nodes // 2, shape.nodes) if n > 1)]
    seconds = [1 + cost * (n - 1) for n in options]
    gains = [[PRIOR * min(n - 1, confidence) / 4 for n in options] for confidence in range(32)]
    seen = [PRIOR] * 32
    replay, calibration, spent, tokens = Replay(make(), shape, longest), Calibration(), 0.0, 0
    for prompt, answer in texts:
        confidence, at = replay.begin(prompt, answer[0]), 1
        while at < len(answer):
            nodes = replay.draft() if confidence else []
            path, order = right_path(nodes, answer[at:-1]), calibration.best(nodes)
            accepted = []
            for n in options:
                verified = set(order[: n - 1])
                accepted.append(next((i for i, node in enumerate(path) if node not in verified), len(path)))
            said = [(1 + gain / seen[confidence]) / time for gain, time in zip(gains[confidence], seconds, strict=True)]
            option = said.index(max(said)) if nodes else 0
            count = accepted[option] + 1
            gains[confidence] = [0.98 * old + new for old, new in zip(gains[confidence], accepted, strict=True)]
            seen[confidence] = 0.98 * seen[confidence] + 1
            calibration.learn(nodes, {0, *path})
            confidence = replay.commit(answer[at : at + count])
            at, spent, tokens = at + count, spent + seconds[option], tokens + count
    return tokens / spent


# -- the time ----------------------------------------------------------------------------------------------------------


def times(drafters: Lookups, length: int, least: int = 7) -> dict[str, dict[str, float]]:
    """Microseconds of each operation, the least of several in turn; by the name of the drafter and of the operation."""
    found: dict[str, dict[str, float]] = {name: {} for name in drafters}
    for batch in ROWS:
        rng = torch.Generator().manual_seed(batch)
        # Words of a small vocabulary, so that there are matches.
        tokens = torch.randint(300, 1300, (batch + 1, length + 64), generator=rng)
        kv_len = torch.full((batch + 1,), length)
        slots = Slots(tokens, kv_len, tokens[:, length].contiguous(), torch.zeros_like(kv_len))
        rows, count = torch.arange(batch), torch.full((batch,), 2)
        chunks = tuple(ChunkSpan(row, 0, 0, length, True) for row in range(batch))
        calls: dict[str, dict[str, Callable[[], Any]]] = {}
        for name, (make, shape) in drafters.items():
            drafter, ids = make(batch + 1), torch.zeros(batch * (shape.depth + 1), dtype=torch.int64)
            prompt, step = _batch(rows, rows * 0)._replace(chunks=chunks), _batch(rows, kv_len[:batch] - 2)
            begun = SeenTokens(slots, prompt, None, ids, None, NONE)
            drafter.extend(begun)
            learnt = SeenTokens(slots, step, None, ids, count, NONE)
            drafted = DraftStep(slots, rows, shape, length, NONE)
            calls[name] = {
                "prompt": partial(drafter.extend, begun),
                "insert 2": partial(drafter.extend, learnt),
                "confidence": partial(drafter.confidence, slots, rows, length),
                "confidence and tree": partial(_confidence_and_tree, drafter, drafted),
            }
        for operation in next(iter(calls.values())):
            for _ in range(least):
                for name in drafters:
                    call, turns = calls[name][operation], 1 if operation == "prompt" else 20
                    begun = time.perf_counter()
                    for _ in range(turns):
                        call()
                    took = 1e6 * (time.perf_counter() - begun) / turns
                    key = f"{operation}, {batch} rows of {length}"
                    found[name][key] = min(took, found[name].get(key, took))
    return found


def _confidence_and_tree(drafter: Drafter, step: DraftStep) -> None:
    drafter.confidence(step.table, step.rows, step.max_kv_len)
    drafter.propose(step)


# -- the comparison ----------------------------------------------------------------------------------------------------


def lookups() -> list[Lookups]:
    """Groups that are compared: NGRAM with some of its options, SUFFIX's index with the same tree and contexts of at
    most as many tokens as NGRAM matches, the same with contexts of up to 32 tokens, and SUFFIX itself."""
    ops = make_ops(torch.device("cpu"))

    def ngram(window: int) -> tuple[Callable[[int], Drafter], TreeShape]:
        return lambda rows: NGramDrafter(rows, ops, max_window=window, capacity=1_000_000), MATCHES

    def suffix(context: int, shape: TreeShape = MATCHES) -> tuple[Callable[[int], Drafter], TreeShape]:
        return lambda rows: SuffixDrafter(rows, ops, shape, max_context=context, secret=1), shape

    return [
        {
            "NGRAM": ngram(12),
            "contexts to 12": suffix(12),
            "contexts to 32": suffix(32),
            "SUFFIX": suffix(24, SUFFIXES),
        },
        {"NGRAM, window 4": ngram(4), "contexts to 4": suffix(4), "contexts to 32": suffix(32)},
    ]


def compare(texts: Mapping[str, list[Text]]) -> list[dict[str, dict[str, Any]]]:
    """Of each group by cell and lookup."""
    found: list[dict[str, dict[str, Any]]] = []
    for group in lookups():
        found.append({})
        for cell, some in texts.items():
            of_cell = found[-1].setdefault(cell, {})
            for name, (make, shape) in group.items():
                length, rates = measure(lambda make=make: make(2), shape, some)
                of_cell[name] = {"length": length, **rates}
                first = next(iter(of_cell.values()))
                figures = "  ".join(f"{key} {x:6.3f} ({x / first[key]:.3f})" for key, x in of_cell[name].items())
                print(f"{cell:14} {name:16} {figures}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--times", action="store_true", help="microseconds, too")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    if args.what == "record":
        args.draft, args.options = [], []
        args.out.write_text(json.dumps(record(args)))
        return
    print(machine())
    found: dict[str, Any] = {"cells": compare(cells(json.loads(args.answers.read_text())))}
    for length in (500, 4000) if args.times else ():
        found[f"microseconds, {length}"] = taken = times(lookups()[0], length)
        for key in next(iter(taken.values())):
            print(f"{key:40}", "  ".join(f"{name} {of[key]:.1f}" for name, of in taken.items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
