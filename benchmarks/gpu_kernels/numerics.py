"""What the promise costs: an engine with the default numerics beside one with `--fast-numerics`, by model.

    python benchmarks/gpu_kernels/numerics.py [--models 8b,27b-fp8,glm-4.7-flash,gpt-oss-20b] [--modes default,fast]
        [--requests 1,16,64] [--prompts 1x4000,8x4000,4x11000] [--profile] [--floors]
        [--out FILE] [option=value ...]

Random weights in published shapes. Prompts are random tokens, which no cache knows: seconds until the first tokens of
all, the best of `--runs`. Then answers of 128 tokens behind prompts of 100, in tokens/s while all write: `plain`, and
as chains of three drafts, 1.5 of them accepted (simulated), by the model's prediction layer or an EAGLE-3 head. The
floor of a plain step is the time to read its weights. --profile: milliseconds of kernels of one prompt, and
of some steps of the most requests. --floors: the same by kinds, beside what their bytes or operations take on an H200.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from floors import by_kind, floors, table  # noqa: E402
from hybrid_gpu import config_of  # noqa: E402
from load_runs import drive, fixed_shapes, jobs_of, let_go, listed, machine, options_of, pinned, watched  # noqa: E402
from reference import hf_configs as real  # noqa: E402
from step import LLAMA, weights_read  # noqa: E402
from timing import read_rate  # noqa: E402

from draftwing.config.options import Options  # noqa: E402
from draftwing.config.trees import PLAIN, TreeShape  # noqa: E402
from draftwing.engine.engine import Engine  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "8b": LLAMA,
    "27b-fp8": config_of("27B"),
    "glm-4.7-flash": real.GLM47_FLASH,
    "gpt-oss-20b": real.GPT_OSS_20B,
    "qwen3-30b-a3b": real.QWEN3_30B,
    "gemma4-26b": real.GEMMA4_26B,
    "nemotron-3-nano": real.NEMOTRON3_NANO,
    "granite-4-tiny": real.GRANITE4_TINY,
    "kimi-linear": real.KIMI_LINEAR_48B,
    "lfm2-8b": real.LFM2_8B,
    "tiny": LLAMA | {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 4000,
    },
}  # fmt: skip
HEADS = ("8b", "tiny")  # with an EAGLE-3 head
ACCEPT_LENGTH, CHAIN = 2.5, (3, 1, 4)
LENGTHS = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
FIRST, LAST = 1000, 4000  # between which a prompt's tokens lie
SHOWN = 24  # kernels of a profile
PROMPT, SHORT, STEPS = 4000, 8, 24  # tokens of a prompt and of a short answer, and of one that is longer so many more


def engine_of(folder: Path, name: str, fast: bool, given: dict[str, Any]) -> Engine:
    """Builds an engine on random weights, with what drafts for the model where there is anything."""
    config = SHAPES[name]
    for part, its in (("target", config), ("draft", LLAMA | config | {"num_hidden_layers": 1})):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(its))
    vocabulary = tokenizers.models.WordLevel({f"t{i}": i for i in range(LAST)}, "t0")
    tokenizers.Tokenizer(vocabulary).save(str(folder / "target" / "tokenizer.json"))
    more: dict[str, Any] = {"speculative_algorithm": "none"}
    if name in HEADS:
        more = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(folder / "draft")}
    elif config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers"):
        more = {"speculative_algorithm": "NEXTN"}
    drafts = more["speculative_algorithm"] != "none"
    if drafts:
        more |= LENGTHS | {"simulate_accept_length": ACCEPT_LENGTH}
    settings = {
        "load_format": "dummy", "log_level": "warning", "context_length": 16384, "max_running_requests": 64,
        "cuda_graph_max_bs": 64, "fast_numerics": fast,
    } | more | given  # fmt: skip
    return Engine(Options.from_kwargs(model=str(folder / "target"), **settings))


def prompts_of(count: int, length: int) -> list[list[int]]:
    """Returns prompts that begin in different ways each time."""
    return [[random.randrange(FIRST, LAST) for _ in range(length)] for _ in range(count)]


def answers_per_second(engine: Engine, shape: TreeShape, count: int, tokens: int) -> dict[str, float]:
    """Returns tokens per second while all requests write, a step's median milliseconds, and its tokens by row."""
    with pinned(engine, shape):
        drive(engine, jobs_of(prompts_of(count, 100), 0.0, 8), count)
        with watched(engine) as steps:
            drive(engine, jobs_of(prompts_of(count, 100), 0.0, tokens), count)
    whole = [step for step in steps if step.kind == "tree" and step.rows == count and step.shape == shape]
    ms = statistics.median(later.at - step.at for step, later in itertools.pairwise(whole)) * 1e3
    written = sum(step.tokens for step in whole)
    return {"rate": 1e3 * written / len(whole) / ms, "ms": ms, "tokens": written / len(whole) / count}


def prompt_seconds(engine: Engine, count: int, length: int, runs: int) -> float:
    """Returns the seconds until all of `count` prompts have their first token, the least of some runs."""
    took = []
    for _ in range(runs):
        driven = drive(engine, jobs_of(prompts_of(count, length), 0.0, 1), count)
        took.append(max(answer.first for answer in driven.answers))
    return min(took)


def kernels_in_order(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Returns the kernels of what is called, as they began, with their milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.device_time / 1e3) for event in sorted(events, key=lambda event: event.time_range.start)]


def kernels_of(call: Callable[[], object]) -> list[tuple[str, float, int]]:
    """Returns kernels of what is called with their milliseconds and calls, the longest first."""
    by: dict[str, list[float]] = defaultdict(list)
    for name, ms in kernels_in_order(call):
        by[name].append(ms)
    found = [(name, sum(times), len(times)) for name, times in by.items()]
    return sorted(found, key=lambda each: -each[1])


def by_floor(engine: Engine, count: int) -> dict[str, list[str]]:
    """Returns tables of a prompt and of a plain step of so many rows: kinds of kernels, beside their floors. A step is
    what answers that are longer take more, by their tokens."""
    at_once = kernels_in_order(lambda: prompt_seconds(engine, 1, PROMPT, 1))
    answers = []
    for tokens in (SHORT, SHORT + STEPS):
        call = partial(answers_per_second, engine, PLAIN, count, tokens)
        answers.append(by_kind(kernels_in_order(call)))
    step = {kind: (ms - answers[0].get(kind, 0.0)) / STEPS for kind, ms in answers[1].items()}
    with torch.inference_mode():
        of_prompt, of_step = floors(engine.parts, 1, PROMPT, PROMPT), floors(engine.parts, count, 1, 100 + SHORT)
    return {f"a prompt of {PROMPT}, ms, floor": table(by_kind(at_once), of_prompt),
            f"a step of {count}, ms, floor": table(step, of_step)}  # fmt: skip


def figures(engine: Engine, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yields the figures of one engine, each as soon as it is known."""
    floors_of = {}
    if torch.cuda.is_available():
        with torch.inference_mode():
            floors_of = {n: weights_read(engine.parts, n)[0] / read_rate() / 1e3 for n in args.requests}
    for prompt in args.prompts:
        count, length = map(int, prompt.split("x"))
        yield f"prompts {prompt}, s", round(prompt_seconds(engine, count, length, args.runs), 4)
    shapes = [shape for shape in fixed_shapes(engine) if shape.tree == CHAIN]
    for shape in (PLAIN, *shapes):
        for count in args.requests:
            took = answers_per_second(engine, shape, count, args.tokens)
            if shape == PLAIN and count in floors_of:
                took |= {"floor": floors_of[count], "share": floors_of[count] / took["ms"]}
            yield f"{'plain' if shape == PLAIN else 'chains'} {count}", {k: round(v, 3) for k, v in took.items()}
    if args.floors:
        yield from by_floor(engine, args.requests[-1]).items()
    calls: dict[str, Callable[[], object]] = {
        "a prompt": lambda: prompt_seconds(engine, 1, PROMPT, 1),
        "steps": lambda: answers_per_second(engine, shapes[-1] if shapes else PLAIN, args.requests[-1], 16),
    }
    for what, call in calls.items() if args.profile else ():
        kernels = kernels_of(call)
        yield f"kernels of {what}", [(kernel[:80], round(ms, 3), calls) for kernel, ms, calls in kernels[:SHOWN]]
        yield f"kernels of {what}, ms", round(sum(ms for _, ms, _ in kernels), 2)


def measured(name: str, fast: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one engine, and prints them as they come, behind the seconds since it was asked for."""
    begin, found = time.monotonic(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(Path(folder), name, fast, options_of(args.options))
    with contextlib.ExitStack() as ends:
        ends.callback(let_go, engine)
        for key, value in itertools.chain([("start", round(time.monotonic() - begin, 1))], figures(engine, args)):
            found[key], several = value, isinstance(value, list)
            print(f"{name} {'fast' if fast else 'default'}, {time.monotonic() - begin:.0f} s: {key}",
                  *(value if several else [value]), sep="\n   " if several else " ", flush=True)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=listed(str), default=["8b", "27b-fp8", "glm-4.7-flash", "gpt-oss-20b"])
    parser.add_argument("--modes", type=listed(str), default=["default", "fast"])
    parser.add_argument("--requests", type=listed(int), default=[1, 16, 64])
    parser.add_argument("--prompts", type=listed(str), default=["1x4000", "8x4000", "4x11000"])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--floors", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", metavar="option=value")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    for name in args.models:
        for mode in args.modes:
            try:
                results[f"{name} {mode}"] = measured(name, mode == "fast", args)
            except Exception as error:  # the next model may work
                results[f"{name} {mode}"] = repr(error)
                print(name, mode, repr(error), flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
