"""Tokens per second of waves of requests that come together, over HTTP: draftwing's or SGLang's `/generate`.

    draftwing serve --model-path FOLDER --load-format dummy --speculative-algorithm none --port 30001 &
    python -m sglang.launch_server --model-path FOLDER --load-format dummy --port 30002 &
    python benchmarks/waves.py --vocab 151936 --url http://127.0.0.1:30001 --url http://127.0.0.1:30002

Each request has a prompt of random token ids of its own (the same ones for each server), so that requests have nothing
in common but the model; greedy answers of a model with random weights soon repeat a few tokens, and with them the
experts of a mixture, which is why the last wave is drawn at temperature 1. Servers are asked one after the other.
Prints a line for each wave, the best of `--rounds`, and a table.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import NamedTuple

from draftwing.cli.client import Client

RESERVED = 1000  # the first and the last token ids of a vocabulary, which may mean something


class Wave(NamedTuple):
    """Requests at once."""

    size: int
    temperature: float

    @property
    def label(self) -> str:
        return f"{self.size}{f' at {self.temperature:g}' if self.temperature else ''}"


def wave(text: str) -> Wave:
    """64 or 64@1.0"""
    size, _, temperature = text.partition("@")
    return Wave(int(size), float(temperature or 0))


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(RESERVED, vocab - RESERVED) for _ in range(length)] for _ in range(count)]


def ask(url: str, ids: list[int], tokens: int, temperature: float, adapter: str = "") -> int:
    """An answer of so many tokens. Returns how many there were; raises ServerError when it is refused."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": temperature}
    beside = {"lora_path": adapter} if adapter else {}
    answer = Client(url).post("/generate", {"input_ids": ids, "sampling_params": sampling, **beside})
    return int(answer["meta_info"]["completion_tokens"])


def rate(
    url: str, every: Sequence[list[int]], tokens: int, temperature: float, adapters: Sequence[str] = ("",)
) -> float:
    """Tokens per second from the first request to the last answer. adapters: of requests, by turns."""
    with ThreadPoolExecutor(len(every)) as threads:
        start = time.perf_counter()
        done = list(threads.map(lambda ids, name: ask(url, ids, tokens, temperature, name), every, cycle(adapters)))
        return sum(done) / (time.perf_counter() - start)


def measured(url: str, waves: Sequence[Wave], args: argparse.Namespace) -> dict[str, float]:
    """By wave. A first one of each size does not count: servers compile in it."""
    for one in waves:
        first = prompts(one.size, args.prompt, args.vocab, args.seed - one.size)
        rate(url, first, 16, one.temperature, args.adapters)
    found = {}
    for number, one in enumerate(waves):
        rates = [
            rate(
                url, prompts(one.size, args.prompt, args.vocab, args.seed + seed), args.tokens, one.temperature,
                args.adapters,
            )
            for seed in range(number * args.rounds, (number + 1) * args.rounds)
        ]  # fmt: skip
        found[one.label] = max(rates)
        shown = {"url": url, "wave": one.label, "tokens_per_s": [round(each, 1) for each in rates]}
        print(json.dumps(shown), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True, help="of a server; may be given several times")
    parser.add_argument("--vocab", type=int, required=True, help="token ids of the model")
    parser.add_argument("--waves", type=wave, nargs="+", default=[wave(text) for text in ("1", "16", "64", "64@1")])
    parser.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1000, help="another one for servers that know these prompts")
    parser.add_argument("--adapters", default=[""], type=lambda names: names.split(","), help="of requests, by turns")
    args = parser.parse_args()
    found = {url: measured(url, args.waves, args) for url in args.url}
    print("| | " + " | ".join(one.label for one in args.waves) + " |\n|---|" + "---|" * len(args.waves))
    for url, rates in found.items():
        print(f"| {url} | " + " | ".join(f"{value:,.0f}" for value in rates.values()) + " |")


if __name__ == "__main__":
    main()
