"""Threads for work on texts, by size: short work is never behind long work, clients take turns, and no work is on the
event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from draftwing.fair_deque import FairDeque
from draftwing.machine import processors
from draftwing.server.edge.keys import client_name

T = TypeVar("T")
MAX_INLINE_SIZE = 4096  # numbers, and characters that are read, at once: some milliseconds
MAX_SHORT_SIZE = 65_536  # characters: a tenth of a second of a tokenizer at its slowest
# Seconds after each picture of a client, while others are answered: an answer takes milliseconds of the event loop, and
# the more pictures are decoded in a second the more answers there are. Of all places; so one rests times their number.
PICTURE_REST = 0.008
REST_FACTOR = 9  # times what reading a large body took: so long no other one is read for its client


class FairSemaphore:
    """Places for work, for which clients take turns: a free one is for the client that has fewest, and among those for
    who has waited for its turn for longest. So who has much to do keeps nobody waiting for longer than one piece of it.

    Belongs to the running event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._held: Counter[str] = Counter()
        self._waiting: FairDeque[asyncio.Future[None], bool] = FairDeque()

    async def acquire(self, client: str) -> None:
        """Waits for a place, which has to be given back."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.put(client, place, True)
        self._next()
        try:
            await place
        except asyncio.CancelledError:
            self._waiting.drop(place)
            if not place.cancelled():  # it had been given meanwhile
                self.release(client)
            raise

    def release(self, client: str) -> None:
        """Gives back a place that this client has taken."""
        self._held -= Counter([client])
        self._free += 1
        self._next()

    def _next(self) -> None:
        while self._free and self._waiting:
            client = min(self._waiting.clients, key=self._held.__getitem__)
            place, _ = self._waiting.pop(client)
            if not place.done():  # else it was cancelled just now
                self._free -= 1
                self._held[client] += 1
                place.set_result(None)


class _Pool:
    """Threads, one for each place."""

    def __init__(self, threads: int, name: str, rest: Callable[[str], float] | None = None) -> None:
        """rest: seconds in which a place is nobody's after work of a client."""
        self._semaphore, self._rest = FairSemaphore(threads), rest
        self._threads = ThreadPoolExecutor(threads, f"draftwing-{name}")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        client, loop = client_name(), asyncio.get_running_loop()
        await self._semaphore.acquire(client)
        try:
            result = self._threads.submit(work, *args)
        except BaseException:
            self._semaphore.release(client)
            raise

        def rest() -> None:
            seconds = 0.0 if self._rest is None else self._rest(client)
            if seconds:
                loop.call_later(seconds, self._semaphore.release, client)
            else:
                self._semaphore.release(client)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(rest)

        # Not when this coroutine ends: work whose client left holds its thread until it ends.
        result.add_done_callback(ended)
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class WorkerPools:
    """Two pools of threads, two for pictures, to fetch and to decode them, a thread that makes JSON, and the event
    loop's time for large bodies. In each of them clients take turns, told apart by the keys of their HTTP requests.

    Long work has few threads, so that it leaves processors to the engine. They have the priority of all: work in Python
    holds the interpreter's lock, and who holds that and has to wait for a processor stops the event loop.
    """

    def __init__(self, others: Callable[[str], bool] = lambda client: False) -> None:
        """others: whether any other client is answered."""
        share = processors().threads // 4
        places = min(max(share, 1), 4)
        self._reading = FairSemaphore(1)
        self._short = _Pool(min(max(share, 2), 8), "short")
        self._long = _Pool(min(max(share, 1), 4), "long")
        self._json = _Pool(1, "json")
        self._pictures = _Pool(places, "pictures", lambda client: PICTURE_REST * places if others(client) else 0.0)
        self._fetching = _Pool(4, "fetch")

    async def read(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which reads a large body on the event loop: one at a time, and after each
        nothing of it for `REST_FACTOR` times as long, so that whoever sends them again and again leaves most of the
        time to others."""
        client = client_name()
        await self._reading.acquire(client)
        begun = time.perf_counter()
        try:
            return work()
        finally:
            rest = REST_FACTOR * (time.perf_counter() - begun)
            asyncio.get_running_loop().call_later(rest, self._reading.release, client)

    async def run(self, size: int, work: Callable[[Callable[[], bool]], T]) -> T:
        """Returns the result of `work`, which is given a function that says whether nobody waits for it any more: this
        coroutine was cancelled. What has not begun by then never does. size: of the texts, in characters, or of other
        work that takes as long as so many."""
        gone = threading.Event()
        try:
            return await (self._short if size <= MAX_SHORT_SIZE else self._long).run(work, gone.is_set)
        finally:
            gone.set()

    async def see(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which waits until pictures are decoded, however small their files are: a few
        at once, and no text waits behind them. While others are answered there are only so many in a second."""
        return await self._pictures.run(work)

    async def fetch(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which waits for other servers: in threads of their own, so that nobody who asks
        for no picture waits with it."""
        return await self._fetching.run(work)

    async def render(self, size: int, work: Callable[[bool], T]) -> T:
        """Returns the result of `work`, which makes JSON of answers; in a thread where that is much, which `work` is
        passed. size: token ids and log probabilities in it, and characters that are read as messages."""
        if size <= MAX_INLINE_SIZE:
            return work(False)
        return await self._json.run(work, True)

    def close(self) -> None:
        """Begins no more work."""
        for pool in (self._short, self._long, self._json, self._pictures, self._fetching):
            pool.close()
