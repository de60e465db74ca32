"""/v1/responses through OpenAI's own client: a server with a stand-in engine, streaming and not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine

from draftwing.server import http
from draftwing.server.http import encode
from draftwing.server.openai.responses import endpoints, store

SCRIPTED = dict(reasoning="qwen3", tools="qwen25")

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    },
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
BLOCK = "<think>\nhm\n</think>\n\n"


def known(response: Any) -> dict[str, Any]:
    """Without what differs between two responses to the same request."""
    data: dict[str, Any] = response.model_dump()
    for name in ("id", "created_at", "completed_at"):
        del data[name]
    if data["usage"]:
        del data["usage"]["input_tokens_details"]["cached_tokens"]
    for item in data["output"]:
        for name in ("id", "call_id"):
            assert item.pop(name, "x")
        item.pop("parsed_arguments", None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return data


def ask(api: openai.OpenAI, **more: Any) -> Any:
    """The same response at once and from the stream."""
    body: dict[str, Any] = {"model": "m", "input": "hi"} | more
    whole = api.responses.create(**body)
    last = list(api.responses.create(**body, stream=True))[-1]
    assert last.type == f"response.{whole.status}" and known(last.response) == known(whole)
    return whole


def test_a_plain_answer(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "Hello, wörld!"
    response = ask(api, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=50)
    assert scripted.prompt == "<system>Be kind.</system>\n<user>hi</user>\n<assistant>"
    assert response.output_text == "Hello, wörld!" and response.status == "completed"
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.id.startswith("resp_") and response.object == "response" and response.store is True
    size, said = len(scripted.prompt.encode()), len(scripted.script.encode()) + 1
    assert (response.usage.input_tokens, response.usage.output_tokens) == (size, said)
    assert response.usage.total_tokens == size + said
    assert (response.instructions, response.metadata, response.temperature) == ("Be kind.", {"a": "b"}, 0.5)
    assert scripted.requests[-1].params.temperature == 0.5 and scripted.requests[-1].params.max_new_tokens == 50


def test_events_build_the_response(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = f"{BLOCK}So: {CALL}"
    events = list(api.responses.create(model="m", input="hi", tools=TOOLS, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type.removeprefix("response.") for e in events]
    order = list(dict.fromkeys(kinds))
    assert order == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done", "output_text.delta", "output_text.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed",
    ]  # fmt: skip
    assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1, 2]
    text = {"reasoning_text": "", "output_text": "", "function_call_arguments": ""}
    for e in events:
        if e.type.endswith(".delta"):
            text[e.type.split(".")[1]] += e.delta
    done = {e.type.split(".")[1]: e for e in events if e.type.endswith(("_text.done", "_arguments.done"))}
    assert text["reasoning_text"] == done["reasoning_text"].text == "hm"
    assert text["output_text"] == done["output_text"].text == "So:"
    arguments = done["function_call_arguments"].arguments
    assert text["function_call_arguments"] == arguments and json.loads(arguments) == {"city": "Paris é"}
    items = [e.item for e in events if e.type == "response.output_item.done"]
    assert items == events[-1].response.output
    for e in events:
        if hasattr(e, "item_id"):
            assert e.item_id == items[e.output_index].id
    usage = events[-1].response.usage
    assert usage.output_tokens_details.reasoning_tokens == len("<think>\nhm\n</think>")


def test_items_go_back_to_the_model(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = f"{BLOCK}Looking. {CALL}"
    asked: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    ]
    first = ask(api, input=asked, tools=TOOLS)
    call = first.output[-1]
    scripted.script = "Sunny."
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    ask(api, input=[*asked, *(item.to_dict() for item in first.output), result])
    assert scripted.prompt == (
        "<system>Be brief.</system>\n<user>Weather?</user>\n"
        f'<assistant>[hm]Looking.<call {call.call_id}>get_weather {{"city": "Paris é"}}</assistant>\n'
        f"<tool>sun by get_weather for {call.call_id}</tool>\n<assistant>"
    )


def test_how_answers_end(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "one two three"
    cut = ask(api, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output_text == "one" and cut.output[0].status == "incomplete"
    scripted.script = CALL
    partial = ask(api, max_output_tokens=60, tools=TOOLS)
    assert partial.output[0].type == "function_call" and partial.output[0].status == "incomplete"
    assert partial.output[0].arguments.startswith('{"city": "P')
    scripted.script = ""
    empty = ask(api)
    assert empty.output_text == "" and empty.output[0].type == "message"


def test_formats_and_choices_are_grammars(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = '{"a": 1}'
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    response = ask(api, text={"format": form})
    assert '"a"' in scripted.grammar and "</think>" in scripted.grammar
    assert response.text.format.model_dump(by_alias=True, exclude_none=True) == form
    ask(api, text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, reasoning={"effort": "none"})
    grammar = scripted.requests[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_schema" and json.loads(grammar.text) == SCHEMA
    ask(api, text={"format": {"type": "json_object"}}, reasoning={"effort": "none"})
    grammar = scripted.requests[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_object"
    scripted.script = CALL
    for choice, there in (("required", True), ({"type": "function", "name": "now"}, False)):
        ask(api, tools=TOOLS, tool_choice=choice)
        assert ("get_weather" in scripted.grammar) == there and '\\"now\\"' in scripted.grammar
    strict = [TOOLS[0] | {"strict": True, "parameters": SCHEMA}]
    ask(api, tools=strict)
    assert "triggered_tags" in scripted.grammar
    ask(api, tools=TOOLS, tool_choice="none")
    assert not scripted.grammar and "<tools>" not in scripted.prompt


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nonsense": 1}, "nonsense"), ({"conversation": "c"}, "conversation"), ({"background": True}, "background"),
    ({"include": ["message.output_text.tokens"]}, "include.0"), ({"top_logprobs": 21}, "top_logprobs"),
    ({"prompt": {"id": "p"}}, "prompt"), ({"input": []}, "input"), ({"input": None}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input.0.call_id"),
    ({"input": [{"role": "user", "content": "x", "output": "y"}]}, "input.0.output"),
    ({"input": "x" * 3000}, "input"), ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"), ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools.0.name"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "no"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "text", "strict": True}}}, "text.format.strict"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize("body, named", REFUSED, ids=lambda v: v if isinstance(v, str) else None)
def test_refusals_name_the_field(url: str, body: dict[str, Any], named: str) -> None:
    whole = {"model": "m", "input": "hi"} | body
    response = httpx.post(f"{url}/v1/responses", json={k: v for k, v in whole.items() if v is not None})
    data = response.json()
    assert response.status_code == 400, data
    assert data["object"] == "error" and data["param"] == named and named in data["message"]


def test_an_aborted_answer_has_failed(url: str, api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script, scripted.pause = "x" * 1500, 0.02
    try:
        stream = api.responses.create(model="m", input="hi", stream=True, extra_body={"rid": "r"})
        events = []
        for event in stream:
            events.append(event)
            if len(events) == 8:
                httpx.post(f"{url}/abort_request", json={"rid": "r"})
    finally:
        scripted.pause = 0.0005
    last = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert "aborted" in last.response.error.message and last.response.output[0].status == "incomplete"


LARGE: dict[str, dict[str, Any]] = {
    "many tools": {
        "tools": [
            {"type": "function", "name": f"f{i}", "parameters": {"type": "object", "description": "x" * 1000}}
            for i in range(200)
        ],
        "tool_choice": "none",
    },
    "input that is stored": {
        "input": [
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x" * 200_000},
            {"role": "user", "content": "hi"},
        ]
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", LARGE)
def test_what_a_response_repeats_is_encoded_in_a_thread_where_it_is_large(
    url: str, scripted: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, case: str, stream: bool
) -> None:
    encoded: list[int] = []  # bytes of JSON that was made on the event loop
    inside = 0

    def watched(data: Any, *large: Any) -> bytes:
        nonlocal inside
        found = encode(data, *large)
        try:
            asyncio.get_running_loop()
            encoded.append(len(found))
        except RuntimeError:
            inside += len(found)
        return found

    for module in (http, store, endpoints):
        monkeypatch.setattr(module, "encode", watched)
    scripted.script = "hello"
    response = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "hi", "stream": stream} | LARGE[case])
    assert response.status_code == 200, response.text
    text = response.text.splitlines()[-2].removeprefix("data: ") if stream else response.text
    data = json.loads(text)["response"] if stream else json.loads(text)
    assert data["status"] == "completed" and data["output"][0]["content"][0]["text"] == "hello"
    listed = httpx.get(f"{url}/v1/responses/{data['id']}/input_items").json()["data"]
    assert len(listed) == len(LARGE[case].get("input", "1"))
    assert inside >= 100_000 and max(encoded, default=0) < 10_000
