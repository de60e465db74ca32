"""A picture by the clients of others, and as programs were seen to send it: the engine gets it once for each request,
and it is the same picture."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine
from image_models import encoded, picture
from scripted import TEMPLATE, ScriptedEngine, serving
from seeing import Seeing

from draftwing.images.processing import PatchProcessor

SHOWN = picture(40, 24)
BYTES = encoded(SHOWN)
DATA = base64.b64encode(BYTES).decode()
URL = f"data:image/png;base64,{DATA}"
PARTS = {
    "chat": {"type": "image_url", "image_url": {"url": URL}},
    "block": {"type": "image", "base64": DATA, "mime_type": "image/png"},  # LangChain's own, of every model
}


@pytest.fixture
def seeing() -> Iterator[tuple[Seeing, str]]:
    engine = Seeing()
    with serving(engine) as url:
        yield engine, url


def check(engine: FakeEngine, requests: int) -> None:
    assert len(engine.requests) == requests
    for request in engine.requests:
        (image,) = request.images
        assert np.array_equal(image.pixels, np.asarray(SHOWN))


def test_openai(seeing: Any) -> None:
    openai, (engine, url) = importlib.import_module("openai"), seeing
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    content = [PARTS["chat"], {"type": "text", "text": "a"}]
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], max_tokens=4)
    content = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "a"}]
    client.responses.create(model="m", input=[{"role": "user", "content": content}], max_output_tokens=16)
    check(engine, 2)


def test_anthropic(seeing: Any) -> None:
    anthropic, (engine, url) = importlib.import_module("anthropic"), seeing
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    client.messages.create(model="m", max_tokens=4, messages=[{"role": "user", "content": [image]}])
    check(engine, 1)


def test_ollama(seeing: Any) -> None:
    pytest.importorskip("ollama._client", reason="draftwing[clients] is not installed")
    ollama, (engine, url) = importlib.import_module("ollama"), seeing
    client, few = ollama.Client(host=url), {"num_predict": 4}
    for image in (BYTES, DATA):
        client.chat(model="m", messages=[{"role": "user", "content": "a", "images": [image]}], options=few)
    client.generate(model="m", prompt="a", images=[BYTES], options=few)
    check(engine, 3)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("kind", ["chat", "responses", "ollama"])
def test_langchain(seeing: Any, kind: str, name: str) -> None:
    engine, url = seeing
    if kind == "ollama":
        found = pytest.importorskip("langchain_ollama", reason="draftwing[clients] is not installed")
        chat = found.ChatOllama(model="m", base_url=url, num_predict=4)
    else:
        found = pytest.importorskip("langchain_openai", reason="draftwing[clients] is not installed")
        responses = kind == "responses"
        chat = found.ChatOpenAI(
            model="m", base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=16, use_responses_api=responses
        )
    messages = [{"role": "user", "content": [PARTS[name], {"type": "text", "text": "a"}]}]
    chat.invoke(messages)
    assert [*chat.stream(messages)]
    check(engine, 2)


# -- programs that need Node.js: what `make test-clients` saw them send, without most of its words ------------------

PLACE = "<|image_pad|>"
CONTENT = (  # of a message
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{% if p.type == 'image' %}"
    f"{PLACE}{{% else %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
)


class Agent(ScriptedEngine):
    """A model that reads pictures and knows tools."""

    def __init__(self) -> None:
        template = TEMPLATE.replace("{{ m.content }}", CONTENT)
        super().__init__("It is red.", tools="hermes", template=template, special=(PLACE,))
        token = self.tokenizer.backend.token_to_id(PLACE)
        images = PatchProcessor(token, PLACE, PLACE, 8, 8 * 8 * 4, 8 * 8 * 48)
        self.info = dataclasses.replace(self.info, images=images)


CLAUDE = {
    "model": "m", "max_tokens": 320, "stream": True, "thinking": {"type": "adaptive"},
    "metadata": {"user_id": "{}"}, "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "required": ["file_path"],
        "properties": {"file_path": {"type": "string"}}, "additionalProperties": False}}],
}  # fmt: skip
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
REMINDER = {"type": "text", "text": "<system-reminder>\nAs you answer\n</system-reminder>"}
ASKED = {"type": "text", "text": "Look at it.", "cache_control": {"type": "ephemeral"}}
AGENTS = {"role": "system", "content": "Available agent types for the Agent tool"}
CODEX = {
    "model": "m", "stream": True, "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
    "client_metadata": {"session_id": "s"},
    "tools": [
        {"type": "function", "name": "view_image", "description": "View a local image file.", "strict": False,
         "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"],
                        "additionalProperties": False}},
        {"type": "web_search"},
    ],
}  # fmt: skip
SHOWN_TO_CODEX = {"type": "input_image", "image_url": URL, "detail": "high"}
DEVELOPER = {
    "type": "message", "id": "msg_0", "role": "developer", "content": [{"type": "input_text", "text": "You are"}],
}  # fmt: skip
REPLAYED: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code, pasted": (
        "/v1/messages",
        CLAUDE
        | {
            "messages": [
                {"role": "user", "content": [
                    REMINDER, {"type": "text", "text": "[Image #1] What is it?"}, BLOCK,
                    {"type": "text", "text": "[Image: source: /tmp/images/1.png]"}]},
                AGENTS,
                {"role": "assistant", "content": [{"type": "text", "text": "A square."}]},
                {"role": "user", "content": [ASKED]},
            ]
        },
    ),
    "Claude Code, a file that it reads": (
        "/v1/messages",
        CLAUDE
        | {
            "messages": [
                {"role": "user", "content": [REMINDER, {"type": "text", "text": "Look at picture.png."}]},
                AGENTS,
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "call_1", "name": "Read", "input": {"file_path": "/tmp/picture.png"}}]},
                {"role": "user", "content": [
                    {"tool_use_id": "call_1", "type": "tool_result", "content": [BLOCK],
                     "cache_control": {"type": "ephemeral"}}]},
            ]
        },
    ),
    "codex exec --image": (
        "/v1/responses",
        CODEX
        | {
            "input": [
                DEVELOPER,
                {"type": "message", "id": "msg_1", "role": "user", "content": [
                    {"type": "input_text", "text": '<image name=[Image #1] path="/tmp/picture.png">'}, SHOWN_TO_CODEX,
                    {"type": "input_text", "text": "</image>"}, {"type": "input_text", "text": "Look at it."}]},
            ]
        },
    ),
    "Codex, a file that it views": (
        "/v1/responses",
        CODEX
        | {
            "input": [
                DEVELOPER,
                {"type": "message", "id": "msg_1", "role": "user", "content": [
                    {"type": "input_text", "text": "Look at picture.png."}]},
                {"type": "function_call", "status": "completed", "id": "fc_1", "name": "view_image",
                 "arguments": '{"path": "/tmp/picture.png"}', "call_id": "call_1"},
                {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": [SHOWN_TO_CODEX]},
            ]
        },
    ),
    "AI SDK, chat completions": (
        "/v1/chat/completions",
        {
            "model": "m", "tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}},
                                                      {"type": "text", "text": "Look at it."}]}],
        },
    ),
    "AI SDK, responses": (
        "/v1/responses",
        {
            "model": "m", "tool_choice": "auto", "stream": True,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL},
                                                   {"type": "input_text", "text": "Look at it."}]}],
        },
    ),
    "AI SDK, messages": (
        "/v1/messages",
        {
            "model": "m", "max_tokens": 40, "tool_choice": {"type": "auto"}, "stream": True,
            "messages": [{"role": "user", "content": [BLOCK, {"type": "text", "text": "Look at it."}]}],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLAYED)
def test_bodies_of_programs(name: str) -> None:
    engine, (path, body) = Agent(), REPLAYED[name]
    with serving(engine) as url:
        answer = httpx.post(url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    check(engine, 1)
    assert engine.prompt.count(PLACE) == 15
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    last = json.loads(next(event for event in reversed(events) if event != "[DONE]"))
    assert last.get("type") in (None, "response.completed", "message_stop") and "It is red." in "".join(
        text_of(json.loads(event)) for event in events if event != "[DONE]"
    )


def text_of(event: dict[str, Any]) -> str:
    """Of a stream's event of any of the dialects."""
    if event.get("choices"):
        return event["choices"][0]["delta"].get("content") or ""
    delta = event.get("delta") or ""
    return delta if isinstance(delta, str) else delta.get("text", "")
