"""A front with real servers of tiny models: what becomes of requests when processes end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_process import OPTIONS, SECONDS, Process, wait_for, write_models

from draftwing import LLM
from draftwing.server.router.memory import taken

pytestmark = pytest.mark.slow

PROMPTS = [f"prompt {i} of several" for i in range(6)]
TOKENS = 40
ENDS = "until its end "
# Of each model, by prompt: `TOKENS` tokens, and behind `ENDS` and the prompt what it says if it may end.
Texts = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Texts]:
    """A folder, and what its models answer when each is alone."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    write_models(folder)
    for name in ("qwen2", "llama", "qwen3"):
        with LLM(str(folder / name), **OPTIONS) as llm:
            found[name] = {}
            for kind, ignore_eos in (("", True), (ENDS, False)):
                params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": ignore_eos}
                answers: Any = llm.generate(PROMPTS, params)
                found[name] |= {kind + prompt: answer.text for prompt, answer in zip(PROMPTS, answers, strict=True)}
    assert all(len({texts[prompt] for texts in found.values()}) == 3 for prompt in PROMPTS), "they differ"
    return folder, found


@pytest.fixture(scope="module")
def front(expected: tuple[Path, Texts]) -> Iterator[Process]:
    server = Process(expected[0], 0, "--drain-timeout=60")
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


def body(model: str, prompt: str, tokens: int = TOKENS, stream: bool = False) -> dict[str, Any]:
    more = {"temperature": 0, "ignore_eos": True, "stream": stream}
    return {"model": model, "prompt": prompt, "max_tokens": tokens, **more}


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream. Raises EOFError where it has no last one."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
    raise EOFError


def wake_ups(pid: int) -> int:
    """Returns how often the threads of a process have waited for something."""
    states = [state.read_text() for state in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(state.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for state in states)


def test_a_front_without_requests_hardly_wakes_up(tmp_path: Path) -> None:
    server = Process(tmp_path, 0)
    try:
        assert httpx.get(f"{server.url}/health").status_code == 200
        time.sleep(1)  # for what its start has left
        before = wake_ups(server.process.pid)
        time.sleep(5)
        assert wake_ups(server.process.pid) - before <= 10, "a second: one for the date, and as many to spare"
        date = httpx.get(f"{server.url}/health").headers["date"]
        assert abs(parsedate_to_datetime(date).timestamp() - time.time()) < SECONDS
    finally:
        assert server.end() == 0


async def test_a_model_that_dies_takes_its_own_requests_alone(front: Process, expected: tuple[Path, Texts]) -> None:
    async with httpx.AsyncClient(base_url=front.url, timeout=SECONDS) as client:

        async def whole(model: str) -> str:
            found = (await client.post("/v1/completions", json=body(model, PROMPTS[0]))).json()
            assert found["model"] == model
            return str(found["choices"][0]["text"])

        async def running(model: str) -> int:
            return int((await client.get(f"/v1/loads?model={model}")).json()["loads"][0]["num_running_reqs"])

        assert await asyncio.gather(whole("llama"), whole("qwen3")) == [
            expected[1][model][PROMPTS[0]] for model in ("llama", "qwen3")
        ]
        servers = front.below("router.child")
        assert len(servers) == 2
        streams = [client.stream("POST", "/v1/completions", json=body(m, "x", 900, True)) for m in ("llama", "qwen3")]
        async with streams[0] as first, streams[1] as second:
            one, two = events(first), events(second)
            await asyncio.gather(anext(one), anext(two))
            os.kill(servers[0], signal.SIGKILL)
            seen = [[event async for event in stream] for stream in (one, two)]
        failed = ["error" in every[-1] for every in seen]
        assert sorted(failed) == [False, True] and "killed by SIGKILL" in json.dumps(seen[failed.index(True)][-1])
        assert [await whole(model) for model in ("llama", "qwen3")] == [
            expected[1][model][PROMPTS[0]] for model in ("llama", "qwen3")
        ]
        async with client.stream("POST", "/v1/completions", json=body("llama", "x", 900, True)) as left:
            await anext(events(left))
        async with asyncio.timeout(SECONDS):
            while await running("llama"):
                await asyncio.sleep(0.05)


@pytest.mark.exhaustive
async def test_models_sleep_and_wake_up(front: Process, expected: tuple[Path, Texts]) -> None:
    """Whatever is in flight is answered; one that is killed is started anew."""
    async with httpx.AsyncClient(base_url=front.url, timeout=SECONDS) as client:

        async def text(model: str) -> str:
            found = (await client.post("/v1/completions", json=body(model, PROMPTS[0]))).json()
            return str(found["choices"][0]["text"])

        async def state() -> str:
            cards = (await client.get("/v1/models")).json()["data"]
            return str(next(one["status"]["value"] for one in cards if one["id"] == "llama"))

        right = expected[1]["llama"][PROMPTS[0]]
        for turn in range(3):
            asked = asyncio.gather(*(text("llama") for _ in range(4)))
            assert await text("llama") == right and await state() == "loaded"
            assert (await client.post("/sleep?model=llama")).status_code == 200
            assert await asked == [right] * 4
            if await state() == "sleeping":
                assert (await client.get("/metrics?model=llama")).status_code == 200 and await state() == "sleeping"
            (server,) = front.below("router.child")
            if turn == 1:
                os.kill(server, signal.SIGKILL)
        assert await text("llama") == right


@pytest.mark.exhaustive
async def test_the_page_has_what_it_reads_of_a_model(front: Process) -> None:
    async with httpx.AsyncClient(base_url=front.url, timeout=SECONDS) as client:
        assert "main.js" in (await client.get("/")).text
        loaded = await client.post("/api/generate?model=qwen3", json={"model": "qwen3", "stream": False})
        assert loaded.json()["done_reason"] == "load"
        facts = (await client.get("/ui/info?model=qwen3")).json()
        assert facts["model"] == "qwen3" and facts["architecture"] == "Qwen3ForCausalLM"
        one = next(one for one in (await client.get("/ui/info")).json()["models"] if one["name"] == "qwen3")
        assert one["state"] == "loaded" and one["memory"] > one["files"] > 0
        async with asyncio.timeout(SECONDS):  # its engine takes a quarter of a GiB for a moment
            while not one["memory"] <= one["at_most"] < 1.3 * one["memory"]:
                await asyncio.sleep(1.1)
                one = next(one for one in (await client.get("/ui/info")).json()["models"] if one["name"] == "qwen3")
        assert (await client.get("/api/ps")).json()["models"][0]["size"] < 1.1 * one["at_most"]
        asked = {"model": "qwen3", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
        async with client.stream("GET", "/ui/engine?model=qwen3") as watched:
            snapshots = events(watched)
            assert (await anext(snapshots))["engine"] in ("up", "busy")
            assert (await client.post("/v1/chat/completions?model=qwen3", json=asked)).status_code == 200
            assert (await client.post("/models/unload", json={"model": "qwen3"})).status_code == 200


async def test_the_front_ends_in_order(front: Process, expected: tuple[Path, Texts]) -> None:
    """It answers what it was asked; killed, it leaves no process behind."""
    async with httpx.AsyncClient(base_url=front.url, timeout=SECONDS) as client:
        async with client.stream("POST", "/v1/completions", json=body("qwen2", "x", 900, True)) as response:
            stream = events(response)
            await anext(stream)
            below = front.below()
            front.process.send_signal(signal.SIGTERM)
            seen = [event async for event in stream]
        assert "error" not in seen[-1] and seen[-1]["choices"][0]["finish_reason"] == "length"
    assert front.process.wait(SECONDS) == 0
    wait_for(below)
    again = Process(expected[0], 0)
    httpx.post(f"{again.url}/models/load", json={"model": "qwen2"}, timeout=SECONDS)
    below = again.below()
    assert len(below) >= 2
    again.end(signal.SIGKILL)
    wait_for(below)


def judged(right: bool, *about: object) -> str:
    return "right" if right else f"wrong: {about}"


class Load:
    """Random requests, and kills of the processes that answer them."""

    def __init__(self, folder: Path, texts: Texts, budget: float) -> None:
        self.folder, self.texts, self.budget = folder, texts, budget
        self.rng = random.Random(11)
        self.server = Process(folder, 0, f"--models-memory={budget}", "--keep-alive=20")
        self.port = int(self.server.url.rpartition(":")[2])
        self.outcomes: list[str] = []
        self.peak = 0
        self.kills = dict.fromkeys(("front", "child", "worker"), 0)

    async def one(self, client: httpx.AsyncClient, when: float) -> None:
        await asyncio.sleep(when)
        name, prompt = self.rng.choice([*self.texts]), self.rng.choice(PROMPTS)
        ask = self.rng.choice([self.openai, self.ollama])
        while True:
            kind = ENDS if ask == self.ollama else ""  # whose API cannot ignore the end
            try:
                self.outcomes.append(await ask(client, name, prompt, self.texts[name][kind + prompt]))
                return
            except httpx.ConnectError:  # the front is down; a client sees that
                await asyncio.sleep(0.5)
            except (httpx.HTTPError, EOFError) as error:
                self.outcomes.append("silent" if isinstance(error, EOFError) else "broken connection")
                return

    async def openai(self, client: httpx.AsyncClient, name: str, prompt: str, text: str) -> str:
        url, given = f"http://127.0.0.1:{self.port}/v1/completions", body(name, prompt, stream=self.rng.random() < 0.5)
        if not given["stream"]:
            response = await client.post(url, json=given)
            if response.status_code != 200:
                return "error"
            found = response.json()
            return judged((found["model"], found["choices"][0]["text"]) == (name, text), name, text, found)
        pieces = []
        async with client.stream("POST", url, json=given) as response:
            if response.status_code != 200:
                return "error"
            async for event in events(response):
                if "error" in event:
                    return "error"
                pieces += [choice["text"] for choice in event["choices"]]
                if event["model"] != name:
                    return f"wrong: {event}"
        return judged("".join(pieces) == text, name, text, pieces)

    async def ollama(self, client: httpx.AsyncClient, name: str, prompt: str, text: str) -> str:
        kept = self.rng.choice([None, "1s", "30s"])
        given = {"model": name, "prompt": prompt, "raw": True, "stream": False, "keep_alive": kept}
        options = {"temperature": 0, "num_predict": TOKENS}
        response = await client.post(f"http://127.0.0.1:{self.port}/api/generate", json={**given, "options": options})
        if response.status_code != 200:
            return "error"
        found = response.json()
        return judged((found["model"], found["response"]) == (name, text), name, text, found)

    async def kill(self) -> None:
        while True:
            answered = self.outcomes.count("right")
            await asyncio.sleep(self.rng.uniform(5, 20))
            while self.outcomes.count("right") == answered:  # on a busy machine no start would ever end
                await asyncio.sleep(0.5)
            (what,) = self.rng.choices([*self.kills], (1, 4, 3))
            self.kills[what] += 1
            if what == "front":
                below = self.server.below()
                self.server.end(signal.SIGKILL)
                wait_for(below)
                self.server = Process(self.folder, self.port, f"--models-memory={self.budget}", "--keep-alive=20")
            else:
                for pid in self.rng.sample(found := self.server.below(what), min(1, len(found))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, await asyncio.to_thread(lambda: taken(self.server.process.pid)))
            await asyncio.sleep(1)


@pytest.mark.exhaustive
async def test_200_random_requests_and_kills(expected: tuple[Path, Texts]) -> None:
    """Two of three models have room at once: models make room for others, too."""
    load = Load(*expected, budget=1.1)
    async with httpx.AsyncClient(timeout=2 * SECONDS, limits=httpx.Limits(max_connections=300)) as client:
        beside = [asyncio.create_task(work) for work in (load.kill(), load.watch())]
        await asyncio.gather(*(load.one(client, load.rng.uniform(0, 150)) for _ in range(200)))
        for task in beside:
            task.cancel()
        ends = await asyncio.gather(*beside, return_exceptions=True)
    load.server.end()
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    counts = {outcome: load.outcomes.count(outcome) for outcome in set(load.outcomes)}
    assert len(load.outcomes) == 200 and counts.keys() <= {"right", "error", "broken connection"}, counts
    assert counts["right"] >= 100, counts
    assert load.peak < 1.1e9 + 0.1e9, "the front and its models"
    print(counts, load.kills, load.peak)
