"""A model that answers in harmony, through the clients of all chat APIs: streaming and not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
# As gpt-oss's template does it, in short.
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{% for tool in tools or [] %}<|start|>developer<|message|>{{ '// ' + tool.function.description }}\n"
    "type {{ tool.function.name }}<|end|>{% endfor %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
SCRIPTED = dict(template=TEMPLATE, special=SPECIAL)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
HI: list[Any] = [{"role": "user", "content": "hi"}]
WHY = "<|channel|>analysis<|message|>the city<|end|>"
FINAL = f"{WHY}<|start|>assistant<|channel|>final<|message|>It is sunny in Köln."
CALL = (
    f"{WHY}<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}'
)


def test_chat_completions(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    """Without any option: the template tells."""
    scripted.script = FINAL
    body: dict[str, Any] = {"model": "m", "messages": HI}
    whole = api.chat.completions.create(**body)
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("the city", "It is sunny in Köln.")  # type: ignore[attr-defined]
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(WHY) - len("analysis") + 8 - sum(
        len(marker) - 1 for marker in SPECIAL[1:4]
    )
    chunks = list(api.chat.completions.create(**body, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "the city"
    assert "".join(delta.content or "" for delta in deltas) == "It is sunny in Köln."
    assert scripted.prompt.startswith("<|start|>system<|message|>Reasoning: medium<|end|>")
    api.chat.completions.create(**body, reasoning_effort="high")
    assert "Reasoning: high" in scripted.prompt


def test_calls_and_their_results(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = CALL
    choice = api.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert "type get_weather" in scripted.prompt
    stream = api.chat.completions.create(model="m", messages=HI, tools=TOOLS, stream=True)
    pieces = [piece for chunk in stream for one in chunk.choices for piece in one.delta.tool_calls or []]
    assert pieces[0].function.name == "get_weather"
    assert "".join(piece.function.arguments or "" for piece in pieces) == '{"city": "Paris"}'
    history = [
        *HI,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
    ]
    scripted.script = FINAL
    api.chat.completions.create(model="m", messages=history, tools=TOOLS)
    assert scripted.prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>the city<|end|><|start|>assistant to=functions.get_weather"
        '<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sun<|end|><|start|>assistant"
    )


def test_a_forced_call_and_a_format_are_grammars(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = CALL
    api.chat.completions.create(model="m", messages=HI, tools=TOOLS, tool_choice="required")
    assert "to=functions.get_weather" in scripted.grammar and "final" not in scripted.grammar
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    api.chat.completions.create(model="m", messages=HI, response_format=shape)
    assert "<|channel|>final<|message|>" in scripted.grammar and "functions" not in scripted.grammar


def test_a_text_that_goes_on(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "ny."
    more = [*HI, {"role": "assistant", "content": "It is sun"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    answer = api.chat.completions.create(model="m", messages=more, extra_body=body)
    assert answer.choices[0].message.content == "ny."
    assert scripted.prompt.endswith("<|channel|>final<|message|>It is sun")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ("/v1/chat/completions", {"tool_choice": "auto"}, None),
        ("/v1/chat/completions", {"tool_choice": "none"}, None),
        ("/v1/messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("/v1/messages", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ("/v1/messages", {"tool_choice": {"type": "auto"}}, None),
    ],
)
def test_no_call_is_forced_where_a_text_goes_on(
    url: str, scripted: ScriptedEngine, path: str, body: dict[str, Any], param: str | None
) -> None:
    scripted.script = "ny."
    more = [*HI, {"role": "assistant", "content": "It is sun"}]
    if path == "/v1/messages":
        tools: Any = [{"name": "f", "input_schema": PARAMETERS}]
        own: dict[str, Any] = {"max_tokens": 50}
    else:
        tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
        own = {"continue_final_message": True, "add_generation_prompt": False}
    response = httpx.post(f"{url}{path}", json={"model": "m", "messages": more, "tools": tools} | own | body)
    if param is None:
        assert response.status_code == 200 and "ny." in response.text
        assert not scripted.grammar
    else:
        assert response.status_code == 400 and response.json()["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": "b"}'),
        ({"structured_outputs": {"regex": "[a-z]+ny"}}, "sunny"),
        ({"structured_outputs": {"regex": "(.|\\n)*"}}, "any text"),
        ({"structured_outputs": {"choice": ["sunny", "wet"]}}, "wet"),
    ],
)
@pytest.mark.parametrize("budget", [None, 0, 5])
def test_a_grammar_of_a_text_that_goes_on_waits_for_no_marker(
    url: str, scripted: ScriptedEngine, form: dict[str, Any], answer: str, budget: int | None
) -> None:
    """It begins at once, and holds to the end; no reasoning can begin that a budget would have to end."""
    scripted.script = answer
    more = [*HI, {"role": "assistant", "content": "It is "}]
    body = {"model": "m", "messages": more, "continue_final_message": True, "add_generation_prompt": False} | form
    response = httpx.post(f"{url}/v1/chat/completions", json=body | {"thinking_budget": budget})
    assert response.status_code == 200 and response.json()["choices"][0]["message"]["content"] == answer
    params = scripted.requests[-1].params
    assert params.grammar is not None
    state = scripted.grammars.compile(params.grammar)
    markers = [scripted.tokenizer.backend.token_to_id(marker) for marker in SPECIAL]
    for token in scripted.tokenizer.encode(answer, add_special_tokens=False):
        words = state.mask()
        assert not any((int(words[marker // 32]) >> (marker % 32)) & 1 for marker in markers)
        assert state.advance(token)
    assert state.may_end
