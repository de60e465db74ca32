"""/api/pull and /api/delete: a hub on this machine, its cache, and a folder of models."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fake_hub
import httpx
import pytest
from fake_hub import REPO, FakeHub
from socket_server import SocketServer

from draftwing.config.model_list import ServedModel
from draftwing.config.options import Options
from draftwing.models import hub_files
from draftwing.models.hub import resolve_model
from draftwing.server.router.app import create_front
from draftwing.server.router.memory import Forecast
from draftwing.server.router.models import Models
from draftwing.server.router.run import further

pytestmark = pytest.mark.slow  # a download is a process that imports torch
WEIGHTS = bytes(range(256)) * 4000
FILES = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}', "model.safetensors": WEIGHTS}
KEYS = {"api_key": "user", "admin_api_key": "chief"}
CHIEF = {"authorization": "Bearer chief"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub.running(FILES) as server:
        cache = tmp_path / "cache"
        fake_hub.connect(monkeypatch, server.url, cache)
        for name, value in {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": cache, "XDG_CACHE_HOME": tmp_path}.items():
            monkeypatch.setenv(name, str(value))
        yield server


@asynccontextmanager
async def front(listed: str | None = None, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Models]]:
    """A client of a front whose models' servers answer with what they were asked."""
    SocketServer.every.clear()
    chosen = Options(device="cpu", disable_ui=True, **options)
    named = [] if listed is None else [ServedModel(("mine",), 1e9, {"model": listed, "device": "cpu"})]
    models = Models(
        named, further=lambda known: further({"device": "cpu"}, chosen, known), start=SocketServer,  # type: ignore[arg-type]
        forecast=lambda one: Forecast(1, 0, 0), taken=lambda pid: 0,
    )  # fmt: skip
    transport = httpx.ASGITransport(create_front(models, chosen))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
        yield client, models
    await models.close()


async def names(client: httpx.AsyncClient) -> list[str]:
    return [one["name"] for one in (await client.get("/api/tags")).json()["models"]]


async def delete(client: httpx.AsyncClient, name: str, **more: Any) -> httpx.Response:
    return await client.request("DELETE", "/api/delete", json={"model": name}, **more)


async def test_a_model_is_pulled_served_and_deleted(hub: FakeHub, tmp_path: Path) -> None:
    async with front(models_cache=True) as (client, _):
        assert await names(client) == [] and (await delete(client, REPO)).status_code == 404
        got = await client.post("/api/pull", json={"model": REPO})
        lines = [json.loads(one) for one in got.text.splitlines()]
        assert got.headers["content-type"] == "application/x-ndjson"
        assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}
        sizes = [(one["total"], one["completed"]) for one in lines if "total" in one]
        assert sizes[-1] == (len(WEIGHTS), len(WEIGHTS)) and sizes == sorted(sizes)
        assert await names(client) == [REPO]
        place = hub_files.cached(REPO, None)
        assert place is not None and (place / "model.safetensors").read_bytes() == WEIGHTS
        assert (await client.post("/v1/any", json={"model": REPO})).json()["name"] == REPO
        assert (await client.post("/api/pull", json={"name": REPO, "stream": False})).json() == {"status": "success"}

        slow = asyncio.create_task(client.post("/v1/stream", json={"model": REPO}))
        while SocketServer.every[0].requests < 2:
            await asyncio.sleep(0.01)
        gone = asyncio.create_task(delete(client, REPO))
        async with asyncio.timeout(60):
            while (await client.post("/v1/any", json={"model": REPO})).status_code != 404:
                await asyncio.sleep(0.01)
        assert place.exists() and not gone.done(), "a request in flight keeps its model"
        SocketServer.every[0].go.set()
        assert (await slow).status_code == 200 and (await gone).status_code == 200
        assert not place.exists() and await names(client) == []
        assert (await client.post("/v1/any", json={"model": REPO})).status_code == 404
        assert len(SocketServer.every) == 1, "it was not started again"


async def test_what_is_not_pulled(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    (tmp_path / "org" / "here" / "config.json").write_text("{}")
    async with front(models_cache=True) as (client, _):
        for name in ("../x", "/etc/passwd", "org/..", "org/../x", "~/x", ".", "model", "", "org/x:../../y", 1, None):
            got = await client.post("/api/pull", json={"model": name})
            assert got.status_code == 400 and isinstance(got.json()["error"], str), name
        for name in ("org/other", "org/here"):  # which the hub does not have, and a folder that is none of it
            got = await client.post("/api/pull", json={"model": name})
            assert "no hub model" in json.loads(got.text.splitlines()[-1])["error"]
        got = await client.post("/api/pull", json={"model": "org/other", "stream": False})
        assert got.status_code == 400 and "no hub model" in got.json()["error"]
    async with front(models_dir=str(tmp_path)) as (client, _):
        assert "--models-cache" in (await client.post("/api/pull", json={"model": REPO})).json()["error"]
    assert hub.asked == []


async def test_they_are_for_operators(hub: FakeHub) -> None:
    async with front(models_cache=True, **KEYS) as (client, _):
        for headers, status in (({}, 401), ({"authorization": "Bearer user"}, 403), (CHIEF, 404)):
            assert (await delete(client, REPO, headers=headers)).status_code == status
            got = await client.post("/api/pull", json={"model": "/x"}, headers=headers)
            assert got.status_code == (400 if status == 404 else status)


@pytest.mark.exhaustive
async def test_a_pull_that_is_left_goes_on_later(hub: FakeHub, tmp_path: Path) -> None:
    hub.pause = len(WEIGHTS) // 2
    async with front(models_cache=True) as (client, _):
        pull = asyncio.create_task(client.post("/api/pull", json={"model": REPO}))
        async with asyncio.timeout(120):
            while not list(tmp_path.glob("cache/*/blobs/*.part")) or not hub.paused.is_set():
                await asyncio.sleep(0.05)
        assert await names(client) == [], "it is no model before it is whole"
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        hub.pause = None
        hub.go.set()
        assert (await client.post("/api/pull", json={"model": REPO, "stream": False})).status_code == 200
        assert await names(client) == [REPO]


def write(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


async def test_models_of_a_folder_are_deleted_there_alone(tmp_path: Path) -> None:
    folder, other = tmp_path / "models", tmp_path / "other"
    write(
        folder, "one.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "hf/config.json", "hf/w.safetensors"
    )
    write(folder, "two/x.gguf", "two/y.gguf", "alone/z.gguf", "mine/config.json")
    write(other, "linked/config.json", "linked/w.safetensors", "file.gguf", "sub/s.gguf", "sub/t.gguf")
    (folder / "linked").symlink_to(other / "linked")
    (folder / "file.gguf").symlink_to(other / "file.gguf")
    (folder / "sub").symlink_to(other / "sub")
    (folder / "hf" / "out").symlink_to(other)
    async with front(str(folder / "mine"), models_dir=str(folder)) as (client, _):
        for name in ("one", "big", "hf", "two/x", "alone", "linked", "file"):
            assert (await delete(client, name)).status_code == 200, name
            assert (await delete(client, name)).status_code == 404
        for name in ("mine", "sub/s"):
            assert (await delete(client, name)).status_code == 400
        for name in ("../other/file", str(other / "file.gguf"), ".", "hf/out"):
            assert (await delete(client, name)).status_code == 404
        assert sorted(await names(client)) == ["mine", "sub/s", "sub/t", "two"]
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    assert left == {
        "models/two/y.gguf", "models/mine/config.json", "other/linked/config.json", "other/linked/w.safetensors",
        "other/file.gguf", "other/sub/s.gguf", "other/sub/t.gguf",
    }  # fmt: skip
    assert not any(name.startswith(".deleted") for name in os.listdir(folder))


def test_a_disk_without_room_is_said_before_anything_large_is_fetched(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": len(WEIGHTS) - 1})
    monkeypatch.setattr(hub_files.shutil, "disk_usage", lambda place: usage)
    with pytest.raises(hub_files.CheckpointError, match="are free"):
        resolve_model(REPO)
    assert not any(name == "model.safetensors" for name, _ in hub.asked)
    usage.free += 1  # type: ignore[attr-defined]
    resolve_model(REPO)
