"""Tokens a second behind long contexts that a cache knows, over HTTP, of any server with SGLang's /generate.

    python benchmarks/contexts_http.py --url http://127.0.0.1:30001 --vocab 128256 [--modes off,plain,chain3]
        [--contexts 16000,32000,64000,128000] [--requests 1,4] [--out FILE]

Contexts are random tokens, one of its own for each request. They are asked for once, and then again with a few new
tokens behind; what counts are the tokens that come while all requests write. Modes: `plain` asks for nothing more,
`off` for no drafts and `chainN` for chains of N drafts, of draftwing alone. Modes take turns, and each figure is the
median of `--rounds`; a round before them does not count. FILE has a line a figure, as soon as it is known. `beside.py`
starts the servers, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

from load_runs import listed
from waves import accept_length, prompts, request

from draftwing.cli.client import Client

NEW = 24  # tokens of a prompt behind its context


class Answer(NamedTuple):
    """stamps: seconds, and how many tokens there were then. meta: what the server says of it in the end."""

    sent: float
    stamps: list[tuple[float, int]]
    meta: dict[str, Any]

    def tokens_at(self, seconds: float) -> int:
        return max((count for at, count in self.stamps if at <= seconds), default=0)


def asked_for(mode: str) -> dict[str, Any]:
    """Returns what a request of this mode has beside its prompt."""
    if mode == "off":
        return {"speculative": "off"}
    if mode.startswith("chain"):
        drafts = int(mode.removeprefix("chain"))
        return {"speculative": {"num_steps": drafts, "topk": 1, "num_draft_tokens": drafts + 1}}
    return {}


def ask(url: str, ids: list[int], tokens: int, mode: str, ready: Barrier) -> Answer:
    """Streams an answer. Raises ServerError where it is refused."""
    body = request(ids, tokens, **asked_for(mode))
    ready.wait()
    answer = Answer(time.perf_counter(), [], {})
    for event in Client(url).stream("/generate", body):
        answer.meta.update(event.get("meta_info", {}))
        answer.stamps.append((time.perf_counter(), int(answer.meta["completion_tokens"])))
    return answer


def wave(url: str, every: Sequence[list[int]], tokens: int, mode: str = "plain") -> dict[str, Any]:
    """Asks for all at once: tokens per second while all write, and what the server says."""
    ready = Barrier(len(every))
    with ThreadPoolExecutor(len(every)) as threads:
        answers = list(threads.map(lambda ids: ask(url, ids, tokens, mode, ready), every))
    begin, end = max(one.stamps[0][0] for one in answers), min(one.stamps[-1][0] for one in answers)
    written = sum(one.tokens_at(end) - one.tokens_at(begin) for one in answers)
    return {
        "rate": round(written / (end - begin), 1) if end > begin else 0.0,
        "accept_length": accept_length([one.meta for one in answers]),
        "cached": [one.meta.get("cached_tokens") for one in answers],
        "first_s": [round(one.stamps[0][0] - one.sent, 3) for one in answers],
    }


def measured(url: str, contexts: Sequence[list[int]], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """contexts: one a request -> figures by mode"""
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    for number in range(args.rounds + 1):
        for mode, waves in found.items():
            waves.append(wave(url, continued(contexts, args.vocab, f"{number} {mode}"), args.tokens, mode))
    return {
        mode: waves[-1] | {"rate": statistics.median(one["rate"] for one in waves[1:])} for mode, waves in found.items()
    }


def continued(contexts: Sequence[list[int]], vocab: int, seed: str) -> list[list[int]]:
    """Returns prompts that begin with these contexts. seed: of the tokens behind them."""
    seed = f"{seed} {len(contexts)} {len(contexts[0])}"
    return [ids + new for ids, new in zip(contexts, prompts(len(contexts), NEW, vocab, seed), strict=True)]


def figures(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    whole = prompts(max(args.requests), max(args.contexts), args.vocab, 0)
    for context in args.contexts:
        mine = [ids[:context] for ids in whole]
        for ids in mine:
            wave(args.url, [ids], 2)
        for count in args.requests:
            for mode, found in measured(args.url, mine[:count], args).items():
                yield {"context": context, "requests": count, "mode": mode, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--vocab", type=int, required=True, help="token ids of the model")
    parser.add_argument("--contexts", type=listed(int), default=[16_000, 32_000, 64_000, 128_000])
    parser.add_argument("--requests", type=listed(int), default=[1, 4], help="at once")
    parser.add_argument("--modes", type=listed(str), default=["plain"])
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for found in figures(args):
        line = json.dumps(found)
        print(line, flush=True)
        if args.out is not None:
            with args.out.open("a") as out:
                out.write(line + "\n")


if __name__ == "__main__":
    main()
