"""What balancers and Kubernetes ask: /v1/loads, /liveness and /readiness."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from datetime import datetime

import httpx
import pytest
from fake_engine import CONTEXT, FakeEngine, local
from scripted import ScriptedEngine, asking, serving
from starlette.testclient import TestClient

from draftwing.engine.process.link import EngineDead
from draftwing.errors import GenerationError
from draftwing.server import operations
from draftwing.server.app import create_app
from draftwing.server.operations import MAX_WAITING, Flushing, load
from draftwing.server.quotas import QueueFull


def test_head_answers_where_get_does(client: TestClient, engine: FakeEngine) -> None:
    paths = (
        "/", "/health", "/health_generate", "/liveness", "/readiness", "/metrics", "/v1/models", "/v1/models/echo",
        "/models", "/v1/loads", "/version", "/model_info", "/server_info", "/tokenizer_info", "/openapi.json", "/docs",
    )  # fmt: skip
    for path in paths:
        head, whole = client.head(path), client.get(path)
        assert head.status_code == whole.status_code == 200, path
        assert head.headers.get("content-type") == whole.headers.get("content-type"), path
    assert client.head("/v1/models/other").status_code == 404 and client.head("/nothing").status_code == 404
    # It must do nothing, and come to an end.
    for path in ("/flush_cache", "/ui/engine", "/v1/chat/completions"):
        assert client.head(path).status_code == 405, path
    assert not engine.flushed
    assert not any("head" in methods for methods in client.get("/openapi.json").json()["paths"].values())


def test_a_head_has_no_body() -> None:
    with serving(ScriptedEngine()) as url:
        response = httpx.head(f"{url}/metrics")
        assert response.status_code == 200 and response.content == b""


def test_loads_are_those_of_the_engine(client: TestClient, engine: FakeEngine) -> None:
    body = client.get("/v1/loads", params={"include": "core,disagg,queues,memory"}).json()
    assert datetime.fromisoformat(body["timestamp"]).tzinfo is not None and body["dp_rank_count"] == 1
    (one,) = body["loads"]
    assert one["num_running_reqs"] == one["num_waiting_reqs"] == one["num_used_tokens"] == one["gen_throughput"] == 0
    assert one["max_total_num_tokens"] == 4 * CONTEXT and one["dp_rank"] == 0


def test_load_of_a_busy_engine() -> None:
    engine = FakeEngine()
    info = dataclasses.replace(
        engine.info, max_total_tokens=1000, options=dataclasses.replace(engine.options, max_running_requests=8)
    )
    busy = {"running": 2, "waiting": 3, "free_tokens": 500, "cached_tokens": 250, "waiting_tokens": 40}
    last = {"gen_throughput": 12.5, "cache_hit_rate": 0.75}
    assert load({**engine.stats(), **busy, "uncomputed_tokens": 50, "last": last}, info) == {
        "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 3, "num_total_reqs": 5,
        "num_waiting_uncached_tokens": 50, "num_used_tokens": 250, "num_total_tokens": 290,
        "max_total_num_tokens": 1000, "max_running_requests": 8, "token_usage": 0.25, "gen_throughput": 12.5,
        "cache_hit_rate": 0.75, "utilization": 0.25,
    }  # fmt: skip


async def test_a_server_that_ends_is_alive_but_not_ready() -> None:
    engine = FakeEngine()
    bridge = local(engine)
    app = create_app(bridge, engine.tokenizer)
    async with asking(app) as client:
        assert (await client.get("/readiness")).status_code == 200
        bridge.draining = True
        assert (await client.get("/readiness")).status_code == 503
        assert (await client.get("/liveness")).status_code == (await client.get("/health")).status_code == 200


async def test_a_dead_engine_is_alive_but_not_ready() -> None:
    engine = FakeEngine()
    engine.crash = RuntimeError("boom")
    bridge = local(engine)  # with nobody to take over: restarts fail until it gives up
    app = create_app(bridge, engine.tokenizer)
    async with asking(app) as client:
        engine.wake()
        async with asyncio.timeout(10):
            while bridge.healthy:
                await asyncio.sleep(0.005)
        for path in ("/readiness", "/health", "/health_generate", "/v1/loads", "/server_info"):
            dead = await client.get(path)
            assert dead.status_code == 503 and ("boom" in dead.text) == (path in ("/v1/loads", "/server_info"))
        assert (await client.get("/liveness")).status_code == 200


def test_sleep_and_wake(client: TestClient, engine: FakeEngine) -> None:
    """An operator asks for it; whoever asks whether the engine lives wakes nobody up, a request does."""

    def asleep() -> list[bool]:
        return [client.get(path).json()["is_sleeping"] for path in ("/is_sleeping", "/props")]

    assert asleep() == [False, False]
    for query in ("", "?level=1", "?level=1&mode=wait"):
        assert client.post(f"/sleep{query}").status_code == 200 and asleep() == [True, True]
        assert client.get("/health_generate").status_code == 200 and engine.sleeping
        assert client.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200 and asleep() == [False, False]
    for query in ("?level=2", "?level=x"):
        refused = client.post(f"/sleep{query}")
        assert refused.status_code == 400 and "level" in refused.json()["error"]["message"]
    client.post("/sleep")
    assert client.post("/generate", json={"text": "ab"}).json()["text"] == "ab" and asleep() == [False, False]


def test_a_sleep_that_has_no_room_says_so(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Future[None]:
        done = Future[None]()
        done.set_exception(GenerationError("no room to sleep"))
        return done

    monkeypatch.setattr(engine, "sleep", refused)
    answer = client.post("/sleep")
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "no room to sleep" and not engine.sleeping


class Busy:
    """An engine that can be flushed after so many looks; fewer than none: it is dead."""

    def __init__(self, looks: int) -> None:
        self.left, self.looks = looks, 0

    async def flush_cache(self) -> bool:
        self.looks += 1
        await asyncio.sleep(0)
        self.left -= 1
        if self.left == -99:
            raise EngineDead("gone")
        return self.left < 0


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "PAUSE_SECONDS", 0.01)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(within())


def test_one_waits_for_all() -> None:
    async def scenario() -> None:
        engine = Busy(30)
        one = Flushing(engine)  # type: ignore[arg-type]
        assert await asyncio.gather(*(one.flush(5) for _ in range(MAX_WAITING))) == [True] * MAX_WAITING
        assert engine.looks < 40 and not len(one)

    run(scenario)


def test_it_ends_with_its_time_or_its_client() -> None:
    async def scenario() -> None:
        engine = Busy(10**9)
        one = Flushing(engine)  # type: ignore[arg-type]
        assert not await one.flush(0) and not await one.flush(0.05)
        waiting = [asyncio.ensure_future(one.flush(3600)) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert len(one) == 20
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        looks = engine.looks
        await asyncio.sleep(0.1)
        assert not len(one) and engine.looks <= looks + 1, "somebody looks for nobody"
        engine.left = 3
        assert await one.flush(5)

    run(scenario)


def test_they_are_limited() -> None:
    async def scenario() -> None:
        one = Flushing(Busy(10**9))  # type: ignore[arg-type]
        waiting = [asyncio.ensure_future(one.flush(60)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0.05)
        for _ in range(100):
            with pytest.raises(QueueFull):
                await one.flush(60)
        assert not await one.flush(0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(scenario)


def test_all_are_told_when_the_engine_dies() -> None:
    async def scenario() -> None:
        engine = Busy(10**9)
        one = Flushing(engine)  # type: ignore[arg-type]
        waiting = [asyncio.ensure_future(one.flush(60)) for _ in range(3)]
        await asyncio.sleep(0.05)
        engine.left = -98
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in found] == [EngineDead] * 3

    run(scenario)
