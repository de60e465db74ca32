"""Streams that go on without their client: what is kept, how long, and for whom; over HTTP with a stand-in engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from scripted import serving, wait_until

from draftwing.config.options import Options
from draftwing.errors import RequestError
from draftwing.server.kept_streams import HEADER, KeptStreams
from draftwing.server.quotas import QueueFull

ID, OTHER = "0123456789abcdef", "another-one_of-these"
QUESTION = "a question that is repeated in pieces"
CHAT = {"model": "echo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60, "stream": True}


# -- what is kept ------------------------------------------------------------------------------------------------------


class Script:
    """Events that come when a test lets them."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.closed = 0

    async def events(self) -> AsyncGenerator[str, None]:
        while (text := await self.queue.get()) is not None:
            yield text

    def close(self) -> None:
        self.closed += 1

    async def say(self, *texts: str | None) -> None:
        for text in texts:
            self.queue.put_nowait(text)
        for _ in range(20):
            await asyncio.sleep(0)


async def all_of(events: AsyncIterator[bytes]) -> str:
    return b"".join([data async for data in events]).decode()


async def test_readers_from_any_event_on() -> None:
    script = Script()
    stream = KeptStreams().begin("", ID, script.events(), script.close)
    readers = [asyncio.create_task(all_of(stream.read(after))) for after in (0, 1, 3, 9)]
    await script.say("a\n\n", "b\n\nc\n\n", "d\n\n")
    assert stream.readers == 4 and script.closed == 0
    late = asyncio.create_task(all_of(stream.read(2)))
    await script.say("e\n\n", None)
    assert await asyncio.gather(*readers) == ["a\n\nb\n\nc\n\nd\n\ne\n\n", "b\n\nc\n\nd\n\ne\n\n", "d\n\ne\n\n", ""]
    assert await late == "c\n\nd\n\ne\n\n" and await all_of(stream.read(4)) == "e\n\n"
    assert script.closed == 1 and stream.readers == 0


async def test_clients_have_ids_of_their_own() -> None:
    script, streams = Script(), KeptStreams()
    first = streams.begin("one", ID, script.events(), script.close)
    second = streams.begin("two", ID, script.events(), script.close)
    assert streams.get("one", ID) is first and streams.get("two", ID) is second and streams.get("", ID) is None
    for wrong in ("short", "x" * 65, "a space in it, and a comma", "../../0123456789", ID + "\n"):
        with pytest.raises(RequestError, match="16 to 64"):
            streams.begin("one", wrong, script.events(), script.close)
    with pytest.raises(RequestError, match="already"):
        streams.begin("one", ID, script.events(), script.close)
    assert streams.delete("one", ID) and not streams.delete("one", ID) and streams.get("two", ID) is second
    await script.say()
    assert first.ended and not second.ended and script.closed == 1


async def test_time_and_room() -> None:
    now = [0.0]
    streams = KeptStreams(max_bytes=100, max_streams=3, seconds=60, alone_seconds=10, clock=lambda: now[0])
    scripts = [Script() for _ in range(4)]
    kept = [streams.begin("", f"{ID}-{i}", one.events(), one.close) for i, one in enumerate(scripts[:3])]
    with pytest.raises(QueueFull, match="3 answers are written and kept") as refused:
        streams.begin("", OTHER, scripts[3].events(), scripts[3].close)
    assert not refused.value.own
    reader = asyncio.create_task(all_of(kept[0].read()))
    await scripts[1].say("x" * 30 + "\n\n", None)
    now[0] = 11.0
    streams.look()
    await scripts[2].say()
    assert kept[2].ended and scripts[2].closed == 1, "nobody read it"
    assert not kept[0].ended and len(streams) == 3
    streams.begin("", OTHER, scripts[3].events(), scripts[3].close)  # in the place of the oldest one that has ended
    assert streams.get("", f"{ID}-1") is None and len(streams) == 3
    await scripts[0].say(*["y" * 20 + "\n\n"] * 10)
    assert streams.bytes <= 100 and kept[0].first == 8 and streams.get("", f"{ID}-2") is None
    assert await all_of(kept[0].read(3)) == "", "what it asks for is gone"
    await scripts[0].say(None)
    assert await reader == ("y" * 20 + "\n\n") * 10
    now[0] = 80.0
    streams.look()
    assert len(streams) == 1


async def test_nobody_has_room_for_all() -> None:
    """Neither of places nor of bytes: what others have kept stays."""
    streams = KeptStreams(max_bytes=100, max_streams=4, max_of_a_key=2)
    scripts = [Script() for _ in range(5)]
    ids = [f"{ID}-{i}" for i in range(5)]
    for client, id, script in zip(("one", "two", "two"), ids, scripts, strict=False):
        streams.begin(client, id, script.events(), script.close)
    await scripts[0].say("x" * 38 + "\n\n", None)
    with pytest.raises(QueueFull, match="2 answers of this key") as refused:
        streams.begin("two", ids[3], scripts[3].events(), scripts[3].close)
    assert refused.value.own
    await scripts[1].say("é" * 9 + "\n\n", None)
    assert streams.bytes == 60, "in UTF-8"
    streams.begin("two", ids[3], scripts[3].events(), scripts[3].close)  # in the place of its own that has ended
    assert streams.get("two", ids[1]) is None and len(streams) == 3 and streams.bytes == 40
    reader = asyncio.create_task(all_of(streams._streams["two", ids[2]].read()))
    await scripts[2].say(*["y" * 18 + "\n\n"] * 40)
    assert streams.bytes <= 100 and streams.get("one", ids[0]) is not None, "without waiting for a look"
    await scripts[3].say("z" * 98 + "\n\n", None)
    await scripts[2].say(None)
    assert streams.bytes <= 100 and streams.get("one", ids[0]) is not None
    assert await reader == ("y" * 18 + "\n\n") * 40, "who reads in time misses nothing"


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(burst=1, pause=0.02)


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


def text_of(events: str) -> str:
    found = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for one in found for choice in one["choices"])


def begun(url: str, id: str, count: int, **headers: str) -> list[str]:
    """The first events of an answer, whose client leaves then."""
    events: list[str] = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, headers={HEADER: id, **headers}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            events += [line + "\n\n"] if line else []
            if len(events) == count:
                break
    return events


def test_an_answer_goes_on_without_its_client(url: str, engine: FakeEngine) -> None:
    whole = httpx.post(f"{url}/v1/chat/completions", json=CHAT).text
    first = begun(url, ID, 5)
    running = httpx.get(f"{url}/ui/answers/{ID}", params={"after": 5}).text
    assert text_of("".join(first) + running) == text_of(whole) and running.endswith("data: [DONE]\n\n")
    assert not engine.aborted
    again = httpx.get(f"{url}/ui/answers/{ID}").text
    assert again == "".join(first) + running, "it has ended, and may be read once more"
    assert httpx.get(f"{url}/ui/answers/{ID}?after=100000").text == ""


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/generate", "/v1/completions"])
def test_other_dialects(url: str, path: str) -> None:
    own = {
        "/v1/responses": {"input": QUESTION},
        "/generate": {"text": QUESTION},
        "/v1/completions": {"prompt": QUESTION},
    }
    body = own.get(path, CHAT) | {"stream": True}
    asked = httpx.post(f"{url}{path}", json=body, headers={HEADER: ID}).text
    assert asked.count("\n\n") > 5 and httpx.get(f"{url}/ui/answers/{ID}").text == asked


def test_who_stops_an_answer(url: str, engine: FakeEngine) -> None:
    begun(url, ID, 3)
    assert httpx.delete(f"{url}/ui/answers/{ID}").json() == {"deleted": True}
    wait_until(lambda: bool(engine.aborted))
    assert httpx.get(f"{url}/ui/answers/{ID}").status_code == 404
    begun(url, ID, 3)
    assert httpx.get(f"{url}/ui/answers/{ID}").text.endswith("data: [DONE]\n\n"), "the id is free again"
    assert httpx.delete(f"{url}/ui/answers/{OTHER}").json() == {"deleted": False}
    late = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={HEADER: OTHER})
    assert late.status_code == 400 and "stopped before it began" in late.text
    wait_until(lambda: not engine.running)


def test_refusals(url: str, engine: FakeEngine) -> None:
    begun(url, ID, 2)
    for id, words in ((ID, "already"), ("short", "16 to 64")):
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={HEADER: id})
        assert response.status_code == 400 and words in response.json()["error"]["message"]
    whole = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": False}, headers={HEADER: OTHER})
    assert whole.status_code == 400 and "stream" in whole.json()["error"]["message"]
    lines = httpx.post(f"{url}/api/chat", json={"model": "echo", "messages": CHAT["messages"]}, headers={HEADER: OTHER})
    assert lines.status_code == 400 and "Ollama" in lines.json()["error"]
    assert httpx.get(f"{url}/ui/answers/{ID}?after=-1").status_code == 400
    wait_until(lambda: not engine.running)  # none was left behind by what was refused


def test_a_full_house_says_when_to_come_again(url: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptStreams, "__len__", lambda self: 256)
    response = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers={HEADER: ID})
    assert response.status_code == 503 and response.headers["retry-after"]
    assert "when one has ended" in response.json()["error"]["message"]
    wait_until(lambda: not engine.running)


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[one]\nkey = "key-of-one"\n[two]\nkey = "key-of-two"\n')
    file.chmod(0o600)
    engine = FakeEngine(Options(random_seed=7, api_key_file=str(file)), burst=1, pause=0.02)
    with serving(engine) as url:
        one, two = ({"authorization": f"Bearer key-of-{name}"} for name in ("one", "two"))
        begun(url, ID, 3, **one)
        assert httpx.get(f"{url}/ui/answers/{ID}").status_code == 401
        assert httpx.get(f"{url}/ui/answers/{ID}", headers=two).status_code == 404
        assert httpx.delete(f"{url}/ui/answers/{ID}", headers=two).json() == {"deleted": False}
        found = httpx.get(f"{url}/ui/answers/{ID}", headers=one).text
        assert QUESTION in text_of(found)


def test_many_clients_that_leave(url: str, engine: FakeEngine) -> None:
    ids = [f"{ID}-{i}" for i in range(12)]
    for id in ids:
        begun(url, id, 1)
    started = time.monotonic()
    texts = {text_of(httpx.get(f"{url}/ui/answers/{id}", timeout=30).text) for id in ids}
    assert texts == {text_of(httpx.post(f"{url}/v1/chat/completions", json=CHAT).text)} and not engine.aborted
    assert time.monotonic() - started < 20
