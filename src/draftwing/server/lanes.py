"""Threads for work on texts, by size: short work is never behind long work, and no work is on the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
INLINE = 4096  # numbers, and characters that are read, at once: some milliseconds
SHORT = 65_536  # characters: a tenth of a second of a tokenizer at its slowest
REST = 9


class Turns:
    """Work on the event loop that may take long, one at a time: after each nothing of it for `REST` times as long, so
    that whoever sends it again and again leaves most of the time to others."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        await self._lock.acquire()
        begun = time.perf_counter()
        try:
            return work()
        finally:
            rest = REST * (time.perf_counter() - begun)
            asyncio.get_running_loop().call_later(rest, self._lock.release)


class Lanes:
    """Two pools of threads, and a thread that makes JSON.

    Long work has few threads, so that it leaves processors to the engine. They have the priority of all: work in Python
    holds the interpreter's lock, and who holds that and has to wait for a processor stops the event loop.
    """

    def __init__(self) -> None:
        share = (os.cpu_count() or 1) // 4
        self.reading = Turns()  # of large bodies
        self._short = ThreadPoolExecutor(min(max(share, 2), 8), "draftwing-short")
        self._long = ThreadPoolExecutor(min(max(share, 1), 4), "draftwing-long")
        self._json = ThreadPoolExecutor(1, "draftwing-json")

    async def run(self, size: int, work: Callable[[Callable[[], bool]], T]) -> T:
        """The result of `work`, which is given a function that says whether nobody waits for it any more: this
        coroutine was cancelled. What has not begun by then never does. size: of the texts, in characters."""
        gone = threading.Event()
        try:
            lane = self._short if size <= SHORT else self._long
            return await asyncio.get_running_loop().run_in_executor(lane, work, gone.is_set)
        finally:
            gone.set()

    async def render(self, size: int, work: Callable[[bool], T]) -> T:
        """The result of `work`, which makes JSON of answers; in a thread where that is much, which `work` is told.
        size: token ids and log probabilities in it, and characters that are read as messages."""
        if size <= INLINE:
            return work(False)
        return await asyncio.get_running_loop().run_in_executor(self._json, work, True)

    def close(self) -> None:
        """Begins no more work."""
        for lane in (self._short, self._long, self._json):
            lane.shutdown(wait=False, cancel_futures=True)
