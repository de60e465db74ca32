"""A server below a path of a proxy, which strips it from requests or does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine, local
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.server.app import create_app, paced
from draftwing.server.edge.hosts import guarded
from draftwing.server.edge.root_path import rooted

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


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/", "//v1//models", f"{ROOT}/v1/models/", f"{ROOT}//v1/models", f"/{ROOT}/v1/models",
     "//llm///one//v1/models//"],
)  # fmt: skip
def test_slashes_make_no_difference(client: TestClient, path: str) -> None:
    url = f"http://127.0.0.1{path}"
    assert client.get(url).json()["data"][0]["id"] == client.get("/v1/models").json()["data"][0]["id"]
    wrong = client.get(url.replace("models", "modles"))
    assert wrong.status_code == 404 and "did you mean /v1/models?" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "location"),
    [(ROOT, f"{ROOT}/"), (f"/{ROOT}", f"{ROOT}/"), (f"{ROOT}?a=1&b=%2F", f"{ROOT}/?a=1&b=%2F")],
)
def test_the_path_alone_leads_to_the_page(client: TestClient, asked: str, location: str) -> None:
    found = client.get(f"http://127.0.0.1{asked}")
    assert (found.status_code, found.headers["location"]) == (307, location)
    assert client.get(location).status_code == 200


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


@pytest.mark.parametrize("path", ["/a", "/a/b.c-d_e~f"])
def test_paths(path: str) -> None:
    assert Options(root_path=path).resolve().root_path == path


@pytest.mark.parametrize("path", ["a", "/", "/a/", "//a", "/a//b", "http://x/a", "/a b", "/a?b", "/ä"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ConfigError, match="root_path must be a path such as /llm"):
        Options(root_path=path).resolve()
