"""Routes that are not there, wrong base addresses, methods and slashes: what is answered, and in whose shape."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, local
from starlette.routing import Route
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.server.app import create_app, paced
from draftwing.server.edge.hosts import guarded
from draftwing.server.unserved import UNSERVED

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PATHS = [
    path.replace("/**", more).replace("*", "a1")
    for row in UNSERVED
    for path in row.paths.split()
    for more in (("", "/a/b") if path.endswith("/**") else ("",))
]
METHODS = dict.fromkeys(PATHS, "POST") | {"/v1/chat/completions/chatcmpla1": "GET"}


@pytest.fixture(scope="module")
def app() -> Any:
    """The application as it is served, and its routes."""
    engine = FakeEngine()
    return create_app(local(engine), engine.tokenizer), engine


@pytest.fixture(scope="module")
def whole(app: Any) -> Iterator[TestClient]:
    inner, engine = app
    with TestClient(paced(inner, engine.options), raise_server_exceptions=False) as client:
        yield client


def message_of(path: str, body: Any, headers: dict[str, str] | None = None) -> str:
    """The message of an error, which has the shape of the API whose path it is."""
    if path.startswith(("/v1/messages", "/messages")) or "anthropic-version" in (headers or {}):
        assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
        return str(body["error"]["message"])
    if path.startswith("/api/"):
        assert set(body) == {"error"}
        return str(body["error"])
    if path.startswith("/v1/"):
        assert body["object"] == "error" and body["error"]["code"] == 404
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
def test_a_route_of_another_server_is_answered_by_its_sentence(app: Any, path: str) -> None:
    inner, _ = app
    response = TestClient(inner, raise_server_exceptions=False).request(METHODS[path], path, json={})
    (row,) = {row for row in UNSERVED if any(_same(one, path) for one in row.paths.split())}
    assert response.status_code == 404 and row.instead in message_of(path, response.json())


def _same(pattern: str, path: str) -> bool:
    return path in {pattern.replace("/**", more).replace("*", "a1") for more in ("", "/a/b")}


def test_no_route_of_the_table_is_served_and_none_is_there_twice(app: Any) -> None:
    routes = [route for route in app[0].routes if isinstance(route, Route)]
    served = {route.path for route in routes if ":path" not in route.path}
    assert not served & set(PATHS) and len(set(PATHS)) == len(PATHS)


def test_what_a_sentence_tells_to_ask_is_served(app: Any) -> None:
    served = {
        (method, route.path) for route in app[0].routes if isinstance(route, Route) for method in route.methods or ()
    }
    named = [one for row in UNSERVED for one in re.findall(r"(GET|POST) (/[\w/-]*[\w-])", row.instead)]
    assert len(named) > 20 and set(named) <= served


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_every_path_of_a_client_s_library_is_served_or_in_the_table(app: Any, package: str) -> None:
    """The libraries' own paths, as they stand in their sources."""
    pytest.importorskip(package)
    folder = Path(importlib.import_module(package).__file__ or "").parent / "resources"
    found = set[str]()
    for file in folder.rglob("*.py"):
        found |= set(re.findall(r'"(/[a-z0-9_]+(?:/[a-z0-9_{}]+)*)(?:\?[^"]*)?"', file.read_text()))
    prefix = "" if package == "anthropic" else "/v1"
    paths = {prefix + re.sub(r"\{\w+\}", "chatcmpl1", path) for path in found}
    client = TestClient(app[0], raise_server_exceptions=False)
    assert len(paths) > (40 if package == "openai" else 15)
    unknown = []
    for path in sorted(paths):
        message = client.post(path, json={}, headers={"anthropic-version": "1"}).json().get("error", {}).get("message")
        unknown += [path] if message is not None and "/openapi.json" in message else []
    assert not unknown


@pytest.mark.parametrize(
    ("method", "path", "there"),
    [
        ("POST", "/v1/v1/chat/completions", "POST /v1/chat/completions"), ("GET", "/v1/v1/models", "GET /v1/models"),
        ("POST", "/v1/v1/messages", "POST /v1/messages"), ("POST", "/v1/api/chat", "POST /api/chat"),
        ("POST", "/api/v1/chat/completions", "POST /v1/chat/completions"), ("GET", "/api/v1/models", "GET /v1/models"),
        ("POST", "/openai/v1/responses", "POST /v1/responses"), ("POST", "/llm/generate", "POST /generate"),
        ("POST", "/v1/chat/completions/chat/completions", "POST /chat/completions"),
        ("POST", "/v1/messages/v1/messages", "POST /v1/messages"), ("POST", "/v1/v1/v1/completions", "POST /v1/comp"),
        ("POST", "/v1/v1/embeddings", "embedding"),
    ],
)  # fmt: skip
def test_a_wrong_base_address_is_told(whole: TestClient, method: str, path: str, there: str) -> None:
    response = whole.request(method, path, json=CHAT)
    assert response.status_code == 404
    meant = there.split()[-1]
    message = message_of(meant if meant.startswith("/") else "/v1/embeddings", response.json())
    assert there in message and "base address" in message
    assert ("ends in /v1 already" in message) == path.startswith("/v1/v1/")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/api/chat"])
def test_a_wrong_method_is_told(whole: TestClient, path: str) -> None:
    for method in ("GET", "PATCH", "DELETE"):
        response = whole.request(method, path)
        assert response.status_code == 405 and "POST" in response.headers["allow"]
        error = response.json()["error"]
        assert "POST" in (error if isinstance(error, str) else error["message"])
    both = whole.patch("/v1/responses/resp_1")
    assert both.status_code == 405 and set(both.headers["allow"].split(", ")) == {"GET", "DELETE"}


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat///completions//", "/v1/chat/completions//"],
)
def test_slashes_make_no_difference(whole: TestClient, path: str) -> None:
    response = whole.post(f"http://testserver{path}", json=CHAT, follow_redirects=False)
    assert response.status_code == 200 and response.json()["object"] == "chat.completion"


@pytest.mark.parametrize(
    "path", ["/health/", "/metrics/", "//health", "/v1/models/", "/api/tags/", "/docs/", "//", "/"]
)
def test_slashes_make_no_difference_to_what_is_got(whole: TestClient, path: str) -> None:
    assert whole.get(f"http://testserver{path}", follow_redirects=False).status_code == 200


@pytest.mark.parametrize("path", ["/flush_cache", "//flush_cache", "/flush_cache/", "///flush_cache//"])
def test_no_slash_leads_around_a_key_or_to_another_site(path: str) -> None:
    for options in (Options(random_seed=1, api_key="right", admin_api_key="more"), Options(random_seed=1)):
        engine = FakeEngine(options)
        app = paced(guarded(create_app(local(engine), engine.tokenizer), engine.options), engine.options)
        client = TestClient(app, raise_server_exceptions=False)
        key = {"authorization": "Bearer right"} if options.api_key else {"sec-fetch-site": "cross-site"}
        for method in ("GET", "POST"):
            assert client.request(method, f"http://127.0.0.1{path}", headers=key).status_code in (401, 403)
        assert engine.flushed == 0


@pytest.mark.parametrize(
    ("path", "near"),
    [("/v1/chat/completion", "/v1/chat/completions"), ("/v1/model", "/v1/models"), ("/Generate", "/generate"),
     ("/v1/Messages", "/v1/messages"), ("/tokenise", "/tokenize")],
)  # fmt: skip
def test_a_slip_is_told(whole: TestClient, path: str, near: str) -> None:
    body = whole.post(path, json={}).json()
    assert f"did you mean {near}?" in str(body)


def test_an_error_has_anthropic_s_shape_for_anthropic_s_clients(whole: TestClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    for path in ("/v1/files", "/v1/complete", "/v1/nothing", "/v1/models/other"):
        response = whole.get(path, headers=headers)
        assert response.status_code == 404 and message_of(path, response.json(), headers)
        assert whole.get(path).json()["object"] == "error"
