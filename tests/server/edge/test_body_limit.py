"""What is taken of bodies when those of all requests together are too large."""

from __future__ import annotations

import asyncio

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from draftwing.server.edge import body_limit
from draftwing.server.edge.body_limit import ALL_BODIES, LARGE, SMALL, BodyLimit

MAX_SIZE = 2**20


async def read(limit: BodyLimit, body: bytes) -> int:
    """Bytes that the application got of a body."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    async def send(message: Message) -> None:
        raise AssertionError

    await limit({"type": "http", "method": "POST", "headers": []}, receive, send)
    return len(got.pop())


got: list[bytes] = []


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    got.append(await Request(scope, receive).body())


def test_small_bodies_are_taken_however_much_is_held() -> None:
    limit = BodyLimit(app, MAX_SIZE)
    limit.held = ALL_BODIES * MAX_SIZE
    assert asyncio.run(read(limit, b" " * SMALL)) == SMALL
    with pytest.raises(HTTPException) as refused:
        asyncio.run(read(limit, b" " * (SMALL + 1)))
    assert refused.value.status_code == 503
    assert limit.held == ALL_BODIES * MAX_SIZE  # nothing of both is held any more
    limit.held = 0
    assert asyncio.run(read(limit, b" " * (SMALL + 1))) == SMALL + 1


@pytest.mark.parametrize(("bytes_sent", "times"), [(LARGE - 1, 0), (LARGE, 1)])
async def test_what_a_large_response_took_is_given_back(
    bytes_sent: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[None] = []
    monkeypatch.setattr(body_limit, "give_back", lambda: given.append(None))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        for i in range(4):
            size = bytes_sent // 4 + (bytes_sent % 4 if i == 3 else 0)
            await send({"type": "http.response.body", "body": b" " * size, "more_body": i < 3})

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        pass

    await BodyLimit(answer, MAX_SIZE)({"type": "http", "method": "GET", "headers": []}, receive, send)
    assert len(given) == times
