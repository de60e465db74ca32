"""Prompts that are long to tokenize hold up nobody else."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest
from fake_engine import CONTEXT, FakeEngine, local
from scripted import asking, client_of
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.grammar import compiler
from draftwing.grammar.compiler import GrammarCompiler
from draftwing.grammar.state import Vocabulary
from draftwing.requests.grammar_field import Grammar
from draftwing.server import service
from draftwing.server.app import create_app
from draftwing.server.service import MAX_COUNTED, Service
from draftwing.server.worker_pools import MAX_SHORT_SIZE
from draftwing.text.tokenizer import PIECE, Tokenizer


@pytest.fixture
def calls(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], bool]]:
    """Batches that are tokenized, and whether on the event loop's thread."""
    found: list[tuple[list[str], bool]] = []
    encode_many = Tokenizer.encode_many

    def spy(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        found.append((texts, threading.current_thread() is threading.main_thread()))
        return encode_many(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_many", spy)
    return found


def test_long_texts_are_one_batch_in_a_thread(engine: FakeEngine, calls: list[tuple[list[str], bool]]) -> None:
    service = Service(local(engine), engine.tokenizer)
    texts = ["ab" * 700, "cé" * 700, "e" * 1400]  # each is short, together they are not
    ids, batched = asyncio.run(service.encode("prompt", texts))
    assert batched and calls == [(texts, False)]
    assert [engine.tokenizer.decode(one) for one in ids] == texts
    short = asyncio.run(service.encode("prompt", ["ab", "cd"]))
    assert short == ([engine.tokenizer.encode("ab"), engine.tokenizer.encode("cd")], True)
    assert len(calls) == 1  # short ones are not worth a thread


def test_tokenize_takes_its_texts_as_a_batch(client: TestClient, calls: list[tuple[list[str], bool]]) -> None:
    texts = ["a" * 3000, "b" * 3000]
    assert client.post("/tokenize", json={"prompt": texts}).json()["count"] == [3000, 3000]
    assert [batch for batch, _ in calls] == [texts]


@pytest.mark.slow
def test_documents_longer_than_the_context_are_counted(client: TestClient, engine: FakeEngine) -> None:
    text = "a" * 100_000
    assert engine.info.context_length < len(text) < MAX_COUNTED
    said = client.post("/tokenize", json={"prompt": text}).json()
    assert said["count"] == len(text)
    assert client.post("/detokenize", json={"tokens": said["tokens"]}).json()["text"] == text
    for path, body in (("/tokenize", {"prompt": text * 4}), ("/v1/completions", {"prompt": text})):
        assert client.post(path, json=body).status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize("large", ["template", "grammar"])
async def test_small_chats_are_not_behind_large_ones(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is large is not the text of a message; some dozens of them wait for one another, and no one else does."""
    hold = threading.Event()

    def render(self: Tokenizer, messages: list[dict[str, str]], **variables: object) -> str:
        hold.wait(20 if len(str(variables)) > MAX_SHORT_SIZE else 0)
        return messages[-1]["content"]

    def compile(self: GrammarCompiler, grammar: Grammar, param: str | None = None, text: str | None = None) -> None:
        hold.wait(20 if len(grammar.text) > MAX_SHORT_SIZE else 0)

    monkeypatch.setattr(Tokenizer, "render_chat", render)
    monkeypatch.setattr(GrammarCompiler, "compile", compile)
    engine = FakeEngine(Options(random_seed=7))
    app = create_app(local(engine), engine.tokenizer)
    small = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "regex": "a+"}
    long = "d" * (MAX_SHORT_SIZE + 1)
    more = (
        {"chat_template_kwargs": {"about": long}}
        if large == "template"
        else {"ebnf": f'root ::= "a" # {long}', "regex": None}
    )

    async with asking(app) as client:
        ask = lambda body: asyncio.ensure_future(client.post("/v1/chat/completions", json=body))  # noqa: E731
        waiting = [ask(small | more) for _ in range(40)]
        await asyncio.sleep(0.3)
        assert (await asyncio.wait_for(ask(small), 10)).status_code == 200
        assert not any(one.done() for one in waiting)
        hold.set()
        await asyncio.gather(*waiting)


@pytest.mark.parametrize(("length", "at_once"), [(3, True), (8, False)])
async def test_words_are_tokenized_once_and_where_nobody_waits(
    length: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all prompts of a request and all of their answers; many of them in a thread."""
    words, seen = [f"{i:03}"[::-1].zfill(length) for i in range(60)], list[tuple[str, bool]]()
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, *rest: bool, **named: bool) -> list[int]:
        seen.append((text, threading.current_thread() is threading.main_thread()))
        return encode(self, text, *rest, **named)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    monkeypatch.setattr(service, "_INLINE_CHARACTERS", 60 * 2 * 5)
    engine = FakeEngine(Options(random_seed=7))
    app = create_app(local(engine), engine.tokenizer)

    async with asking(app) as client:
        body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 2, "bad_words": words}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    found = [(text, main) for text, main in seen if text.strip() in words]
    assert sorted(text for text, _ in found) == sorted([*words, *(f" {word}" for word in words)])
    assert {main for _, main in found} == {at_once}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_the_time_of_a_request_begins_when_it_arrives(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends while the grammar is compiled, and the engine gets when it began."""
    hold, begun = threading.Event(), threading.Event()

    def compile(self: GrammarCompiler, grammar: Grammar, param: str | None = None, text: str | None = None) -> None:
        begun.set()
        hold.wait(20)

    monkeypatch.setattr(GrammarCompiler, "compile", compile)
    hasty, engine = (FakeEngine(Options(random_seed=7, request_timeout=seconds)) for seconds in (0.5, 60))
    asked = {"text": "a"} if path == "/generate" else {"prompt": "a"}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "a"}]}  # type: ignore[dict-item]
    guided = asked | ({"sampling_params": {"regex": "a+"}} if path == "/generate" else {"regex": "a+"})
    with client_of(hasty) as client:
        before = time.monotonic()
        late = client.post(path, json=guided)
        assert late.status_code == 500 and "timeout" in late.text and begun.is_set()
        assert 0.5 <= time.monotonic() - before < 15 and not hasty.requests
        hold.set()
    with client_of(engine) as client:
        before = time.monotonic()
        assert client.post(path, json=asked).status_code == 200
    (request,) = engine.requests
    assert request.arrived is not None and before <= request.arrived <= time.monotonic()


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
def test_a_grammar_is_compiled_once(path: str, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = compiler._built

    def counted(vocabulary: Vocabulary, text: str) -> tuple[Any, str | None]:
        built.append(text)
        return build(vocabulary, text)

    monkeypatch.setattr(compiler, "_built", counted)
    for pattern in (f"[ab]+{path}", f"[ab]+{path}", f"[cd]+{path}"):
        prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
        body = prompt | {"max_tokens": 2, "regex": pattern}
        if path == "/generate":
            body = {"text": "a", "sampling_params": {"max_new_tokens": 2, "regex": pattern}}
        assert client.post(path, json=body).status_code == 200
    assert len(built) == 2


def test_a_grammar_that_the_engine_fails_at_is_a_500(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(self: GrammarCompiler, grammar: Grammar, param: str | None = None, text: str | None = None) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(GrammarCompiler, "compile", compile)
        for path in ("/v1/completions", "/v1/messages"):
            body = {"prompt": "a", "regex": "a+"}
            if path == "/v1/messages":
                message, schema = {"role": "user", "content": "a"}, {"type": "object"}
                body = {"messages": [message], "max_tokens": 2, "model": "echo"}  # type: ignore[dict-item]
                body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}  # type: ignore[assignment]
            failed = client.post(path, json=body)
            assert failed.status_code == 500, failed.text
            assert "the grammar could not be compiled: MemoryError: no room" in failed.json()["error"]["message"]
    assert client.post("/v1/completions", json={"prompt": "a", "regex": "a+"}).status_code == 200


def test_server_info_masks_the_key_and_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "it's $secret"  # which a shell has to quote
    engine = FakeEngine(Options(model="folder/of model", api_key=key, random_seed=1))
    monkeypatch.setattr("sys.argv", ["draftwing", "serve", "--model", "folder/of model", f"--api-key={key}", "-x", key])
    with client_of(engine) as client:
        info = client.get("/server_info", headers={"authorization": f"Bearer {key}"})
    assert "secret" not in info.text
    assert info.json()["launch_command"] == "draftwing serve --model 'folder/of model' '--api-key=***' -x '***'"
    assert info.json()["model"] == info.json()["model_path"] == "folder/of model"


async def test_a_client_that_leaves_takes_its_tokenization_along(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second piece of a text is not begun when nobody waits for it."""
    pieces: list[int] = []
    first, left = threading.Event(), threading.Event()

    def slow(self: Tokenizer, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        pieces.append(len(texts[0]))
        first.set()
        left.wait(10)
        return [[1]]

    monkeypatch.setattr(Tokenizer, "encode_many", slow)
    app = create_app(local(engine), engine.tokenizer)
    body = b'{"prompt": "' + b"a" * 500_000 + b'"}'

    events = iter([{"type": "http.request", "body": body}])

    async def receive() -> dict[str, object]:
        while (event := next(events, None)) is None:
            if first.is_set():
                return {"type": "http.disconnect"}
            await asyncio.sleep(0.001)
        return event

    async def send(message: object) -> None:
        pass

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers, "query_string": b""}
    await asyncio.wait_for(app(scope, receive, send), 10)
    left.set()
    time.sleep(0.05)
    assert pieces == [PIECE]


CUT: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/completions", "max_tokens", {"prompt": "abc"}),
    ("/v1/chat/completions", "max_completion_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", "max_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/messages", "max_tokens", {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", "max_output_tokens", {"input": "a"}),
    ("/api/generate", "options.num_predict", {"model": "m", "prompt": "a", "stream": False}),
    ("/generate", "sampling_params.max_new_tokens", {"text": "abc"}),
]


@pytest.mark.parametrize("cuts", [False, True])
def test_a_length_above_what_fits_is_refused_or_cut(cuts: bool) -> None:
    engine = FakeEngine(Options(random_seed=7, allow_auto_truncate=cuts))
    with client_of(engine) as client:
        for (path, field, body), length in itertools.product(CUT, (CONTEXT, CONTEXT // 20)):
            outer, _, inner = field.partition(".")
            answer = client.post(path, json=body | {outer: {inner: length} if inner else length})
            fits = length < CONTEXT
            assert answer.status_code == (200 if cuts or fits else 400), answer.text
            if answer.status_code == 200:
                asked = engine.requests[-1]
                room = CONTEXT - len(asked.prompt_ids)
                assert asked.params.max_new_tokens == min(length, room)
                assert ((inner or outer) in answer.headers.get("draftwing-ignored", "")) == (not fits)
        if cuts:  # a prompt is never cut
            path, _, body = CUT[0]
            least = client.post(path, json=body | {"max_tokens": 2 * CONTEXT, "min_tokens": CONTEXT + 1})
            assert least.status_code == 200 or "min_tokens" in least.json()["error"]["message"], least.text
            assert "prompt is too long" in client.post(path, json={"prompt": "a" * CONTEXT}).text


def test_every_name_is_listed_and_the_first_one_is_the_model() -> None:
    engine = FakeEngine(Options(random_seed=7, served_model_name=("one", "two/x")))
    with TestClient(create_app(local(engine), engine.tokenizer)) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["one", "two/x"]
        assert client.get("/v1/models/two/x").json()["id"] == "two/x"
        assert "'one', 'two/x'" in client.get("/v1/models/three").json()["message"]
        assert [card["name"] for card in client.get("/api/tags").json()["models"]] == ["one", "two/x"]
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["model"] == "one"
