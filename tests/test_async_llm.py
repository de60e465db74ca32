"""The Python API for asyncio: around the stand-in for the engine, and with an engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine, local

from draftwing import LLM, AsyncLLM, Completion, ConfigError, RequestError

ENDLESS = {"ignore_eos": True, "max_new_tokens": None}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Of every AsyncLLM."""
    engine = FakeEngine()
    opened = contextlib.nullcontext((local(engine), engine.tokenizer))
    monkeypatch.setattr("draftwing.server.run.opened", lambda options: opened)
    return engine


def test_generate_and_stream(engine: FakeEngine) -> None:
    chat = [{"role": "user", "content": "hi"}]

    async def main() -> None:
        async with AsyncLLM() as llm:
            assert (await llm.generate(chat)).text == "user:hi\n"
            done = await llm.generate("one two three", {"stop": "two"}, return_logprob=True, priority=3)
            assert (done.text, done.finish_reason) == ("one ", {"type": "stop", "matched": "two"})
            assert len(done.meta_info["output_token_logprobs"]) == len(done.token_ids)
            assert engine.requests[-1].priority == 3
            pieces = [piece async for piece in llm.stream("one two three", {"stop": "two"})]
            assert "".join(piece.text for piece in pieces) == done.text
            assert [token for piece in pieces for token in piece.token_ids] == done.token_ids
            assert pieces[-1].completion is not None and not any(piece.completion for piece in pieces[:-1])
            for prompt, params in (("", {}), (["a"], {}), ("a", {"n": 2}), ("a", {"regex": "("})):
                with pytest.raises(RequestError):
                    await llm.generate(prompt, params)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="async with"):
            await llm.generate("a")
        await llm.close()

    asyncio.run(main())
    with pytest.raises(ConfigError):
        AsyncLLM(dtpye="float32")


def test_what_is_given_up_is_aborted(engine: FakeEngine) -> None:
    async def main() -> None:
        async with AsyncLLM() as llm:
            pieces = llm.stream("abc", ENDLESS)
            assert (await anext(pieces)).text
            task = asyncio.create_task(llm.generate("xyz", ENDLESS))
            while len(engine.running) < 2:  # both at a time
                await asyncio.sleep(0.001)
            await pieces.aclose()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not engine.idle():
                await asyncio.sleep(0.001)
            assert set(engine.aborted) == {request.uid for request in engine.requests}
            assert (await llm.generate("abc")).text == "abc"

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_start_that_is_given_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    @contextlib.contextmanager
    def opened(options: object) -> Iterator[None]:
        began.set()
        assert go_on.wait(30)
        yield
        ended.set()

    monkeypatch.setattr("draftwing.server.run.opened", opened)

    async def main() -> None:
        task = asyncio.create_task(AsyncLLM().__aenter__())
        assert await asyncio.to_thread(began.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended.is_set()


@pytest.mark.slow
def test_same_answers_as_llm(model: str) -> None:
    """With the engine that a server has, requests at the same time."""
    options: dict[str, Any] = {"max_total_tokens": 2048, "speculative_algorithm": "NGRAM", "num_threads": 1}
    asked = [("abcabc", {"temperature": 0}), ("hello", {"temperature": 1, "seed": 5}), ("a", {"regex": "[ab]{8}"})]

    async def answers() -> list[Completion]:
        async with AsyncLLM(model, **options) as llm:
            return await asyncio.gather(*(llm.generate(prompt, params) for prompt, params in asked))  # type: ignore

    found = asyncio.run(answers())
    with LLM(model, **options) as llm:
        expected = [llm.generate(prompt, params)[0] for prompt, params in asked]  # type: ignore[arg-type]
        streamed = [list(llm.stream(prompt, params))[-1].completion for prompt, params in asked[:2]]  # type: ignore[arg-type]
        free = llm.engine.stats()["free_tokens"] + llm.engine.stats()["cached_tokens"]
        pieces = llm.stream("abcabc", ENDLESS)
        assert next(pieces) and not llm.engine.idle()
        pieces.close()
        stats = llm.engine.stats()
        assert llm.engine.idle() and stats["free_tokens"] + stats["cached_tokens"] == free
    assert [one and (one.text, one.token_ids) for one in streamed] == [
        (one.text, one.token_ids) for one in expected[:2]
    ]
    assert [(one.text, one.token_ids) for one in found[:2]] == [(one.text, one.token_ids) for one in expected[:2]]
    assert len(found[2].text) == 8 and set(found[2].text) <= {*"ab"}
