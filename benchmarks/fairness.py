"""What a small streaming client feels of others: gaps between its events and its times to the first one.

    python benchmarks/fairness.py [--heavy 4] [--peers 0] [--kinds ebnf,stop,...] [--out result.json]

Starts `draftwing serve` with a key for each client. One client streams short answers, one after the other: first
alone, or with `--peers` clients like it, then with `--heavy` clients of one kind in addition, which ask again as soon
as they are answered or refused; those that are there to be refused ask on eight connections. Clients are processes; the
heavy ones have a lower priority, so that what they take of this machine's processors is not measured as the server's.
The rounds of the kinds alternate with those without, so that what else the machine does is the same for all.
Prints the median and the 99th percentile of gaps and of times to first tokens, and their ratios to those without heavy
clients (`_ratio`) and to those with as many that send what the others do (`_to_plain`).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import random
import shlex
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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


def thousands(rng: random.Random) -> Body:
    """More answers than a key may have waiting, again and again."""
    sampling = {"n": 128, "max_new_tokens": 900, "ignore_eos": True}
    return {"text": [words(rng, 2) for _ in range(16)], "sampling_params": sampling, "stream": True}


def dozens(rng: random.Random) -> Body:
    """Answers that it waits for, many more than there are rows."""
    sampling = {"n": 64, "max_new_tokens": 200, "ignore_eos": True}
    return {"text": [words(rng, 8) for _ in range(4)], "sampling_params": sampling, "stream": True}


def wrong(rng: random.Random) -> Body:
    return body(words(rng, 12), 48, rng, temperature="warm")


class Kind(NamedTuple):
    """connections: of one client.  seconds: after which it leaves, whatever it got.  key: None: its own."""

    make: Callable[[random.Random], Body]
    connections: int = 1
    seconds: float = 600
    key: str | None = None


KINDS = {
    "plain": Kind(small), "ebnf": Kind(ambiguous), "stop": Kind(polynomial), "enum": Kind(enumeration),
    "prompt": Kind(long_prompt), "edits": Kind(edits), "logprobs": Kind(logprobs),
    "thousands": Kind(thousands, 8, 0.3), "dozens": Kind(dozens), "wrong": Kind(wrong, 8),
    "stranger": Kind(small, 8, key="no-key-of-the-file"),
}  # fmt: skip
CLIENTS = ("watched", "peer", "heavy")
MAX_CLIENTS = 16


def key_file(folder: Path) -> Path:
    """A key for every client; a client's key is its name."""
    file = folder / "keys.toml"
    file.touch(0o600)
    file.write_text("".join(f'[{name}{i}]\nkey = "{name}{i}"\n' for name in CLIENTS for i in range(MAX_CLIENTS)))
    return file


class Client:
    """A connection, which is kept as long as the server keeps it."""

    def __init__(self, port: int, key: str, seconds: float = 600) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=seconds)
        self._headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        self.refusals = 0

    def events(self, one: Body) -> Generator[float, None, None]:
        """When each event of an answer came; nothing more when it is refused. Who closes it leaves."""
        complete = False
        try:
            self._connection.request("POST", "/generate", json.dumps(one), self._headers)
            response = self._connection.getresponse()
            if response.status != 200:
                response.read()
                self.refusals += 1
            else:
                for line in response:
                    if line.startswith(b"data: {"):
                        yield time.monotonic()
            complete = True
        except (TimeoutError, ConnectionError, http.client.HTTPException):
            pass
        finally:
            if not complete:
                self._connection.close()

    def close(self) -> None:
        self._connection.close()


class Crowd:
    """Clients that ask again and again until they are asked to stop."""

    def __init__(self, port: int, kinds: list[tuple[str, str]], seed: int) -> None:
        """kinds: name and kind of each client."""
        context = multiprocessing.get_context("spawn")
        self._gone, self._there = context.Event(), context.Barrier(len(kinds) + 1)
        self._counts = context.Array("q", 2)  # answers, refusals
        self._processes = [
            context.Process(target=_ask, args=(port, name, kind, seed, self._gone, self._there, self._counts))
            for name, kind in kinds
        ]
        for process in self._processes:
            process.start()
        self._there.wait(60)

    def leave(self) -> tuple[int, int]:
        """Answers and refusals that they had."""
        self._gone.set()
        for process in self._processes:
            process.join()
        return int(self._counts[0]), int(self._counts[1])


def _ask(port: int, name: str, kind: str, seed: int, gone: Any, there: Any, counts: Any) -> None:
    """One client, in a process of its own."""
    make, connections, seconds, key = KINDS[kind]
    if name.startswith("heavy"):
        os.nice(10)
    there.wait(60)

    def work(number: int) -> None:
        rng = random.Random(f"{seed} {name} {number}")
        client, answers = Client(port, key or name, seconds), 0
        while not gone.is_set():
            refused, end = client.refusals, time.monotonic() + seconds
            with contextlib.closing(client.events(make(rng))) as times:
                for now in times:
                    if gone.is_set() or now > end:
                        break
            answers += 1
            if client.refusals == refused:
                time.sleep(0.02)
        client.close()
        with counts.get_lock():
            counts[0] += answers - client.refusals
            counts[1] += client.refusals

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(work, range(connections)))


def watch(port: int, seconds: float, rng: random.Random) -> tuple[list[float], list[float]]:
    """The small client's gaps and times to first events."""
    gaps, first, client = [], [], Client(port, "watched0")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        asked = time.monotonic()
        times = list(client.events(small(rng)))
        if times:
            first.append(times[0] - asked)
            gaps += [after - before for before, after in itertools.pairwise(times)]
    client.close()
    return gaps, first


def percentile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return round(1000 * sorted(values)[min(int(share * len(values)), len(values) - 1)], 1) if values else float("nan")


def run(port: int, args: argparse.Namespace) -> dict[str, Any]:
    kinds = ["without", *args.kinds.split(",")]
    found: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in kinds}
    others = {kind: [0, 0] for kind in kinds}
    watch(port, 4, random.Random(0))
    for number in range(args.rounds):
        for kind in kinds:
            names = [(f"peer{i}", "plain") for i in range(args.peers)]
            names += [(f"heavy{i}", kind) for i in range(0 if kind == "without" else args.heavy)]
            crowd = Crowd(port, names, number)
            time.sleep(1)
            gaps, first = watch(port, args.seconds, random.Random(number))
            found[kind][0].extend(gaps)
            found[kind][1].extend(first)
            others[kind] = [before + more for before, more in zip(others[kind], crowd.leave(), strict=True)]
            print(f"round {number}, {kind}: gap p99 {percentile(gaps, 0.99)} ms of {len(gaps)}", flush=True)
    result: dict[str, Any] = {}
    for kind in kinds:
        result[kind] = summary(*found[kind]) | {"answers": others[kind][0], "refusals": others[kind][1]}
    for kind, figures in result.items():
        for name in [name for name in figures if name.endswith("_ms")]:
            for base, of in (("without", "ratio"), ("plain", "to_plain")):
                if base in result and kind != base:
                    figures[f"{name[:-3]}_{of}"] = round(figures[name] / result[base][name], 2)
    return result


def summary(gaps: list[float], first: list[float]) -> dict[str, Any]:
    out: dict[str, Any] = {"gaps": len(gaps)}
    for name, values in (("gap", gaps), ("ttft", first)):
        for share, of in ((0.5, "median"), (0.99, "p99")):
            out[f"{name}_{of}_ms"] = percentile(values, share)
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
    parser.add_argument("--port", type=int, help="of a server that runs, without keys; without it one is started")
    parser.add_argument("--out", type=Path, help="write the JSON to a file, too")
    args = parser.parse_args()
    if max(args.peers, args.heavy) > MAX_CLIENTS:
        parser.error(f"--peers and --heavy are at most {MAX_CLIENTS}")
    server, port, folder = None, args.port, tempfile.TemporaryDirectory()
    if port is None:
        command = f"python -m draftwing.launch_server --model {shlex.quote(args.model)} --log-level warning"
        keys = shlex.quote(str(key_file(Path(folder.name))))
        server, port = launch_server_cmd(f"{command} --api-key-file {keys} {args.serve}", HOST)
    try:
        if server is not None:
            wait_for_server(f"http://{HOST}:{port}", process=server)
        result = run(port, args)
    finally:
        if server is not None:
            terminate_process(server)
        folder.cleanup()
    for kind, figures in result.items():
        print(kind, json.dumps(figures))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
