"""What is taken of bodies when those of all requests together are too large."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from draftwing.config.api_keys import ApiKey
from draftwing.server.edge import limits
from draftwing.server.edge.keys import client
from draftwing.server.edge.limits import ALL_BODIES, LARGE, SMALL, BodyLimit, ResponseThrottle, Throttle

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
    monkeypatch.setattr(limits, "give_back", lambda: given.append(None))

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


Asked = tuple[ResponseThrottle, list[float], list[Any]]  # with what was slept, and what was sent


def throttled(status: int) -> Asked:
    """An application that always answers so, behind a throttle whose clock stands still."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client.set(ApiKey(scope["key"], "k"))
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    return ResponseThrottle(app, lambda: 0.0, sleep=sleep), slept, []


async def ask(asked: Asked, path: str = "/a", key: str = "a", size: int = 0) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b" " * size}

    async def send(message: Any) -> None:
        asked[2].append((len(asked[1]), message))

    await asked[0]({"type": "http", "method": "GET", "path": path, "key": key}, receive, send)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are added without an error: up to eight at once, then each a 64th of a second after the other, and at
    most half a second; those that are held longer end together."""
    monkeypatch.setattr(limits, "A_SECOND", 64)
    monkeypatch.setattr(limits, "NO_DEFERRAL", 8)
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(limits, "GOLDEN", 0.0)


def test_a_client_is_refused_so_often_in_a_second() -> None:
    now = [0.0]
    refusals = Throttle(64, 8, 0.5, lambda: now[0])
    waits = [refusals.wait("a") for _ in range(8 + 33)]
    assert waits == [0.0] * 8 + [i / 64 for i in range(33)]
    assert refusals.wait("a") is None and refusals.wait("a") is None, "so many wait already"
    assert refusals.wait("b") == 0, "others do not feel it"
    now[0] += 1 / 8
    assert [refusals.wait("a") for _ in range(9)] == [(25 + i) / 64 for i in range(8)] + [None]
    now[0] += 1000
    assert [refusals.wait("a") for _ in range(10)] == [0.0] * 9 + [1 / 64]


@pytest.mark.parametrize("status", [200, 204, 302, 400, 401, 403, 404, 413, 429, 499, 500, 503])
async def test_refusals_wait_and_answers_do_not(status: int) -> None:
    asked = throttled(status)
    _, slept, sent = asked

    for key in ["a"] * (8 + 35) + ["b"]:
        await ask(asked, key=key)
    closed = [(b"connection", b"close") in message["headers"] for _, message in sent[::2]]
    if status in (400, 401, 403, 404, 413, 429, 503):
        assert slept == [*(i / 64 for i in range(1, 33)), 0.5, 0.5]
        assert closed == [False] * (8 + 33) + [True] * 2 + [False]
        waits = [count for count, _ in sent[::2]]
        assert waits == [0] * 9 + [*range(1, 35)] + [34], "nothing of a refusal is sent before its time"
    else:
        assert not slept and not any(closed)


async def test_connections_that_end_are_held_for_a_while_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever makes a new one for each request would be refused as fast as it can."""
    monkeypatch.setattr(limits, "MAX_HELD", 3)
    slept: list[float] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    go, turn = asyncio.Event(), asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await go.wait()

    refusals = ResponseThrottle(app, lambda: 0.0, sleep=sleep)
    while refusals._refusals.wait("") is not None:
        pass
    async with asyncio.TaskGroup() as together:
        for _ in range(10):
            together.create_task(refusals({"type": "http", "method": "GET", "path": "/a"}, None, send))  # type: ignore[arg-type]
        while len(sent) < 7:
            await turn(0)
        assert slept == [0.5] * 3 and len(sent) == 7, "so many are held, the others end at once"
        go.set()
    assert len(sent) == 10 and refusals._held == 0
    assert all((b"connection", b"close") in message["headers"] for message in sent)


async def test_connections_that_are_held_end_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever they belong to would ask again on all of them together."""
    monkeypatch.setattr(limits, "GOLDEN", 0.618)
    asked = throttled(400)
    for _ in range(8 + 33 + 64):
        await ask(asked)
    held = sorted(asked[1][32:])
    assert len(held) == 64 and held[0] >= 0.5 and held[-1] <= 1.0
    assert max(after - before for before, after in itertools.pairwise(held)) < 3 * 0.5 / 64


async def test_large_bodies_of_a_client_come_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all its connections together, and not those of another; the first ones, and none that is a picture or
    two, wait for nothing."""
    monkeypatch.setattr(limits, "LARGE_A_SECOND", LARGE)
    monkeypatch.setattr(limits, "LARGE_AT_ONCE", 2 * LARGE)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(limits, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))  # others use theirs
    limit = BodyLimit(app, 4 * LARGE)
    for name, size in (("a", LARGE), ("a", 4 * LARGE), ("a", 4 * LARGE), ("b", 4 * LARGE), ("c", 2 * LARGE)):
        client.set(ApiKey(name, name))
        await read(limit, b" " * size)
    assert slept == [pytest.approx(seconds, abs=1) for seconds in (2, 6, 2)]


@pytest.mark.parametrize(
    ("path", "status", "size", "waits", "closes"),
    [
        ("/generate", 400, SMALL, True, False),
        ("/generate", 400, SMALL + 1, False, True),
        ("/generate", 503, 0, True, False),
        ("/health", 503, 0, False, False),
        ("/readiness", 503, 0, False, False),
        ("/nothing", 404, 0, True, False),
    ],
)
async def test_what_does_not_wait(path: str, status: int, size: int, waits: bool, closes: bool) -> None:
    """Large bodies, which would be held meanwhile, and health checks."""
    asked = throttled(status)

    for _ in range(10):
        await ask(asked, path, size=size)
    _, slept, sent = asked
    assert bool(slept) is waits
    assert [bool(message["headers"]) for _, message in sent[::2]] == [False] * 9 + [closes]


@pytest.mark.parametrize(
    ("method", "path", "free"),
    [
        ("GET", "/health", True),
        ("GET", "/readiness", True),
        ("OPTIONS", "/v1/models", True),
        ("GET", "/v1/models", False),
    ],
)
async def test_what_needs_no_key_is_begun_one_after_the_other(
    method: str, path: str, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come together: each has its turn, so that what runs with them never waits for all of them."""
    monkeypatch.setattr(limits, "FREE_A_SECOND", 64)
    monkeypatch.setattr(limits, "FREE_AT_ONCE", 4)
    monkeypatch.setattr(limits, "FREE_SECONDS", 1.0)
    now = [0.0]
    begun: list[float] = []
    closed: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(now[0])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        closed.append((b"connection", b"close") in message["headers"])

    turn, sleeping = asyncio.sleep, []

    async def sleep(seconds: float) -> None:
        sleeping.append((now[0] + seconds, awake := asyncio.Event()))
        await awake.wait()

    paced = ResponseThrottle(app, lambda: now[0], sleep=sleep)
    async with asyncio.TaskGroup() as together:
        for _ in range(4 + 65 + 3):
            together.create_task(paced({"type": "http", "method": method, "path": path}, None, send))  # type: ignore[arg-type]
        await turn(0)
        while sleeping:
            now[0], awake = sleeping.pop(sleeping.index(min(sleeping, key=lambda one: one[0])))
            awake.set()
            await turn(0)
            await turn(0)
    if free:
        assert begun == [0.0] * 5 + [i / 64 for i in range(1, 65)] + [1.0] * 3
        assert closed == [False] * 69 + [True] * 3, "whoever would wait for longer"
    else:
        assert begun == [0.0] * 72 and not any(closed)
