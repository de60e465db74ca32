"""Several models at one address, by the clients of others: each answers as if it were alone."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import openai
import pytest
from front_process import OPTIONS, SECONDS, Process, write_models
from tiny_encoder import write_encoder

from draftwing import LLM
from draftwing.server.batches.store import ENDED

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # tests/server/router shows the same in one process

CHATS = ("qwen3", "llama")
TURNS = CHATS * 2
SAYS = ["what is the capital of china?", "beijing", "one, three, five!"]
TOKENS = 24
UNKNOWN = "the model 'other' does not exist"


class Served(NamedTuple):
    url: str
    texts: dict[tuple[str, str], str]  # by model and prompt: what it answers when it is alone


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A front with room for three of its four models."""
    folder, texts = tmp_path_factory.mktemp("models"), {}
    write_models(folder)
    write_encoder(folder / "bert")
    prompts = [f"user: {said}\nassistant:" for said in SAYS]
    for name in CHATS:
        with LLM(str(folder / name), **OPTIONS) as llm:
            answers: Any = llm.generate(prompts, {"temperature": 0, "max_new_tokens": TOKENS})
            texts |= {(name, said): answer.text for said, answer in zip(SAYS, answers, strict=True)}
    assert all(len({texts[name, said] for name in CHATS}) == 2 for said in SAYS), "they differ"
    batches = tmp_path_factory.mktemp("batches")
    server = Process(folder, 0, "--models-max=3", f"--batches-dir={batches}")
    try:
        yield Served(server.url, texts)
    finally:
        assert server.end() == 0


@pytest.fixture
def texts(served: Served) -> dict[tuple[str, str], str]:
    return served.texts


@pytest.fixture
def plain(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=SECONDS) as client:
        yield client


@pytest.fixture
def vectors(plain: httpx.Client) -> list[list[float]]:
    """Of `SAYS`, as /v1/embeddings writes them."""
    found = plain.post("/v1/embeddings", json={"model": "bert", "input": SAYS}).json()
    return [one["embedding"] for one in found["data"]]


@pytest.fixture
def of_openai(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def ollama() -> Any:
    # A module of it: the folder of the server's own tests has the package's name.
    pytest.importorskip("ollama._client", reason="draftwing[clients] is not installed")
    return importlib.import_module("ollama")


@pytest.fixture
def of_ollama(served: Served, ollama: Any) -> Any:
    return ollama.Client(host=served.url)


def user(said: str) -> list[Any]:
    return [{"role": "user", "content": said}]


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_openai(of_openai: openai.OpenAI, texts: dict[tuple[str, str], str], vectors: list[list[float]]) -> None:
    create = of_openai.chat.completions.create
    for name in TURNS:
        for said in SAYS:
            whole = create(model=name, messages=user(said), temperature=0, max_tokens=TOKENS)
            assert (whole.model, whole.choices[0].message.content) == (name, texts[name, said])
        chunks = list(create(model=name, messages=user(SAYS[0]), temperature=0, max_tokens=TOKENS, stream=True))
        assert {chunk.model for chunk in chunks} == {name}
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == texts[name, SAYS[0]]
    cards = {card.id: card.to_dict() for card in of_openai.models.list()}
    assert {name for name, card in cards.items() if card["status"]["value"] == "loaded"} == {*CHATS, "bert"}
    assert cards.keys() == {*CHATS, "qwen2", "bert"} and of_openai.models.retrieve("llama").id == "llama"
    found = of_openai.embeddings.create(model="bert", input=SAYS, encoding_format="float")
    assert [one.embedding for one in found.data] == vectors and found.model == "bert"
    for ask in (create, of_openai.embeddings.create):
        with pytest.raises(openai.NotFoundError, match=UNKNOWN):
            ask(model="other", **({"messages": user("x")} if ask is create else {"input": "x"}))  # type: ignore[operator]
    with pytest.raises(openai.NotFoundError, match=UNKNOWN):
        of_openai.models.retrieve("other")


def test_openai_runs_batches(of_openai: openai.OpenAI, texts: dict[tuple[str, str], str]) -> None:
    """Two at once, each for a model of its own; the third model has to make room."""
    assert of_openai.embeddings.create(model="bert", input="x").data

    def begun(name: str) -> Any:
        more = {"model": name, "temperature": 0, "max_tokens": TOKENS}
        url = "/v1/chat/completions"
        lines = [
            {"custom_id": said, "method": "POST", "url": url, "body": {"messages": user(said), **more}} for said in SAYS
        ]
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = of_openai.files.create(file=("lines.jsonl", data), purpose="batch")
        return of_openai.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")

    batches = {name: begun(name).id for name in CHATS}
    for name, id in batches.items():
        wait(lambda id=id: of_openai.batches.retrieve(id).status in ENDED)
        batch = of_openai.batches.retrieve(id)
        assert batch.status == "completed" and batch.output_file_id, batch
        results = [json.loads(line) for line in of_openai.files.content(batch.output_file_id).text.splitlines()]
        said = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in results}
        assert said == {one: texts[name, one] for one in SAYS}


def test_ollama(of_ollama: Any, ollama: Any, texts: dict[tuple[str, str], str], vectors: list[list[float]]) -> None:
    options = {"temperature": 0, "num_predict": TOKENS}
    for name in TURNS:
        for said in SAYS:
            whole = of_ollama.chat(model=name, messages=user(said), options=options)
            assert (whole.model, whole.message.content) == (name, texts[name, said])
        parts = list(of_ollama.chat(model=name, messages=user(SAYS[0]), options=options, stream=True))
        assert "".join(part.message.content for part in parts) == texts[name, SAYS[0]]
        written = of_ollama.generate(model=f"{name}:latest", prompt=SAYS[1], options=options)
        assert (written.model, written.response) == (f"{name}:latest", texts[name, SAYS[1]])
    assert {one.model for one in of_ollama.list().models} == {*CHATS, "qwen2", "bert"}
    assert of_ollama.embed(model="bert", input=SAYS).embeddings == vectors
    assert of_ollama.embeddings(model="bert", prompt=SAYS[0]).embedding == vectors[0]
    for ask in (
        lambda: of_ollama.chat(model="other", messages=user("x")),
        lambda: next(of_ollama.generate(model="other", prompt="x", stream=True)),
        lambda: of_ollama.embed(model="other", input="x"),
        lambda: of_ollama.show("other"),
    ):
        with pytest.raises(ollama.ResponseError, match=UNKNOWN) as refused:
            ask()
        assert refused.value.status_code == 404


def test_ollama_loads_and_unloads(of_ollama: Any) -> None:
    def loaded() -> dict[str, Any]:
        return {one.model: one for one in of_ollama.ps().models}

    for name in (*loaded(), "qwen2"):  # of one that is not loaded, too
        assert of_ollama.generate(model=name, keep_alive=0).done_reason == "unload"
    wait(lambda: not loaded())
    assert of_ollama.generate(model="qwen2", keep_alive="1h").done_reason == "load"
    assert of_ollama.chat(model="llama", keep_alive=-1).done_reason == "load"
    found = loaded()
    assert found.keys() == {"qwen2", "llama"} and found["qwen2"].expires_at < found["llama"].expires_at
    assert found["llama"].size > 0 and found["llama"].context_length == 1024
    assert of_ollama.chat(model="llama", messages=user("x"), options={"num_predict": 2}, keep_alive=0).done
    wait(lambda: loaded().keys() == {"qwen2"})


def test_ollama_says_what_models_are_for(of_ollama: Any, vectors: list[list[float]]) -> None:
    """Programs choose models by it: those that are loaded, and those that are not."""
    for kept in (None, 0):
        assert of_ollama.show("qwen3").capabilities == ["completion"]
        assert of_ollama.show("bert").capabilities == ["embedding"]
        of_ollama.embed(model="bert", input="x", keep_alive=kept)


@pytest.mark.parametrize("kind", ["openai", "ollama"])
def test_langchain(kind: str, request: pytest.FixtureRequest, served: Served, vectors: list[list[float]]) -> None:
    found = pytest.importorskip(f"langchain_{kind}", reason="draftwing[clients] is not installed")
    if kind == "openai":
        error, at = openai.NotFoundError, {"base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0}
        chat = found.ChatOpenAI(model="llama", temperature=0, max_tokens=TOKENS, **at)
        # Without this it counts tokens itself, with a tokenizer that it fetches.
        embeddings = found.OpenAIEmbeddings(model="bert", check_embedding_ctx_length=False, **at)
    else:
        error, at = request.getfixturevalue("ollama").ResponseError, {"base_url": served.url}
        chat = found.ChatOllama(model="llama", temperature=0, num_predict=TOKENS, validate_model_on_init=True, **at)
        embeddings = found.OllamaEmbeddings(model="bert", **at)
    for name in TURNS:
        for said in SAYS:
            assert chat.invoke(said, model=name).content == served.texts[name, said]
        assert "".join(chunk.content for chunk in chat.stream(SAYS[0], model=name)) == served.texts[name, SAYS[0]]
    made = [*embeddings.embed_documents(SAYS), embeddings.embed_query(SAYS[1])]
    # Of float32 in decimals or, as some versions ask for them, in base64.
    assert np.array_equal(np.float32(made), np.float32([*vectors, vectors[1]]))
    with pytest.raises(error, match=UNKNOWN):
        chat.invoke("x", model="other")
