"""Work on texts in threads: who waits for whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from draftwing.server.lanes import SHORT, Lanes


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
