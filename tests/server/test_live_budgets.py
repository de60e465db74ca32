"""Thinking budgets on a whole server with a tiny random model, which would reason for ever: with drafts and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import tokenizers
from scripted import launched
from tiny_checkpoint import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.further(served=1)]

HI: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "assistant: {% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)


def write_model(folder: Path, marker_tokens: int) -> Path:
    """With markers of one special token each, or of one token for each byte."""
    write_checkpoint(folder, vocab=264)
    (folder / "template.jinja").write_text(TEMPLATE)
    if marker_tokens == 1:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in ("<think>", "</think>")])
        backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=[8, pytest.param(1, marks=pytest.mark.exhaustive)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A server's URL, and the tokens of its end marker."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", request.param)
    command = (
        f"--model {folder} --chat-template {folder / 'template.jinja'} --tool-call-parser hermes --reasoning-parser "
        "qwen3 --speculative-algorithm NGRAM --constrained-json-disable-any-whitespace --max-total-tokens 16384"
    )
    with launched(command) as (_, url):
        yield url, request.param


def chat(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": HI, "seed": 3, "max_tokens": 200, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/chat/completions", json=body | fields, timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def parts(answer: dict[str, Any]) -> list[tuple[str | None, str | None]]:
    return [(one["message"]["reasoning_content"], one["message"]["content"]) for one in answer["choices"]]


def test_reasoning_is_as_long_as_asked_for(served: tuple[str, int]) -> None:
    url, marker = served
    for temperature in (0, 0.8):
        free = chat(url, temperature=temperature)
        assert free["usage"]["reasoning_tokens"] == 200 and not parts(free)[0][1]
        for tokens in (0, 7):
            bounded = [
                chat(url, temperature=temperature, thinking_budget=tokens, speculative=wish)
                for wish in (None, "off", {"num_steps": 2})
            ]
            assert len({json.dumps(parts(one)) for one in bounded}) == 1
            assert {one["usage"]["reasoning_tokens"] for one in bounded} == {tokens + marker}
            ((thought, content),) = parts(bounded[0])
            whole = parts(free)[0][0] or ""
            assert content and (not thought or whole.startswith(thought) or "\ufffd" in thought)
        over = chat(url, temperature=temperature, thinking_budget=300)
        assert parts(over) == parts(free)


def test_several_answers_and_streams(served: tuple[str, int]) -> None:
    url, marker = served
    asked: dict[str, Any] = {"temperature": 0.9, "n": 3, "thinking_budget": 9, "max_tokens": 40}
    answer = chat(url, **asked)
    assert answer["usage"]["reasoning_tokens"] == 3 * (9 + marker) and len(set(parts(answer))) == 3
    body = {"model": "m", "messages": HI, "seed": 3, "ignore_eos": True, "stream": True} | asked
    reported = [["", ""] for _ in range(3)]
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    delta = choice["delta"]
                    reported[choice["index"]][0] += delta.get("reasoning_content") or ""
                    reported[choice["index"]][1] += delta.get("content") or ""
    assert [tuple(one) for one in reported] == [(thought or "", content) for thought, content in parts(answer)]


def test_a_schema_and_calls_after_the_reasoning(served: tuple[str, int]) -> None:
    url, marker = served
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    call_it: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    for tokens in (0, 6):
        for temperature, seed in ((0, 3), (1.0, 0)):
            asked = {"thinking_budget": tokens, "temperature": temperature, "seed": seed, "ignore_eos": False}
            found = []
            for wish in (None, "off"):
                answer = chat(url, **asked, response_format=form, speculative=wish)
                assert answer["choices"][0]["finish_reason"] == "stop"
                assert 0 <= answer["usage"]["reasoning_tokens"] - tokens - marker <= 3  # the rest of a character
                jsonschema.validate(json.loads(parts(answer)[0][1] or ""), SCHEMA)
                called = chat(url, **asked, **call_it, speculative=wish)
                (call,) = called["choices"][0]["message"]["tool_calls"]
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
                assert 0 <= called["usage"]["reasoning_tokens"] - tokens - marker <= 3
                found.append((parts(answer), call["function"]))
            assert found[0] == found[1]
