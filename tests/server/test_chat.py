"""Calls on their way through a conversation: what the server gives out, it takes back, in every dialect."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted import TEMPLATE, ScriptedEngine, serving

from draftwing.server.anthropic_bodies import CountRequest
from draftwing.server.chat import Chat
from draftwing.server.ollama_bodies import OllamaChatRequest
from draftwing.server.openai.responses.schema import ResponsesRequest
from draftwing.server.openai.schema import ChatRequest
from draftwing.server.tokenizing import TokenizeRequest

ITEMS = "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}" + (
    "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v | tojson }}>{% endfor %}{% endfor %}{% endfor %}"
)
CLIENT = httpx.Client()  # one for all: to make one takes longer than a request


@pytest.fixture(scope="module", params=[pytest.param(TEMPLATE, marks=pytest.mark.slow), ITEMS], ids=["tojson", "items"])
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    engine = ScriptedEngine(tools="hermes", template=request.param)
    engine.burst = 100
    return engine


@pytest.fixture(scope="module")
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


def post(url: str, body: dict[str, Any]) -> Any:
    answer = CLIENT.post(url, json=body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


ARGUMENTS: list[tuple[Any, Any]] = [
    ("", {}), (None, {}), ("null", {}), ({"a": 1}, {"a": 1}), ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
    ('{"a": 1, "b": "cut', {"a": 1}), ('{"a": NaN}', {"a": None}), ('{"\\udfff": 1e999}', {"\ufffd": None}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "shown"), ARGUMENTS, ids=lambda a: str(a)[:20])
def test_arguments_of_earlier_calls_are_objects_for_the_template(
    arguments: Any, shown: Any, url: str, engine: ScriptedEngine
) -> None:
    engine.script = "ok"
    user, result = {"role": "user", "content": "hi"}, {"role": "tool", "content": "x", "tool_call_id": "c"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    expected = (
        "".join(f"<{k}={json.dumps(v, ensure_ascii=False)}>" for k, v in shown.items())
        if engine.tokenizer.chat_template == ITEMS
        else json.dumps(shown, ensure_ascii=False)
    )
    post(f"{url}/v1/chat/completions", {"messages": messages})
    assert expected in engine.prompt
    tokens = post(f"{url}/tokenize", {"messages": messages})["tokens"]
    assert expected in engine.tokenizer.decode(tokens)
    items = [user, {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]
    post(f"{url}/v1/responses", {"input": [*items, {"type": "function_call_output", "call_id": "c", "output": "x"}]})
    assert expected in engine.prompt


BODIES: list[tuple[str, Any, str]] = [
    ("/v1/chat/completions", ChatRequest, "messages"),
    ("/v1/messages", CountRequest, "messages"),
    ("/v1/messages/count_tokens", CountRequest, "messages"),
    ("/v1/responses", ResponsesRequest, "input"),
    ("/api/chat", OllamaChatRequest, "messages"),
    ("/tokenize", TokenizeRequest, "messages"),
]


@pytest.mark.parametrize(("path", "model", "field"), BODIES, ids=lambda one: one if isinstance(one, str) else "")
def test_large_conversations_are_read_in_a_thread(
    path: str, model: Any, field: str, url: str, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments of calls are texts of JSON that are parsed: nobody else is served meanwhile."""
    engine.script, read, threads = "ok", model.chat, list[str]()

    def chat(body: Any) -> Chat:
        threads.append(threading.current_thread().name)
        return read(body)  # type: ignore[no-any-return]

    monkeypatch.setattr(model, "chat", chat)
    named = {"model": "m", "max_tokens": 5} if model is CountRequest else {"model": "m"}
    named.pop("max_tokens" if path.endswith("count_tokens") else "", None)
    for size in (10, 100_000):  # more than the context has room for
        CLIENT.post(url + path, json=named | {field: [{"role": "user", "content": "a" * size}]})
    small, large = threads
    assert not small.startswith("draftwing-") and large.startswith("draftwing-")
