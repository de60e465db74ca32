"""Conversations whose calls are garbled, by the model and by the client: none may give a 5xx, a stream tells what the
whole answer is, and what the server gives out it takes back.

`garbled.py` makes them up.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import garbled
import httpx
import pytest
from fake_engine import local
from scripted import TEMPLATE, ScriptedEngine, asking

from draftwing.server.app import create_app

pytestmark = pytest.mark.slow

ITEMS = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}" + (
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %}{% endfor %}{% endfor %}"
)
PARTS = (
    "{{ tools }}{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{{ m.tool_calls }}{% endfor %}"
)
# Parsers of calls and of reasoning, and templates.
SERVERS = [
    ("hermes", "qwen3", TEMPLATE), ("hermes", None, ITEMS), ("llama3", "deepseek-r1", PARTS),
    ("mistral", "mistral", ITEMS), ("json", None, TEMPLATE), ("gpt-oss", None, TEMPLATE),
]  # fmt: skip
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
USER = {"role": "user", "content": "hi"}


@contextlib.asynccontextmanager
async def client(tools: str, reasoning: str | None, template: str) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    engine = ScriptedEngine(tools=tools, reasoning=reasoning, template=template)
    engine.info = dataclasses.replace(engine.info, context_length=100_000, max_total_tokens=400_000)
    engine.burst, engine.pause = 100_000, 0.0
    app = create_app(local(engine), engine.tokenizer)
    async with asking(app) as made:
        yield made, engine


def chat(draw: random.Random, history: list[Any]) -> dict[str, Any]:
    messages = [USER, *history]
    if draw.random() < 0.5:
        call = {"id": "c", "type": "function", "function": {"name": draw.choice(garbled.CALLED)}}
        call["function"] |= {"arguments": garbled.sent(draw)}  # type: ignore[operator]
        messages += [
            {"role": "assistant", "content": draw.choice((None, "", garbled.answer(draw))), "tool_calls": [call]}
        ]
        messages += [{"role": "tool", "tool_call_id": "c", "content": garbled.answer(draw)}]
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in garbled.NAMES]
    return {"messages": messages, "tools": tools}


def responses(draw: random.Random, history: list[Any]) -> dict[str, Any]:
    items = [USER, *history]
    if draw.random() < 0.5:
        arguments = garbled.sent(draw)
        items += [
            {"type": "function_call", "call_id": "c", "name": draw.choice(garbled.CALLED), "arguments": arguments}
        ]
        items += [{"type": "function_call_output", "call_id": "c", "output": garbled.answer(draw)}]
    return {
        "input": items,
        "tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in garbled.NAMES],
    }


def messages(draw: random.Random, history: list[Any]) -> dict[str, Any]:
    turns = [USER, *history]
    if draw.random() < 0.5:
        given = {
            draw.choice(("a", "\ud800", "\u2028")): draw.choice((1, [None], "\ud83d\ude00", "\ud83d", 1e308, 10**400))
        }
        turns += [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": given}]}]
        turns += [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": garbled.answer(draw)}]}
        ]
    tools = [{"name": name, "input_schema": SCHEMA} for name in garbled.NAMES]
    return {"model": "m", "max_tokens": 90_000, "messages": turns, "tools": tools}


ASKED = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}


def said(path: str, body: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """An answer as it goes back into the history, with results of its calls, and the arguments of its calls."""
    if path == "/v1/chat/completions":
        message = body["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
        return [message, *results], [call["function"]["arguments"] for call in calls]
    if path == "/v1/responses":
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in calls]
        return [*body["output"], *results], [call["arguments"] for call in calls]
    blocks = body["content"] or [{"type": "text", "text": ""}]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "x"} for call in calls]
    back = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results or "x"}]
    return back, [json.dumps(call["input"]) for call in calls]


def streamed(path: str, text: str) -> list[str]:
    """Arguments of the calls of a stream, which a client reads line by line."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert events and not any("error" in event or event.get("type") == "error" for event in events), events[-1]
    calls: dict[int, str] = {}
    for event in events:
        if path == "/v1/chat/completions":
            for call in (event["choices"] or [{"delta": {}}])[0]["delta"].get("tool_calls", []):
                calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
        elif event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
            calls[event["output_index"]] = event["item"]["arguments"]
        elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            calls[event["index"]] += event["delta"]["partial_json"]
    return [calls[index] for index in sorted(calls)]


async def turn(
    draw: random.Random, asking: httpx.AsyncClient, engine: Any, statuses: Counter[tuple[str, int]], script: str = ""
) -> None:
    """A question with an odd history, its answer whole and streamed, and the answer sent back. script: the answer."""
    path = draw.choice(sorted(ASKED))
    engine.script, body = script or garbled.answer(draw), ASKED[path](draw, [])

    async def post(where: str, data: dict[str, Any]) -> httpx.Response:
        content = json.dumps(data).encode()  # halves of characters as escapes
        response = await asking.post(where, content=content, headers={"content-type": "application/json"})
        statuses[(where, response.status_code)] += 1
        assert response.status_code < 500, (where, data, engine.script, response.text)
        return response

    response = await post(path, body)
    if path == "/v1/chat/completions" and draw.random() < 0.3:
        tokens = await post("/tokenize", {"messages": body["messages"]})
        assert tokens.status_code == response.status_code
    if response.status_code != 200:
        return
    back, arguments = said(path, json.loads(response.text, parse_constant=pytest.fail))
    if draw.random() < 0.5:
        events = await post(path, body | {"stream": True})
        seen = streamed(path, events.text)
        assert len(seen) == len(arguments) and (path == "/v1/messages" or seen == arguments), (engine.script, seen)
    again = ASKED[path](random.Random(0), back)
    again = again | {key: [USER, *back] for key in ("messages", "input") if key in again}
    assert (await post(path, again)).status_code == 200, (engine.script, again)


async def fuzz(requests: int, seed: int) -> Counter[tuple[str, int]]:
    """Status codes by endpoint."""
    draw, statuses = random.Random(seed), Counter[tuple[str, int]]()
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(client(*server)) for server in SERVERS]
        while statuses.total() < requests:
            asking, engine = draw.choice(servers)
            await turn(draw, asking, engine, statuses)
            engine.requests.clear()
            engine.cached.clear()
    return statuses


@pytest.mark.parametrize("requests", [200, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_no_garbled_conversation_gives_a_5xx(requests: int) -> None:
    statuses = asyncio.run(fuzz(requests, seed=requests))
    for path in ASKED:
        assert statuses[(path, 200)] > requests / 10
    assert sum(count for (_, status), count in statuses.items() if status == 400)


LONE, DEEP = '{"a": "\\ud83d", "\\udc00": [1]}', '{"a":' * 150 + "1" + "}" * 150
ARGUMENTS = [
    LONE, json.dumps(LONE), '{"a": [NaN, -Infinity, 1e999]}', json.dumps('{"a": NaN}'), '{"a": %s}' % ("9" * 900),
    '{"a": 1, "a": 2}', '{"a": "\u2028\x85\u2029"}', '{"a": 1-2}', DEEP, json.dumps("{}"), "null", '{"a": 1}}',
]  # fmt: skip


@pytest.mark.parametrize("server", SERVERS[:2], ids=["tojson", "items"])
def test_calls_come_back(server: tuple[str, str | None, str]) -> None:
    """In every dialect, whole and streamed, whatever their arguments are."""

    async def scenario() -> Counter[tuple[str, int]]:
        draw, statuses = random.Random(1), Counter[tuple[str, int]]()
        async with client(*server) as (asking, engine):
            for script in ARGUMENTS * 3:
                call = f'<tool_call>{{"name": "f", "arguments": {script}}}</tool_call>'
                await turn(draw, asking, engine, statuses, call)
        return statuses

    statuses = asyncio.run(scenario())
    assert all(statuses[(path, 200)] > 10 for path in ASKED)
