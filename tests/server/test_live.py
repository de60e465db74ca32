"""A whole server, its engine in a process of its own, with a tiny model: many clients, disconnects, a killed engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted import launched, wait_until
from tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.slow

CLIENTS = 64
POOL = 64 * 1024


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    with launched(f"--model {folder} --max-total-tokens {POOL} --speculative-algorithm NGRAM") as (_, url):
        yield url


def body(i: int, tokens: int, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0.7, "seed": i, "max_new_tokens": tokens, "ignore_eos": True}
    return {"text": f"client number {i}: ", "sampling_params": params, **more}


def clients(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=CLIENTS))


async def stream(client: httpx.AsyncClient, i: int, tokens: int) -> dict[str, Any]:
    """The last event; every one has to begin with the text of the one before."""
    last: dict[str, Any] = {"text": ""}
    async with client.stream("POST", "/generate", json=body(i, tokens, stream=True)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert event["text"].startswith(last["text"])
                last = event
    assert line == "" or line == "data: [DONE]"
    return last


def test_64_streams_give_what_single_requests_give(url: str) -> None:
    async def scenario() -> None:
        async with clients(url) as client:
            streamed = await asyncio.gather(*(stream(client, i, 40) for i in range(CLIENTS)))
            for i in (0, 17, 63):
                alone = (await client.post("/generate", json=body(i, 40))).json()
                assert alone["output_ids"] == streamed[i]["output_ids"] and alone["text"] == streamed[i]["text"]
        assert all(event["meta_info"]["completion_tokens"] == 40 for event in streamed)

    asyncio.run(scenario())


def test_64_clients_that_go_away_leave_no_slot_behind(url: str) -> None:
    def state() -> dict[str, Any]:
        one: dict[str, Any] = httpx.get(f"{url}/server_info").json()["internal_states"][0]
        return one

    async def scenario() -> None:
        async with clients(url) as client:
            tasks = [asyncio.ensure_future(stream(client, i, 900)) for i in range(CLIENTS)]
            # Answers that end before the last one begins must not be waited for.
            while (running := state()["num_running_reqs"]) < CLIENTS and not any(task.done() for task in tasks):
                await asyncio.sleep(0.02)
            assert running > 0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())
    wait_until(lambda: (now := state())["num_running_reqs"] == now["num_waiting_reqs"] == 0)
    memory = state()["memory_usage"]
    assert memory["free_tokens"] + memory["cached_tokens"] == memory["token_capacity"] == POOL
    assert httpx.post(f"{url}/flush_cache?timeout=5").status_code == 200
    assert state()["memory_usage"]["free_tokens"] == POOL
