"""Steps of one model on several GPUs, and whether drafts leave its texts as they are there.

    python benchmarks/gpu_kernels/ranks.py [--shape 8b|70b|tiny | --config FILE] [--sizes 1,16] [--profile SIZES]
        [--draft JSON] [--prompts 1x4000,8x4000] [--texts N] [option=value ...]

Random weights, from configs that are written here, or of the config.json of another target; options are the engine's,
such as `tp_size=4` and `speculative_algorithm=EAGLE3`. Steps are replays of graphs on rows without context, run by all
ranks. Their floor is the time in which one rank reads its share of the weights, at `timing.read_rate`, which needs 4 GB
beside the engine (`max_total_tokens=20000`). --profile: kernels of rank 0 in steps of so many rows; those of sums wait
for the other ranks. --prompts: seconds until so many requests of so many random tokens have their first tokens, the
best of three, and on a GPU kernels of the first kind. --texts: so many requests, some with a temperature, are answered,
and a hash of their tokens is printed: it is the same for every drafter on the same number of ranks in deterministic
mode.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import step
import torch
from load_runs import listed
from timing import read_rate

from draftwing.engine.executor import Executor
from draftwing.engine.loop import Loop
from draftwing.engine.startup.measure_costs import experts_at_random, replay
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.sched.req import Req

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {},
    "70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "tiny": {},
}  # fmt: skip
REPLAYS = 20
ROWS = (1, 8, 16, 64)  # of a sum that is timed alone


def steps(parts: Any, sizes: list[int], profiled: list[int]) -> None:
    executor: Executor = parts.executor
    captured: Any = executor.graphs._graphs
    keys = sorted({key for stage, key in captured if stage == "verify" and key.size in sizes}, key=lambda key: key.size)
    for key in keys:
        executor.run_on_all_ranks(replay, key)
        seconds = executor.device.timed(partial(executor.run_on_all_ranks, replay, key), REPLAYS)
        took, (size, _) = statistics.median(seconds) * 1e6, step.weights_read(parts, key.size * key.shape.queries)
        floor = size / read_rate()
        print(
            f"{took:9.1f} us  step {tuple(key.shape)} x {key.size}: {size / 1e6:.0f} MB of weights a rank, "
            f"floor {floor:.0f} us, {floor / took:.0%}", flush=True,
        )  # fmt: skip
    for key in keys:
        if key.size in profiled:
            step.profile(f"step {tuple(key.shape)} x {key.size}", partial(executor.run_on_all_ranks, replay, key))


def sums(executor: Executor) -> None:
    import ranks  # this module, as the other ranks know it

    for rows in ROWS:
        seconds = executor.run_on_all_ranks(ranks.time_sums, rows)
        print(f"{seconds * 1e6:9.1f} us  sum of {rows} rows of {executor.model.config.hidden_size}", flush=True)
        seconds = executor.run_on_all_ranks(ranks.time_sums, rows, True)
        print(f"{seconds * 1e6:9.1f} us  as many of all ranks side by side, each with its share", flush=True)


@torch.inference_mode()
def time_sums(executor: Executor, rows: int, gathers: bool = False) -> float:
    """Seconds of one sum over the ranks, from a graph where there are any. gathers: of shares of rows side by side, in
    place of sums."""
    model, device = executor.model, executor.device
    x = torch.ones(rows, model.config.hidden_size, dtype=model.norm.weight.dtype, device=device.device)
    share = x[:, : x.shape[1] // model.ranks.size].contiguous()

    def many() -> Any:
        y = x
        for _ in range(100):
            y = model.ranks.gather_side_by_side(share) if gathers else model.ranks.sum_rows(x, residual=y)
        return y

    run = device.record(many)[0] if executor.graphs.sizes else many
    run()
    return min(device.timed(run, 3)) / 100


def answers(parts: Any, prompts: Sequence[list[int]], tokens: int) -> dict[str, list[int]]:
    """Answers requests together, every other one at a temperature."""
    loop = Loop(parts.sched, parts.executor, parts.options.enable_overlap, lambda plan, result: None)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=tokens, temperature=0.8 if number % 2 else 0.0)
        request = GenerationRequest(f"{number:03}", prompt, params)
        parts.sched.submit(Req(request, seed=number, max_total=len(prompt) + tokens, stop_ids=frozenset()))
    found: dict[str, list[int]] = {}
    while not loop.idle:
        loop.turn()
        for output in parts.sched.take_outputs():
            found.setdefault(output.uid, []).extend(output.token_ids)
    assert len(found) == len(prompts) and all(len(ids) == tokens for ids in found.values())
    return found


def first_tokens(parts: Any, waves: Sequence[tuple[int, int]]) -> None:
    """Prints how long prompts take that no cache knows. waves: requests at once, tokens of each."""
    rng, vocab = random.Random(0), parts.executor.model.config.vocab_size

    def wave(count: int, length: int) -> float:
        prompts = [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]
        begin = time.perf_counter()
        answers(parts, prompts, 1)
        return time.perf_counter() - begin

    for count, length in waves:
        took = min(wave(count, length) for _ in range(3))
        print(f"{took:9.3f} s   {count} x {length}: {count * length / took:.0f} tokens/s", flush=True)
    if parts.executor.device.device.type == "cuda":
        step.profile(f"{waves[0][0]} x {waves[0][1]}", partial(wave, *waves[0]))


def texts(parts: Any, count: int, tokens: int) -> str:
    """Answers so many requests together; returns a hash of all tokens."""
    vocab = parts.executor.model.config.vocab_size
    prompts = [
        [(number * 7919 + place * (number + 1) * 31) % vocab for place in range(10 + number % 40)]
        for number in range(count)
    ]
    found = answers(parts, prompts, tokens)
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()[:16]


def wave(text: str) -> tuple[int, int]:
    """8x4000"""
    count, _, length = text.partition("x")
    return int(count), int(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--config", type=Path, metavar="FILE", help="config.json of the target, in place of a shape")
    parser.add_argument("--draft", type=json.loads, metavar="JSON", help="keys of the draft model's config")
    parser.add_argument("--sizes", type=listed(int), default=[1, 16])
    parser.add_argument("--profile", type=listed(int), default=[], metavar="SIZES", help="whose kernels to show")
    parser.add_argument("--prompts", type=listed(wave), default=[], metavar="WAVES")
    parser.add_argument("--texts", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    given = step.options_of(args.options)
    begin = time.monotonic()
    step.LLAMA.update(SHAPES[args.shape])
    with tempfile.TemporaryDirectory() as folder:
        parts = step.build(Path(folder), given, args.shape == "tiny", args.config, args.draft)
    print(
        f"{args.config or args.shape} {' '.join(args.options)}: built in {time.monotonic() - begin:.1f} s, "
        f"{parts.sched.config.slots} tokens"
    )
    print(json.dumps(parts.capability))
    if parts.executor.model.ranks.size > 1:
        sums(parts.executor)
    with torch.inference_mode(), experts_at_random(parts.executor):
        steps(parts, args.sizes, args.profile)
    if args.prompts:
        first_tokens(parts, args.prompts)
    if args.texts:
        begin = time.monotonic()
        found = texts(parts, args.texts, args.tokens)
        took = time.monotonic() - begin
        print(f"texts {found}: {args.texts * args.tokens / took:.0f} tokens/s, {args.texts} requests", flush=True)
    parts.executor.close()


if __name__ == "__main__":
    main()
