"""A whole server, its engine in a process of its own, with a tiny random model: many clients, disconnects, and tools,
which grammars alone make it call."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from scripted import TEMPLATE, launched, wait_until
from tiny_checkpoint import write_checkpoint

THINKS = TEMPLATE + (
    "{% if add_generation_prompt and (enable_thinking is not defined or enable_thinking) %}<think>\n{% endif %}"
)
MARKER = len("</think>")  # tokens, each a byte

pytestmark = pytest.mark.slow

CLIENTS = 64
POOL = 64 * 1024


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "tiny")
    (folder / "template.jinja").write_text(THINKS)
    command = (
        f"--model {folder / 'tiny'} --chat-template {folder / 'template.jinja'} --tool-call-parser hermes "
        f"--reasoning-parser qwen3 --speculative-algorithm NGRAM --constrained-json-disable-any-whitespace "
        f"--max-total-tokens {POOL}"
    )
    with launched(command) as (_, url):
        yield url


def body(i: int, tokens: int, **more: Any) -> dict[str, Any]:
    params = {"temperature": 0.7, "seed": i, "max_new_tokens": tokens, "ignore_eos": True}
    return {"text": f"client number {i}: ", "sampling_params": params, **more}


def clients(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=CLIENTS))


async def stream(client: httpx.AsyncClient, i: int, tokens: int) -> dict[str, Any]:
    """The last event; every one has to begin with the text of the one before."""
    last: dict[str, Any] = {"text": ""}
    async with client.stream("POST", "/generate", json=body(i, tokens, stream=True)) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert event["text"].startswith(last["text"])
                last = event
    assert line == "" or line == "data: [DONE]"
    return last


async def test_64_streams_give_what_single_requests_give(url: str) -> None:
    async with clients(url) as client:
        streamed = await asyncio.gather(*(stream(client, i, 20) for i in range(CLIENTS)))
        for i in (0, 17, 63):
            alone = (await client.post("/generate", json=body(i, 20))).json()
            assert alone["output_ids"] == streamed[i]["output_ids"] and alone["text"] == streamed[i]["text"]
    assert all(event["meta_info"]["completion_tokens"] == 20 for event in streamed)
    totals = dict(re.findall(r"^(\S+?)\{.*\} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE))
    for name in ("draftwing:verified_rows_total", "draftwing:committed_tokens_total"):
        assert float(totals[name]) > 0, "what the engine reports of itself is read"


async def test_64_clients_that_go_away_leave_no_slot_behind(url: str) -> None:
    def state() -> dict[str, Any]:
        one: dict[str, Any] = httpx.get(f"{url}/server_info").json()["internal_states"][0]
        return one

    async with clients(url) as client:
        tasks = [asyncio.ensure_future(stream(client, i, 900)) for i in range(CLIENTS)]
        # Answers that end before the last one begins must not be waited for.
        while (running := state()["num_running_reqs"]) < CLIENTS and not any(task.done() for task in tasks):
            await asyncio.sleep(0.02)
        assert running > 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    wait_until(lambda: (now := state())["num_running_reqs"] == now["num_waiting_reqs"] == 0)
    memory = state()["memory_usage"]
    assert memory["free_tokens"] + memory["cached_tokens"] == memory["token_capacity"] == POOL
    assert httpx.post(f"{url}/flush_cache?timeout=5").status_code == 200
    assert state()["memory_usage"]["free_tokens"] == POOL


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "wind": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days", "wind"],
    "additionalProperties": False,
}
HI: list[Any] = [{"role": "user", "content": "hi"}]
OFF = {"speculative": "off"}


def test_openais_chat(api: openai.OpenAI) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "flag", "parameters": {"properties": {"on": {"type": "boolean"}}}}},
    ]
    found = []
    for extra in ({}, OFF):
        body: dict[str, Any] = {
            "model": "m", "messages": HI, "tools": tools,
            "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 300, "seed": 7,
            "reasoning_effort": "none", "extra_body": extra,
        }  # fmt: skip
        choice = api.chat.completions.create(**body).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        with api.chat.completions.stream(**body) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed is not None and streamed[0].function.arguments == call.function.arguments
        found.append(call.function.arguments)
        # What follows in the conversation.
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        messages: Any = [*HI, choice.message.to_dict(), result]
        api.chat.completions.create(model="m", messages=messages, tools=tools, max_tokens=5)
    assert found[0] == found[1]


LINES = r"""
start: "*** Begin" LF line line? "*** \"End\""
line: ("+" | "-") WORD LF
WORD: /[a-c"\\é]{1,4}/
%import common.LF
"""
FORMATS = {
    "lark": (LINES, r'\*\*\* Begin\n([+-][a-c"\\é]{1,4}\n){1,2}\*\*\* "End"'),
    "regex": (r"^\d{2}\n\"[a-c]\"$", r'\d{2}\n"[a-c]"'),
}


@pytest.mark.parametrize("syntax", FORMATS)
def test_custom_tools_hold_to_their_format(api: openai.OpenAI, syntax: str) -> None:
    definition, right = FORMATS[syntax]
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    choice: Any = {"type": "custom", "name": "edit"}
    found = []
    for extra in ({}, OFF):
        body: dict[str, Any] = {
            "model": "m", "input": "hi", "tools": [{"type": "custom", "name": "edit", "format": form}],
            "tool_choice": choice, "max_output_tokens": 300, "reasoning": {"effort": "none"},
            "extra_body": {"seed": 7, **extra},
        }  # fmt: skip
        (call,) = api.responses.create(**body).output
        assert call.type == "custom_tool_call" and re.fullmatch(right, call.input), call.input
        with api.responses.stream(**body) as stream:
            (same,) = stream.get_final_response().output
        found += [call.input, same.input]
    assert len(set(found)) == 1


def test_reasoning_is_as_long_as_asked_for(url: str) -> None:
    """A model that would reason for ever ends with what a schema or a tool asks for, with drafts and without."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    wanted: list[dict[str, Any]] = [{"ignore_eos": True, "max_tokens": 40, "n": 2}, {"response_format": form}]
    wanted += [{"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}]
    for (temperature, seed), fields in zip(((0.8, 0), (0, 3), (0.8, 0)), wanted, strict=True):
        body = {"model": "m", "messages": HI, "max_tokens": 300, "temperature": temperature, "seed": seed} | fields
        for tokens in (0, 7) if "n" in fields else (7,):
            found = []
            for extra in ({}, OFF):
                response = httpx.post(f"{url}/v1/chat/completions", json=body | {"thinking_budget": tokens} | extra)
                answer, count = response.json(), fields.get("n", 1)
                over = answer["usage"]["reasoning_tokens"] - count * (tokens + MARKER)
                assert 0 <= over <= 3 * ("n" not in fields), "behind it a grammar waits for the rest of a character"
                found.append([choice["message"] for choice in answer["choices"]])
            first = found[0][0]
            for call in [call for messages in found for one in messages for call in one.get("tool_calls") or ()]:
                del call["id"]
            assert found[0] == found[1]
            if "response_format" in fields:
                jsonschema.validate(json.loads(first["content"]), SCHEMA)
            elif "tools" in fields:
                jsonschema.validate(json.loads(first["tool_calls"][0]["function"]["arguments"]), SCHEMA)
            else:
                assert all(message["content"] for message in found[0])
