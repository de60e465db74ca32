"""What `--learn` keeps of what a server is asked, and what it does not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import EOS, FakeEngine
from scripted import client_of, keys_file
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.learn.history import HeadHistory
from draftwing.learn.traffic import Exchange, TrafficStore
from draftwing.server.telemetry import collector

KEYS = """
[alice]
key = "sk-alice"
[private]
key = "sk-private"
learn = false
[operator]
key = "sk-operator"
admin = true
"""
USER = [{"role": "user", "content": "what is kept?"}]
CHAT = {"messages": USER, "temperature": 0.5}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "what is kept?"},
    "/v1/messages": {"model": "echo", "max_tokens": 99, "messages": USER},
    "/v1/responses": {"input": "what is kept?"},
    "/generate": {"text": "what is kept?"},
    "/api/chat": {"model": "echo", "messages": USER},
    "/api/generate": {"model": "echo", "prompt": "what is kept?", "stream": False},
}


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[tuple[TestClient, FakeEngine]]:
    engine = FakeEngine(Options(random_seed=7, learn=str(folder), **options))
    with client_of(engine) as client:
        yield client, engine


def kept(folder: Path) -> list[Exchange]:
    """Of a server that has ended."""
    return list(TrafficStore(folder).read())


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


def test_all_dialects_are_kept(tmp_path: Path) -> None:
    began = time.time()
    with serving(tmp_path) as (client, engine):
        for path, body in DIALECTS.items():
            assert client.post(path, json=body).status_code == 200
        assert client.post("/v1/chat/completions", json={**CHAT, "stream": True, "cache_salt": "x"}).status_code == 200
    found = kept(tmp_path)
    # Two of them have the same prompt, and the stand-in's answers are prompts: the others are duplicates.
    expected = {(request.cache_salt, tuple(request.prompt_ids)) for request in engine.requests}
    assert len(engine.requests) == len(DIALECTS) + 1
    assert {(one.salt, tuple(one.prompt)) for one in found} == expected and len(found) == len(expected) >= 3
    assert all(one.answer == [*one.prompt, EOS] and one.client == "anonymous" for one in found)
    assert all(began <= one.at <= time.time() for one in found)
    assert next(one for one in found if one.salt == "x").temperature == 0.5


def test_who_opts_out_is_not_kept(tmp_path: Path) -> None:
    with serving(tmp_path, api_key_file=keys_file(tmp_path, KEYS)) as (client, engine):
        for path, body in DIALECTS.items():
            for more, headers in (({"learn": False}, key("alice")), ({}, key("private"))):
                assert client.post(path, json=body | more, headers=headers).status_code == 200
            for value in ("off", "False", "0"):
                headers = key("alice") | {"X-Draftwing-Learn": value}
                assert client.post(path, json=body, headers=headers).status_code == 200
        for path in ("/v1/chat/completions", "/v1/responses"):
            assert client.post(path, json=DIALECTS[path] | {"store": False}, headers=key("alice")).status_code == 200
        assert client.post("/v1/chat/completions", json=CHAT | {"learn": True}, headers=key("private")).is_success
        # Refused, and aborted.
        assert client.post("/generate", json={"text": "a", "priority": 9}, headers=key("alice")).status_code == 400
        endless = {"text": "abcdef", "rid": "one", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
        engine.pause = 0.02
        asking = threading.Thread(
            target=client.post, args=("/generate",), kwargs={"json": endless, "headers": key("alice")}
        )
        asking.start()
        while not any(request.name == "one" for request in engine.requests):
            time.sleep(0.005)
        assert client.post("/abort_request", json={"rid": "one"}, headers=key("operator")).is_success
        asking.join()
        assert engine.aborted
        engine.pause = 0.0
        assert client.post("/generate", json={"text": "kept"}, headers=key("alice")).is_success
    (only,) = kept(tmp_path)
    assert (only.client, engine.tokenizer.decode(only.prompt)) == ("alice", "kept")


def test_an_operator_deletes_a_client_while_the_server_runs(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    heads = HeadHistory(tmp_path / "learnt" / "heads")
    heads.add(head, {"data": {"clients": {"alice": 3}}})
    with serving(tmp_path / "learnt", api_key_file=keys_file(tmp_path, KEYS)) as (client, engine):
        for name in ("alice", "operator"):
            assert client.post("/generate", json={"text": f"secret of {name}"}, headers=key(name)).is_success
        engine.pause = 0.02  # 13 s in all, until nothing waits for it to run
        sampling = {"max_new_tokens": 1900, "ignore_eos": True}
        slow = {"text": "secret of alice, too", "rid": "slow", "sampling_params": sampling}
        asking = threading.Thread(
            target=client.post, args=("/generate",), kwargs={"json": slow, "headers": key("alice")}
        )
        asking.start()
        while not any(request.name == "slow" for request in engine.requests):
            time.sleep(0.005)
        assert client.post("/delete_traffic", json={"client": "alice"}, headers=key("alice")).status_code == 403
        found = client.post("/delete_traffic", json={"client": "alice"}, headers=key("operator"))
        assert found.json() == {"client": "alice", "exchanges": 1, "heads": [1], "lookups": 2}
        assert engine.forgotten == ["alice"] and engine.running
        engine.pause = 0.0
        asking.join()
        assert client.post("/generate", json={"text": "a new one"}, headers=key("alice")).is_success
    texts = [engine.tokenizer.decode(one.prompt) for one in kept(tmp_path / "learnt")]
    assert texts == ["secret of operator", "a new one"]
    assert heads.get(1).deleted == ("alice",)


def test_without_the_option_nothing_is_kept(tmp_path: Path) -> None:
    engine = FakeEngine()
    with client_of(engine) as client:
        assert client.post("/generate", json={"text": "abcdef", "learn": True}).is_success
        found = client.post("/delete_traffic", json={"client": "anonymous"})
        assert found.json() == {"client": "anonymous", "exchanges": 0, "heads": [], "lookups": 4}
        assert engine.forgotten == ["", "anonymous"], "a key may have this name"


@pytest.mark.parametrize("name", ["", "anonymous"])
def test_requests_without_a_name_are_deleted_by_either(tmp_path: Path, name: str) -> None:
    with serving(tmp_path) as (client, _):
        assert client.post("/generate", json={"text": "secret"}).is_success
        found = client.post("/delete_traffic", json={"client": name}).json()
        assert (found["client"], found["exchanges"]) == ("anonymous", 1)
    assert not kept(tmp_path)


def test_two_servers_need_two_folders(tmp_path: Path) -> None:
    with serving(tmp_path), pytest.raises(ConfigError, match="another process"), serving(tmp_path):
        pass


def test_a_disk_that_stands_still_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "QUEUED_TOKENS", 10)
    moving, add = threading.Event(), TrafficStore.add

    def slow(store: TrafficStore, exchange: Exchange) -> bool:
        assert moving.wait(20)
        return add(store, exchange)

    monkeypatch.setattr(TrafficStore, "add", slow)
    with serving(tmp_path) as (client, engine):
        for i in range(5):
            assert client.post("/generate", json={"text": f"request {i}"}).is_success
        moving.set()
    assert [engine.tokenizer.decode(one.prompt) for one in kept(tmp_path)] == ["request 0"]
