"""Tools and other chat APIs on a whole server with a tiny random model, whose grammars alone make it call anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from scripted import TEMPLATE, launched
from tiny_checkpoint import write_checkpoint

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "tiny")
    (folder / "template.jinja").write_text(TEMPLATE)
    command = (
        f"--model {folder / 'tiny'} --chat-template {folder / 'template.jinja'} --tool-call-parser hermes "
        "--speculative-algorithm NGRAM --constrained-json-disable-any-whitespace --max-total-tokens 16384"
    )
    with launched(command) as (_, url):
        yield url


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
            "extra_body": extra,
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
            "tool_choice": choice, "max_output_tokens": 300, "extra_body": {"seed": 7, **extra},
        }  # fmt: skip
        (call,) = api.responses.create(**body).output
        assert call.type == "custom_tool_call" and re.fullmatch(right, call.input), call.input
        with api.responses.stream(**body) as stream:
            (same,) = stream.get_final_response().output
        found += [call.input, same.input]
    assert len(set(found)) == 1
