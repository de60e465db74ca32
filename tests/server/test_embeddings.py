"""/v1/embeddings, /v1/rerank, /score and Ollama's /api/embed, with an engine in this process."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from fake_engine import local
from scripted import client_of
from starlette.testclient import TestClient
from tiny_embedder import LAST, MEAN, ids_of, write_embedder

from draftwing import LLM
from draftwing.config.options import Options
from draftwing.engine.engine import Engine
from draftwing.server import quotas
from draftwing.server.app import create_app
from draftwing.server.batches.store import ENDED

OPTIONS: dict[str, Any] = dict(
    context_length=256,
    max_total_tokens=4096,
    dtype="float32",
    speculative_algorithm="none",
    num_threads=1,
    served_model_name="tiny-embedder",
)
TEXTS = ["one two", "three", "four five six"]
DOCUMENTS = ["no", "a long one", "three four"]


class Local(Engine):
    """What `LocalLink` wants of an engine besides."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(Options.from_kwargs(model=str(folder), **OPTIONS | options).resolve())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("models") / "tiny-embedder", LAST)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with client_of(Local(folder)) as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = write_embedder(tmp_path_factory.mktemp("models") / "tiny-judge")
    with client_of(Local(folder, context_length=1024)) as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray[Any, Any]:
    """[3, 48], as `LLM.embed` has them, which is compared with transformers elsewhere."""
    with LLM(str(folder), **OPTIONS) as llm:
        return llm.embed(TEXTS)


def ok(client: TestClient, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, path: str, **body: Any) -> str:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def rows(found: Any) -> np.ndarray[Any, Any]:
    assert [one["index"] for one in found["data"]] == list(range(len(found["data"])))
    return np.asarray([one["embedding"] for one in found["data"]], np.float32)


def test_all_forms_of_input(client: TestClient, expected: np.ndarray[Any, Any]) -> None:
    found = ok(client, "/v1/embeddings", model="tiny-embedder", input=TEXTS)
    assert np.array_equal(rows(found), expected)
    assert found["object"] == "list" and found["model"] == "tiny-embedder"
    tokens = sum(len(text) + 1 for text in TEXTS)
    assert (found["usage"]["prompt_tokens"], found["usage"]["total_tokens"]) == (tokens, tokens)
    assert np.array_equal(rows(ok(client, "/embeddings", input=TEXTS[0])), expected[:1])
    assert np.array_equal(rows(ok(client, "/v1/embeddings", input=ids_of(TEXTS[1]))), expected[1:2])
    assert np.array_equal(rows(ok(client, "/v1/embeddings", input=list(map(ids_of, TEXTS)))), expected)


def test_base64_and_dimensions(client: TestClient, expected: np.ndarray[Any, Any]) -> None:
    found = ok(client, "/v1/embeddings", input=TEXTS, encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in found["data"]]
    assert np.array_equal(decoded, expected)
    short = rows(ok(client, "/v1/embeddings", input=TEXTS, dimensions=5))
    part = expected[:, :5] / np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(short, part, atol=1e-6)


def test_the_client_of_openai(client: TestClient, expected: np.ndarray[Any, Any]) -> None:
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client)
    found = api.embeddings.create(model="tiny-embedder", input=TEXTS)  # which asks for base64 by itself
    np.testing.assert_array_equal(np.asarray([one.embedding for one in found.data], np.float32), expected)
    assert (
        len(api.embeddings.create(model="m", input="a", dimensions=3, encoding_format="float").data[0].embedding) == 3
    )


def test_ollama(client: TestClient, expected: np.ndarray[Any, Any]) -> None:
    found = ok(client, "/api/embed", model="tiny-embedder", input=TEXTS, keep_alive="5m", options={"num_ctx": 64})
    assert np.array_equal(np.asarray(found["embeddings"], np.float32), expected)
    assert found["prompt_eval_count"] == sum(len(text) + 1 for text in TEXTS) and found["total_duration"] > 0
    assert set(found) == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    one = ok(client, "/api/embeddings", model="tiny-embedder", prompt=TEXTS[2])
    assert set(one) == {"embedding"} and np.array_equal(np.asarray(one["embedding"], np.float32), expected[2])
    assert len(ok(client, "/api/embed", model="m", input="a", dimensions=4)["embeddings"][0]) == 4
    assert (
        ok(client, "/api/embed", model="m")["embeddings"] == ok(client, "/api/embeddings", model="m")["embedding"] == []
    )


def test_long_texts(client: TestClient) -> None:
    long = "b" * 400
    said = refused(client, "/v1/embeddings", input=["a", long])
    assert said.startswith("input.1 is too long: expected at most 255 tokens, found 401") and "truncate" in said
    cut = rows(ok(client, "/v1/embeddings", input=[*ids_of("b" * 254)]))
    assert np.array_equal(rows(ok(client, "/v1/embeddings", input=long, truncate=True)), cut)
    assert np.array_equal(np.float32(ok(client, "/api/embed", model="m", input=long)["embeddings"]), cut)
    assert "input is too long" in refused(client, "/api/embed", model="m", input=long, truncate=False)


def test_scores_of_vectors(client: TestClient) -> None:
    """A model that makes vectors ranks by their cosines."""
    vectors = rows(ok(client, "/v1/embeddings", input=["three", *DOCUMENTS])).astype(np.float64)
    cosines = vectors[1:] @ vectors[0]
    found = ok(client, "/v1/rerank", query="three", documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]])
    order = [one["index"] for one in found["results"]]
    assert order == np.argsort(-cosines).tolist()
    np.testing.assert_allclose([one["relevance_score"] for one in found["results"]], cosines[order], atol=1e-6)
    assert [one["document"]["text"] for one in found["results"]] == [DOCUMENTS[i] for i in order]
    best = ok(client, "/rerank", query="three", documents=DOCUMENTS, top_n=1, return_documents=False)["results"]
    assert best == [{"index": order[0], "relevance_score": found["results"][0]["relevance_score"]}]
    pairs = ok(client, "/score", text_1="three", text_2=DOCUMENTS)["data"]
    np.testing.assert_allclose([one["score"] for one in pairs], cosines, atol=1e-6)
    each = ok(client, "/v1/score", text_1=["three", "three"], text_2=DOCUMENTS[:2])
    assert [one["score"] for one in each["data"]] == [one["score"] for one in pairs[:2]]


def test_scores_of_a_model_that_judges(judge: TestClient) -> None:
    every = ok(judge, "/v1/rerank", query="Why?", documents=DOCUMENTS)
    alone = [ok(judge, "/v1/score", text_1="Why?", text_2=one)["data"][0]["score"] for one in DOCUMENTS]
    assert [one["relevance_score"] for one in every["results"]] == sorted(alone, reverse=True)
    assert all(0 < one < 1 for one in alone) and len(set(alone)) == len(alone)
    assert every["usage"]["prompt_tokens"] > 3 * 200
    other = ok(judge, "/v1/rerank", query="Why?", documents=DOCUMENTS, instruction="Find what is short")
    assert [one["relevance_score"] for one in other["results"]] != sorted(alone, reverse=True)
    assert "documents.1 is too long" in refused(judge, "/v1/rerank", query="q", documents=["a", "b" * 2000])
    ok(judge, "/v1/rerank", query="q", documents=["a", "b" * 2000], truncate=True)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"input": ""}, "input must not be empty"),
        ("/v1/embeddings", {"input": []}, "input must not be empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input must not be empty"),
        ("/v1/embeddings", {}, "input is missing"),
        ("/v1/embeddings", {"input": [9999]}, "9999 in input is outside of the vocabulary"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions must be greater than or equal to 1"),
        ("/v1/embeddings", {"input": "a", "dimensions": 49}, "dimensions must be from 1 to 48"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format must be 'float' or 'base64'"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream"),
        ("/v1/embeddings", {"input": "a", "temprature": 1}, "temprature is not a known field"),
        ("/v1/embeddings", {"input": ["a"] * 1025}, "input takes at most 1024 prompts; found 1025"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query must not be empty"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents must not be empty"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 must be one text, or as many as text_2"),
    ],
)
def test_refusals(client: TestClient, path: str, body: dict[str, Any], said: str) -> None:
    assert said in refused(client, path, **body)


def test_they_are_counted(client: TestClient) -> None:
    def requests() -> float:
        lines = client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("sglang:num_requests_total")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    before = requests()
    ok(client, "/v1/embeddings", input=TEXTS)
    assert requests() == before + len(TEXTS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v1/rerank", {"query": "a", "documents": DOCUMENTS}),
        ("/v1/score", {"text_1": "a", "text_2": "b", "learn": True}),
        ("/api/embed", {"input": "one"}),
    ],
)
def test_nothing_is_learnt_from_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    engine, asked = Local(folder), []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (asked.append(request), submit(request)))
    with client_of(engine) as client:  # type: ignore[arg-type]
        ok(client, path, **body)
    assert asked and not any(request.learn for request in asked)


def test_a_mean_of_too_many_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_REQUEST_LOGPROBS", 1000)
    folder = write_embedder(tmp_path / "mean", MEAN)
    with client_of(Local(folder)) as client:  # type: ignore[arg-type]
        ok(client, "/v1/embeddings", input="a" * 40)
        assert refused(client, "/v1/embeddings", input=["a" * 40] * 2).startswith("input has too many tokens")


def test_a_batch_of_them_has_those_of_single_requests(folder: Path, tmp_path: Path) -> None:
    """A line that is wrong is the only one that fails."""
    with client_of(Local(folder, batches_dir=str(tmp_path))) as client:  # type: ignore[arg-type]
        bodies = {f"{i}": {"input": text, "encoding_format": "float"} for i, text in enumerate([*TEXTS, TEXTS, ""])}
        url = "/v1/embeddings"
        lines = [{"custom_id": id, "method": "POST", "url": url, "body": body} for id, body in bodies.items()]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()
        while batch["status"] not in ENDED:
            time.sleep(0.01)
            batch = client.get(f"/v1/batches/{batch['id']}").json()
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": len(bodies), "completed": len(bodies) - 1, "failed": 1}
        content = client.get(f"/v1/files/{batch['output_file_id']}/content").text
        results = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, content.splitlines())}
        assert results.keys() == bodies.keys() - {"4"}
        for id, found in results.items():
            assert found["data"] == ok(client, url, **bodies[id])["data"]


async def test_who_goes_away_lets_go_of_its_texts(folder: Path) -> None:
    """The engine has nothing to do any more, though nothing was sent."""
    engine = Local(folder, max_total_tokens=16384, chunked_prefill_size=16)
    app = create_app(local(engine), engine.tokenizer)  # type: ignore[arg-type]
    body = json.dumps({"input": [f"{i} " * 60 for i in range(60)]}).encode()
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        while not engine.info or not app.state.service.engine.active:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/embeddings", "raw_path": b"/v1/embeddings", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
        "server": ("testserver", 80), "client": ("me", 1),
    }  # fmt: skip
    async with app.router.lifespan_context(app):
        await app(scope, receive, send)  # type: ignore[arg-type]
        while app.state.service.engine.active or not engine.idle():
            await asyncio.sleep(0.001)
    assert sent[0]["status"] == 499
