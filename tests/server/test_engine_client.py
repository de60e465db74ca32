"""Clients that go away, engines that die, and requests that are aborted."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fake_engine import FakeEngine, local, logprob, traced
from scripted import serving, wait_until

from draftwing.core import Output
from draftwing.engine.process.link import EngineDead
from draftwing.errors import GenerationError
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.dispatch import WAKES, Wakeups
from draftwing.server.engine_client import AsyncEngine, Stream


async def _all_go_on(streams: int) -> tuple[list[int], list[int]]:
    """Returns who goes on by turns, and who went on in which order."""
    wakeups, woken, turns = Wakeups(), list[int](), list[int]()
    events = [asyncio.Event() for _ in range(streams)]

    async def wait(number: int) -> None:
        await events[number].wait()
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(streams)]
    await asyncio.sleep(0)
    for event in events:
        wakeups.set(event)
        wakeups.set(event)  # again, before it has gone on
    while len(woken) < streams:
        before = len(woken)
        await asyncio.sleep(0)
        turns.append(len(woken) - before)
    await asyncio.gather(*tasks)
    return turns, woken


@pytest.mark.parametrize("streams", [1, WAKES, WAKES + 1, 5 * WAKES + 3])
def test_few_go_on_in_a_turn_and_all_in_their_order(streams: int) -> None:
    turns, woken = asyncio.run(_all_go_on(streams))
    assert woken == list(range(streams)) and max(turns) <= WAKES
    assert sum(count > 0 for count in turns) == -(-streams // WAKES)


def test_a_turn_begins_anew() -> None:
    async def run() -> list[bool]:
        wakeups, found = Wakeups(), []
        for _ in range(3):
            events = [asyncio.Event() for _ in range(WAKES)]
            for event in events:
                wakeups.set(event)
            found.append(all(event.is_set() for event in events))
            await asyncio.sleep(0.01)
        return found

    assert asyncio.run(run()) == [True] * 3


FOREVER = {"prompt": "abc", "ignore_eos": True, "max_tokens": 1900}


@pytest.fixture
def slow() -> FakeEngine:
    """Takes about twenty seconds for 1900 tokens."""
    return FakeEngine(burst=1, pause=0.01)


@pytest.fixture
def live(slow: FakeEngine) -> Iterator[str]:
    """URL of a server on a real socket."""
    with serving(slow) as url:
        yield url


def test_a_streaming_client_that_goes_away_aborts_its_requests(live: str, slow: FakeEngine) -> None:
    body = FOREVER | {"stream": True, "n": 2}
    with httpx.Client() as client, client.stream("POST", f"{live}/v1/completions", json=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
        assert len(slow.running) == 2
    wait_until(lambda: len(slow.aborted) == 2)
    assert not slow.running


def test_a_waiting_client_that_goes_away_aborts_its_request(live: str, slow: FakeEngine) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(live).port)) as client:
        body = json.dumps(FOREVER)
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n".encode())
        client.sendall(f"content-type: application/json\r\n\r\n{body}".encode())
        wait_until(lambda: len(slow.running) == 1)
    wait_until(lambda: len(slow.aborted) == 1)
    assert not slow.running


def test_abort_request(live: str, slow: FakeEngine) -> None:
    body = {"text": "abc", "rid": "mine", "sampling_params": {"ignore_eos": True, "max_new_tokens": 1900}}
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda b=b: answers.append(httpx.post(f"{live}/generate", json=b)))
               for b in (body, body | {"rid": "other"})]  # fmt: skip
    for thread in threads:
        thread.start()
    wait_until(lambda: len(slow.running) == 2)
    assert httpx.get(f"{live}/flush_cache").status_code == 400
    httpx.post(f"{live}/abort_request", json={"rid": "mine"})
    wait_until(lambda: len(answers) == 1)
    info = answers[0].json()["meta_info"]
    assert info["id"] == "mine" and info["finish_reason"] == {"type": "abort", "message": "aborted"}
    assert len(slow.running) == 1
    httpx.post(f"{live}/abort_request", json={"abort_all": True})
    for thread in threads:
        thread.join(30)
    assert answers[1].json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_files_that_cannot_be_removed_end_no_engine(
    live: str, slow: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> bool:
        raise GenerationError("what is kept could not be removed: Permission denied: '/kept'")

    monkeypatch.setattr(slow, "flush_cache", refused)
    found = httpx.post(f"{live}/flush_cache")
    assert found.status_code == 500 and "Permission denied: '/kept'" in found.text
    assert httpx.post(f"{live}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_dead_engine_fails_all_that_wait(live: str, slow: FakeEngine) -> None:
    answers: list[httpx.Response] = []
    bodies = [FOREVER, FOREVER | {"stream": True}]
    threads = [threading.Thread(target=lambda b=b: answers.append(httpx.post(f"{live}/v1/completions", json=b)))
               for b in bodies]  # fmt: skip
    for thread in threads:
        thread.start()
    wait_until(lambda: len(slow.running) == 2)
    assert httpx.get(f"{live}/health").status_code == 200
    slow.crash = RuntimeError("out of paper")
    for thread in threads:
        thread.join(30)
    plain, streamed = sorted(answers, key=lambda a: a.status_code, reverse=True)
    assert plain.status_code == 503 and "out of paper" in plain.json()["message"]
    *_, error, done = streamed.text.strip().split("\n\n")
    assert "out of paper" in json.loads(error.removeprefix("data: "))["error"]["message"] and done == "data: [DONE]"
    health = httpx.get(f"{live}/health")
    assert health.status_code == 503 and health.content == b""
    later = httpx.post(f"{live}/v1/completions", json={"prompt": "a"})
    assert later.status_code == 503 and later.json()["type"] == "ServiceUnavailableError"


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[AsyncEngine]:
    bridge = local(engine)
    bridge.start()
    yield bridge
    await bridge.stop()


def request(uid: str, **fields: object) -> GenerationRequest:
    return GenerationRequest(uid, [1, 2, 3], SamplingParams(**fields))  # type: ignore[arg-type]


async def test_a_stream_yields_every_token_once_and_aborts_when_closed_early(slow: FakeEngine) -> None:
    async with running(slow) as bridge:
        tokens = [t async for output in bridge.submit([request("a")]) for t in output.token_ids]
        assert tokens == [1, 2, 3, 256] and slow.aborted == []
        stream = bridge.submit([request("b", ignore_eos=True, max_new_tokens=1000)])
        assert (await anext(aiter(stream))).token_ids[0] == 1
        stream.close()
        await asyncio.to_thread(wait_until, lambda: slow.aborted == ["b"])


async def test_stop_fails_what_waits_and_refuses_what_comes(slow: FakeEngine) -> None:
    async with running(slow) as bridge:
        outputs = aiter(bridge.submit([request("a", ignore_eos=True, max_new_tokens=1900)]))
        await anext(outputs)
    assert not bridge.healthy
    with pytest.raises(EngineDead):
        async for _ in outputs:
            pass
    with pytest.raises(EngineDead):
        bridge.submit([request("b")])


async def test_what_a_slow_client_has_not_taken_is_not_copied_each_time() -> None:
    """The lists that came first are the ones that are given out, with all that came later, and nothing is lost."""
    engine, count = local(FakeEngine()), 2500
    wanted = LogprobParams(start=0)

    def output(i: int) -> Output:
        first = [None, logprob(2, wanted)] if i == 0 else []
        step = traced([i % 200], i, False)
        return Output("x", [i % 200], None, {}, [logprob(i % 200, wanted)], first, [step])

    engine.start()
    stream = Stream(engine, [GenerationRequest("x", [1, 2], SamplingParams(), logprobs=wanted)])
    begin = output(0)
    stream.put(begin)
    for i in range(1, count):
        stream.put(output(i))
    stream.put(Output("x", [7], {"type": "length", "length": count}, {"a": 1}, [logprob(7, wanted)]))
    (whole,) = [one async for one in stream]
    assert whole.token_ids is begin.token_ids and whole.logprobs is begin.logprobs
    assert whole.prompt_logprobs is begin.prompt_logprobs
    assert whole.token_ids == [*(i % 200 for i in range(count)), 7] and whole.meta == {"a": 1}
    assert whole.finish_reason == {"type": "length", "length": count}
    assert len(whole.logprobs) == count + 1 and len(whole.prompt_logprobs) == 2
    assert len(whole.trace) == 64 and whole.trace[-1].number == count - 1
    stream.close()
    await engine.stop()
