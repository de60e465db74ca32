"""Work on texts in threads: who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import FakeEngine, local
from fastapi.testclient import TestClient

from draftwing.server import lanes as lanes_module
from draftwing.server.app import create_app
from draftwing.server.lanes import SHORT, Lanes, Turns


def test_short_work_is_not_behind_long_work() -> None:
    hold = threading.Event()

    async def scenario() -> None:
        lanes = Lanes()
        waiting = [asyncio.ensure_future(lanes.run(SHORT + 1, lambda gone: hold.wait(20))) for _ in range(32)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(lanes.run(SHORT, lambda gone: threading.current_thread().name), 10)
        assert not any(one.done() for one in waiting)
        hold.set()
        assert all(await asyncio.gather(*waiting))
        lanes.close()

    asyncio.run(scenario())


def test_cancelled_work_is_told_or_never_begins() -> None:
    began: list[int] = []
    ended = threading.Event()

    def work(gone: Callable[[], bool]) -> None:
        began.append(1)
        while not gone():
            pass
        ended.set()

    async def scenario() -> None:
        lanes = Lanes()
        waiting = [asyncio.ensure_future(lanes.run(SHORT + 1, work)) for _ in range(8)]
        while not began:
            await asyncio.sleep(0.001)
        first = len(began)
        for one in reversed(waiting):
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await asyncio.to_thread(ended.wait, 10)
        assert len(began) == first
        lanes.close()
        with pytest.raises(RuntimeError):
            await lanes.run(1, lambda gone: None)

    asyncio.run(scenario())


def test_large_bodies_leave_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is read at a time, and the next one nine times as long afterwards, whatever became of it."""
    now, events, rests = [0.0], list[str](), list[float]()
    monkeypatch.setattr(lanes_module.time, "perf_counter", lambda: now[0])

    def reads(name: str) -> str:
        now[0] += 0.5
        events.append(name)
        if name == "b":
            raise ValueError(name)
        return name

    async def run() -> None:
        turns, loop = Turns(), asyncio.get_running_loop()
        later = loop.call_later

        def soon(seconds: float, call: Any, *args: Any) -> Any:
            rests.append(seconds)
            return later(0, lambda: (events.append("rested"), call(*args)))

        monkeypatch.setattr(loop, "call_later", soon)
        found = await asyncio.gather(*(turns.run(lambda n=n: reads(n)) for n in "abc"), return_exceptions=True)
        assert [str(one) for one in found] == ["a", "b", "c"]
        await turns.run(lambda: reads("d"))

    asyncio.run(run())
    assert events[:7] == ["a", "rested", "b", "rested", "c", "rested", "d"]
    assert rests == pytest.approx([4.5] * 4)


@pytest.mark.parametrize("size", [60_000, 70_000])
def test_which_bodies_take_turns(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    run = Turns.run

    async def watched(turns: Turns, work: Any) -> Any:
        taken.append(work)
        return await run(turns, work)

    monkeypatch.setattr(Turns, "run", watched)
    engine = FakeEngine()
    with TestClient(create_app(local(engine), engine.tokenizer)) as client:
        assert client.post("/tokenize", json={"prompt": "a" * size}).status_code == 200
    assert len(taken) == (size > 65_536)
