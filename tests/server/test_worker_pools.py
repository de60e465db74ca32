"""Work on texts in threads: who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from scripted import client_of, watched_sizes

from draftwing.config.api_keys import ApiKey
from draftwing.machine import Processors
from draftwing.server import worker_pools
from draftwing.server.edge.keys import client as client_var
from draftwing.server.worker_pools import MAX_INLINE_SIZE, MAX_SHORT_SIZE, FairSemaphore, WorkerPools


async def test_cancelled_work_is_told_or_never_begins() -> None:
    began: list[int] = []
    ended = threading.Event()

    def work(gone: Callable[[], bool]) -> None:
        began.append(1)
        while not gone():
            pass
        ended.set()

    pools = WorkerPools()
    waiting = [asyncio.ensure_future(pools.run(MAX_SHORT_SIZE + 1, work)) for _ in range(8)]
    async with asyncio.timeout(60):
        while not began:
            await asyncio.sleep(0.001)
    first = len(began)
    for one in reversed(waiting):
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await asyncio.to_thread(ended.wait, 10)
    assert len(began) == first
    pools.close()
    with pytest.raises(RuntimeError):
        await pools.run(1, lambda gone: None)


async def test_large_bodies_leave_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is read at a time, and the next one nine times as long afterwards, whatever became of it."""
    now, events, rests = [0.0], list[str](), list[float]()
    monkeypatch.setattr(worker_pools, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def reads(name: str) -> str:
        now[0] += 0.5
        events.append(name)
        if name == "b":
            raise ValueError(name)
        return name

    pools, loop = WorkerPools(), asyncio.get_running_loop()
    later = loop.call_later

    def soon(seconds: float, call: Any, *args: Any) -> Any:
        rests.append(seconds)
        return later(0, lambda: (events.append("rested"), call(*args)))

    monkeypatch.setattr(loop, "call_later", soon)
    found = await asyncio.gather(*(pools.read(lambda n=n: reads(n)) for n in "abc"), return_exceptions=True)
    assert [str(one) for one in found] == ["a", "b", "c"]
    await pools.read(lambda: reads("d"))
    pools.close()
    assert events[:7] == ["a", "rested", "b", "rested", "c", "rested", "d"]
    assert rests == pytest.approx([4.5] * 4)


@pytest.mark.parametrize("size", [60_000, 70_000])
def test_which_bodies_take_turns(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    read = WorkerPools.read

    async def watched(pools: WorkerPools, work: Any) -> Any:
        taken.append(work)
        return await read(pools, work)

    monkeypatch.setattr(WorkerPools, "read", watched)
    engine = FakeEngine()
    with client_of(engine) as client:
        assert client.post("/tokenize", json={"prompt": "a" * size}).status_code == 200
    assert len(taken) == (size > 65_536)


def as_client(name: str, work: Any) -> asyncio.Task[Any]:
    """A coroutine as it runs for an HTTP request with this key."""

    async def run() -> Any:
        client_var.set(ApiKey(name, f"sk-{name}"))
        return await work

    return asyncio.ensure_future(run())


POOLS: dict[str, Callable[[WorkerPools, Callable[[], None]], Any]] = {
    "short": lambda pools, work: pools.run(MAX_SHORT_SIZE, lambda gone: work()),
    "long": lambda pools, work: pools.run(MAX_SHORT_SIZE + 1, lambda gone: work()),
    "json": lambda pools, work: pools.render(MAX_INLINE_SIZE + 1, lambda large: work()),
    "reading": lambda pools, work: pools.read(work),
}


@pytest.mark.parametrize("pool", POOLS)
async def test_clients_take_turns(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes behind a hundred of another client is next but those that run."""
    monkeypatch.setattr(worker_pools, "processors", lambda: Processors(2, 2))
    monkeypatch.setattr(worker_pools, "REST_FACTOR", 0)
    order: list[str] = []

    pools = WorkerPools()

    def ask(name: str) -> asyncio.Task[Any]:
        return as_client(name, POOLS[pool](pools, lambda: order.append(name)))

    every = [ask("alice") for _ in range(100)]
    every += [ask("bob"), ask("bob"), ask("carol")]
    await asyncio.gather(*every)
    pools.close()
    places = 2 if pool == "short" else 1
    assert len(order) == 103
    assert {"bob", "carol"} <= {*order[places : places + 3]}
    assert order.index("bob", order.index("bob") + 1) <= places + 5


async def test_a_free_place_is_for_who_has_fewest() -> None:
    order: list[str] = []

    semaphore = FairSemaphore(2)

    async def take(name: str) -> None:
        await semaphore.acquire(name)
        order.append(name)

    waiting = [asyncio.ensure_future(take(name)) for name in "aaaabbc"]
    await asyncio.sleep(0)
    assert order == ["a", "a"]
    for held in "aaa":
        semaphore.release(held)
        await asyncio.sleep(0)
    assert order[2:] == ["b", "a", "c"], "the third one: c has waited for longer than a since its turn"
    # Who is cancelled gives back what it was given just then, or leaves the line.
    semaphore.release("b")
    waiting[5].cancel()
    await asyncio.gather(waiting[5], return_exceptions=True)
    await asyncio.sleep(0)
    assert order[5:] == ["a"]
    late = asyncio.ensure_future(take("d"))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    semaphore.release("a")
    semaphore.release("c")
    assert not semaphore._waiting and not semaphore._held and semaphore._free == 2


async def test_work_whose_client_left_keeps_its_place_until_it_ends() -> None:
    """Else who asks and leaves would fill the threads' own queue, where nobody takes turns."""
    hold, began = threading.Event(), list[str]()

    def work(gone: Callable[[], bool]) -> None:
        began.append("alice")
        hold.wait(20)

    pools = WorkerPools()
    for _ in range(20):
        one = as_client("alice", pools.run(MAX_SHORT_SIZE + 1, work))
        await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            while not began:  # the thread starts
                await asyncio.sleep(0.001)
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
    assert pools._long._threads._work_queue.qsize() == 0
    hold.set()
    await as_client("bob", pools.run(MAX_SHORT_SIZE + 1, lambda gone: began.append("bob")))
    pools.close()
    assert began.pop() == "bob" and len(began) <= 4


def test_expressions_are_long_work_unless_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = watched_sizes(monkeypatch, "run")
    engine = FakeEngine()
    with client_of(engine) as client:
        for expressions in (["a{3}"], [f"{i}" + "(ab|cd){0,8}" + "y" * 100 for i in range(16)]):
            params = {"max_new_tokens": 1, "stop_regex": expressions}
            assert client.post("/generate", json={"text": "a", "sampling_params": params}).status_code == 200
    assert len(sizes) == 2 and sizes[0] <= MAX_SHORT_SIZE < sizes[1]
