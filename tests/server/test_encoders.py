"""An encoder behind the endpoints of vectors and scores, and what it says at all others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import client_of
from starlette.testclient import TestClient
from tiny_encoder import XLM, write_encoder

from draftwing import LLM
from draftwing.config.options import Options
from draftwing.engine.engine import Engine

TEXTS = ["what is gravity", "one two three", "a"]
OPTIONS: dict[str, Any] = dict(dtype="float32", num_threads=1, served_model_name="tiny-encoder")


def served(folder: Path) -> Iterator[TestClient]:
    with client_of(Engine(Options.from_kwargs(model=str(folder), **OPTIONS).resolve())) as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "tiny-encoder")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    yield from served(folder)


@pytest.fixture(scope="module")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "tiny-reranker", XLM, scores=True)


@pytest.fixture(scope="module")
def judge(judge_folder: Path) -> Iterator[TestClient]:
    yield from served(judge_folder)


def answer(client: TestClient, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_vectors(client: TestClient, folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        expected = llm.embed(TEXTS)
        cosines = llm.score(TEXTS[0], TEXTS)
    found = answer(client, "/v1/embeddings", input=TEXTS)
    assert np.array_equal(np.asarray([one["embedding"] for one in found["data"]], np.float32), expected)
    of_ollama = answer(client, "/api/embed", input=TEXTS[1])
    assert np.array_equal(np.asarray(of_ollama["embeddings"], np.float32), expected[1:2])
    ranked = answer(client, "/v1/rerank", query=TEXTS[0], documents=TEXTS)["results"]
    assert ranked[0]["index"] == 0 and ranked[0]["relevance_score"] == pytest.approx(1.0)
    assert [one["score"] for one in answer(client, "/score", text_1=TEXTS[0], text_2=TEXTS)["data"]] == cosines


def test_scores(judge: TestClient, judge_folder: Path) -> None:
    with LLM(str(judge_folder), **OPTIONS) as llm:
        expected = llm.score(TEXTS[0], TEXTS)
    found = answer(judge, "/v1/rerank", query=TEXTS[0], documents=TEXTS)["results"]
    assert [(one["index"], one["relevance_score"]) for one in found] == sorted(enumerate(expected), key=lambda p: -p[1])
    assert [one["score"] for one in answer(judge, "/score", text_1=TEXTS[0], text_2=TEXTS)["data"]] == expected
    assert "scores pairs of texts" in answer(judge, "/v1/embeddings", 400, input="a")["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
        ("/generate", {"text": "a"}),
        ("/api/generate", {"model": "tiny-encoder", "prompt": "a"}),
        ("/api/chat", {"model": "tiny-encoder", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_it_writes_no_text(client: TestClient, path: str, body: dict[str, Any]) -> None:
    error = answer(client, path, 400, **body)["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "this model writes no text: it makes vectors of texts; ask /v1/embeddings" in message


def test_other_pages_work(client: TestClient) -> None:
    answer(client, "/v1/embeddings", input="a")
    for path in ("/health", "/v1/models", "/metrics", "/server_info", "/v1/loads", "/api/tags"):
        assert client.get(path).status_code == 200, path
    assert answer(client, "/api/show", model="tiny-encoder")["capabilities"] == ["embedding"]
