"""Requests through the front to servers that are sockets of this process."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from socket_server import PIECES, SocketServer

from draftwing.config.model_list import ServedModel
from draftwing.config.options import Options
from draftwing.server.router import proxy
from draftwing.server.router.app import Front, create_front
from draftwing.server.router.memory import Forecast
from draftwing.server.router.models import Models
from draftwing.server.signals import Hangup
from draftwing.server.uvicorn_server import server_of


@asynccontextmanager
async def front(default: str | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a front that listens at a port; without the page unless options say otherwise."""
    SocketServer.every.clear()
    chosen = Options(**{"disable_ui": True, **options}, port=0, log_level="critical", drain_timeout=0.1)
    own = {"device": "cpu", "load_timeout": chosen.load_timeout}
    served = [ServedModel((name, f"{name}-alias"), 1e9, {"model": name, **own}) for name in "ab"]
    models = Models(
        served,
        start=SocketServer,
        forecast=lambda one: Forecast(1, 0, 0),
        taken=lambda pid: 0,
        most=chosen.models_max,  # type: ignore[arg-type]
    )
    app = create_front(models, chosen, default)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = server_of(app, chosen, Front(models), sock.getsockname()[1], Hangup(), app.state.reload_keys)
        started = asyncio.Event()
        server.ready = started.set
        task = asyncio.create_task(server.serve(sockets=[sock]))
        await started.wait()
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=20) as client:
                yield client
        finally:
            server.should_exit = True
            await task


async def test_a_request_reaches_the_model_that_it_names_and_no_other() -> None:
    async with front() as client:
        for name, owner in (("a", "a"), ("b", "b"), ("a-alias", "a"), ("b:latest", "b")):
            body = json.dumps({"model": name, "x": "é"})
            got = await client.post("/v1/any?y=1", content=body, headers={"x-mine": "8", "authorization": "Bearer k"})
            said = got.json()
            assert (got.status_code, got.headers["x-own"], said["name"]) == (201, "7", owner)
            assert (said["method"], said["target"], said["body"]) == ("POST", "/v1/any?y=1", body)
            assert said["headers"]["x-mine"] == "8" and said["headers"]["authorization"] == "Bearer k"
        marked = await client.post("/v1/any", content='\ufeff{"model": "b"}')
        assert (marked.status_code, marked.json()["name"]) == (201, "b")
        got = await client.get("/metrics?model=a")
        assert got.json()["target"] == "/metrics?model=a"
        assert (await client.head("/metrics?model=a")).content == b""


async def test_a_batch_reaches_the_model_that_its_lines_name(tmp_path: Path) -> None:
    async with front(batches_dir=str(tmp_path)) as client:
        url, bodies = "/v1/completions", {str(i): {"model": "b", "x": f"é{i}"} for i in range(9)}
        lines = [{"custom_id": id, "method": "POST", "url": url, "body": body} for id, body in bodies.items()]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        sent = await client.post("/v1/files", files={"file": ("in", data)}, data={"purpose": "batch"})
        body = {"input_file_id": sent.json()["id"], "endpoint": url, "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body)).json()
        while batch["status"] != "completed":
            assert batch["status"] != "failed"
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        content = await client.get(f"/v1/files/{batch['output_file_id']}/content")
        results = {one["custom_id"]: one["response"] for one in map(json.loads, content.text.splitlines())}
        assert results.keys() == bodies.keys()
        for id, found in results.items():
            said = found["body"]
            assert found["status_code"] == 201 and said["name"] == "b" and json.loads(said["body"]) == bodies[id]
            assert said["headers"]["x-draftwing-priority"] == str(-(2**31))


async def test_a_front_without_a_folder_for_batches_says_what_to_set() -> None:
    async with front("a") as client:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/x")):
            got = await client.request(method, path)
            assert got.status_code == 404 and "--batches-dir DIR" in got.text
        assert not SocketServer.every


async def test_names_that_nobody_has_and_bodies_without_one() -> None:
    async with front() as client:
        for path, field in (("/v1/chat/completions", "error"), ("/v1/messages", "error"), ("/api/chat", "error")):
            got = await client.post(path, json={"model": "x"})
            assert got.status_code == 404 and "this server has 'a', 'b'" in json.dumps(got.json()[field])
        for content in (b"", b"[1]", b"{", b'{"model": 1}', b'{"model": ["a"]}'):
            got = await client.post("/v1/completions", content=content)
            assert got.status_code == 400, content
        assert (await client.post("/v1/completions", json={})).status_code == 404
        assert (await client.get("/metrics?model=a")).status_code == 400, "a look loads nothing"
        assert not SocketServer.every
    async with front(default="b") as client:
        assert (await client.post("/v1/completions", json={})).json()["name"] == "b"


async def test_a_stream_comes_piece_by_piece_and_ends_with_its_client() -> None:
    async with front() as client:
        async with client.stream("POST", "/v1/whole/stream", json={"model": "a"}) as response:
            pieces = response.aiter_bytes()
            assert await anext(pieces) == PIECES[0], "while the server has not gone on"
            SocketServer.every[0].go.set()
            assert b"".join([piece async for piece in pieces]) == PIECES[1]
        SocketServer.every[0].go.clear()
        async with client.stream("POST", "/v1/whole/stream", json={"model": "a"}) as response:
            assert await anext(response.aiter_bytes()) == PIECES[0]
        await asyncio.wait_for(SocketServer.every[0].left.wait(), 10)


async def test_a_request_that_waited_for_its_model_is_told_so() -> None:
    async with front(models_max=1, load_timeout=0.1) as client:
        async with client.stream("POST", "/v1/whole/stream", json={"model": "a"}) as response:
            pieces = response.aiter_bytes()
            assert await anext(pieces) == PIECES[0]
            for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/embeddings", "/models/load"):
                got = await client.post(path, json={"model": "b"})
                assert (
                    got.status_code == 503 and "'b' was not loaded within 0.1 s (--load-timeout): it waits" in got.text
                )
                assert got.headers["retry-after"] == "1" and got.json()["error"], "so a batch asks again"
            SocketServer.every[0].go.set()
        assert (await client.post("/v1/any", json={"model": "b"})).json()["name"] == "b"


@pytest.mark.parametrize("path", ["/v1/any", pytest.param("/models/load", marks=pytest.mark.exhaustive)])
async def test_who_leaves_before_a_model_is_loaded_is_forgotten(path: str) -> None:
    async with front(models_max=1, disable_ui=False) as client:

        async def states() -> list[tuple[str, int]]:
            return [(one["state"], one["waiting"]) for one in (await client.get("/ui/info")).json()["models"]]

        async with client.stream("POST", "/v1/whole/stream", json={"model": "a"}) as response:
            pieces = response.aiter_bytes()
            assert await anext(pieces) == PIECES[0]
            leaving = asyncio.create_task(client.post(path, json={"model": "b"}))
            async with asyncio.timeout(10):
                while await states() != [("unloading", 0), ("loading", 1)]:
                    await asyncio.sleep(0.01)
                leaving.cancel()
                while await states() != [("loaded", 0), ("unloaded", 0)]:
                    await asyncio.sleep(0.01)
            assert (await client.post("/v1/any", json={"model": "a"})).json()["name"] == "a", "it need not end first"


async def test_an_answer_that_is_kept_goes_on_without_its_client_and_keeps_its_model() -> None:
    async with front(disable_ui=False) as client:

        async def in_flight() -> int:
            return int((await client.get("/ui/info")).json()["models"][0]["requests"])

        kept = {"x-draftwing-keep": "0123456789abcdef"}
        async with client.stream("POST", "/v1/whole/stream", json={"model": "a"}, headers=kept) as response:
            assert await anext(response.aiter_bytes()) == PIECES[0]
        server = SocketServer.every[0]
        await asyncio.sleep(0.2)
        assert not server.left.is_set() and await in_flight() == 1
        server.go.set()
        async with asyncio.timeout(10):
            while await in_flight():
                await asyncio.sleep(0.01)
        assert not server.left.is_set(), "it was read to its end"


async def test_an_answer_that_nobody_reads_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "ALONE_SECONDS", 0.1)
    async with front() as client:
        kept = {"x-draftwing-keep": "0123456789abcdef"}
        async with client.stream("POST", "/v1/whole/stream", json={"model": "a"}, headers=kept) as response:
            pieces = response.aiter_bytes()
            assert await anext(pieces) == PIECES[0]
            await asyncio.sleep(0.2)
            assert not SocketServer.every[0].left.is_set(), "its client is there"
        await asyncio.wait_for(SocketServer.every[0].left.wait(), 10)


async def test_a_server_that_ends_is_an_error_for_its_requests() -> None:
    async with front() as client:
        got = await client.post("/dies", json={"model": "a"})
        assert got.status_code == 503 and "the model's process ended: killed by a test" in got.text
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/breaks", json={"model": "a"})
        SocketServer.every[0].go.set()
        got = await client.post("/v1/chat/completions/stream", json={"model": "a"})
        events = got.text.removeprefix(b"".join(PIECES).decode()).split("\n\n")
        assert "killed by a test" in json.loads(events[0].removeprefix("data: "))["error"]["message"]
        assert events[1] == "data: [DONE]"


async def test_lists_and_loading_by_hand() -> None:
    async with front() as client:

        async def states() -> dict[str, str]:
            return {one["id"]: one["status"]["value"] for one in (await client.get("/v1/models")).json()["data"]}

        assert await states() == {"a": "unloaded", "b": "unloaded"}
        assert (await client.post("/models/load", json={"model": "b"})).json() == {"success": True}
        assert await states() == {"a": "unloaded", "b": "loaded"}
        assert (await client.get("/v1/models/b-alias")).json()["aliases"] == ["b-alias"]
        assert (await client.post("/models/unload", json={"model": "b"})).json() == {"success": True}
        assert await states() == {"a": "unloaded", "b": "unloaded"}
        assert (await client.post("/models/unload", json={"model": "b"})).status_code == 400
        assert [one["name"] for one in (await client.get("/api/tags")).json()["models"]] == ["a", "b"]


async def test_sleep_by_hand() -> None:
    """By name behind a question mark or in the body, as the state says; who looks at it wakes nobody up."""
    async with front(default="b", api_key="user", admin_api_key="chief") as client:
        user, chief = ({"authorization": f"Bearer {key}"} for key in ("user", "chief"))

        async def says(method: str, path: str, status: int = 200, key: dict[str, str] = chief, **more: Any) -> Any:
            got = await client.request(method, path, headers=key, **more)
            assert got.status_code == status, got.text
            return got.json() if got.content else None

        assert "not loaded" in (await says("POST", "/sleep?model=a", 400))["error"]["message"]
        assert await says("GET", "/is_sleeping?model=a") == {"is_sleeping": False}
        await says("POST", "/models/load", json={"model": "a"})
        await says("POST", "/sleep?model=a", 403, user)
        await says("POST", "/sleep?model=a&level=2", 400)
        await says("POST", "/sleep?model=a")
        (server,) = SocketServer.every
        assert server.asleep and await says("GET", "/is_sleeping?model=a") == {"is_sleeping": True}
        cards = (await says("GET", "/v1/models"))["data"]
        assert [one["status"]["value"] for one in cards] == ["sleeping", "unloaded"]
        (card,) = (await says("GET", "/api/ps"))["models"]
        assert (card["name"], card["state"], card["size_vram"]) == ("a", "sleeping", 0)
        assert (await says("GET", "/metrics?model=a", 201))["name"] == "a" and server.asleep
        await says("POST", "/v1/any", 201, user, json={"model": "a"})
        assert not server.asleep
        await says("POST", "/sleep?model=a")
        await says("GET", "/flush_cache?model=a", 201)  # as scripts for SGLang ask
        assert not server.asleep, "its engine woke up, which has to have its memory before"
        await says("POST", "/sleep", json={"model": "a"})
        assert server.asleep and await says("GET", "/is_sleeping") == {"is_sleeping": False}, "that is of the default"
        await says("POST", "/wake_up?model=a")
        assert not server.asleep
        await says("POST", "/sleep?model=a")
        freed = await says("POST", "/api/generate", json={"model": "a", "keep_alive": 0})
        assert freed["done_reason"] == "unload" and server.asleep and not (await says("GET", "/api/ps"))["models"]


async def test_who_reads_metrics_keeps_no_model_loaded() -> None:
    async with front() as client:
        await client.post("/api/chat", json={"model": "b", "keep_alive": "1h"})

        async def expires() -> datetime:
            (card,) = (await client.get("/api/ps")).json()["models"]
            return datetime.fromisoformat(card["expires_at"])

        before = await expires()
        await asyncio.sleep(0.1)
        assert (await client.get("/metrics?model=b")).json()["name"] == "b"
        assert abs(await expires() - before) < timedelta(seconds=0.05)
        await client.post("/v1/any", json={"model": "b"})
        assert await expires() - before > timedelta(seconds=0.05)


async def test_keep_alive_of_ollama() -> None:
    async with front() as client:

        async def running() -> dict[str, str]:
            return {one["name"]: one["expires_at"] for one in (await client.get("/api/ps")).json()["models"]}

        await client.post("/api/generate", json={"model": "a", "keep_alive": -1})
        await client.post("/api/chat", json={"model": "b", "keep_alive": "1h"})
        found = await running()
        assert found["a"].startswith("9999") and not found["b"].startswith("9999")
        await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        async with asyncio.timeout(10):
            while set(await running()) != {"b"}:
                await asyncio.sleep(0.01)
        got = await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert got.json()["done_reason"] == "unload" and len(SocketServer.every) == 2, "it was loaded to unload it"
        assert (await client.post("/api/chat", json={"model": "a", "keep_alive": "soon"})).status_code == 400


@pytest.mark.parametrize(
    ("path", "keep_alive", "ignored", "told"),
    [
        ("/api/chat", "1h", "keep_alive", None),
        ("/api/generate", -1, "options.num_ctx, keep_alive", "options.num_ctx"),
        ("/api/generate", 300, "keep_alive, truncate, shift", "truncate, shift"),
        ("/api/chat", "1h", "truncate", "truncate"),
        ("/api/chat", None, "keep_alive", "keep_alive"),
        ("/v1/chat/completions", "1h", "keep_alive", "keep_alive"),
    ],
)
async def test_keep_alive_is_not_said_to_have_no_effect(
    path: str, keep_alive: object, ignored: str, told: str | None
) -> None:
    """The model's server, which says so, does not know it."""
    async with front() as client:
        body = {"model": "a", "prompt": "b", "keep_alive": keep_alive}
        got = await client.post(path, json=body, headers={"x-ignored": ignored})
        assert got.headers.get("draftwing-ignored") == told and got.headers["x-own"] == "7"


async def test_keys_are_asked_for_before_anything_is_loaded() -> None:
    async with front(api_key="user", admin_api_key="chief") as client:
        assert (await client.post("/v1/completions", json={"model": "a"})).status_code == 401
        assert not SocketServer.every
        user, chief = ({"authorization": f"Bearer {key}"} for key in ("user", "chief"))
        assert (await client.post("/v1/completions", json={"model": "a"}, headers=user)).status_code == 201
        cards = (await client.get("/v1/models", headers=user)).json()["data"]
        assert cards[0]["seen"] == "Bearer user", "the model's server has the same keys"
        assert (await client.post("/models/unload", json={"model": "a"}, headers=user)).status_code == 403
        assert (await client.post("/models/unload", json={"model": "a"}, headers=chief)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_bodies_that_are_too_large() -> None:
    async with front(max_body_size=1024) as client:
        got = await client.post("/v1/completions", json={"model": "a", "prompt": "x" * 2000})
        assert got.status_code == 413 and not SocketServer.every


async def test_the_page() -> None:
    async with front(disable_ui=False) as client:
        got = await client.get("/")
        assert got.status_code == 200 and "ui/assets/main.js" in got.text
        assert (await client.get("/ui/assets/models.js")).status_code == 200
        await client.post("/v1/any", json={"model": "b"})
        found = (await client.get("/ui/info")).json()
        assert [(one["name"], one["state"], one["requests"]) for one in found["models"]] == [
            ("a", "unloaded", 0), ("b", "loaded", 0),
        ]  # fmt: skip
        assert (await client.get("/ui/info?model=b")).json()["target"] == "/ui/info?model=b", "of the model alone"
        assert (await client.get("/ui/info?model=a")).status_code == 400
        async with client.stream("GET", "/ui/engine?model=b&stream") as watched:
            assert await anext(watched.aiter_bytes()) == PIECES[0]
            assert (await client.get("/ui/info")).json()["models"][1]["requests"] == 0
            assert (await client.post("/models/unload", json={"model": "b"})).status_code == 200, "a viewer keeps none"
    async with front() as client:
        assert (await client.get("/")).status_code == 404 and (await client.get("/ui/info")).status_code == 404


async def test_the_page_needs_no_key_and_what_it_reads_does() -> None:
    async with front(disable_ui=False, api_key="user") as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/ui/info")).status_code == 401
        assert (await client.get("/ui/info", headers={"authorization": "Bearer user"})).status_code == 200
