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
from starlette.types import Receive, Scope, Send

from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.server.app import create_app, paced
from draftwing.server.edge.hosts import guarded
from draftwing.server.edge.paths import UNSERVED, rooted, unserved

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PATHS = [
    (path.replace("/**", more).replace("*", "a1"), row.instead)
    for row in UNSERVED
    for path in row.paths.split()
    for more in (("", "/a/b") if path.endswith("/**") else ("",))
]


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


def test_a_route_of_another_server_is_answered_by_its_sentence(whole: TestClient) -> None:
    """Asked for by one path of each row; the others are the same row's."""
    for path, instead in PATHS:
        row = unserved(path)
        assert row is not None and row.instead == instead, path
    for instead, path in {instead: path for path, instead in PATHS}.items():
        method = "GET" if path == "/v1/chat/completions/chatcmpla1" else "POST"
        response = whole.request(method, path, json={})
        assert response.status_code == 404 and instead in message_of(path, response.json()), path


def test_no_route_of_the_table_is_served_and_none_is_there_twice(app: Any) -> None:
    routes = [route for route in app[0].routes if isinstance(route, Route)]
    served = {route.path for route in routes if ":path" not in route.path}
    paths = [path for path, _ in PATHS]
    assert not served.intersection(paths) and len(set(paths)) == len(paths)


def test_what_a_sentence_tells_to_ask_is_served(app: Any) -> None:
    served = {
        (method, route.path) for route in app[0].routes if isinstance(route, Route) for method in route.methods or ()
    }
    named = [one for row in UNSERVED for one in re.findall(r"(GET|POST) (/[\w/-]*[\w-])", row.instead)]
    assert len(named) > 20 and set(named) <= served


@pytest.mark.slow
@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_every_path_of_a_client_s_library_is_served_or_in_the_table(whole: TestClient, package: str) -> None:
    """The libraries' own paths, as they stand in their sources."""
    pytest.importorskip(package)
    folder = Path(importlib.import_module(package).__file__ or "").parent / "resources"
    found = set[str]()
    for file in folder.rglob("*.py"):
        found |= set(re.findall(r'"(/[a-z0-9_]+(?:/[a-z0-9_{}]+)*)(?:\?[^"]*)?"', file.read_text()))
    prefix = "" if package == "anthropic" else "/v1"
    paths = {prefix + re.sub(r"\{\w+\}", "chatcmpl1", path) for path in found}
    assert len(paths) > (40 if package == "openai" else 15)
    unknown = []
    for path in sorted(paths):
        message = whole.post(path, json={}, headers={"anthropic-version": "1"}).json().get("error", {}).get("message")
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


def test_a_wrong_method_is_told(whole: TestClient) -> None:
    paths = ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages", "/api/chat"]
    for path, method in zip(paths, ("GET", "PATCH", "DELETE", "GET", "DELETE"), strict=True):
        response = whole.request(method, path)
        assert response.status_code == 405 and "POST" in response.headers["allow"]
        error = response.json()["error"]
        assert "POST" in (error if isinstance(error, str) else error["message"])
    both = whole.patch("/v1/responses/resp_1")
    assert both.status_code == 405 and set(both.headers["allow"].split(", ")) == {"GET", "DELETE"}


def test_slashes_make_no_difference(whole: TestClient) -> None:
    for path in ("/v1/chat/completions/", "//v1/chat/completions", "/v1//chat///completions//"):
        response = whole.post(f"http://testserver{path}", json=CHAT, follow_redirects=False)
        assert response.status_code == 200 and response.json()["object"] == "chat.completion", path
    for path in ("/health/", "//health", "/v1/models/", "/docs/", "//", "/"):
        assert whole.get(f"http://testserver{path}", follow_redirects=False).status_code == 200, path


def test_no_slash_leads_around_a_key_or_to_another_site() -> None:
    for options in (Options(random_seed=1, api_key="right", admin_api_key="more"), Options(random_seed=1)):
        engine = FakeEngine(options)
        app = paced(guarded(create_app(local(engine), engine.tokenizer), engine.options), engine.options)
        client = TestClient(app, raise_server_exceptions=False)
        key = {"authorization": "Bearer right"} if options.api_key else {"sec-fetch-site": "cross-site"}
        for path in ("/flush_cache", "//flush_cache", "/flush_cache/", "///flush_cache//"):
            for method in ("GET", "POST"):
                assert client.request(method, f"http://127.0.0.1{path}", headers=key).status_code in (401, 403)
        assert engine.flushed == 0


def test_a_slip_is_told(whole: TestClient) -> None:
    for path, near in (("/v1/model", "/v1/models"), ("/Generate", "/generate"), ("/v1/Messages", "/v1/messages")):
        assert f"did you mean {near}?" in str(whole.post(path, json={}).json())


def test_an_error_has_anthropic_s_shape_for_anthropic_s_clients(whole: TestClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    for path in ("/v1/files", "/v1/complete", "/v1/nothing", "/v1/models/other"):
        response = whole.get(path, headers=headers)
        assert response.status_code == 404 and message_of(path, response.json(), headers)
        assert whole.get(path).json()["object"] == "error"


ROOT = "/llm/one"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """The application as it is served."""
    engine = FakeEngine(Options(random_seed=7, root_path=ROOT))
    inner = guarded(create_app(local(engine), engine.tokenizer), engine.options)
    host = "http://127.0.0.1"
    with TestClient(rooted(paced(inner, engine.options), ROOT), host, follow_redirects=False) as found:
        yield found


@pytest.mark.parametrize("prefix", ["", ROOT])
def test_it_answers_with_the_path_and_without(client: TestClient, prefix: str) -> None:
    for path in ("/", "/health", "/v1/models", "/openapi.json", "/docs", "/ui/info", "/ui/assets/main.js", "/api/tags"):
        assert client.get(prefix + path).status_code == 200, path
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert client.post(f"{prefix}/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3
    assert client.post(f"{prefix}/v1/chat/completions", json=body | {"stream": True}).text.endswith("data: [DONE]\n\n")
    assert "type" in client.post(f"{prefix}/v1/messages", json={}).json()["error"]  # Anthropic's shape
    assert client.get(f"{prefix}/v1/nothing").status_code == client.get(f"{prefix}/llm/health").status_code == 404
    assert client.get(f"{ROOT}health").status_code == client.get("/llm-one/health").status_code == 404


def test_slashes_of_the_prefix_make_no_difference(client: TestClient) -> None:
    for path in ("//v1//models", f"{ROOT}/v1/models/", f"/{ROOT}/v1/models", "//llm///one//v1/models//"):
        url = f"http://127.0.0.1{path}"
        assert client.get(url).json()["data"][0]["id"] == "echo"
        wrong = client.get(url.replace("models", "modles"))
        assert wrong.status_code == 404 and "did you mean /v1/models?" in wrong.json()["error"]["message"]


def test_the_path_alone_leads_to_the_page(client: TestClient) -> None:
    for asked, query in ((ROOT, ""), (f"/{ROOT}", ""), (ROOT, "?a=1&b=%2F")):
        found = client.get(f"http://127.0.0.1{asked}{query}")
        assert (found.status_code, found.headers["location"]) == (307, f"{ROOT}/{query}")
        assert client.get(f"{ROOT}/{query}").status_code == 200


def test_links_and_the_document_stay_below_the_path(client: TestClient) -> None:
    page = client.get(f"{ROOT}/").text
    links = re.findall(r'(?:href|src)="([^"#]*)"', page)
    assert len(links) > 5 and all(client.get(f"{ROOT}/{link}").status_code == 200 for link in links)
    assert client.get(f"{ROOT}/openapi.json").json()["servers"] == [{"url": ROOT}]
    assert not re.search(r"""(?:href|src)=["']/""", client.get(f"{ROOT}/docs").text)


def test_a_redirect_within_stays_below_the_path() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        location = scope["path"].encode()[2:]
        await send({"type": "http.response.start", "status": 307, "headers": [(b"location", location)]})
        await send({"type": "http.response.body"})

    client = TestClient(rooted(app, "/llm"), follow_redirects=False)
    for path, found in (("/to/v1/x", "/llm/v1/x"), ("/tohttps://a/b", "https://a/b")):
        for prefix in ("", "/llm"):
            response = client.get(f"{prefix}/{path[1:]}".replace("/to", "/:", 1))
            assert response.headers["location"] == found


def test_paths() -> None:
    for path in ("/a", "/a/b.c-d_e~f"):
        assert Options(root_path=path).resolve().root_path == path
    for path in ("a", "/", "/a/", "//a", "/a//b", "http://x/a", "/a b", "/a?b", "/ä"):
        with pytest.raises(ConfigError, match="root_path"):
            Options(root_path=path).resolve()
