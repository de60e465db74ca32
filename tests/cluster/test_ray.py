"""A real Ray on this machine: replicas of the default model behind its HAProxy, killed, scaled, and left by clients."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cluster_processes import module, running, until

from draftwing.utils import free_port

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'draftwing[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

MARK = "DRAFTWING_TEST_CLUSTER"
OPTIONS = {
    "speculative_algorithm": "NGRAM", "num_threads": 1, "num_cpus": 1, "max_total_tokens": 16384, "log_level": "error",
    "min_replicas": 2, "max_replicas": 3, "target_ongoing_requests": 4, "upscale_delay_s": 1, "downscale_delay_s": 3,
    "imbalanced_threshold": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    url: str
    stats: str  # HAProxy's
    folder: str  # of its logs
    mark: str  # in the environment of all its processes

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def replicas(self) -> list[str]:
        """Addresses of the replicas that HAProxy has; it lists each for several backends, and Ray logs its port."""
        rows = csv.DictReader(httpx.get(self.stats).text.removeprefix("# ").splitlines())
        up = {row["svname"] for row in rows if "replicas-" in row["svname"] and row["status"].startswith("UP")}
        logs = Path(self.folder, "session_latest/logs/serve")
        texts = [(logs / f"replica_default_replicas_{name.rpartition('-')[2]}.log").read_text() for name in up]
        ports = [re.findall(r"Started HTTP server on port (\d+)", text)[-1] for text in texts]
        return [f"http://127.0.0.1:{port}" for port in sorted(ports)]

    def loads(self) -> list[int]:
        """Running requests of each replica."""
        each = [httpx.get(f"{url}/v1/loads", timeout=60).json()["loads"][0] for url in self.replicas()]
        return [one["num_running_reqs"] for one in each]

    def hits(self) -> list[float]:
        """Cached prompt tokens of each replica."""
        every = [httpx.get(f"{url}/metrics", timeout=60).text.splitlines() for url in self.replicas()]
        name = "vllm:prefix_cache_hits_total"
        return [sum(float(line.split()[-1]) for line in one if line.startswith(name)) for one in every]

    def processes(self, name: str) -> dict[int, str]:
        """Those of the cluster whose command has this name, by id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_text().replace("\0", " ")
                if name in command and self.mark in (folder / "environ").read_text(errors="replace"):
                    found[int(folder.name)] = command
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Cluster]:
    """Two machines of one CPU, so that each gets a replica, and a head."""
    logs = tmp_path_factory.mktemp("ray")
    gcs, port, stats, metrics, fallback = (free_port("127.0.0.1") for _ in range(5))
    mark = uuid.uuid4().hex
    environ = {
        MARK: mark, "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats), "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback), "RAY_USAGE_STATS_ENABLED": "0",
        # A busy machine starts processes slowly.
        "RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60", "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": mark,
    }  # fmt: skip
    ray = module("ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
    folder = f"/tmp/{mark[:8]}"  # paths of sockets must be short
    head = [*ray, "--head", f"--port={gcs}", "--num-cpus=1", "--include-dashboard=false", f"--temp-dir={folder}"]
    node = [*ray, f"--address=127.0.0.1:{gcs}", "--num-cpus=2"]
    made = Cluster(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{stats}/stats;csv", folder, mark)
    try:
        with running(head, environ, logs / "head"), running(node, environ, logs / "node"):
            try:
                deploy(f"127.0.0.1:{gcs}", port, {**os.environ, **environ})
                until(lambda: len(made.replicas()) == 2)
                yield made
            finally:
                for pid in made.processes(""):  # Ray takes a minute to say goodbye
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def deploy(address: str, port: int, environ: dict[str, str]) -> None:
    check = module("ray.scripts.scripts", "health-check", f"--address={address}")
    until(lambda: not subprocess.call(check, env=environ, stderr=subprocess.DEVNULL))
    start = ["start", "--http-host=127.0.0.1", f"--http-port={port}", "--proxy-location=HeadOnly"]
    args = [f"{name}={value}" for name, value in OPTIONS.items()]
    for words in (start, ["run", "--non-blocking", "draftwing.serve.ray:app", *args]):
        command = module("ray.serve.scripts", words[0], f"--address={address}", *words[1:])
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def story(client: openai.OpenAI, number: int, tokens: int) -> Iterator[str]:
    """The pieces of an answer as they come."""
    stream = client.chat.completions.create(
        model="smollm2", stream=True, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True},
        messages=[{"role": "user", "content": f"{number}: tell a long story of a lighthouse."}],
    )  # fmt: skip
    ended = False
    for chunk in stream:
        ended = ended or bool(chunk.choices and chunk.choices[0].finish_reason)
        yield (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert ended, "the stream was cut"


def test_streams_as_it_is_written(cluster: Cluster) -> None:
    times, texts, begun = [], [], time.monotonic()
    for piece in story(cluster.client, 0, 64):
        times.append(time.monotonic())
        texts.append(piece)
    assert len(times) > 10 and times[len(times) // 2] - begun < 0.9 * (times[-1] - begun), "it came all at once"
    assert "".join(story(cluster.client, 0, 64)) == "".join(texts)


def test_all_endpoints(cluster: Cluster) -> None:
    for path in ("/health", "/readiness", "/v1/models", "/v1/loads", "/metrics", "/server_info", "/"):
        assert httpx.get(cluster.url + path, timeout=60).status_code == 200, path
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 4}},
        "/v1/completions": {"model": "smollm2", "prompt": "Once", "max_tokens": 4},
        "/v1/messages": {"model": "smollm2", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]},
        "/v1/responses": {"model": "smollm2", "max_output_tokens": 4, "input": "Hello"},
        "/tokenize": {"prompt": "Once upon a time"},
    }
    for path, body in bodies.items():
        assert httpx.post(cluster.url + path, json=body, timeout=300).status_code == 200, path
    wrong = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "Once", "max_tokens": -1}, timeout=60)
    assert wrong.status_code == 400 and "max_tokens" in wrong.json()["error"]["message"]


def test_the_same_beginning_goes_to_the_same_replica(cluster: Cluster) -> None:
    texts = [f"The chronicle of town {town}. " + f"In year {town} it had {town} mills. " * 30 for town in range(4)]
    before = cluster.hits()
    for number, text in itertools.product(range(3), texts):
        body = {"model": "smollm2", "max_tokens": 2, "messages": [{"role": "user", "content": f"{text}{number}?"}]}
        assert httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=300).status_code == 200
    after = cluster.hits()
    assert len(before) == len(after) == 2
    hits = [b - a for a, b in zip(before, after, strict=True)]
    asked = sum(len(text) for text in texts) * 3 / 3.5  # about 3.5 characters for a token
    assert sum(hits) > 0.55 * asked and min(hits) > 0, "2 of 3 are cached in the best case, by both"


def test_clients_that_leave_are_aborted(cluster: Cluster) -> None:
    pieces = story(cluster.client, 1, 4000)
    for _ in range(5):
        next(pieces)
    assert sum(cluster.loads()) == 1
    pieces.close()  # type: ignore[attr-defined]
    until(lambda: sum(cluster.loads()) == 0, 60)


def attempt(work: Callable[[], Any]) -> str:
    """How it ended."""
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return "ended"


def test_a_killed_replica_is_replaced(cluster: Cluster) -> None:
    """Those of the other one end; its own get an error, none waits for ever."""
    with ThreadPoolExecutor(6) as pool:
        running = [
            pool.submit(attempt, lambda number=number: list(story(cluster.client, number, 300))) for number in range(6)
        ]
        until(lambda: sum(cluster.loads()) == 6 and min(cluster.loads()) > 0, 120)
        actors = cluster.processes("ray::ServeReplica:default:replicas")
        victim = min(actors)
        engines = set(cluster.processes("draftwing.engine.process.worker"))
        os.kill(victim, signal.SIGKILL)
        ends = Counter(one.result(timeout=300) for one in running)
    assert 0 < ends["ended"] < 6, ends
    until(lambda: len(engines & set(cluster.processes("draftwing.engine.process.worker"))) == 1, 60)
    assert "".join(story(cluster.client, 0, 16))
    until(lambda: len(cluster.processes("draftwing.engine.process.worker")) == 2 and len(cluster.loads()) == 2)


def test_up_to_three_and_back_without_a_failed_request(cluster: Cluster) -> None:
    ends: Counter[str] = Counter()
    enough, few = threading.Event(), threading.Event()

    def ask(worker: int) -> None:
        for number in itertools.count(worker * 1000):
            if enough.is_set() or (few.is_set() and worker >= 2):
                return
            ends[attempt(lambda number=number: list(story(cluster.client, number, 48)))] += 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(14)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(cluster.replicas()) == 3 and min(cluster.loads()) > 0)
        few.set()
        until(lambda: len(cluster.replicas()) == 2)
        until(lambda: len(cluster.processes("draftwing.engine.process.worker")) == 2)
    finally:
        enough.set()
        for thread in threads:
            thread.join(300)
    assert set(ends) == {"ended"} and ends["ended"] > 10, ends
