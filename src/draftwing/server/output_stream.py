"""Outputs on their way from the engine to whoever asked: one who is slow to read gets fewer and longer pieces."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from draftwing.core import Output
from draftwing.engine.process.link import EngineDead
from draftwing.requests.request import GenerationRequest
from draftwing.server.logprob_quota import LogprobQuotaFull, count_logprobs

if TYPE_CHECKING:
    from draftwing.server.engine_client import AsyncEngine

# Streams that go on in a turn of the event loop: about 2 ms of it. Beside 500 that nobody reads 4, 8, 16 and 32 let
# /health answer within 70 to 105 ms.
WAKES = 16
MAX_TRACED = 64  # newest steps of a request that are kept for a client that is slow to read


class Wakeups:
    """Has streams go on that have outputs, a few in a turn of the event loop: whoever comes or sends meanwhile is never
    behind all of them, and outputs of those that wait are joined. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Event, None] = {}  # in the order in which they came
        self._left = WAKES  # of this turn
        self._next: asyncio.Handle | None = None

    def set(self, event: asyncio.Event) -> None:
        """Sets the event, now or in a later turn."""
        if not event.is_set():
            self._waiting[event] = None
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._left:
            event = next(iter(self._waiting))
            del self._waiting[event]
            event.set()
            self._left -= 1
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._next, self._left = None, WAKES
        if self._waiting:
            self._go_on()


class Stream:
    """Outputs of requests that were submitted together, in the order in which they come.

    Iterate until all of them are finished, and `close()` in any case: what is unfinished then is aborted.
    requests: all of them.  open: the unfinished ones by uid.
    """

    def __init__(self, owner: AsyncEngine, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        self.open = {request.uid: request for request in requests}
        self._owner = owner
        self._news: dict[str, Output] = {}
        self._error: EngineDead | LogprobQuotaFull | None = None
        self._client, self._held = requests[0].client, 0  # log probabilities
        self._woken = asyncio.Event()

    def put(self, output: Output) -> None:
        """Adds to what has not been taken yet, so that a slow client gets fewer and longer pieces, not a backlog."""
        if self._error is not None or output.uid not in self.open:
            return
        count = count_logprobs(output, self.open[output.uid])
        self._held += count
        try:
            self._owner.logprob_quota.add(self._client, count, self._held)
        except LogprobQuotaFull as error:
            self.fail(error)
            return
        earlier = self._news.get(output.uid)
        if earlier is not None:  # its lists go on: to copy them each time would take longer and longer
            earlier.token_ids.extend(output.token_ids)
            earlier.logprobs.extend(output.logprobs)
            output = dataclasses.replace(
                output,
                token_ids=earlier.token_ids,
                logprobs=earlier.logprobs,
                prompt_logprobs=earlier.prompt_logprobs or output.prompt_logprobs,  # they come once
                trace=[*earlier.trace, *output.trace][-MAX_TRACED:],
            )
        self._news[output.uid] = output
        self._owner.wakeups.set(self._woken)

    def fail(self, error: EngineDead | LogprobQuotaFull) -> None:
        self._error = error
        self._woken.set()

    async def __aiter__(self) -> AsyncIterator[Output]:
        while self.open:
            await self._woken.wait()
            self._woken.clear()
            news, self._news = self._news, {}
            for output in news.values():
                if output.finish_reason is not None:
                    self.open.pop(output.uid, None)
                    self._owner.forget(output.uid)
                yield output
            if self._error is not None and self.open:
                raise self._error

    def close(self) -> None:
        self._owner.logprob_quota.give_back(self._client, self._held)
        self._held = 0
        for uid in self.open:
            self._owner.forget(uid)
        if self.open:
            self._owner.quota.abandoned(self.open)
            self._owner.abort_all(self.open)
        self.open.clear()
