"""Who looks at the engine: nothing happens while nobody does, and one who is slow holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from fake_engine import FakeEngine, local

from draftwing.config.options import Options
from draftwing.core import Output
from draftwing.engine.process.link import EngineDead
from draftwing.requests.request import GenerationRequest, SpecLimits
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.service import Service
from draftwing.server.ui.snapshot import MAX_REQUESTS, MAX_TEXT, Snapshots
from draftwing.server.ui.viewers import MAX_OF_A_KEY, MAX_VIEWERS, Snapshot, Viewers


class Looks:
    """Counts how often somebody looked."""

    def __init__(self) -> None:
        self.count = 0
        self.last: int | None = None  # after which there is nothing more
        self.error: Exception | None = None

    async def __call__(self) -> Snapshot | None:
        if self.error is not None:
            raise self.error
        self.count += 1
        return None if self.count == self.last else {"number": self.count}


def look(viewers: Viewers) -> AsyncIterator[Snapshot]:
    viewer = viewers.enter()
    assert viewer is not None
    return viewers.watch(viewer)


def run(scenario: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_nobody_looks_nothing_runs() -> None:
    async def scenario() -> None:
        looks = Looks()
        viewers = Viewers(looks, 0.001)
        await asyncio.sleep(0.02)
        assert looks.count == 0
        for _ in range(2):  # and again after all have left
            async with aclosing(look(viewers)) as stream:
                seen = [(await anext(stream))["number"] for _ in range(3)]
                assert seen == sorted(set(seen)) and len(viewers) == 1
            before = looks.count
            await asyncio.sleep(0.02)
            assert looks.count == before and len(viewers) == 0

    run(scenario())


def test_a_slow_viewer_skips_and_holds_up_nobody() -> None:
    async def scenario() -> None:
        looks = Looks()
        viewers = Viewers(looks, 0.001)
        async with aclosing(look(viewers)) as slow, aclosing(look(viewers)) as quick:
            assert (await anext(slow))["number"] == 1
            for _ in range(30):
                await anext(quick)
            newest = looks.count
            assert (await anext(slow))["number"] >= newest - 1, "only the newest was kept"

    run(scenario())


@pytest.mark.parametrize("error", [None, RuntimeError("a bug")])
def test_the_end(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        looks = Looks()
        looks.last, looks.error = 3, error
        viewers = Viewers(looks, 0.001)
        streams = await asyncio.gather(*(collected(viewers) for _ in range(3)))
        assert all(len(seen) == (0 if error else 2) for seen in streams) and not len(viewers)
        looks.last, looks.error = None, None
        async with aclosing(look(viewers)) as stream:
            await anext(stream)  # whoever comes later is shown again

    run(scenario())
    assert ("a bug" in caplog.text) == (error is not None)


async def collected(viewers: Viewers) -> list[Snapshot]:
    return [snapshot async for snapshot in look(viewers)]


def test_there_is_a_limit() -> None:
    async def scenario() -> None:
        viewers = Viewers(Looks(), 0.001)
        own = [viewers.enter("alice") for _ in range(MAX_OF_A_KEY)]
        assert all(own) and viewers.enter("alice") is None, "before any of them has read anything"
        others = [viewers.enter() for _ in range(MAX_VIEWERS - MAX_OF_A_KEY)]
        assert all(others) and viewers.enter() is viewers.enter("bob") is None
        for viewer in own:
            assert viewer is not None
            stream = viewers.watch(viewer)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            viewers.leave(viewer)
        assert len(viewers) == len(others) and viewers.enter("alice") is not None

    run(scenario())


# -- what they are shown -----------------------------------------------------------------------------------------------


class Written:
    text = "an answer " * 200


def service(**options: Any) -> Service:
    engine = FakeEngine(Options(random_seed=7, **options))
    bridge = local(engine)
    service = Service(bridge, engine.tokenizer)

    async def stats() -> dict[str, Any]:
        return engine.stats() | {"age": 0.001}

    bridge.stats = stats  # type: ignore[method-assign]
    return service


def began(service: Service, count: int, **fields: Any) -> None:
    prompt = service.tokenizer.encode("a secret question")
    requests = [GenerationRequest(f"uid-{i}", prompt, SamplingParams(), name="job", **fields) for i in range(count)]
    service.engine.observer.begin("job", requests, [Written() for _ in requests])
    service.engine.observer.output(Output("uid-0", [1, 2]))


def taken(service: Service) -> dict[str, Any]:
    snapshot = asyncio.run(Snapshots(service).take())
    assert snapshot is not None
    return snapshot


def test_texts_are_not_shown() -> None:
    one = service()
    began(one, 2, limits=SpecLimits(0, 1, 1))
    snapshot = taken(one)
    assert [request["tokens"] for request in snapshot["requests"]] == [2, 0]
    first = snapshot["requests"][0]
    assert first["drafts"] is False and first["prompt_tokens"] == 17 and first["first_token_seconds"] >= 0
    for secret in ("secret", "answer", "uid-", "job"):
        assert secret not in str(snapshot)


def test_unless_they_are_to_be() -> None:
    one = service(ui_show_texts=True)
    began(one, 1)
    (request,) = taken(one)["requests"]
    assert request["prompt"] == "a secret question" and request["text"] == Written.text[-MAX_TEXT:]


def test_what_is_shown_is_bounded() -> None:
    one = service()
    began(one, 3 * MAX_REQUESTS)
    snapshot = taken(one)
    assert len(snapshot["requests"]) == MAX_REQUESTS and snapshot["unfinished"] == 3 * MAX_REQUESTS


def test_an_engine_that_does_not_answer() -> None:
    one = service()

    async def scenario() -> None:
        snapshots = Snapshots(one)
        known = await snapshots.take()
        assert known is not None and known["engine"] == "up"

        async def late() -> Any:
            return known_stats | {"age": 2.5}

        known_stats = await one.engine.stats()
        one.engine.stats = late  # type: ignore[method-assign]
        busy = await snapshots.take()
        assert busy is not None and busy["engine"] == "busy" and busy["totals"] == known["totals"]
        assert busy["age"] >= 2.5

        async def dead() -> Any:
            raise EngineDead("it died")

        one.engine.stats = dead  # type: ignore[method-assign]
        gone = await snapshots.take()
        assert gone is not None and gone["engine"] == "down" and gone["age"] >= busy["age"]
        one.engine.draining = True
        assert await snapshots.take() is None, "a page does not keep a server from ending"

    run(scenario())
    one.engine.draining = False
    first = asyncio.run(Snapshots(one).take())
    assert first is not None and first["age"] is None and "totals" not in first
