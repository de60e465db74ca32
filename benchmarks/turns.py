"""Engines of this process and others take turns at decoding: for hybrid_cpu.py and cpu_contexts.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from load_runs import Job, drive, sampling

from draftwing.config.options import Options
from draftwing.engine.engine import Engine
from draftwing.gguf_file import open_gguf


class Answer(NamedTuple):
    """decode: tokens per second after the first.  first: seconds until then.  computed: prompt tokens that were not
    cached.  accept_length: tokens of a step."""

    decode: float
    first: float = 0.0
    computed: int = 0
    accept_length: float = 1.0


Ask = Callable[[list[int], int], Answer]  # a prompt, and how many tokens


def cpu_engine(model: str, threads: int, tokens: int, **given: Any) -> Engine:
    """tokens: of its KV pool."""
    options = {
        "model": model, "device": "cpu", "num_threads": threads, "max_total_tokens": tokens,
        "max_running_requests": 2, "log_level": "warning",
    }  # fmt: skip
    return Engine(Options.from_kwargs(**{**options, **given}))


def ask_engine(engine: Engine, prompt: list[int], tokens: int) -> Answer:
    """A greedy answer of exactly so many tokens."""
    ((answer,), _, _) = drive(engine, [Job(prompt, sampling(0.0, tokens, 0))], 1)
    decode = (len(answer.tokens) - 1) / (answer.end - answer.first) if answer.gaps else 0.0
    computed = len(prompt) - answer.meta.get("cached_tokens", 0)
    steps = answer.meta.get("spec_verify_ct") or 0
    return Answer(decode, answer.first, computed, (len(answer.tokens) - 1) / steps if steps else 1.0)


def in_turn(asks: dict[str, Ask], prompts: Sequence[list[int]], tokens: int) -> dict[str, list[Answer]]:
    """Answers to each prompt by everyone; nobody always comes after the same one."""
    names, found = list(asks), {name: list[Answer]() for name in asks}
    for number, prompt in enumerate(prompts):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            found[name].append(asks[name](prompt, tokens))
    return found


def median_ratio(rates: Sequence[float], bases: Sequence[float]) -> float:
    """Of the ratios of each round."""
    return statistics.median(rate / base for rate, base in zip(rates, bases, strict=True))


def kv_bytes_per_token(file: Path) -> int:
    """Of the target's layers, in 16 bits, which is everyone's default."""
    data = open_gguf(file).metadata
    family = data["general.architecture"]
    heads, width = data[f"{family}.attention.head_count"], data[f"{family}.embedding_length"]
    head_dim = data.get(f"{family}.attention.key_length", width // heads)
    return int(data[f"{family}.block_count"] * 2 * data[f"{family}.attention.head_count_kv"] * head_dim * 2)


def read_bandwidth(size: int, threads: int, repeats: int = 15) -> float:
    """Bytes per second at which all threads read an array of `size` bytes over and over: the best time of a sum and of
    its product with itself, of which either may be slower with an instruction set."""
    torch.set_num_threads(threads)
    array, best = torch.zeros(size // 4), float("inf")
    for _ in range(repeats):
        for read in (array.sum, lambda: array.dot(array)):
            begin = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - begin)
    return size / best
