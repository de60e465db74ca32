"""Custom tools and allowed tools in /v1/chat/completions, through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine, written

SCRIPTED = dict(tools="hermes")

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
LINES = 'start: line+\nline: ("+" | "-") /.*/ LF\n%import common.LF\n'
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LINES}}
EDIT: dict[str, Any] = {"type": "custom", "custom": {"name": "edit", "description": "Edits.", "format": GRAMMAR}}
SAY: dict[str, Any] = {"type": "custom", "custom": {"name": "say"}}
TEXT = '+a "b" \\ é 😀\n-\t\n'
ASKED: list[Any] = [{"role": "user", "content": "hi"}]


def streamed(api: openai.OpenAI, **body: Any) -> tuple[list[dict[str, Any]], str | None]:
    """The calls that the deltas make together, and why the answer ended."""
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in api.chat.completions.create(model="m", messages=ASKED, stream=True, **body):
        reason = chunk.choices[0].finish_reason or reason
        for delta in chunk.choices[0].delta.to_dict().get("tool_calls", []):  # type: ignore[attr-defined]
            if delta["index"] == len(calls):
                calls.append({key: value for key, value in delta.items() if key != "index"})
                continue
            kind = calls[delta["index"]]["type"]
            field = "input" if kind == "custom" else "arguments"
            calls[delta["index"]][kind][field] += delta[kind][field]
    return calls, reason


def test_custom_calls_with_and_without_stream(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = written(("edit", {"input": TEXT}), ("now", {"a": 1}), ("say", {"input": ""}), ("say", {"no": 1}))
    tools = [NOW, EDIT, SAY]
    said = api.chat.completions.create(model="m", messages=ASKED, tools=tools).choices[0]
    whole = [call.to_dict() for call in said.message.tool_calls or []]
    parts, reason = streamed(api, tools=tools)
    assert said.finish_reason == reason == "tool_calls"
    for calls in (whole, parts):
        assert [call["type"] for call in calls] == ["custom", "function", "custom", "custom"]
        assert [call["custom"] for call in calls if "custom" in call] == [
            {"name": "edit", "input": TEXT},
            {"name": "say", "input": ""},
            {"name": "say", "input": '{"no": 1}'},
        ]
        assert calls[1]["function"] == {"name": "now", "arguments": '{"a": 1}'} and len({c["id"] for c in calls}) == 4
    # They go back to the model as it wrote them.
    history = [*ASKED, said.message.to_dict(), {"role": "tool", "tool_call_id": whole[0]["id"], "content": "done"}]
    api.chat.completions.create(model="m", messages=history)
    edit = f"<call {whole[0]['id']}>edit {json.dumps({'input': TEXT}, ensure_ascii=False)}<call"
    assert edit in scripted.prompt and f"<tool>done by edit for {whole[0]['id']}</tool>" in scripted.prompt


def test_a_stop_string_within_an_input_makes_it_no_call(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    tools = [NOW, EDIT, SAY]
    scripted.script = f"{written(('edit', {'input': 'do not stop here'}))} and so on"
    for stop, left, why in (("stop", "do not ", "stop"), ("so on", "do not stop here", "tool_calls")):
        said = api.chat.completions.create(model="m", messages=ASKED, tools=tools, stop=stop).choices[0]
        calls, reason = streamed(api, tools=tools, stop=stop)
        assert said.finish_reason == reason == why
        for call in (said.message.tool_calls[0].to_dict(), calls[0]):
            assert call["custom"] == {"name": "edit", "input": left}
    scripted.script = written(("say", {"no": 1})) + " and so on"  # another input than was asked for is as it is
    said = api.chat.completions.create(model="m", messages=ASKED, tools=tools, stop="so on").choices[0]
    assert said.finish_reason == "tool_calls"


def test_a_stop_string_within_deep_arguments(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    """JSON that nobody can read is none, too."""
    scripted.script = '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * 1500 + "and"
    said = api.chat.completions.create(model="m", messages=ASKED, tools=[NOW], stop="and", max_tokens=1700)
    assert said.choices[0].finish_reason == "stop"


def test_the_format_is_a_grammar(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "Fine."
    api.chat.completions.create(model="m", messages=ASKED, tools=[NOW, EDIT])
    assert "triggered_tags" in scripted.grammar
    choice: Any = {"type": "custom", "custom": {"name": "edit"}}
    api.chat.completions.create(model="m", messages=ASKED, tools=[NOW, EDIT], tool_choice=choice)
    assert "edit" in scripted.grammar and "now" not in scripted.grammar


def test_allowed_tools(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "Fine."
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [SAY, {"type": "function", "function": {"name": "now"}}]}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        api.chat.completions.create(model="m", messages=ASKED, tools=[EDIT, NOW, SAY], tool_choice=choice)
        reported = json.loads(scripted.prompt.split("<tools>")[1].split("</tools>")[0])
        assert [tool["function"]["name"] for tool in reported] == ["now", "say"]
        assert scripted.grammar and ("triggered_tags" in scripted.grammar) == (mode == "auto")


def chosen(*tools: dict[str, Any]) -> dict[str, Any]:
    allowed = {"mode": "auto", "tools": list(tools)}
    return {"tools": [NOW, SAY], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}


def custom(**form: Any) -> dict[str, Any]:
    return {"tools": [{"type": "custom", "custom": {"name": "x", "format": form}}]}


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.custom"),
        ({"tools": [{"type": "function", "custom": {"name": "x"}}]}, "tools.0.function"),
        ({"tools": [NOW, {"type": "custom", "custom": {"name": "now"}}]}, "tools.1.custom.name"),
        (custom(type="grammar"), "tools.0.custom.format.grammar"),
        (custom(type="text", grammar=GRAMMAR["grammar"]), "tools.0.custom.format.grammar"),
        (
            custom(type="grammar", grammar={"syntax": "regex", "definition": "(?=a)"}),
            "tools.0.custom.format.grammar.definition",
        ),
        ({"tools": [NOW, SAY], "tool_choice": {"type": "function", "function": {"name": "say"}}}, "tool_choice"),
        ({"tools": [NOW, SAY], "tool_choice": {"type": "custom", "function": {"name": "say"}}}, "tool_choice.function"),
        (chosen(), "tool_choice.allowed_tools.tools"),
        (chosen(*[SAY] * 513), "tool_choice.allowed_tools.tools"),
        (chosen({"type": "custom", "custom": {"name": "no"}}), "tool_choice.allowed_tools.tools.0"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages.0.tool_calls.0.custom",
        ),
    ],
)
def test_refusals(url: str, body: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": ASKED} | body)
    assert (response.status_code, response.json().get("param")) == (400, param), response.text
