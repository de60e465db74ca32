"""Several replicas behind one address against one of them: throughput, and how many prompt tokens were cached.

Requests come in groups that share a long beginning, as those of one system prompt do. So a balancer that looks at
prompts keeps a group at one replica, and one that does not computes its beginning once in each of them. Any balancer
will do; the counts are read from the `/metrics` of the servers behind it.

    draftwing serve --port 30001 & draftwing serve --port 30002 &
    smg launch --worker-urls http://127.0.0.1:30001 http://127.0.0.1:30002 --policy cache_aware \
        --disable-worker-overload-protection --port 30000
    python benchmarks/replicas.py --url http://127.0.0.1:30000 --one http://127.0.0.1:30001 \
        --replicas http://127.0.0.1:30001 http://127.0.0.1:30002

Prints a line of JSON for each run and a table; `busiest` is the share of the prompt tokens that one replica was asked
for: two are no faster than that one. Cached prefixes are forgotten before a run, and then there is a question to each
system prompt that does not count, since prompts of this kind have long been in use. Before each run there is a pause,
in which a balancer that asks servers how busy they are sees that they are not: smg does so every ten seconds, and until
then gives nothing to one with eight requests that wait, as `one` has had.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

COUNTS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
SUBJECTS = ("a lighthouse", "a railway", "an orchard", "a library", "a harbour", "a bakery", "a choir", "a mill")


class Counts(NamedTuple):
    """Prompt tokens of a server since it started: all of them, and those that were cached."""

    queries: float
    hits: float


def prompts(groups: int, each: int, words: int, rng: random.Random) -> list[list[dict[str, str]]]:
    """Conversations: a question to each of `groups` system prompts of so many words, then `each` more to all of them.
    The latter are in random order."""
    first, every = [], []
    for group in range(groups):
        facts = " ".join(f"{rng.choice(SUBJECTS)} of {rng.randrange(10**6)} stones," for _ in range(words // 5))
        system = {"role": "system", "content": f"Town {group} has {facts} and you know all of it."}
        for number in range(each + 1):
            question = f"Tell a story, number {number}, of {rng.choice(SUBJECTS)}."
            (every if number else first).append([system, {"role": "user", "content": question}])
    rng.shuffle(every)
    return first + every


def ask(url: str, messages: list[dict[str, str]], tokens: int, key: str | None) -> int:
    """Streams an answer of so many tokens. Returns how many came; raises OSError or ValueError when it fails."""
    where = urlsplit(url)
    assert where.hostname is not None
    connection = http.client.HTTPConnection(where.hostname, where.port or 80, timeout=600)
    body = {"model": model_of(url), "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    usage = b""
    for line in response:
        if b'"usage":{' in line or b'"usage": {' in line:
            usage = line
    connection.close()
    if response.status != 200 or not usage:
        raise ValueError(f"status {response.status}, usage {usage!r}")
    return int(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])


_models: dict[str, str] = {}


def model_of(url: str) -> str:
    if url not in _models:
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            _models[url] = json.load(response)["data"][0]["id"]
    return _models[url]


def counts_of(metrics: str) -> Counts:
    """metrics: the text of `/metrics`."""
    found = dict.fromkeys(COUNTS, 0.0)
    for line in metrics.splitlines():
        name = line.partition("{")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return Counts(*found.values())


def read_counts(urls: Sequence[str]) -> list[Counts]:
    each = []
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics") as response:
            each.append(counts_of(response.read().decode()))
    return each


def since(before: Sequence[Counts], after: Sequence[Counts]) -> tuple[Counts, float]:
    """Of all servers together, and the share of the prompt tokens that the busiest one was asked for."""
    each = [Counts(new.queries - old.queries, new.hits - old.hits) for old, new in zip(before, after, strict=True)]
    queries = sum(one.queries for one in each)
    busiest = max(one.queries for one in each) / queries if queries else 0.0
    return Counts(queries, sum(one.hits for one in each)), busiest


def ask_all(
    url: str, tokens: int, key: str | None, conversations: Sequence[list[dict[str, str]]], at_once: int
) -> tuple[int, int]:
    """Returns how many tokens came of these conversations, so many at once, and how many failed."""

    def answer(messages: list[dict[str, str]]) -> tuple[int, int]:
        try:
            return ask(url, messages, tokens, key), 0
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"# a request failed: {error!r}", flush=True)
            return 0, 1

    model_of(url)
    with ThreadPoolExecutor(at_once) as threads:
        found = list(threads.map(answer, conversations))
    return sum(came for came, _ in found), sum(failed for _, failed in found)


def run(name: str, url: str, replicas: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """All requests through `url`, so many at once. replicas: the servers that answer.

    A server that is not full with so many answers hardly more where there are two of them: ask for as many as all
    replicas together can run.
    """
    time.sleep(args.pause)
    for one in replicas:
        urllib.request.urlopen(urllib.request.Request(f"{one}/flush_cache?timeout=60", method="POST")).close()
    model_of(url)
    each = args.requests // args.groups
    every = prompts(args.groups, each, args.prefix_words, random.Random(args.seed))
    for messages in every[: args.groups]:
        ask(url, messages, 1, args.api_key)
    clients = max(min(args.processes, args.concurrency), 1)
    shares = [every[args.groups + i :: clients] for i in range(clients)]
    at_once = [len(range(i, args.concurrency, clients)) for i in range(clients)]

    # Streams are read in processes: one has a thread at a time, and then the client is what is measured.
    with ProcessPoolExecutor(clients, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(abs, range(clients)))  # they are there before the clock begins
        before, start = read_counts(replicas), time.perf_counter()
        reported = list(pool.map(partial(ask_all, url, args.max_tokens, args.api_key), shares, at_once))
        seconds, after = time.perf_counter() - start, read_counts(replicas)
    (queries, hits), busiest = since(before, after)
    return {
        "run": name,
        "replicas": len(replicas),
        "requests": each * args.groups,
        "failed": sum(failed for _, failed in reported),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(tokens for tokens, _ in reported) / seconds, 1),
        "prompt_tokens": int(queries),
        "hit_rate": round(hits / queries, 4) if queries else 0.0,
        "busiest": round(busiest, 3),
    }


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Rows of several replicas are compared with the last one before them that has one."""
    yield "| run | replicas | requests | failed | tokens/s | x | hit rate | of the first | busiest |"
    yield "|---|---|---|---|---|---|---|---|---|"
    first = rows[0]
    for row in rows:
        first = row if row["replicas"] == 1 else first
        speed = row["tokens_per_s"] / first["tokens_per_s"] if first["tokens_per_s"] else 0.0
        share = row["hit_rate"] / first["hit_rate"] if first["hit_rate"] else 0.0
        yield (
            f"| {row['run']} | {row['replicas']} | {row['requests']} | {row['failed']} | {row['tokens_per_s']} | "
            f"{speed:.2f} | {row['hit_rate']:.3f} | {share:.1%} | {row['busiest']:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="of the balancer")
    parser.add_argument("--one", required=True, help="of one server, asked alone")
    parser.add_argument("--replicas", nargs="+", required=True, help="of the servers behind the balancer")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=128, help="requests at a time, of all replicas together")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 8), help="of the client")
    parser.add_argument("--groups", type=int, default=16, help="system prompts")
    parser.add_argument("--prefix-words", type=int, default=400, help="of a system prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--pause", type=float, default=11.0, help="seconds before each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key")
    args = parser.parse_args()
    rows = []
    for _ in range(args.repeats):
        for name, url, replicas in (("one", args.one, [args.one]), ("balanced", args.url, args.replicas)):
            rows.append(run(name, url, replicas, args))
            print(json.dumps(rows[-1]), flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
