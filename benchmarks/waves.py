"""Tokens per second of waves of requests that come together, over HTTP: draftwing's or SGLang's `/generate`.

    draftwing serve --model-path FOLDER --load-format dummy --speculative-algorithm none --port 30001 &
    python -m sglang.launch_server --model-path FOLDER --load-format dummy --port 30002 &
    python benchmarks/waves.py --vocab 151936 --url http://127.0.0.1:30001 --url http://127.0.0.1:30002

Each request has a prompt of random token ids of its own (the same ones for each server), so that requests have nothing
in common but the model; greedy answers of a model with random weights soon repeat a few tokens, and with them the
experts of a mixture, which is why the last wave is drawn at temperature 1. Servers are asked one after the other.
Prints a line for each wave, the best of `--rounds`, and a table. `beside.py` starts the servers, too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any, NamedTuple

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


def prompts(count: int, length: int, vocab: int, seed: int | str) -> list[list[int]]:
    """seed: of the token ids, none of which is among the first or last of the vocabulary."""
    rng, kept = random.Random(seed), min(RESERVED, vocab // 4)
    return [[rng.randrange(kept, vocab - kept) for _ in range(length)] for _ in range(count)]


def request(ids: list[int], tokens: int, temperature: float = 0.0, **beside: Any) -> dict[str, Any]:
    """The body of a request of `/generate` for so many tokens."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": temperature}
    return {"input_ids": ids, "sampling_params": sampling, **beside}


def accept_length(every: Sequence[dict[str, Any]]) -> float | None:
    """Mean tokens of a step, of what a server says of its answers; None where it says nothing of drafts."""
    steps = [(one["completion_tokens"], one.get("spec_verify_ct")) for one in every]
    lengths = [tokens / count for tokens, count in steps if count]
    return round(statistics.mean(lengths), 3) if lengths else None


def asked(
    url: str, every: Sequence[list[int]], tokens: int, temperature: float = 0.0, adapters: Sequence[str] = ("",)
) -> dict[str, Any]:
    """Asks for all at once: tokens per second from the first request to the last answer, and what the server says.

    adapters: of requests, by turns. Raises ServerError when one is refused.
    """

    def ask(ids: list[int], name: str) -> dict[str, Any]:
        beside = {"lora_path": name} if name else {}
        answer = Client(url).post("/generate", request(ids, tokens, temperature, **beside))
        return dict(answer["meta_info"])

    with ThreadPoolExecutor(len(every)) as threads:
        start = time.perf_counter()
        found = list(threads.map(ask, every, cycle(adapters)))
        took = time.perf_counter() - start
    return {
        "rate": round(sum(one["completion_tokens"] for one in found) / took, 1),
        "accept_length": accept_length(found),
        "cached": sum(one.get("cached_tokens") or 0 for one in found),
        "seconds": round(took, 3),
    }


def measured(url: str, waves: Sequence[Wave], args: argparse.Namespace) -> dict[str, float]:
    """By wave. A first one of each size does not count: servers compile in it."""
    for one in waves:
        first = prompts(one.size, args.prompt, args.vocab, args.seed - one.size)
        asked(url, first, 16, one.temperature, args.adapters)
    found = {}
    for number, one in enumerate(waves):
        rates = [
            asked(
                url, prompts(one.size, args.prompt, args.vocab, args.seed + seed), args.tokens, one.temperature,
                args.adapters,
            )["rate"]
            for seed in range(number * args.rounds, (number + 1) * args.rounds)
        ]  # fmt: skip
        found[one.label] = max(rates)
        print(json.dumps({"url": url, "wave": one.label, "tokens_per_s": rates}), flush=True)
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
