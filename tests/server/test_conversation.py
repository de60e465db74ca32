"""Answers of other servers, and of older clients, as they come back in a history."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from scripted import ScriptedEngine, client_of
from sdk_answers import ASK, Maker, histories
from starlette.testclient import TestClient

HISTORIES = histories()
MEDIA = ("image", "file", "screenshot")


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    engine = ScriptedEngine("ok", tools="hermes")
    engine.info = dataclasses.replace(engine.info, context_length=100_000)
    return engine


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> Iterator[TestClient]:
    with client_of(engine) as client:
        yield client


def parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in it that has a type."""
    if isinstance(value, dict):
        yield from [value] if "type" in value else []
        value = list(value.values())
    for one in value if isinstance(value, list) else []:
        yield from parts(one)


def said(history: dict[str, Any]) -> list[str]:
    """The texts that the assistant said, where it says them in one place."""
    found: list[str] = []
    for message in history.get("messages") or history["input"]:
        content = message.get("content")
        if message.get("role") == "assistant":
            found += [content] if isinstance(content, str) else []
            listed = content if isinstance(content, list) else []
            found += [part["text"] for part in listed if part["type"] in ("text", "output_text")]
    return found


@pytest.mark.parametrize("count", [4, pytest.param(2000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("source", HISTORIES)
def test_what_servers_answer_can_be_sent_back(
    client: TestClient, engine: ScriptedEngine, source: str, count: int
) -> None:
    path, make = HISTORIES[source]
    maker, refused = Maker(count), Counter[str]()
    for _ in range(count):
        history = make(maker)
        response = client.post(path, json=history)
        if response.status_code == 200:
            assert "draftwing-ignored" not in response.headers or source == "responses", response.headers
            assert all(text in engine.prompt for text in said(history)), (history, engine.prompt)
            continue
        assert response.status_code == 400, (history, response.text)
        message = response.json()["error"]
        message = message if isinstance(message, str) else message["message"]
        # A screenshot comes without the call that asked for it: all else of it can be read.
        lacks_call = "must be the id of" in message and "computer_call_output" in json.dumps(history)
        known = lacks_call or "send text alone" in message or "images belong" in message
        assert known, (json.dumps(history), message)
        kinds = {part["type"] for part in parts(history) if isinstance(part["type"], str)}
        assert any(word in kind for kind in kinds for word in MEDIA), (history, message)
        refused[message.partition("has the type")[2][:40]] += 1
    assert refused.total() < count, refused


THOUGHT = "<user>hi</user>\n<assistant>[T]{}</assistant>\n<user>hi</user>\n<assistant>"
PLAIN = "<user>hi</user>\n<assistant>{}</assistant>\n<user>hi</user>\n<assistant>"
TEXTS = [{"type": "text", "text": "T"}]
CHAT = [  # a message, and what the model sees of the history
    ({"content": "a", "reasoning_text": "T", "reasoning_opaque": "xx"}, THOUGHT.format("a")),
    ({"content": "a", "reasoning": "T", "reasoning_details": [{"type": "reasoning.text", "text": "T"}]},
     THOUGHT.format("a")),
    ({"content": "a", "thinking": "T"}, THOUGHT.format("a")),
    ({"content": [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "a"}]}, THOUGHT.format("a")),
    ({"content": [{"type": "thinking", "thinking": TEXTS, "closed": True}, {"type": "text", "text": "a"}]},
     THOUGHT.format("a")),
    ({"content": [{"type": "reasoning", "text": "T", "id": "r"}, {"type": "output_text", "text": "a"}]},
     THOUGHT.format("a")),
    ({"content": [{"type": "reasoning", "summary": TEXTS}, {"type": "redacted_thinking", "data": "x"}]},
     THOUGHT.format("")),
    ({"content": [*TEXTS, {"type": "reference", "reference_ids": [1]}]}, PLAIN.format("T")),
    ({"content": None, "audio": {"id": "a", "data": "aGk=", "expires_at": 1, "transcript": "a"}}, PLAIN.format("a")),
    ({"content": "a", "audio": None, "function_call": None, "tool_calls": None, "refusal": None}, PLAIN.format("a")),
    ({"content": [{"type": "text", "text": "a", "citations": [{"url": "u"}]}]}, PLAIN.format("a")),
    ({"content": None, "refusal": "I cannot."}, PLAIN.format("I cannot.")),
    ({"content": None, "function_call": {"name": "f", "arguments": "{}"}}, PLAIN.format("<call call_f>f {}")),
    ({"content": None}, PLAIN.format("")), ({}, PLAIN.format("")), ({"content": []}, PLAIN.format("")),
    # what gateways before other servers add
    ({"content": "a", "reasoning": "T", "reasoning_details": [], "images": [], "id": "1"}, THOUGHT.format("a")),
    ({"content": "a", "reasoning_content": "T", "provider_specific_fields": {"a": 1}, "parsed": None,
      "thinking_blocks": [{"type": "thinking"}], "annotations": []}, THOUGHT.format("a")),
    ({"content": [{"type": "refusal", "refusal": "a"}], "logprobs": {"content": []}, "citations": ["https://a.org"]},
     PLAIN.format("a")),
    ({"content": [{"type": "text", "text": "a", "annotations": [{"type": "url_citation"}], "logprobs": None}]},
     PLAIN.format("a")),
    ({"content": None, "tool_calls": [{"id": "c", "type": "function", "index": 0, "function": {
        "name": "f", "arguments": "{}", "parsed_arguments": {}, "provider_specific_fields": None},
        "extra_content": {"google": {"thought_signature": "x"}}}]}, PLAIN.format("<call c>f {}")),
]  # fmt: skip


@pytest.mark.parametrize(("message", "prompt"), CHAT, ids=lambda value: json.dumps(value)[:60])
def test_what_is_read_of_a_message(client: TestClient, engine: ScriptedEngine, message: Any, prompt: str) -> None:
    messages = [ASK, {"role": "assistant", **message}, ASK]
    response = client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200 and "draftwing-ignored" not in response.headers, response.text
    assert engine.prompt == prompt


BLOCKS: list[tuple[Any, str]] = [
    ({"type": "text", "text": "a", "citations": [{"type": "char_location", "cited_text": "x"}]}, "a"),
    ({"type": "text", "text": "a", "citations": None}, "a"), ({"type": "compaction", "content": "a"}, "a"),
    ({"type": "compaction", "content": None, "encrypted_content": "x"}, ""),
    ({"type": "thinking", "thinking": "T", "signature": "s"}, "[T]"), ({"type": "redacted_thinking", "data": "x"}, ""),
    ({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}}, ""),
    ({"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "x", "url": "u"}]}, ""),
    ({"type": "mcp_tool_use", "id": "m", "name": "n", "server_name": "s", "input": {}}, ""),
    ({"type": "mcp_tool_result", "tool_use_id": "m", "is_error": True, "content": [{"type": "text", "text": "x"}]}, ""),
    ({"type": "container_upload", "file_id": "f"}, ""), ({"type": "tool_use", "id": "t", "name": "f"}, "<call t>f {}"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "shown"), BLOCKS, ids=lambda value: json.dumps(value)[:60])
def test_what_is_read_of_a_block(client: TestClient, engine: ScriptedEngine, block: Any, shown: str) -> None:
    later: list[Any] = [{"type": "text", "text": "hi"}]
    if block["type"] == "tool_use":
        later = [{"type": "tool_result", "tool_use_id": "t"}, *later]
    messages = [ASK, {"role": "assistant", "content": [block]}, {"role": "user", "content": later}]
    response = client.post("/v1/messages", json={"model": "m", "max_tokens": 9, "messages": messages})
    assert response.status_code == 200 and "draftwing-ignored" not in response.headers, response.text
    result = "<tool> by f for t</tool>\n" if len(later) > 1 else ""
    assert engine.prompt == PLAIN.format(shown).replace("</assistant>\n", f"</assistant>\n{result}")


SOURCE = {"type": "text", "media_type": "text/plain", "data": "abc"}
DOCUMENTS: list[tuple[Any, str]] = [
    ({"type": "document", "source": SOURCE}, "abc"),
    ({"type": "document", "source": SOURCE, "title": "T", "context": "C", "citations": {"enabled": True}}, "T\nC\nabc"),
    ({"type": "document", "source": {"type": "content", "content": "abc"}, "title": None}, "abc"),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}] * 2}}, "aa"),
    ({"type": "search_result", "source": "u", "title": "T", "content": [{"type": "text", "text": "a"}]}, "T\nu\na"),
    ({"type": "tool_reference", "tool_name": "f"}, "f"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "shown"), DOCUMENTS, ids=lambda value: json.dumps(value)[:60])
def test_documents_that_are_text(client: TestClient, engine: ScriptedEngine, block: Any, shown: str) -> None:
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    results = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]}
    for messages, wanted in (
        ([{"role": "user", "content": [block, {"type": "text", "text": "?"}]}], f"<user>{shown}?</user>"),
        ([ASK, {"role": "assistant", "content": [call]}, results], f"<tool>{shown} by f for t</tool>"),
    ):
        response = client.post("/v1/messages", json={"model": "m", "max_tokens": 9, "messages": messages})
        assert response.status_code == 200, response.text
        assert wanted in engine.prompt


@pytest.mark.parametrize("source", [{"type": "base64", "data": "aGk="}, {"type": "url", "url": "u"}, "x", None, [1]])
def test_other_documents_are_refused(client: TestClient, source: Any) -> None:
    content = [{"type": "document", "source": source}] if source != "x" else [{"type": ["document"]}]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    response = client.post("/v1/messages", json=body)
    assert response.status_code == 400 and "messages.0.content.0" in response.json()["error"]["message"]


TOOL_RESULTS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", lambda more: {"messages": [ASK, {"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", **({"content": more[0]} if more else {})}]}),
    ("/v1/responses", lambda more: {"input": [ASK, {"type": "function_call", "call_id": "c", "name": "f"},
        {"type": "function_call_output", "call_id": "c", **({"output": more[0]} if more else {})}]}),
    ("/v1/messages", lambda more: {"model": "m", "max_tokens": 9, "messages": [ASK, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "c", "name": "f"}]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", **({"content": more[0]} if more else {})}]}]}),
    ("/api/chat", lambda more: {"model": "m", "stream": False, "messages": [ASK, {"role": "assistant", "tool_calls": [
        {"id": "c", "function": {"name": "f"}}]}, {"role": "tool", **({"content": more[0]} if more else {})}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), TOOL_RESULTS, ids=[path for path, _ in TOOL_RESULTS])
@pytest.mark.parametrize("more", [[], [None], [""], [[]]], ids=["missing", "null", "empty", "no parts"])
def test_a_tool_may_give_nothing(client: TestClient, engine: ScriptedEngine, path: str, body: Any, more: Any) -> None:
    if more == [[]] and path == "/api/chat":
        return  # it has no parts
    response = client.post(path, json=body(more))
    assert response.status_code == 200, response.text
    assert "<tool> by f for c</tool>" in engine.prompt
