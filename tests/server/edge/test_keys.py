"""Who may use which route, by every method, and how much."""

from __future__ import annotations

import contextlib
import hmac
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from fastapi.routing import APIRoute
from scripted import client_of, keys_file
from starlette.testclient import TestClient

from draftwing.config.api_keys import ApiKey
from draftwing.config.options import Options
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.edge import limits
from draftwing.server.edge.keys import Allowances, Bucket
from draftwing.server.telemetry.observer import AnswerRecord

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS", "BOGUS")
FREE = {"/health", "/health_generate", "/liveness", "/readiness", "/", "/ui/assets/page.js"}
KEYS = """
[alice]
key = "sk-alice"
requests_per_minute = 3
[bob]
key = "sk-bob"
tokens_per_minute = 20
[eve]
key = "sk-eve"
admin = true
max_priority = 5
"""


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[tuple[TestClient, FakeEngine]]:
    engine = FakeEngine(Options(random_seed=7, **options))
    with client_of(engine) as client:
        yield client, engine


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[TestClient, FakeEngine]]:
    with serving(api_key_file=keys_file(tmp_path, KEYS)) as found:
        yield found


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"authorization": f"{scheme} {key}"}


def paths(client: TestClient) -> set[str]:
    """All routes, and what looks like one that is free."""
    routes: Any = client.app.routes  # type: ignore[attr-defined]
    known = {route.path.replace("assets/{name:path}", "assets/page.js").replace("{name:path}", "m") for route in routes}
    assert any(isinstance(route, APIRoute) for route in routes)
    return known | {"/healthy", "/health/", "/%2Fhealth", "/health%2F..%2Fgenerate", "/HEALTH", "/health_generate/x"}


@pytest.mark.slow
def test_every_route_and_method_needs_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NO_DEFERRAL", 10_000)
    with serving(api_key="secret") as (client, engine):
        wrong = itertools.cycle(({}, bearer("wrong"), bearer(""), {}, {"x-api-key": ""}))
        for path, method in itertools.product(sorted(paths(client)), METHODS):
            status = client.request(method, path, headers=next(wrong)).status_code
            if method in ("GET", "HEAD") and path in FREE:
                assert status in (200, 404) or (method == "HEAD" and "assets" in path), (path, method)
            else:
                assert status == 401, (path, method)
        assert len(engine.requests) == 1  # of /health_generate


@pytest.mark.parametrize(
    ("choice", "free"),
    [
        pytest.param("none", [], marks=pytest.mark.slow),
        ("metrics", ["/metrics", "/v1/loads"]),
        ("docs", ["/docs", "/redoc", "/openapi.json"]),
        pytest.param("all", ["/metrics", "/v1/loads", "/docs", "/redoc", "/openapi.json"], marks=pytest.mark.slow),
    ],
)
def test_metrics_and_docs_by_option(choice: str, free: list[str]) -> None:
    with serving(api_key="secret", public_endpoints=choice) as (client, _):
        for path in ("/metrics", "/v1/loads", "/docs", "/redoc", "/openapi.json", "/server_info"):
            assert client.get(path).status_code == (200 if path in free else 401), path
            assert client.post(path).status_code == client.options(path).status_code == 401
        assert client.get("/server_info").status_code == 401


def test_the_scheme_may_be_written_in_any_case() -> None:
    with serving(api_key="secret") as (client, _):
        for headers in (bearer("secret"), bearer("secret", "bearer"), bearer(" secret ", "BEARER")):
            assert client.get("/v1/models", headers=headers).status_code == 200
        for scheme in ("Basic", "", "Bearer:", "Bearerx"):
            assert client.get("/v1/models", headers=bearer("secret", scheme)).status_code == 401


def test_how_long_a_key_is_looked_for_tells_nothing(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is compared with all keys, whichever it is, in constant time, as values of one length."""
    client, _ = keyed
    compare, compared = hmac.compare_digest, list[bytes]()

    def watched(sent: bytes, known: bytes) -> bool:
        assert len(sent) == len(known) == 32
        compared.append(known)
        return compare(sent, known)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    every = set()
    for key in ("sk-alice", "sk-bob", "sk-eve", "sk-ali", "x" * 4000, ""):
        for headers in (bearer(key), {"x-api-key": key}):
            compared.clear()
            expected = 200 if key in ("sk-alice", "sk-bob", "sk-eve") else 401
            assert client.get("/v1/models", headers=headers).status_code == expected
            assert len(set(compared)) == 3 and len(compared) == 6  # in either header
            every |= set(compared)
    assert len(every) == 3


ADMIN = [
    ("POST", "/abort_request", {"rid": "x"}), ("POST", "/flush_cache", None), ("GET", "/flush_cache", None),
    ("POST", "/delete_traffic", {"client": "x"}), ("POST", "/sleep", None), ("POST", "/wake_up", None),
]  # fmt: skip


def test_operators_endpoints_are_for_the_key_that_may(keyed: Any) -> None:
    def statuses(client: TestClient, keys: list[dict[str, str]]) -> Iterator[tuple[str, list[int]]]:
        for method, path, body in ADMIN:
            yield path, [client.request(method, path, json=body, headers=headers).status_code for headers in keys]

    for path, found in statuses(keyed[0], [{}, *map(bearer, ("sk-alice", "sk-bob", "sk-eve"))]):
        assert found == [401, 403, 403, 200], path
    cases: list[tuple[dict[str, str], list[int]]] = [
        ({}, [200, 200, 200]),
        ({"api_key": "a"}, [401, 200, 401]),
        ({"admin_api_key": "b"}, [401, 401, 200]),
        ({"api_key": "a", "admin_api_key": "b"}, [401, 403, 200]),
    ]
    for options, expected in cases:
        with serving(**options) as (client, _):
            for path, found in statuses(client, [{}, bearer("a"), bearer("b")]):
                assert found == expected, (options, path)
            generate = client.post("/generate", json={"text": "a"})
            assert generate.status_code == (401 if "api_key" in options else 200)


def test_requests_of_a_minute(keyed: Any) -> None:
    client, engine = keyed
    post = lambda key: client.post("/v1/completions", json={"prompt": "ab"}, headers=bearer(key))  # noqa: E731
    assert [post("sk-alice").status_code for _ in range(4)] == [200, 200, 200, 429]
    late = post("sk-alice")
    assert 1 <= int(late.headers["retry-after"]) <= 20 and late.json()["type"] == "RateLimitError"
    assert client.get("/v1/models", headers=bearer("sk-alice")).status_code == 200  # reading is no request
    assert post("sk-eve").status_code == 200
    assert [request.client for request in engine.requests] == ["alice"] * 3 + ["eve"]


def test_no_key_goes_before_others_unless_its_file_says_so(keyed: Any) -> None:
    client, engine = keyed
    for path, field in (("/v1/completions", "prompt"), ("/generate", "text")):
        for key, priority, status in (
            ("bob", -1, 200),
            ("bob", 0, 200),
            ("bob", 1, 400),
            ("eve", 5, 200),
            ("eve", 6, 400),
        ):
            body = {field: "a", "priority": priority}
            answer = client.post(path, json=body, headers=bearer(f"sk-{key}"))
            assert answer.status_code == status, answer.text
            assert status == 200 or "priority must be at most" in answer.text
    assert [request.priority for request in engine.requests] == [-1, 0, 5] * 2
    with serving(api_key="a") as (alone, engine):
        assert alone.post("/generate", json={"text": "a", "priority": 9}, headers=bearer("a")).status_code == 200


def test_tokens_of_a_minute(keyed: Any) -> None:
    client, _ = keyed
    body = {"text": "abcdef", "sampling_params": {"max_new_tokens": 4, "n": 2}}  # 6 + 2 * 4
    post = lambda: client.post("/generate", json=body, headers=bearer("sk-bob"))  # noqa: E731
    assert [post().status_code for _ in range(3)] == [200, 200, 429]
    assert 20 <= int(post().headers["retry-after"]) <= 27  # 8 more than there are, and one, at 20 in 60 s


def test_an_allowance_comes_back_evenly() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    bucket.take(90)
    assert bucket.wait(1) == 31
    now[0] = 40
    assert bucket.wait(1) == 0 and bucket.wait(20) == 10
    now[0] = 1000
    assert bucket.wait(60) == 0 and bucket.wait(61) == 1  # no more than a minute's is kept


def test_n_answers_count_their_prompt_once() -> None:
    allowances = Allowances([ApiKey("a", "k", tokens_per_minute=100)], lambda: 0.0)
    prompt = [1] * 30
    for i in range(3):
        request = GenerationRequest(str(i), prompt, SamplingParams(), client="a")
        allowances.began(AnswerRecord(request, 0.0))
    allowances.progressed(AnswerRecord(request, 0.0), None, 0.0, 60)
    assert allowances.ask("a") == (0, "")
    allowances.progressed(AnswerRecord(request, 0.0), None, 0.0, 10)
    assert allowances.ask("a") == (pytest.approx(0.6), "tokens") and allowances.ask("nobody") == (0, "")


def test_every_answer_is_a_request(keyed: Any) -> None:
    client, engine = keyed
    body = {"prompt": ["ab", "cd"], "n": 2}
    assert client.post("/v1/completions", json=body, headers=bearer("sk-alice")).status_code == 200  # four of three
    late = client.post("/v1/completions", json={"prompt": "ab"}, headers=bearer("sk-alice"))
    assert late.status_code == 429 and 21 <= int(late.headers["retry-after"]) <= 40 and len(engine.requests) == 4


def test_health_generate_costs_one_token_a_second() -> None:
    with serving(api_key="secret") as (client, engine):
        assert {client.get("/health_generate").status_code for _ in range(50)} == {200}
        assert len(engine.requests) <= 2


def statuses(client: TestClient, *keys: str) -> list[int]:
    body = {"prompt": "a", "max_tokens": 1}
    return [client.post("/v1/completions", json=body, headers=bearer(key)).status_code for key in keys]


def test_keys_that_are_read_again(keyed: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client, _ = keyed
    caplog.set_level("INFO")
    assert statuses(client, "sk-alice", "sk-bob", "sk-new") == [200, 200, 401]
    new = (
        KEYS.replace("sk-bob", "sk-bob-2")
        .replace("max_priority = 5", "")
        .replace("[eve]", "[carol]\nkey = 'sk-new'\n[eve]")
    )
    keys_file(tmp_path, new)
    assert statuses(client, "sk-bob") == [200]  # not yet
    client.app.state.reload_keys()
    assert statuses(client, "sk-bob", "sk-bob-2", "sk-new", "sk-eve") == [401, 200, 200, 200]
    assert "new: carol; changed: bob, eve" in caplog.text and "sk-" not in caplog.text
    assert [statuses(client, "sk-alice")[0] for _ in range(3)] == [200, 200, 429]  # what was used counts on
    keys_file(tmp_path, KEYS.replace("requests_per_minute = 3", "requests_per_minute = 9"))
    client.app.state.reload_keys()
    assert statuses(client, "sk-alice", "sk-new") == [200, 401] and "gone: carol" in caplog.text


def test_wrong_keys_leave_those_before(keyed: Any, tmp_path: Path, caplog: Any) -> None:
    client, _ = keyed
    wrong = ["", "[alice", "[a]\nkey = 1", "[a]\nkey = ''", "[a]\nkey='x'\n[b]\nkey='x'", "[a]\nkey='x'\nlimit=1"]
    for text in [*wrong, None]:
        file = Path(keys_file(tmp_path, text or ""))
        if text is None:
            file.unlink()
        client.app.state.reload_keys()
        assert statuses(client, "sk-eve", "x") == [200, 401], text
    records = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert len(records) == 7 and all("stay as they were: " in one and "sk-" not in one for one in records)
