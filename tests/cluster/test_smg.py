"""A real smg in front of two servers of the default model."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cluster_processes import module, running, until

from draftwing.utils import free_port

pytest.importorskip("smg", reason="smg is not installed: pip install smg")
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

OPTIONS = (
    "--num-threads", "1", "--max-total-tokens", "16384", "--log-level", "error", "--speculative-algorithm", "none",
)  # fmt: skip
GATEWAY = ("--policy", "cache_aware", "--health-check-interval-secs", "1", "--health-failure-threshold", "1")
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


@dataclass(frozen=True)
class Gateway:
    url: str
    servers: dict[str, subprocess.Popen[bytes]]  # by address

    def healthy(self) -> int:
        found: int = httpx.get(f"{self.url}/readiness").json().get("healthy_workers", 0)
        return found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Gateway]:
    logs = tmp_path_factory.mktemp("smg")
    first, second, port, metrics = (free_port("127.0.0.1") for _ in range(4))
    urls = [f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"]
    serve = [module("draftwing", "serve", "--port", str(one), *OPTIONS) for one in (first, second)]
    launch = module("smg", "launch", "--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port), *GATEWAY)
    offline = {"HF_HUB_OFFLINE": "1"}
    launch += ["--prometheus-port", str(metrics)]
    with (
        running(serve[0], offline, logs / "0") as one,
        running(serve[1], offline, logs / "1") as other,
        running(launch, {}, logs / "smg"),
    ):
        made = Gateway(f"http://127.0.0.1:{port}", dict(zip(urls, (one, other), strict=True)))
        until(lambda: made.healthy() == 2)
        yield made


def counts(url: str) -> dict[str, float]:
    lines = [line.split() for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines()]
    return {name: sum(float(line[-1]) for line in lines if line[0].startswith(name)) for name in (HITS, QUERIES)}


def hit_rate(url: str, servers: list[str]) -> float:
    """Of questions to eight texts, three to each, one after the other. Cached prefixes are forgotten before."""
    for one in servers:
        assert httpx.post(f"{one}/flush_cache?timeout=60", timeout=120).status_code == 200
    before = [counts(one) for one in servers]
    for number in range(3):
        for town in range(8):
            text = f"The chronicle of town {town}. " + f"In year {town} it had {town} mills. " * 20
            body: dict[str, Any] = {"model": "smollm2", "max_tokens": 2}
            body["messages"] = [{"role": "user", "content": f"{text}{number}?"}]
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
            assert response.status_code == 200, response.text
    after = [counts(one) for one in servers]
    hits, queries = (sum(b[name] - a[name] for a, b in zip(before, after, strict=True)) for name in (HITS, QUERIES))
    return hits / queries


def test_prefixes_are_as_often_cached_as_with_one_server(gateway: Gateway) -> None:
    one, *_ = servers = list(gateway.servers)
    alone, together = hit_rate(one, [one]), hit_rate(gateway.url, servers)
    assert alone > 0.6 and together > 0.95 * alone, (alone, together)


def test_it_streams(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=300)
    stream = client.chat.completions.create(
        model="smollm2", stream=True, max_tokens=32, messages=[{"role": "user", "content": "Tell a story."}]
    )
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in stream) > 10


def test_a_killed_server_is_taken_out(gateway: Gateway) -> None:
    """The last test: the server stays dead."""
    first = next(iter(gateway.servers.values()))
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: gateway.healthy() == 1, 60)
    for number in range(4):
        body = {"model": "smollm2", "max_tokens": 2, "messages": [{"role": "user", "content": f"Question {number}"}]}
        assert httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=300).status_code == 200
