"""Ollama's own client: chats, streams, tool loops, formats, and what it asks of a model."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

# A module of it: the folder of the server's own tests has the package's name.
pytest.importorskip("ollama._client", reason="draftwing[clients] is not installed")
ollama: Any = importlib.import_module("ollama")
HI: list[Any] = [{"role": "user", "content": "hi"}]


def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
      city: its name
    """
    return f"sunny in {city}"


@pytest.fixture
def client(root: str) -> Any:
    return ollama.Client(host=root)


def test_chat_and_stream(client: Any, say: Any) -> None:
    whole = client.chat(model="m", messages=HI, options={"temperature": 0, "num_ctx": 4096}, keep_alive="5m")
    parts = list(client.chat(model="m", messages=HI, stream=True))
    assert whole.message.content == "".join(part.message.content for part in parts) == "It is sunny."
    assert parts[-1].done and parts[-1].done_reason == "stop" and whole.eval_count == parts[-1].eval_count


def test_generate_and_format(client: Any, say: Any) -> None:
    assert client.generate(model="m", prompt="hi").response == "It is sunny."
    say("json")
    answer = client.chat(model="m", messages=HI, format={"type": "object", "properties": {"name": {"type": "string"}}})
    assert json.loads(answer.message.content)["name"] == "Paris"


def test_a_tool_loop(client: Any, say: Any) -> None:
    say("call")
    messages = list(HI)
    first = client.chat(model="m", messages=messages, tools=[get_weather])
    messages.append(first.message)
    for call in first.message.tool_calls:
        result = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    say("text")
    assert client.chat(model="m", messages=messages, tools=[get_weather]).message.content == "It is sunny."


def test_models(client: Any) -> None:
    (card,) = client.list().models
    assert client.show(card.model).capabilities[0] == "completion"
    assert client.ps().models[0].model == card.model
    with pytest.raises(ollama.ResponseError):
        client.chat(model="m", messages=HI, options={"mirostat": 2})


def test_langchain(root: str, say: Any) -> None:
    langchain = pytest.importorskip("langchain_ollama", reason="draftwing[clients] is not installed")
    model = langchain.ChatOllama(base_url=root, model="m", temperature=0)
    assert model.invoke("hi").content == "It is sunny."
    assert "".join(part.content for part in model.stream("hi")) == "It is sunny."
    say("call")
    assert model.bind_tools([get_weather]).invoke("hi").tool_calls[0]["args"] == {"city": "Paris"}
