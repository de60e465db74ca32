"""Which names and pages may reach a server that is there for this machine alone."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine, local
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.server.edge.hosts import guarded
from draftwing.server.uvicorn_server import make_server

HOST = "127.0.0.1:30000"


def client(**options: Any) -> TestClient:
    engine = FakeEngine(Options(random_seed=7, **options))
    server = make_server(local(engine), engine.tokenizer, [], 5.0, 30000)
    app: Any = server.config.app
    return TestClient(app, raise_server_exceptions=False)


def status(client: TestClient, host: str, origin: str | None = None, method: str = "GET") -> int:
    headers = {"host": host} | ({"origin": origin} if origin else {})
    return client.request(method, "/v1/models", headers=headers).status_code


def test_names_of_others_are_refused_where_nobody_needs_a_key() -> None:
    own = client(allowed_hosts="other.example, My.example")
    for host in (HOST, "localhost", "LOCALHOST:1", "[::1]:30000", "a.localhost", "my.example:80", "10.0.0.7"):
        assert status(own, host) == 200, host
    for host in (
        "evil.example",
        "evil.example:30000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "[",
        "a@b/c",
    ):
        assert status(own, host) == 403, host
    refused = own.post("/flush_cache", headers={"host": "evil.example"})
    assert refused.status_code == 403
    for words in ("evil.example", "--allowed-hosts", "--api-key"):
        assert words in refused.json()["error"]["message"]


def test_pages_of_others_are_refused_where_nobody_needs_a_key() -> None:
    own = client(allowed_hosts="my.example")
    for origin in (f"http://{HOST}", "http://localhost:3000", "https://my.example", "chrome-extension://abc", None):
        assert status(own, HOST, origin) == 200, origin
    assert status(own, "10.0.0.7", "http://10.0.0.7") == 200
    for origin in (
        "http://evil.example",
        "https://evil.example:30000",
        "null",
        "http://6.6.6.6",
        "HTTP://[",
        "http://",
    ):
        assert status(own, HOST, origin) == 403, origin
        assert own.post("/flush_cache", headers={"host": HOST, "origin": origin}).status_code == 403


@pytest.mark.parametrize(
    "options", [{"host": "0.0.0.0"}, {"api_key": "right"}, {"allowed_hosts": "*"}], ids=["open", "a key", "any"]
)
def test_elsewhere_they_are_not_looked_at(options: Any) -> None:
    own = client(**options)
    assert status(own, "evil.example", "http://evil.example") in (200, 401)


ORIGIN = "http://page.example"
CHANGES = [("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/abort_request"), ("DELETE", "/anything")]
PATHS = ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/generate", "/health", "/tokenize", "/nothing"]


def preflight(client: TestClient, path: str, origin: str = ORIGIN, **more: str) -> Any:
    headers = {"host": HOST, "origin": origin, "access-control-request-method": "POST"}
    return client.options(path, headers=headers | {name.replace("_", "-"): value for name, value in more.items()})


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"api_key": "right"}, {"host": "0.0.0.0"}], ids=["own", "a key", "open"])
@pytest.mark.parametrize("allowed", ["*", "page.example, other.example"])
def test_pages_of_the_allowed_sites_may_ask_and_read(allowed: str, options: dict[str, str]) -> None:
    """Whatever the endpoint and the headers, with a key too, and also what went wrong."""
    own = client(allowed_hosts=allowed, **options)
    asked = "authorization,content-type,x-api-key,anthropic-version,anthropic-beta,openai-organization,x-stainless-os"
    for path in PATHS:
        answer = preflight(own, path, access_control_request_headers=asked)
        assert answer.status_code == 200, answer.text
        reported = answer.headers["access-control-allow-headers"]
        assert reported == "*" or set(asked.split(",")) <= set(reported.split(","))
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert int(answer.headers["access-control-max-age"]) > 0 and "Origin" in answer.headers["vary"]
        read = own.post(path, json={"wrong": 1}, headers={"host": HOST, "origin": ORIGIN})
        assert read.status_code >= 400
        for one in (answer, read):
            assert one.headers["access-control-allow-origin"] == ("*" if allowed == "*" else ORIGIN)
            assert "access-control-allow-credentials" not in one.headers
        assert "draftwing-ignored" in read.headers["access-control-expose-headers"]
    near = preflight(own, "/v1/models", access_control_request_private_network="true")
    assert near.headers["access-control-allow-private-network"] == "true"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"api_key": "right"}, {"host": "0.0.0.0"}], ids=["own", "a key", "open"])
@pytest.mark.parametrize("allowed", [None, "other.example", "age.example,page.example.org"])
def test_pages_of_other_sites_may_not(allowed: str | None, options: dict[str, str]) -> None:
    own = client(allowed_hosts=allowed, **options)
    for origin in (ORIGIN, "null", "https://page.example:8443", "ftp://other.example"):
        answer = preflight(own, "/v1/chat/completions", origin, access_control_request_private_network="true")
        assert answer.status_code >= 400
        for found in (answer, own.get("/v1/models", headers={"host": HOST, "origin": origin})):
            assert "access-control-allow-origin" not in found.headers
            assert "access-control-allow-private-network" not in found.headers


def test_pages_of_this_machines_programs_may_where_the_server_is_its_own() -> None:
    own, open_ = client(), client(host="0.0.0.0")
    for origin in ("http://localhost:3000", "http://127.0.0.1:5173", "https://app.localhost"):
        assert preflight(own, "/v1/messages", origin).headers["access-control-allow-origin"] == origin
        assert preflight(open_, "/v1/messages", origin).status_code == 405


@pytest.mark.parametrize("options", [{}, {"allowed_hosts": "page.example"}, {"allowed_hosts": "*", "api_key": "k"}])
def test_behind_a_front_headers_for_browsers_come_once(options: dict[str, str]) -> None:
    chosen, engine = Options(**options), FakeEngine(Options(random_seed=7, **options))  # type: ignore[arg-type]
    child: Any = make_server(local(engine), engine.tokenizer, [], 5.0, None).config.app
    alone, behind = client(**options), TestClient(guarded(child, chosen), raise_server_exceptions=False)
    for origin in (ORIGIN, "http://localhost:3000", "null", None):
        for path in ("/v1/models", "/nothing"):
            headers = {"host": HOST, "authorization": "Bearer k"} | ({"origin": origin} if origin else {})
            found = [one.get(path, headers=headers) for one in (alone, behind)]
            for name in ("vary", "access-control-allow-origin", "access-control-expose-headers"):
                assert found[0].headers.get_list(name) == found[1].headers.get_list(name), (origin, path)


BROWSER = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64)", "host": HOST}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize("options", [{}, {"host": "0.0.0.0"}], ids=["own", "open"])
def test_what_changes_something_refuses_other_sites(method: str, path: str, options: dict[str, str]) -> None:
    """Forms, pictures and links of any page, of browsers that say where they come from and of those that do not."""
    own = client(**options)
    pages: list[dict[str, str]] = [
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
        {"origin": ORIGIN, "content-type": "text/plain"},
        {"origin": "null", "content-type": "application/x-www-form-urlencoded"},
        {},  # to a name of a local network: browsers tell nothing
    ]
    for page in pages:
        assert own.request(method, path, headers=BROWSER | page).status_code == 403, page
    for program in ({"host": HOST}, {"host": HOST, "sec-fetch-site": "same-origin"}, {"origin": f"http://{HOST}"}):
        found = own.request(method, path, headers={"host": HOST} | program)
        assert found.status_code != 403, program


def test_links_to_the_server_may_be_followed_and_pictures_of_it_not_shown() -> None:
    own, link = client(), BROWSER | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert own.get("/", headers=link).status_code == 200
    for path in ("/v1/models", "/ui/info", "/health_generate"):
        assert own.get(path, headers=link | {"sec-fetch-mode": "no-cors"}).status_code == 403
