"""Engines that hang, die again and again, or die of one request."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from draftwing.config.adapters import AdapterCard
from draftwing.core import Output
from draftwing.engine.admission import EngineInfo
from draftwing.engine.heartbeat import Heartbeat
from draftwing.engine.process.link import Compile, EngineDead, Listener, Reply
from draftwing.errors import RequestError
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server import supervision
from draftwing.server.engine_client import AsyncEngine
from draftwing.server.supervision import CrashHistory, Watchdog


def test_the_watchdog_bites_a_silent_engine_and_a_long_step() -> None:
    dog = Watchdog(100.0)
    assert (dog.silence, dog.every) == (20.0, 1.0)
    assert not any(dog.look(True, None) for _ in range(1000)), "idle, or compiling"
    assert not any(dog.look(True, step) for step in range(1000)), "it gets on"
    assert not any(dog.look(True, 7) for _ in range(100)) and not dog.look(True, 8), "steps of just less than 100 s"
    found = [dog.look(True, 8) for _ in range(100)]
    assert found[-1] == "a step took more than 100 s" and not any(found[:-1])
    assert [dog.look(False, None) for _ in range(20)][-1] == "nothing was heard of it for 20 s"
    assert Watchdog(2.0).silence == 2.0 and Watchdog(2.0).every == 0.5


def test_progress() -> None:
    progress = Heartbeat()
    assert progress.now is None
    with progress.step():
        first = progress.now
        assert first is not None
        progress._begin("compiler")
        assert progress.now is None
        progress._end()
        assert progress.now not in (None, first)
    with pytest.raises(ValueError), progress.step():
        progress._begin()
        raise ValueError
    with progress.step():
        assert progress.now is not None, "a compiler that failed is no excuse for the next step"


def test_restarts_wait_longer_and_longer_and_end() -> None:
    deaths = CrashHistory()
    assert [deaths.back_off(float(i)) for i in range(6)] == [0, 1, 2, 4, 8, None]
    assert deaths.back_off(supervision.WINDOW + 5.5) == 0, "what is long ago counts no more"


def asking(prompt: list[int], uid: str, **more: object) -> list[GenerationRequest]:
    return [GenerationRequest(uid, prompt, SamplingParams(**more), name=f"name-{uid}")]  # type: ignore[arg-type]


def test_a_request_that_was_alone_in_two_deaths_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    deaths = CrashHistory()
    with caplog.at_level(logging.ERROR):
        deaths.suspect(asking([1, 2, 3], "a", seed=1))
        deaths.check(asking([1, 2, 3], "b"))
        (later,) = asking([1, 2, 3], "c", seed=2)
        deaths.suspect([later._replace(arrived=5.0)])
    assert "request 'name-c' was alone in the engine when it stopped, twice" in caplog.text
    with pytest.raises(RequestError, match="the engine stopped 2 times while it ran this request alone"):
        deaths.check(asking([1, 2, 3], "d", seed=3))
    deaths.check(asking([1, 2, 4], "e"))
    deaths.check(asking([1, 2, 3], "f", temperature=0.5))
    for i in range(supervision.SUSPECTS):
        deaths.suspect(asking([i], "g"))
    assert len(deaths._alone) == supervision.SUSPECTS


class SilentLink:
    """An engine that answers nothing and dies when asked to."""

    process = SimpleNamespace(kill=lambda: None)
    listener: Listener | None = None

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def wait_ready(self) -> EngineInfo:
        return FakeEngine().info

    def listen(self, listener: Listener) -> None:
        self.listener = listener

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self, grace: float = 5.0) -> None:
        pass


@asynccontextmanager
async def silent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[AsyncEngine, Callable[[], Awaitable[None]]]]:
    """An engine that answers nothing, and what ends it and waits for the next one."""
    monkeypatch.setattr(CrashHistory, "back_off", lambda self, now: 0.0)
    bridge = AsyncEngine(FakeEngine().info, SilentLink(), SilentLink)  # type: ignore[arg-type]

    async def die() -> None:
        await asyncio.sleep(0)  # what was begun is asked
        dead: Any = bridge.link
        dead.listener.died("a test")
        while bridge.link is dead or not bridge.healthy:
            await asyncio.sleep(0.01)

    bridge.start()
    yield bridge, die
    await bridge.stop()


def card(name: str, digest: str = "") -> AdapterCard:
    return AdapterCard(name, f"/adapters/{name}", digest or name, 4, "")


async def test_what_a_new_engine_is_asked_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """First, at once and before any request, to unload what others have replaced; then to load, one by one, what is
    still to be served: clients unload and replace adapters meanwhile."""
    info = dataclasses.replace(FakeEngine().info, adapters=[card(name) for name in "abcd"])

    class Link(SilentLink):
        def wait_ready(self) -> EngineInfo:
            return info

    monkeypatch.setattr(CrashHistory, "back_off", lambda self, now: 0.0)
    bridge = AsyncEngine(info, Link(), Link)  # type: ignore[arg-type]
    bridge.start()
    del bridge.adapters["b"]
    bridge.adapters |= {name: card(name, "another") for name in ("c", "a", "e", "f", "g")}
    dead: Any = bridge.link
    dead.listener.died("a test")
    while bridge.link is dead or not bridge.healthy:
        await asyncio.sleep(0)
    link: Any = bridge.link
    assert sorted(one.args[0] for one in link.sent if one.method == "unload_adapter") == ["a", "b", "c"]
    gone = asyncio.ensure_future(bridge.unload_adapter("e"))
    other = asyncio.ensure_future(bridge.load_adapter("f", Path("/adapters/other"), True))
    answered = 0
    for _ in range(50):
        await asyncio.sleep(0.01)
        for one in link.sent[answered:]:
            found = card(one.args[0], str(one.args[1])) if one.method == "load_adapter" else None
            link.listener.reply(Reply(one.number, found))
            answered += 1
    await asyncio.gather(gone, other)
    loaded = [(one.args[0], str(one.args[1])) for one in link.sent if one.method == "load_adapter"]
    assert [one for one in loaded if one[0] in "ef"] == [("f", "/adapters/other")]
    assert sorted(name for name, _ in loaded) == ["a", "c", "f", "g"] and "d" in bridge.adapters
    await bridge.stop()


KILLER, OTHER = Grammar("regex", "a+"), Grammar("regex", "b+")


def compiling(bridge: AsyncEngine, grammar: Grammar) -> asyncio.Future[None]:
    return asyncio.ensure_future(bridge.compile(grammar, "", "regex", ""))


@pytest.mark.parametrize("stays", [True, False])
async def test_a_grammar_that_was_alone_in_two_deaths_is_refused(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asked waits for it or leaves; a request that runs meanwhile is not suspected."""
    async with silent(monkeypatch) as (bridge, die):
        for i in range(2):
            innocent = bridge.submit(asking([1, 2, 3], f"innocent {i}"))
            askers = [compiling(bridge, KILLER) for _ in range(2)]
            await asyncio.sleep(0)
            if not stays:
                for asker in askers:
                    asker.cancel()
            await die()
            innocent.close()
            kinds = {type(error) for error in await asyncio.gather(*askers, return_exceptions=True)}
            assert kinds == {EngineDead if stays else asyncio.CancelledError}
        with pytest.raises(RequestError, match="2 times while it compiled this grammar alone") as refused:
            await compiling(bridge, KILLER)
        assert refused.value.param == "regex"
        bridge.submit(asking([1, 2, 3], "innocent")).close()
        other = compiling(bridge, OTHER)
        await die()
        with pytest.raises(EngineDead):
            await other


async def test_nothing_is_suspected_that_was_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with silent(monkeypatch) as (bridge, die):
        for _ in range(2):
            askers = [compiling(bridge, KILLER), compiling(bridge, OTHER)]
            await die()
            await asyncio.gather(*askers, return_exceptions=True)
        answered = compiling(bridge, KILLER)
        await asyncio.sleep(0)
        link: Any = bridge.link
        number = next(one.number for one in link.sent if isinstance(one, Compile))
        link.listener.reply(Reply(number, None))
        await answered
        for i in range(2):  # what is answered is compiled no more: the request that runs is alone
            running = bridge.submit(asking([1, 2, 3], f"a {i}"))
            await die()
            running.close()
        with pytest.raises(RequestError, match="while it ran this request alone"):
            bridge.submit(asking([1, 2, 3], "b"))


def test_an_answer_that_the_model_cannot_give_is_an_error_with_its_reason(
    engine: FakeEngine, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = {"type": "abort", "message": "the model's logits are not finite", "status_code": 500}
    advance = engine._advance

    def failing(uid: str) -> Output:
        prompt = engine.tokenizer.decode(engine.running[uid][0].prompt_ids)
        return engine._end(uid, [], reason) if "nan" in prompt else advance(uid)

    monkeypatch.setattr(engine, "_advance", failing)
    for path, body in (
        ("/v1/completions", {"prompt": "nan"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "nan"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "nan"}], "max_tokens": 5, "model": "x"}),
        ("/generate", {"text": "nan"}),
    ):
        whole = client.post(path, json=body)
        assert whole.status_code == 500 and "logits are not finite" in whole.text
        streamed = client.post(path, json=body | {"stream": True}).text
        assert "logits are not finite" in streamed and '"finish_reason":"abort"' not in streamed
    assert client.post("/v1/completions", json={"prompt": "abc"}).json()["choices"][0]["text"] == "abc"
