"""Who waits until the cache can be flushed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from draftwing.engine.process.link import EngineDead
from draftwing.server.admission_quota import QueueFull
from draftwing.server.native import flushing
from draftwing.server.native.flushing import MAX_WAITING, Flushing


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
    monkeypatch.setattr(flushing, "PAUSE_SECONDS", 0.01)


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
