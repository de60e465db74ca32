"""What a small streaming client feels of others: gaps between its events and its times to the first one.

    python benchmarks/fairness.py [--heavy 4] [--peers 0] [--kinds ebnf,stop,...] [--out result.json]

Starts `draftwing serve`. One client streams short answers, one after the other: first alone, or beside `--peers`
clients like it, then with `--heavy` clients of one kind in addition, which ask again as soon as they are answered or
refused. The rounds of the kinds alternate with those without, so that what else the machine does is the same for all.
Prints the median and the 99th percentile of gaps and of times to first tokens, and their ratios to those without heavy
clients.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from draftwing.utils import launch_server_cmd, terminate_process, wait_for_server

HOST = "127.0.0.1"
TEXT = "the river house under light old garden train morning paper stone quiet window yellow market seven letters"
WORDS = TEXT.split()
Body = dict[str, Any]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def body(text: str, tokens: int, rng: random.Random, **params: Any) -> Body:
    sampling = {"max_new_tokens": tokens, "temperature": 0.7, "sampling_seed": rng.getrandbits(30), **params}
    return {"text": text, "sampling_params": sampling, "stream": True}


def small(rng: random.Random) -> Body:
    return body(f"Once upon a time, {words(rng, 12)}", 48, rng, ignore_eos=True)


def ambiguous(rng: random.Random) -> Body:
    return body(words(rng, 12), 64, rng, ebnf="root ::= x\nx ::= [a-z ] | x x\n")


def polynomial(rng: random.Random) -> Body:
    expressions = [f"[^#]+[^#]+[^#]+(?<=Q{i})#" for i in range(64)]
    return body(words(rng, 12), 200, rng, ignore_eos=True, stop_regex=expressions)


def enumeration(rng: random.Random) -> Body:
    schema = {"enum": [f"{i:x} {rng.getrandbits(32):x}" for i in range(15_000)]}
    return body(words(rng, 12), 32, rng, json_schema=json.dumps(schema))


def long_prompt(rng: random.Random) -> Body:
    return body(words(rng, 6000), 16, rng)


def edits(rng: random.Random) -> Body:
    """All that edits logits, as much of it as is taken."""
    biases = {str(token): rng.uniform(-5, 5) for token in rng.sample(range(1000, 40_000), 1024)}
    unwanted = [words(rng, 12) for _ in range(64)]
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    return body(words(rng, 12), 48, rng, ignore_eos=True, logit_bias=biases, bad_words=unwanted, **penalties)


def logprobs(rng: random.Random) -> Body:
    """The log probabilities of many tokens, for each token of the answer."""
    return body(words(rng, 12), 48, rng, ignore_eos=True) | {"return_logprob": True, "top_logprobs_num": 128}


KINDS: dict[str, Callable[[random.Random], Body]] = {
    "plain": small, "ebnf": ambiguous, "stop": polynomial, "enum": enumeration, "prompt": long_prompt,
    "edits": edits, "logprobs": logprobs,
}  # fmt: skip


def events(port: int, one: Body) -> Iterator[float]:
    """When each event of an answer came; nothing more when it is refused."""
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    try:
        connection.request("POST", "/generate", json.dumps(one), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            print(response.status, response.read()[:200].decode())
            return
        for line in response:
            if line.startswith(b"data: {"):
                yield time.monotonic()
    finally:
        connection.close()


class Crowd:
    """Clients that ask again and again until they are told to go."""

    def __init__(self, port: int, makers: list[Callable[[random.Random], Body]], seed: int) -> None:
        self._gone = threading.Event()
        self.answers = 0
        self._threads = [
            threading.Thread(target=self._ask, args=(port, make, random.Random(f"{seed} {i}")))
            for i, make in enumerate(makers)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, port: int, make: Callable[[random.Random], Body], rng: random.Random) -> None:
        while not self._gone.is_set():
            for _ in events(port, make(rng)):
                if self._gone.is_set():
                    return
            self.answers += 1
            time.sleep(0.02)

    def leave(self) -> None:
        self._gone.set()
        for thread in self._threads:
            thread.join()


def watch(port: int, seconds: float, rng: random.Random) -> tuple[list[float], list[float]]:
    """The small client's gaps and times to first events."""
    gaps, first = [], []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        asked = time.monotonic()
        times = list(events(port, small(rng)))
        if times:
            first.append(times[0] - asked)
            gaps += [after - before for before, after in itertools.pairwise(times)]
    return gaps, first


def percentile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return round(1000 * sorted(values)[min(int(share * len(values)), len(values) - 1)], 1) if values else float("nan")


def run(port: int, args: argparse.Namespace) -> dict[str, Any]:
    kinds = ["without", *args.kinds.split(",")]
    found: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in kinds}
    answers = dict.fromkeys(kinds, 0)
    watch(port, 4, random.Random(0))
    for number in range(args.rounds):
        for kind in kinds:
            makers = [small] * args.peers + ([] if kind == "without" else [KINDS[kind]] * args.heavy)
            crowd = Crowd(port, makers, number)
            time.sleep(1)
            gaps, first = watch(port, args.seconds, random.Random(number))
            found[kind][0].extend(gaps)
            found[kind][1].extend(first)
            print(f"round {number}, {kind}: gap p99 {percentile(gaps, 0.99)} ms of {len(gaps)}", flush=True)
            crowd.leave()
            answers[kind] += crowd.answers
    return {kind: told(*found[kind], *found["without"]) | {"answers": answers[kind]} for kind in kinds}


def told(gaps: list[float], first: list[float], gaps_before: list[float], first_before: list[float]) -> dict[str, Any]:
    out: dict[str, Any] = {"gaps": len(gaps)}
    for name, values, before in (("gap", gaps, gaps_before), ("ttft", first, first_before)):
        for share, of in ((0.5, "median"), (0.99, "p99")):
            out[f"{name}_{of}_ms"] = percentile(values, share)
            out[f"{name}_{of}_ratio"] = round(percentile(values, share) / percentile(before, share), 2)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--heavy", type=int, default=4, help="heavy clients of a kind at once")
    parser.add_argument("--peers", type=int, default=0, help="clients like the small one, always there")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15, help="of each kind in each round")
    parser.add_argument("--serve", default="", help="more options of the server, as one string")
    parser.add_argument("--port", type=int, help="of a server that runs; without it one is started")
    parser.add_argument("--out", type=Path, help="write the JSON to a file, too")
    args = parser.parse_args()
    server, port = None, args.port
    if port is None:
        command = f"python -m draftwing.launch_server --model {shlex.quote(args.model)} --log-level warning"
        server, port = launch_server_cmd(f"{command} {args.serve}", HOST)
    try:
        if server is not None:
            wait_for_server(f"http://{HOST}:{port}", process=server)
        result = run(port, args)
    finally:
        if server is not None:
            terminate_process(server)
    for kind, figures in result.items():
        print(kind, json.dumps(figures))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
