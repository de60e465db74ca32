"""What the server lists of adapters is what the engine has, whatever is asked for at once, and by whom."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, local
from scripted import serving, wait_until

from draftwing.config.adapters import AdapterCard
from draftwing.errors import ConfigError, DraftwingError, NotFound

LOAD, UNLOAD, SCALES = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"


class Adapting(FakeEngine):
    """Has names of adapters, and takes its time for each change."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        if folder is not None:
            self.options = dataclasses.replace(self.options, lora_dir=str(folder))
            self.info = dataclasses.replace(
                self.info, options=dataclasses.replace(self.info.options, lora_dir=str(folder))
            )
        self.adapters: dict[str, AdapterCard] = {}
        self.entered, self.goes_on = threading.Semaphore(0), threading.Event()
        self.goes_on.set()
        self.draw = random.Random(1)

    def load_adapter(self, name: str, path: Path, replace: bool = False) -> AdapterCard:
        self._take_time()
        if name in self.adapters and not replace:
            raise ConfigError("there is one")
        self.adapters[name] = AdapterCard(name, str(path), str(path), 4, "")
        return self.adapters[name]

    def unload_adapter(self, name: str) -> None:
        self._take_time()
        if self.adapters.pop(name, None) is None:
            raise NotFound("there is none")

    def _take_time(self) -> None:
        self.entered.release()
        self.goes_on.wait(30)
        time.sleep(self.draw.choice((0, 0, 0.003)))


@pytest.mark.parametrize("seed", range(12))
async def test_the_list_is_what_the_engine_has(seed: int) -> None:
    draw, engine = random.Random(seed), Adapting()
    bridge = local(engine)
    bridge.start()

    async def change(number: int) -> None:
        name = draw.choice("ab")
        try:
            if draw.random() < 0.5:
                await bridge.load_adapter(name, Path(f"/{number}"), draw.random() < 0.5)
            else:
                await bridge.unload_adapter(name)
        except DraftwingError:
            pass

    for _ in range(8):
        engine.goes_on.clear()
        changes = [asyncio.ensure_future(change(number)) for number in range(draw.randint(1, 6))]
        await asyncio.sleep(0.002)
        engine.goes_on.set()
        await asyncio.gather(*changes)
        assert bridge.adapters == engine.adapters
    await bridge.stop()


@pytest.mark.parametrize("folder", [None, Path("/head")])
@pytest.mark.parametrize(("adapter", "asleep"), [("digest", True), ("", False)])
async def test_a_head_that_an_adapter_has_learnt_wakes_nobody(folder: Path | None, adapter: str, asleep: bool) -> None:
    """An adapter's is taken with its next request; the model's is copied at once."""
    engine = Adapting()
    bridge = local(engine)
    bridge.start()
    await bridge.sleep()
    assert engine.sleeping and await bridge.swap_draft(folder, adapter) is None
    assert engine.sleeping is asleep
    await bridge.stop()


def names(url: str) -> set[str]:
    return {model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]} - {"echo"}


def post(url: str, path: str, **body: object) -> int:
    return httpx.post(url + path, json=body).status_code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_an_unload_while_it_is_loaded(folder: Path) -> None:
    engine = Adapting(folder)
    with serving(engine) as url:
        for again in range(3):
            engine.goes_on.clear()
            loading = threading.Thread(target=post, args=(url, LOAD), kwargs={"lora_name": "x", "lora_path": "a"})
            loading.start()
            assert engine.entered.acquire(timeout=10)
            unloading = threading.Thread(target=post, args=(url, UNLOAD), kwargs={"lora_name": "x"})
            unloading.start()
            time.sleep(0.05 * again)
            engine.goes_on.set()
            loading.join()
            unloading.join()
            assert names(url) == set(engine.adapters)
            post(url, UNLOAD, lora_name="x")
            while engine.entered.acquire(blocking=False):
                pass


def test_a_client_that_goes_away_while_it_is_loaded(folder: Path) -> None:
    engine = Adapting(folder)
    engine.goes_on.clear()
    with serving(engine) as url:
        body = json.dumps({"lora_name": "x", "lora_path": "a"})
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as client:
            head = f"POST {LOAD} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            assert engine.entered.acquire(timeout=10)
        time.sleep(0.1)  # in which the server notices
        engine.goes_on.set()
        wait_until(lambda: names(url) == set(engine.adapters) == {"x"})


def test_an_adapter_that_is_loaded_anew_has_no_scale_of_the_one_before(folder: Path) -> None:
    engine = Adapting(folder)

    def scales() -> dict[str, float]:
        return {one["name"]: one["scale"] for one in httpx.get(url + SCALES).json()}

    with serving(engine) as url:
        for scale in (0.5, 1.0, -2.0):
            assert post(url, LOAD, lora_name="x", lora_path="a") == post(url, LOAD, lora_name="y", lora_path="b") == 200
            numbers = {one["name"]: one["id"] for one in httpx.get(url + SCALES).json()}
            both = [{"id": numbers["x"], "scale": scale}, {"id": numbers["y"], "scale": 0.25}]
            assert httpx.post(url + SCALES, json=both).status_code == 200
            assert post(url, LOAD, lora_name="y", lora_path="b", load_inplace=True) == 200
            assert scales() == {"x": scale, "y": 0.25}
            assert post(url, UNLOAD, lora_name="x") == post(url, LOAD, lora_name="x", lora_path="b") == 200
            assert scales() == {"x": 0.0, "y": 0.25}
            httpx.post(f"{url}/v1/completions", json={"model": "echo", "prompt": "a", "max_tokens": 1})
            assert engine.requests[-1].adapters == (("y", 0.25),)
            assert post(url, UNLOAD, lora_name="x") == post(url, UNLOAD, lora_name="y") == 200
