"""Which names and pages may reach a server that is there for this machine alone."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine, local
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.server.border.hosts import is_loopback
from draftwing.server.listen import make_server

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


def test_hosts_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
