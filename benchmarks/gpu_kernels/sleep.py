"""How long an engine takes to fall asleep and to wake up, and what memory it gives back.

    python benchmarks/gpu_kernels/sleep.py [--shapes 8b,27b] [--times 3] [--folder DIR] [--tiny] [--out FILE]
        [option=value ...]

Random weights in the shapes of Llama 3.1 8B and of Qwen3.5-27B in FP8, a KV cache of all memory that is free. Each time
an answer comes before it sleeps, and the same one, which must have the same tokens, wakes it up. `start` is that of an
engine with made-up weights, which reads no files. disable_cuda_graph=true shows what graphs take of waking up.
--tiny: small models, on any device.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from host_level import PROMPTS, Run, ask, shape_of
from load_runs import let_go, listed, machine, options_of

from draftwing.config.options import Options
from draftwing.engine.engine import Engine
from draftwing.machine import free_memory

TOKENS = 512  # of the prompt


class Memory(NamedTuple):
    """Bytes that are free: of the device's, and of the host's."""

    device: int
    host: int

    @classmethod
    def now(cls, engine: Engine) -> Memory:
        return cls(engine.parts.executor.device.free_memory(), free_memory() or 0)


class Round(NamedTuple):
    """Seconds, and bytes that are free while it sleeps less those before and after it. waking_token: until the first
    token of a request that wakes the engine up.  next_token: of the same request behind it, from no cache."""

    sleep: float
    wake: float
    waking_token: float
    next_token: float
    given: Memory
    taken: Memory


def seconds(engine: Engine, action: Callable[[], Future[None]]) -> float:
    began, done = time.perf_counter(), action()
    while not done.done():
        engine.step()
    done.result()
    return time.perf_counter() - began


def once(engine: Engine, prompt: list[int], expected: Run) -> Round:
    before = Memory.now(engine)
    slept = seconds(engine, engine.sleep)
    asleep = Memory.now(engine)
    woke = seconds(engine, engine.wake_up)
    after = Memory.now(engine)
    seconds(engine, engine.sleep)
    waking = ask(engine, prompt)
    assert engine.parts.sched.flush_cache()
    again = ask(engine, prompt)
    assert waking.tokens == again.tokens == expected.tokens, "a text differs"
    given, taken = (Memory(*(one - other for one, other in zip(asleep, was, strict=True))) for was in (before, after))
    return Round(slept, woke, waking.first_token, again.first_token, given, taken)


def measure(shape: str, args: argparse.Namespace, place: Path) -> dict[str, Any]:
    folder = place / shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape_of(shape, args.tiny)))
    words = tokenizers.models.WordLevel({str(i): i for i in range(PROMPTS[1])}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    named: dict[str, Any] = {"speculative_algorithm": "none", "log_level": "warning"} | args.options
    began = time.perf_counter()
    engine = Engine(Options.from_kwargs(model=str(folder), load_format="dummy", **named))
    started = time.perf_counter() - began
    rng = random.Random(0)
    prompt = [rng.randrange(*PROMPTS) for _ in range(TOKENS)]
    ask(engine, prompt)  # compiles
    assert engine.parts.sched.flush_cache()
    expected = ask(engine, prompt)
    print(f"{machine()}; {shape}, start {started:.1f} s, {len(engine.parts.executor.captures)} graphs")
    rounds = [once(engine, prompt, expected) for _ in range(args.times)]
    for one in rounds:
        print(
            f"asleep in {one.sleep:6.2f} s, awake in {one.wake:6.2f} s, first token {one.waking_token:6.2f} s, of the "
            f"next request {one.next_token:6.3f} s; given back {one.given.device / 1e9:7.2f} GB of the device's, "
            f"{-one.given.host / 1e9:6.2f} GB of the host's taken meanwhile, {-one.taken.host / 1e9:6.2f} given back"
        )
    weights, pool = sum(engine.info.weight_bytes.values()), engine.info.pool_bytes
    let_go(engine)
    return {"start": started, "weights": weights, "pool": pool, "rounds": [one._asdict() for one in rounds]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=listed(str), default=["8b", "27b"])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", help="where models are, for so long")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", metavar="option=value")
    args = parser.parse_args()
    args.options = options_of(args.options)
    found: dict[str, Any] = {"machine": machine(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        for shape in args.shapes:
            found[shape] = measure(shape, args, Path(place))
            if args.out is not None:
                args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
