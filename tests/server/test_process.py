"""The engine in a process of its own: how both ends notice what becomes of the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_engine import CONTEXT, FakeEngine, byte_tokenizer, local, process
from tiny_checkpoint import write_checkpoint

from draftwing.config.options import Options
from draftwing.engine.process.link import EngineDead, EngineLink
from draftwing.errors import RequestError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server import supervision
from draftwing.server.engine_client import AsyncEngine

pytestmark = pytest.mark.slow

OPTIONS = Options(random_seed=3, log_level="critical", speculative_algorithm="none").resolve()


def request(uid: str, prompt: list[int] | None = None, **fields: object) -> GenerationRequest:
    return GenerationRequest(uid, prompt or [1, 2, 3], SamplingParams(**fields))  # type: ignore[arg-type]


FOREVER = partial(request, ignore_eos=True, max_new_tokens=CONTEXT - 100)


@pytest.fixture
def spawned() -> Iterator[list[EngineLink]]:
    """Links that the test's engine made; afterwards none of their processes is left, not even as a zombie."""
    links: list[EngineLink] = []
    yield links
    assert links
    for link in links:
        assert link.process.returncode is not None, "the process was not waited for"
        with pytest.raises(ProcessLookupError):
            os.kill(link.process.pid, 0)


@asynccontextmanager
async def running(
    links: list[EngineLink], options: Options = OPTIONS, start: Callable[[Options], EngineLink] = process
) -> AsyncIterator[AsyncEngine]:
    def spawn() -> EngineLink:
        links.append(start(options))
        return links[-1]

    link = spawn()
    engine = AsyncEngine(await asyncio.to_thread(link.wait_ready), link, spawn)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def text_of(engine: AsyncEngine, one: GenerationRequest) -> list[int]:
    with contextlib.closing(engine.submit([one])) as stream:
        return [token async for output in stream for token in output.token_ids]


async def test_tokens_questions_and_aborts_pass(spawned: list[EngineLink]) -> None:
    """To an engine that outlives signals meant for the server."""
    async with running(spawned) as engine:
        assert os.getsid(spawned[0].process.pid) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(spawned[0].process.pid, number)
        assert engine.info.model_name == "echo" and engine.info.context_length == CONTEXT
        assert engine.info.options.random_seed == 3
        every = await asyncio.gather(*(text_of(engine, request(str(i), [i, i + 1])) for i in range(64)))
        assert every == [[i, i + 1, 256] for i in range(64)]
        stops = await text_of(engine, request("s", byte_tokenizer().encode("abcdef"), stop=("cd",)))
        assert byte_tokenizer().decode(stops) == "abcd"
        assert (await engine.stats())["running"] == 0 and await engine.flush_cache()
        stream = engine.submit([FOREVER("x")._replace(name="mine")])
        await until(lambda: bool(stream._news))
        assert (await engine.stats())["running"] == 1 and not await engine.flush_cache()
        engine.abort("mine")
        last = [output async for output in stream][-1]
        assert last.finish_reason == {"type": "abort", "message": "aborted"}
        with pytest.raises(RequestError, match="vocabulary"):
            engine.submit([request("bad", [257])])


async def test_an_engine_that_hangs_is_replaced(spawned: list[EngineLink], monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose step does not end, while its other thread answers; then one that is stopped in the midst of steps: in
    one that began before, it would be either that is noticed first."""
    monkeypatch.setenv("FAKE_ENGINE_PAUSE", "1000")
    async with running(spawned, dataclasses.replace(OPTIONS, watchdog_timeout=1.0)) as engine:
        for stopped, pause in ((False, "0.1"), (True, "0.0005")):
            waiting = asyncio.ensure_future(text_of(engine, FOREVER(f"x{pause}")))
            async with asyncio.timeout(10):
                while (await engine.stats())["progress"] is None:
                    await asyncio.sleep(0.005)
            monkeypatch.setenv("FAKE_ENGINE_PAUSE", pause)  # of the next one
            if stopped:
                os.kill(spawned[-1].process.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, spawned[-1].process.pid, os.WSTOPPED)  # a signal does not stop a process at once
                assert (await engine.stats())["age"] > 0.4, "its numbers are those of before"
            reason = "nothing was heard of it for 1 s" if stopped else "a step took more than 1 s"
            with pytest.raises(EngineDead, match=f"it hung: {reason}"):
                await asyncio.wait_for(waiting, 30)
            await until(lambda: engine.healthy)
        assert await text_of(engine, request("again")) == [1, 2, 3, 256]


async def test_a_killed_engine_is_noticed_and_restarted_until_it_dies_too_often(
    spawned: list[EngineLink], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "DEATHS", 1)
    lost: list[int] = []

    async with running(spawned) as engine:
        engine.lost = lambda: lost.append(len(spawned))
        for deaths in (1, 2):
            waiting = [asyncio.ensure_future(text_of(engine, FOREVER(f"{deaths}{i}"))) for i in range(3)]
            await asyncio.sleep(0.05)
            question = asyncio.ensure_future(engine.stats())
            os.kill(spawned[-1].process.pid, signal.SIGKILL)
            await until(lambda: not engine.healthy)  # long before the watchdog would tell
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, EngineDead) and "killed by SIGKILL" in str(outcome)
            with contextlib.suppress(EngineDead):  # it may have been answered before
                await question
            with pytest.raises(EngineDead):
                engine.submit([request("late")])
            if deaths < 2:
                await until(lambda: engine.healthy)
                assert await text_of(engine, request("again")) == [1, 2, 3, 256]
                assert not lost
        await asyncio.sleep(0.3)
        assert not engine.healthy and lost == [2] and len(spawned) == 2
        with pytest.raises(EngineDead, match=r"stopped too often: killed by SIGKILL.*; it is not restarted"):
            engine.submit([request("too late")])
    assert "killed by SIGKILL" in caplog.text


@pytest.mark.exhaustive  # tests/engine/process/test_ranks.py has the engine's side
@pytest.mark.parametrize("size", [2, 4])
async def test_an_engine_that_loses_a_rank_is_replaced(spawned: list[EngineLink], tmp_path: Path, size: int) -> None:
    """Who asks meanwhile is told which rank it was."""
    folder = write_checkpoint(tmp_path / "model", hidden=64, heads=4)
    settings: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4000, "num_threads": 1, "random_seed": 1}
    options = Options.from_kwargs(model=str(folder), tp_size=size, **settings).resolve()
    one = request("one", temperature=0.0, max_new_tokens=8, ignore_eos=True)
    async with running(spawned, options, EngineLink) as engine:
        expected = await text_of(engine, one)
        for number, what in (
            (signal.SIGKILL, "ended: killed by SIGKILL"),
            (signal.SIGSTOP, "hangs: nothing was heard"),
        ):
            waiting = asyncio.ensure_future(text_of(engine, request("long", ignore_eos=True, max_new_tokens=900)))
            await asyncio.sleep(0.3)
            pid = spawned[-1].process.pid
            ranks = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            ranks = [child for child in ranks if b"process.rank" in Path(f"/proc/{child}/cmdline").read_bytes()]
            begun = time.monotonic()
            os.kill(ranks[-1], number)
            with pytest.raises(EngineDead, match=f"rank {size - 1} of the engine {what}"):
                await asyncio.wait_for(waiting, 60)
            told = time.monotonic() - begun
            await until(lambda: engine.healthy, 120)
            print(
                f"{size} ranks, {number.name}: told after {told:.2f} s, served after {time.monotonic() - begun:.2f} s"
            )
            assert await text_of(engine, one) == expected


async def test_an_engine_that_dies_while_the_server_drains_is_not_restarted(caplog: pytest.LogCaptureFixture) -> None:
    engine = local(first := FakeEngine(burst=1), second := FakeEngine())
    engine.start()
    waiting = asyncio.ensure_future(text_of(engine, FOREVER("a")))
    await until(lambda: bool(first.running))
    engine.draining = True
    first.crash = RuntimeError("out of paper")
    with pytest.raises(EngineDead, match="out of paper; the server is shutting down"):
        await waiting
    await engine.stop()
    assert not second.closed and not second.requests and engine.link.engine is first  # type: ignore[attr-defined]
    assert "out of paper" in caplog.text and "restart" not in caplog.text


async def test_an_engine_that_cannot_be_restarted_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "DEATHS", 2)
    engine = local(first := FakeEngine())  # without a successor
    lost = asyncio.Event()
    engine.lost = lost.set
    engine.start()
    first.crash = RuntimeError("out of paper")
    first.wake()
    await asyncio.wait_for(lost.wait(), 30)
    with pytest.raises(EngineDead, match="it is not restarted"):
        engine.submit([request("a")])
    await engine.stop()


def test_errors_at_the_start_come_back_as_themselves() -> None:
    link = EngineLink(Options(device="cuda", model="/nowhere", log_level="critical"))
    with pytest.raises(Exception, match="nowhere") as info:
        link.wait_ready()
    assert not isinstance(info.value, EngineDead)
    link.close()
    assert link.process.returncode is not None
    broken = EngineLink(OPTIONS, "no_such_module")
    with pytest.raises(EngineDead, match="before it was ready: exit code 1"):
        broken.wait_ready()
    broken.close(0)


def test_the_engine_ends_when_the_server_is_gone() -> None:
    link = process(OPTIONS)
    link.wait_ready()
    link._conn.close()  # what the system does for a server that was killed
    assert link.process.wait(30) == 1
