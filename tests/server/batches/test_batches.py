"""Files and batches, asked by OpenAI's client and by hand, of a server around a stand-in engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, local
from scripted import asking, client_of, keys_file, listening, openai_client
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.errors import ConfigError
from draftwing.server.app import create_app
from draftwing.server.batches import store as stored
from draftwing.server.batches.store import Results, Store

CHAT = "/v1/chat/completions"


def made(folder: Path, **options: Any) -> FakeEngine:
    return FakeEngine(Options(random_seed=7, batches_dir=str(folder), **options))


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[tuple[FakeEngine, TestClient]]:
    engine = made(folder, **options)
    with client_of(engine) as client:
        yield engine, client


def line(id: str, content: str = "hello", url: str = CHAT, **body: Any) -> dict[str, Any]:
    message = {"messages": [{"role": "user", "content": content}]} if url == CHAT else {"prompt": content}
    return {"custom_id": id, "method": "POST", "url": url, "body": {"model": "echo", **message, **body}}


def jsonl(*lines: Any) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def send(client: TestClient, data: bytes, purpose: str = "batch", **more: Any) -> Any:
    return client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": purpose}, **more)


def begin(client: TestClient, data: bytes, endpoint: str = CHAT, **more: Any) -> dict[str, Any]:
    file = send(client, data, **more).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    response = client.post("/v1/batches", json=body, **more)
    assert response.status_code == 200, response.text
    return dict(response.json())


def awaited(client: TestClient, id: str, when: Callable[[dict[str, Any]], bool] | None = None, **more: Any) -> Any:
    end = time.monotonic() + 60
    while True:
        batch = client.get(f"/v1/batches/{id}", **more).json()
        if (when or (lambda one: one["status"] in stored.ENDED))(batch):
            return batch
        assert time.monotonic() < end, batch
        time.sleep(0.01)


def lines_of(client: TestClient, id: str | None) -> list[dict[str, Any]]:
    if id is None:
        return []
    response = client.get(f"/v1/files/{id}/content")
    assert response.status_code == 200
    return [json.loads(one) for one in response.content.splitlines()]


def finished(client: TestClient, data: bytes, endpoint: str = CHAT) -> tuple[Any, list[Any], list[Any]]:
    batch = awaited(client, begin(client, data, endpoint)["id"])
    return batch, lines_of(client, batch["output_file_id"]), lines_of(client, batch["error_file_id"])


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, TestClient]]:
    with served(tmp_path_factory.mktemp("batches") / "kept") as (engine, client):
        yield engine, client


@pytest.fixture
def client(here: tuple[FakeEngine, TestClient]) -> TestClient:
    return here[1]


def test_openais_client_runs_a_batch(tmp_path: Path) -> None:
    engine = made(tmp_path)
    with listening(create_app(local(engine), engine.tokenizer)) as url:
        api = openai_client(url)
        file = api.files.create(file=("mine.jsonl", jsonl(line("a"), line("b", "other"))), purpose="batch")
        assert (file.filename, file.purpose, file.object) == ("mine.jsonl", "batch", "file")
        assert [one.id for one in api.files.list()] == [file.id] and api.files.retrieve(file.id) == file
        batch = api.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "test"}
        )
        assert batch.status == "validating" and batch.metadata == {"of": "test"}
        end = time.monotonic() + 60
        while batch.status not in stored.ENDED and time.monotonic() < end:
            batch = api.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.completed_at and batch.error_file_id is None
        assert batch.request_counts and batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}
        assert batch.output_file_id is not None
        results = [json.loads(one) for one in api.files.content(batch.output_file_id).text.splitlines()]
        assert {one["custom_id"] for one in results} == {"a", "b"}
        assert all(one["error"] is None and one["response"]["status_code"] == 200 for one in results)
        assert [one.id for one in api.batches.list()] == [batch.id]
        outputs = api.files.list(purpose="batch_output")
        assert [one.id for one in outputs] == [batch.output_file_id]
        with pytest.raises(openai.BadRequestError, match="completed"):
            api.batches.cancel(batch.id)
        assert api.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            api.files.retrieve(file.id)


def test_a_lines_text_is_that_of_the_same_request_sent_directly_and_it_runs_behind_all(
    here: tuple[FakeEngine, TestClient],
) -> None:
    engine, client = here
    engine.forget()
    asked = [line(str(i), f"text {i} é\n\u2028", max_tokens=5 + i, temperature=0) for i in range(6)]
    batch, results, errors = finished(client, jsonl(*asked))
    assert batch["status"] == "completed" and not errors and len(results) == 6
    assert {request.priority for request in engine.requests} == {-(2**31)}
    for one in asked:
        direct = client.post(CHAT, json=one["body"]).json()
        (found,) = [result["response"] for result in results if result["custom_id"] == one["custom_id"]]
        assert found["body"]["choices"] == direct["choices"]
    assert engine.requests[-1].priority == 0


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses"])
def test_other_endpoints(client: TestClient, endpoint: str) -> None:
    one = line("a", "abc", endpoint)
    if endpoint == "/v1/responses":
        one["body"] = {"model": "echo", "input": "abc"}
    _, results, errors = finished(client, jsonl(one), endpoint)
    kind = {"/v1/completions": "text_completion", "/v1/responses": "response"}[endpoint]
    assert not errors and results[0]["response"]["body"]["object"] == kind


def test_a_line_that_is_refused_is_in_the_error_file_with_its_response(client: TestClient) -> None:
    batch, results, errors = finished(client, jsonl(line("good"), line("bad", max_tokens=-5), line("odd", nonsense=1)))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    assert [one["custom_id"] for one in results] == ["good"]
    assert {one["custom_id"]: one["response"]["status_code"] for one in errors} == {"bad": 400, "odd": 400}
    (odd,) = [one["response"]["body"]["error"]["message"] for one in errors if one["custom_id"] == "odd"]
    direct = client.post(CHAT, json=line("odd", nonsense=1)["body"])
    assert odd == direct.json()["error"]["message"]


WRONG: list[tuple[Any, str, str | None]] = [
    (b"{", "invalid_json_line", None),
    (b"\xff\xfe", "invalid_json_line", None),
    (b"[" * 100_000, "invalid_json_line", None),
    ([1], "invalid_json_line", None),
    (line("a"), "duplicate_custom_id", "custom_id"),
    ({"custom_id": "x"}, "missing_required_parameter", "method"),
    (line("x") | {"method": "GET"}, "invalid_method", "method"),
    (line("x") | {"url": "/v1/completions"}, "invalid_url", "url"),
    (line("x") | {"url": ["/v1"]}, "invalid_url", "url"),
    (line("x") | {"body": None}, "invalid_body", "body"),
    (line("x", stream=True), "stream_unsupported", "body.stream"),
    (line("x", model="other"), "mismatched_model", "body.model"),
    (line(""), "invalid_custom_id", "custom_id"),
    (line("x" * 513), "invalid_custom_id", "custom_id"),
    (line("x") | {"custom_id": 7}, "invalid_custom_id", "custom_id"),
]


def test_every_bad_line_is_named_and_nothing_is_run(here: tuple[FakeEngine, TestClient]) -> None:
    engine, client = here
    engine.forget()
    batch, results, errors = finished(client, jsonl(line("a"), *(bad for bad, _, _ in WRONG)))
    assert batch["status"] == "failed" and batch["failed_at"] and not results and not errors
    found = [(one["line"], one["code"], one["param"]) for one in batch["errors"]["data"]]
    assert found == [(i, code, param) for i, (_, code, param) in enumerate(WRONG, 2)]
    assert all(one["message"] for one in batch["errors"]["data"])
    assert not engine.requests


def test_thousands_of_bad_lines_are_listed_in_part_and_an_empty_file_is_none(client: TestClient) -> None:
    batch = awaited(client, begin(client, b"{\n" * 5000)["id"])
    assert batch["status"] == "failed" and len(batch["errors"]["data"]) == 100
    batch = awaited(client, begin(client, b"\n \n")["id"])
    assert batch["errors"]["data"][0]["code"] == "empty_file"


def test_what_is_no_file_for_a_batch_is_refused_and_leaves_nothing(
    here: tuple[FakeEngine, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, client = here
    folder = Path(engine.options.batches_dir or "") / "files"
    before = sorted(folder.iterdir())
    assert "purpose must be batch" in send(client, b"{}", "fine-tune").text
    assert "file is missing" in client.post("/v1/files", files={"purpose": (None, "batch")}).text
    assert "multipart/form-data" in client.post("/v1/files", json={}).text
    form = {"content-type": "multipart/form-data; boundary=x"}
    assert "last boundary" in client.post("/v1/files", content=b"--x\r\n", headers=form).text
    assert "not a form" in client.post("/v1/files", content=b"nothing", headers=form).text
    two = [("file", ("a", b"1")), ("file", ("b", b"2"))]
    assert "found two" in client.post("/v1/files", files=two, data={"purpose": "batch"}).text
    assert "50000 lines" in send(client, b"\n" * 50_001).text
    monkeypatch.setattr("draftwing.server.batches.upload.MAX_FILE_BYTES", 3_000_000)
    assert "3000000 bytes" in send(client, bytes(3_000_001)).text
    monkeypatch.setattr(stored, "MAX_KEPT_BYTES", 2_000_000)
    assert "delete some" in send(client, bytes(2_500_000)).text
    monkeypatch.setattr(stored, "MAX_KEPT_FILES", len(client.get("/v1/files").json()["data"]))
    assert "delete some" in send(client, b"").text
    assert sorted(folder.iterdir()) == before


def test_a_file_larger_than_other_bodies_is_taken(client: TestClient) -> None:
    data = jsonl(*({"custom_id": str(i), "x": "y" * 1000} for i in range(6000)))
    assert len(data) > client.app.state.service.max_body_size  # type: ignore[attr-defined]
    file = send(client, data).json()
    assert file["bytes"] == len(data)
    assert client.get(f"/v1/files/{file['id']}/content").content == data
    assert client.delete(f"/v1/files/{file['id']}").json()["deleted"]


def test_lists_have_pages(tmp_path: Path) -> None:
    with served(tmp_path) as (_, client):
        ids = [send(client, b"{}\n").json()["id"] for _ in range(5)]
        assert [one["id"] for one in client.get("/v1/files?order=asc").json()["data"]] == ids
        first = client.get("/v1/files?limit=2").json()
        assert [one["id"] for one in first["data"]] == ids[:2:-1] and first["has_more"]
        rest = client.get(f"/v1/files?limit=3&after={first['last_id']}").json()
        assert [one["id"] for one in rest["data"]] == ids[2::-1] and not rest["has_more"]
        assert client.get("/v1/files?purpose=other").json()["data"] == []
        for query in ("limit=0", "limit=x", "order=up", "after=file-none"):
            assert client.get(f"/v1/files?{query}").status_code == 400
        assert client.get("/v1/batches").json()["data"] == []


def test_bodies_of_batches_that_are_wrong(client: TestClient) -> None:
    file = send(client, jsonl(line("a"))).json()["id"]
    right = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for wrong, param, status in (
        ({"input_file_id": "file-none"}, None, 404), ({"input_file_id": "../../lock"}, None, 404),
        ({"endpoint": "/v1/files"}, "endpoint", 400), ({"completion_window": "1h"}, "completion_window", 400),
        ({"metadata": {"a": 1}}, "metadata.a", 400), ({"metadata": {str(i): "" for i in range(17)}}, "metadata", 400),
        ({"else": 1}, "else", 400), ({"output_expires_after": {"seconds": 9}}, "output_expires_after", 400),
    ):  # fmt: skip
        response = client.post("/v1/batches", json=right | wrong)
        assert response.status_code == status, (wrong, response.text)
        assert param is None or response.json()["error"]["param"] == param
    assert client.post("/v1/batches", content=b"{").status_code == 400
    assert client.post("/v1/batches", content=json.dumps(right).encode("utf-8-sig")).status_code == 200
    for method, path in (("GET", "/v1/batches/none"), ("POST", "/v1/batches/none/cancel"), ("DELETE", "/v1/files/x")):
        assert client.request(method, path).status_code == 404


def test_without_a_folder_the_routes_say_what_to_set() -> None:
    with client_of(FakeEngine()) as client:
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/files/x/content"), ("POST", "/v1/batches")):
            response = client.request(method, path)
            assert response.status_code == 404 and "--batches-dir DIR" in response.json()["error"]["message"]


def test_a_batch_is_cancelled_and_keeps_what_is_answered(tmp_path: Path) -> None:
    with served(tmp_path, max_running_requests=4) as (engine, client):
        engine.burst, engine.pause = 1, 0.01
        endless = [line(f"e{i}", ignore_eos=True, max_tokens=1900) for i in range(3)]
        batch = begin(client, jsonl(line("quick"), *endless))
        assert client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 400
        awaited(client, batch["id"], lambda one: one["request_counts"]["completed"] == 1)
        assert client.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] in ("cancelling", "cancelled")
        batch = awaited(client, batch["id"])
        assert batch["status"] == "cancelled" and batch["cancelled_at"] and batch["cancelling_at"]
        assert [one["custom_id"] for one in lines_of(client, batch["output_file_id"])] == ["quick"]
        assert client.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelled"
        assert client.delete(f"/v1/files/{batch['input_file_id']}").status_code == 200
        engine.forget()
        assert awaited(client, begin(client, jsonl(line("next")))["id"])["status"] == "completed"


def test_a_batch_that_takes_too_long_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "DAY", 1)
    with served(tmp_path, max_running_requests=4) as (engine, client):
        engine.burst, engine.pause = 1, 0.01
        batch = begin(client, jsonl(*(line(f"e{i}", ignore_eos=True, max_tokens=1900) for i in range(3))))
        batch = awaited(client, batch["id"])
        assert batch["status"] == "expired" and batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
        errors = lines_of(client, batch["error_file_id"])
        assert [one["error"]["code"] for one in errors] == ["batch_expired"] * 3
        assert all(one["response"] is None for one in errors)


KEYS = '[ann]\nkey = "a"\n[bob]\nkey = "b"\nrequests_per_minute = 4\n'


def test_keys_have_files_and_batches_of_their_own(tmp_path: Path) -> None:
    ann, bob = ({"headers": {"authorization": f"Bearer {key}"}} for key in "ab")
    with served(tmp_path / "kept", api_key_file=keys_file(tmp_path, KEYS)) as (engine, client):
        assert client.get("/v1/files").status_code == client.post("/v1/batches").status_code == 401
        batch = begin(client, jsonl(line("a"), line("b")), **ann)
        batch = awaited(client, batch["id"], **ann)
        assert batch["status"] == "completed" and {request.client for request in engine.requests} == {"ann"}
        for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{batch['output_file_id']}/content",
                     f"/v1/files/{batch['input_file_id']}"):  # fmt: skip
            assert client.get(path, **ann).status_code == 200 and client.get(path, **bob).status_code == 404
        assert client.delete(f"/v1/files/{batch['input_file_id']}", **bob).status_code == 404
        assert client.get("/v1/files", **bob).json()["data"] == client.get("/v1/batches", **bob).json()["data"] == []
        body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        assert client.post("/v1/batches", json=body, **bob).status_code == 404
        assert len(client.get("/v1/files", **ann).json()["data"]) == 2
    kept = "".join(path.read_text() for path in (tmp_path / "kept").rglob("*.json"))
    assert "Bearer" not in kept and all(path.stat().st_mode & 0o77 == 0 for path in (tmp_path / "kept").rglob("*"))


def test_a_batch_whose_key_is_removed_fails_in_words(tmp_path: Path) -> None:
    ann = {"headers": {"authorization": "Bearer a"}}
    file = keys_file(tmp_path, KEYS)
    with served(tmp_path / "kept", api_key_file=file, max_running_requests=8) as (engine, client):
        engine.burst, engine.pause = 1, 0.002
        batch = begin(client, jsonl(*(line(str(i)) for i in range(40))), **ann)
        awaited(client, batch["id"], lambda one: one["request_counts"]["completed"] >= 5, **ann)
        keys_file(tmp_path, KEYS.replace('[ann]\nkey = "a"\n', ""))
        client.app.state.reload_keys()  # type: ignore[attr-defined]
        assert client.get(f"/v1/batches/{batch['id']}", **ann).status_code == 401
        kept, end = tmp_path / "kept" / "batches" / f"{batch['id']}.json", time.monotonic() + 60
        while json.loads(kept.read_text())["shown"]["status"] != "failed" and time.monotonic() < end:
            time.sleep(0.01)
        keys_file(tmp_path, KEYS)
        client.app.state.reload_keys()  # type: ignore[attr-defined]
        batch = awaited(client, batch["id"], **ann)
        assert batch["status"] == "failed" and batch["error_file_id"] is None
        (error,) = batch["errors"]["data"]
        assert error["code"] == "invalid_api_key" and "removed" in error["message"]
        response = client.get(f"/v1/files/{batch['output_file_id']}/content", **ann)
        assert len(response.text.splitlines()) == batch["request_counts"]["completed"] >= 5


async def test_limits_of_a_key_make_lines_wait_and_fail_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwing.server.batches.runner.MAX_WAIT", 0.01)
    file = keys_file(tmp_path, '[bob]\nkey = "b"\nrequests_per_minute = 120\n')
    async with application(tmp_path / "kept", api_key_file=file) as (_, client):
        client.headers["authorization"] = "Bearer b"
        batch = await ended(client, await begun(client, jsonl(*(line(str(i), "x") for i in range(121)))))
        assert batch["request_counts"] == {"total": 121, "completed": 121, "failed": 0}


@asynccontextmanager
async def application(folder: Path, **options: Any) -> AsyncIterator[tuple[FakeEngine, httpx.AsyncClient]]:
    engine = made(folder, **options)
    async with asking(create_app(local(engine), engine.tokenizer)) as client:
        yield engine, client


async def begun(client: httpx.AsyncClient, data: bytes) -> str:
    sent = await client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    body = {"input_file_id": sent.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    return str((await client.post("/v1/batches", json=body)).json()["id"])


async def ended(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    end = time.monotonic() + 60
    while (batch := (await client.get(f"/v1/batches/{id}")).json())["status"] not in stored.ENDED:
        assert time.monotonic() < end, batch
        await asyncio.sleep(0.005)
    return dict(batch)


async def test_requests_beside_a_batch_of_100_lines_find_rows(tmp_path: Path) -> None:
    async with application(tmp_path, max_running_requests=16) as (engine, client):
        most = 0
        submit = engine.submit

        def watched(request: Any) -> None:
            nonlocal most
            submit(request)
            most = max(most, len([uid for uid, one in engine.running.items() if one[0].priority < 0]))

        engine.submit = watched  # type: ignore[method-assign]
        batch = await begun(client, jsonl(*(line(str(i), "x" * 300, max_tokens=200) for i in range(100))))
        done = 0
        for i in range(20):
            answer = await client.post(CHAT, json=line("", f"beside {i}")["body"])
            assert answer.status_code == 200
            done = (await client.get(f"/v1/batches/{batch}")).json()["request_counts"]["completed"]
        assert done < 100  # they did not wait for its end
        assert (await ended(client, batch))["request_counts"]["completed"] == 100
        assert 0 < most <= 4  # a quarter of the rows


def test_lines_whose_engine_ends_are_asked_again(tmp_path: Path) -> None:
    engine, successor = made(tmp_path, max_running_requests=16), made(tmp_path)
    engine.burst, engine.pause = 1, 0.005
    with TestClient(create_app(local(engine, successor), engine.tokenizer)) as client:
        batch = begin(client, jsonl(*(line(str(i)) for i in range(20))))
        awaited(client, batch["id"], lambda one: one["request_counts"]["completed"] > 0)
        engine.crash = RuntimeError("of a test")
        batch = awaited(client, batch["id"])
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert 0 < len(successor.requests) < 20


def test_a_header_lowers_the_priority_and_never_raises_it(here: tuple[FakeEngine, TestClient]) -> None:
    engine, client = here
    for given, own, found in (("-3", None, -3), ("5", None, 0), ("5", 2, 2), ("-1", -7, -7)):
        body = line("")["body"] | ({} if own is None else {"priority": own})
        assert client.post(CHAT, json=body, headers={"x-draftwing-priority": given}).status_code == 200
        assert engine.requests[-1].priority == found
    for given in ("high", "2147483648", "-2147483649", "1e3"):
        got = client.post(CHAT, json=line("")["body"], headers={"x-draftwing-priority": given})
        assert got.status_code == 400 and "x-draftwing-priority" in got.text
    assert "/v1/batches" in client.get("/openapi.json").json()["paths"] and "/v1/files" in client.get("/docs").text


def test_a_server_that_starts_again_goes_on(tmp_path: Path) -> None:
    count = 40
    with served(tmp_path, max_running_requests=8) as (engine, client):
        engine.burst, engine.pause = 1, 0.002
        batch = begin(client, jsonl(*(line(str(i), f"text {i}") for i in range(count))))
        done = awaited(client, batch["id"], lambda one: one["request_counts"]["completed"] >= 5)
        assert done["status"] == "in_progress"
    output, _ = json.loads((tmp_path / "batches" / f"{batch['id']}.json").read_text())["outputs"]
    with (tmp_path / "files" / f"{output}.jsonl").open("ab") as file:
        file.write(b'{"id": "batch_req_1", "custom_id": "39", "respo')  # torn
    (tmp_path / "files" / "file-foreign.jsonl").write_bytes(b"left behind")
    (tmp_path / "files" / "file-odd.json").write_text("{")
    with served(tmp_path) as (engine, client):
        batch = awaited(client, batch["id"])
        assert batch["status"] == "completed" and batch["request_counts"]["completed"] == count
        assert len(engine.requests) <= count - 5
        ids = [one["custom_id"] for one in lines_of(client, batch["output_file_id"])]
        assert sorted(ids, key=int) == [str(i) for i in range(count)]
        assert not (tmp_path / "files" / "file-foreign.jsonl").exists()


def test_a_batch_that_cannot_go_on_keeps_what_is_answered(tmp_path: Path) -> None:
    with served(tmp_path, max_running_requests=8) as (engine, client):
        engine.burst, engine.pause = 1, 0.002
        batch = begin(client, jsonl(*(line(str(i)) for i in range(40))))
        awaited(client, batch["id"], lambda one: one["request_counts"]["completed"] >= 5)
    (tmp_path / "files" / f"{batch['input_file_id']}.jsonl").unlink()
    with served(tmp_path) as (_, client):
        batch = awaited(client, batch["id"])
        assert batch["status"] == "failed" and str(tmp_path) not in json.dumps(batch["errors"])
        assert len(lines_of(client, batch["output_file_id"])) == batch["request_counts"]["completed"] >= 5


def test_results_are_cut_at_the_first_line_that_is_not_whole(tmp_path: Path) -> None:
    lines = [b'{"custom_id": "%d"}\n' % i for i in range(3)]
    whole = b"".join(lines)
    for size in range(len(whole) + 1):
        (tmp_path / "out").write_bytes(whole[:size])
        results = Results(tmp_path / "out", tmp_path / "err")
        results.close()
        assert results.counts == [size // len(lines[0]), 0]
        assert (tmp_path / "out").read_bytes() == whole[: size // len(lines[0]) * len(lines[0])]


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    first = Store(tmp_path)
    with pytest.raises(ConfigError, match="another server"):
        Store(tmp_path)
    first.close()
    Store(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path / "file" / "below")
