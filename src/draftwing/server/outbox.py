"""Requests on their way to the engine's process: many of one client in small parts, so that they hold up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from draftwing.requests.request import GenerationRequest

SENT = 64  # requests in one message: no thread of either process is busy with it for long
PAUSE_SECONDS = 0.02  # between messages of a client: the engine's thread shares an interpreter with who reads them


class Outbox:
    """Sends a client's requests in their order, the first part at once. Belongs to the running event loop."""

    def __init__(self, send: Callable[[list[GenerationRequest]], None]) -> None:
        self._send = send
        self._lines: dict[str, dict[str, GenerationRequest]] = {}  # unsent ones by client and uid; none is empty
        self._clients: dict[str, str] = {}  # by uid of an unsent one
        self._pauses: dict[str, asyncio.TimerHandle] = {}  # by client; one goes on where all is dropped meanwhile

    def put(self, requests: Sequence[GenerationRequest]) -> None:
        """requests: of one client."""
        client = requests[0].client
        line = self._lines.setdefault(client, {})
        for request in requests:
            line[request.uid] = request
            self._clients[request.uid] = client
        if client not in self._pauses:
            self._next(client)

    def drop(self, uids: Iterable[str]) -> list[str]:
        """Those of the requests that were not sent, and now never are."""
        found = [uid for uid in uids if uid in self._clients]
        for uid in found:
            self._take(self._clients[uid], uid)
        return found

    def clear(self) -> None:
        self._lines.clear()
        self._clients.clear()
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()

    def _next(self, client: str) -> None:
        self._pauses.pop(client, None)
        line = self._lines.get(client)
        if line is None:
            return  # all were dropped
        self._send([self._take(client, uid) for uid in list(islice(line, SENT))])
        if client in self._lines:
            self._pauses[client] = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._next, client)

    def _take(self, client: str, uid: str) -> GenerationRequest:
        del self._clients[uid]
        line = self._lines[client]
        request = line.pop(uid)
        if not line:
            del self._lines[client]
        return request
