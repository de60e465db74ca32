"""Tools and reasoning in /v1/chat/completions, through OpenAI's own client: streaming and not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from scripted import WITHOUT_TOOLS, ScriptedEngine, events, openai_client, serving, written

from draftwing.text import chat_template

SCRIPTED = dict(reasoning="qwen3", tools="qwen25")

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
HI: list[Any] = [{"role": "user", "content": "hi"}]
BLOCK = "<think>\nthe city\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def joined(chunks: Any) -> list[dict[str, Any]]:
    """The choices that a client puts together from a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = choices.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "reason": None})
            delta = choice.delta
            one["content"] += delta.content or ""
            one["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(one["calls"]) and call.type == "function"
                    assert call.function.arguments == ""
                    one["calls"].append([call.function.name, ""])
                else:
                    assert call.function.name is None
                    one["calls"][call.index][1] += call.function.arguments
            one["reason"] = choice.finish_reason or one["reason"]
    return [choices[i] for i in sorted(choices)]


def ask(api: openai.OpenAI, **more: Any) -> Any:
    """The first choice, the same at once and from the stream."""
    body: dict[str, Any] = {"model": "m", "messages": HI} | more
    whole = api.chat.completions.create(**body)
    streamed = joined(api.chat.completions.create(**body, stream=True))
    for choice, other in zip(whole.choices, streamed, strict=True):
        message = choice.message
        assert (message.content or "") == other["content"] and choice.finish_reason == other["reason"]
        assert (message.reasoning_content or "") == other["reasoning"]
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
        assert calls == other["calls"]
        assert all(call.id.startswith("call_") for call in message.tool_calls or [])
    return whole.choices[0]


def test_reasoning_is_told_apart(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = f"{BLOCK}It is sunny."
    choice = ask(api)
    assert (choice.message.reasoning_content, choice.message.content) == ("the city", "It is sunny.")
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    usage = api.chat.completions.create(model="m", messages=HI).usage
    assert usage is not None and usage.completion_tokens == len(scripted.script) + 1
    assert usage.reasoning_tokens == len(BLOCK.rstrip())  # type: ignore[attr-defined]
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len(BLOCK.rstrip())
    cut = ask(api, max_tokens=12)
    assert cut.message.content is None and cut.message.reasoning_content == "the"


def test_reasoning_may_stay_in_the_text_or_come_at_once(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = f"{BLOCK}It is sunny."
    whole = ask(api, extra_body={"separate_reasoning": False})
    assert whole.message.content == scripted.script and whole.message.reasoning_content is None
    ask(api, extra_body={"stream_reasoning": False})
    chunks = api.chat.completions.create(model="m", messages=HI, stream=True, extra_body={"stream_reasoning": False})
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
    assert [thought for thought in thoughts if thought] == ["the city"]
    ask(api, reasoning_effort="none")
    assert scripted.prompt.endswith("<think>\n\n</think>\n\n")


def test_lists_in_all_tools_are_bounded_together(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be as long as any, but all of them are copied to the process that renders templates."""
    copied: list[Any] = []
    dumps = chat_template.pickle.dumps
    monkeypatch.setattr(chat_template.pickle, "dumps", lambda job: copied.append(job) or dumps(job))
    schema = {"type": "object", "properties": {"code": {"enum": list(range(16_000))}}}
    tools: list[Any] = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(5)]
    with pytest.raises(openai.BadRequestError, match="all tools may have 65536 values together") as refused:
        ask(api, tools=tools)
    assert refused.value.param == "tools" and not any("f0" in str(job.variables) for job in copied)


def test_calls(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = f"{BLOCK}Looking.\n{CALL}\n{NOW}"
    choice = ask(api, tools=TOOLS)
    message = choice.message
    assert (message.reasoning_content, message.content, choice.finish_reason) == ("the city", "Looking.", "tool_calls")
    first, second = message.tool_calls
    assert first.function.name == "get_weather" and json.loads(first.function.arguments) == {"city": "Paris é"}
    assert (second.function.name, second.function.arguments) == ("now", "{}") and first.id != second.id
    shown = json.loads(scripted.prompt[len("<tools>") : scripted.prompt.index("</tools>")])
    assert shown[0] == TOOLS[0]
    single = ask(api, tools=TOOLS, parallel_tool_calls=False)
    assert len(single.message.tool_calls) == 1
    scripted.script = CALL
    alone = ask(api, tools=TOOLS)
    assert alone.message.content is None and alone.finish_reason == "tool_calls"
    cut = ask(api, tools=TOOLS, stop="Par")
    assert cut.finish_reason == "stop" and cut.message.tool_calls[0].function.arguments == '{"city": "'
    raw = ask(api, tools=TOOLS, tool_choice="none")
    assert raw.message.content == CALL and raw.finish_reason == "stop" and "<tools>" not in scripted.prompt
    assert ask(api).message.content == CALL


def test_a_call_may_lack_its_marker_where_no_grammar_holds_it(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    strict: Any = {"type": "function", "function": {**WEATHER, "strict": True}}
    for script in (call, f"```json\n{call}\n```"):
        scripted.script = script
        choice = ask(api, tools=TOOLS)
        assert choice.message.content is None and choice.finish_reason == "tool_calls"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        for more in ({"tools": [strict]}, {"tools": TOOLS, "response_format": {"type": "json_object"}}):
            choice = ask(api, **more)
            assert choice.message.content == script and choice.finish_reason == "stop"


def test_n_answers_have_their_own_calls(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = f"{BLOCK}{CALL}"
    data = api.chat.completions.create(model="m", messages=HI, tools=TOOLS, n=3)
    calls = [choice.message.tool_calls[0] for choice in data.choices if choice.message.tool_calls]
    assert len({call.id for call in calls}) == 3
    ask(api, tools=TOOLS, n=3)


def test_results_go_back_to_the_model(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = f"{BLOCK}Looking. {CALL}"
    message = ask(api, tools=TOOLS).message
    scripted.script = "Sunny."
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    ask(api, messages=[*HI, message.to_dict(), result], tools=TOOLS)
    assert scripted.prompt.endswith(
        "<user>hi</user>\n"
        f'<assistant>[the city]Looking.<call {call.id}>get_weather {{"city": "Paris é"}}</assistant>\n'
        f"<tool>sun by get_weather for {call.id}</tool>\n<assistant>"
    )
    cut = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": '}}
    ask(api, messages=[*HI, {"role": "assistant", "tool_calls": [cut]}, result])
    assert "<assistant><call c1>now {}</assistant>" in scripted.prompt


def test_what_is_not_text_of_a_call_is_content(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
    choice = ask(api, tools=TOOLS)
    assert choice.message.content == scripted.script and choice.finish_reason == "stop"
    scripted.script = CALL
    cut = ask(api, tools=TOOLS, max_tokens=60)
    assert cut.finish_reason == "length" and cut.message.tool_calls[0].function.arguments.startswith('{"city": "P')


def test_choices_are_grammars(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = f"{BLOCK}{CALL}"

    def grammar(**more: Any) -> Any:
        ask(api, tools=TOOLS, **more)
        return scripted.requests[-1].params.grammar

    assert grammar() is None and grammar(tool_choice="auto") is None
    required = grammar(tool_choice="required")
    assert "get_weather" in required.text and '\\"now\\"' in required.text and "</think>" in required.text
    named = grammar(tool_choice={"type": "function", "function": {"name": "now"}})
    assert "get_weather" not in named.text and '\\"now\\"' in named.text
    strict = [{"type": "function", "function": WEATHER | {"strict": True}}]
    ask(api, tools=strict)
    auto = scripted.requests[-1].params.grammar
    assert auto is not None and "triggered_tags" in auto.text and '"strict"' not in scripted.prompt
    form = {"type": "json_object"}
    both = grammar(response_format=form)
    assert "get_weather" in both.text and "json_schema" in both.text
    assert grammar(response_format=form, tool_choice="none").kind == "structural_tag"
    off = grammar(response_format=form, tool_choice="none", reasoning_effort="none")
    assert off.kind == "json_object"


def test_markers_that_are_special_tokens_are_seen() -> None:
    scripted = ScriptedEngine(
        '[TOOL_CALLS][{"name": "now", "arguments": {}}]', tools="mistral", special=("[TOOL_CALLS]",)
    )
    with serving(scripted) as url:
        api = openai_client(url)
        body: Any = {"model": "m", "messages": HI}
        message = api.chat.completions.create(**body, tools=TOOLS).choices[0].message
        assert message.tool_calls is not None and len(message.tool_calls[0].id) == 9 and message.content is None
        assert api.chat.completions.create(**body).choices[0].message.content == '[{"name": "now", "arguments": {}}]'


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [{"type": "custom", "function": {"name": "x"}}]}, "tools.0.function"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.function.name"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools.0.function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": TOOLS, "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
    ({"functions": [WEATHER]}, "functions"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"messages": [*HI, {"role": "tool", "content": None}]}, "messages.1.tool_call_id"),
    ({"messages": [*HI, {"role": "user", "content": None}]}, "messages.1.content"),
]


@pytest.mark.parametrize("body, named", REFUSED, ids=lambda v: v if isinstance(v, str) else None)
def test_refusals_name_the_field(url: str, body: dict[str, Any], named: str) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": HI} | body)
    data = response.json()
    assert response.status_code == 400, data
    assert data["object"] == "error" and data["param"].startswith(named) and named in data["message"]


@pytest.mark.slow
def test_an_effort_is_used_or_named_as_ignored() -> None:
    def ask(url: str, effort: str, path: str = "chat/completions") -> httpx.Headers:
        fields: dict[str, Any] = {"messages": HI, "reasoning_effort": effort}
        if path == "responses":
            fields = {"input": "a", "reasoning": {"effort": effort}}
        if path == "messages":
            fields = {"messages": HI, "max_tokens": 5, "output_config": {"effort": effort}}
        answer = httpx.post(f"{url}/v1/{path}", json=fields | {"model": "m", "stream": effort == "high"})
        assert answer.status_code == 200, answer.text
        return answer.headers

    efforts = ("none", "minimal", "low", "medium", "high", "xhigh")
    template_text = "{{ reasoning_effort }} {{ enable_thinking }}"
    for template, ignored in ((WITHOUT_TOOLS, True), (template_text, False), ("a{{ thinking }}", False)):
        scripted = ScriptedEngine("x", template=template)
        with serving(scripted) as url:
            for effort in efforts:
                says = "reasoning_effort" if ignored and effort not in ("none", "medium") else None
                assert ask(url, effort).get("draftwing-ignored") == says
                if template == template_text:
                    assert scripted.prompt == f"{effort} {({'none': False, 'medium': ''}).get(effort, True)}"
            named = ask(url, "high", "responses").get("draftwing-ignored")
            assert named == ("reasoning.effort" if ignored else None)
            for effort, word in (("low", "low"), ("high", "high"), ("max", "xhigh")):
                named = ask(url, effort, "messages").get("draftwing-ignored")
                assert named == ("output_config.effort" if ignored else None)
                assert template != template_text or scripted.prompt == f"{word} True"


@pytest.mark.slow
def test_servers_that_cannot() -> None:
    with serving(ScriptedEngine(f"{BLOCK}{CALL}")) as url:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            openai_client(url).chat.completions.create(model="m", messages=HI, tools=TOOLS)
        choice = openai_client(url).chat.completions.create(model="m", messages=HI).choices[0]
        assert choice.message.content == f"{BLOCK}{CALL}"
        assert httpx.get(f"{url}/model_info").json()["tool_call_parser"] is None
    with serving(ScriptedEngine("x", "deepseek-r1", "hermes", WITHOUT_TOOLS)) as url:
        with pytest.raises(openai.BadRequestError, match=r"knows no tools.*--chat-template FILE"):
            openai_client(url).chat.completions.create(model="m", messages=HI, tools=TOOLS)
        info = httpx.get(f"{url}/model_info").json()
        assert (info["reasoning_parser"], info["tool_call_parser"]) == ("deepseek-r1", "hermes")


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(("choice", "first", "more"), [
    ("required", None, {"logprobs": True, "top_logprobs": 1}), (NAMED, None, {"n": 2}), ("auto", "", {"n": 2}),
    ("none", "", {}),
])  # fmt: skip
def test_a_stream_that_can_only_be_a_call_has_no_content(
    url: str, scripted: ScriptedEngine, choice: Any, first: str | None, more: dict[str, Any]
) -> None:
    scripted.script = written(("now", {"a": "bcd"}))
    body = {"messages": HI, "tools": TOOLS, "tool_choice": choice, "stream": True, **more}
    deltas = [
        one["delta"]
        for chunk in events(httpx.post(f"{url}/v1/chat/completions", json=body).text)
        for one in chunk["choices"]
    ]
    assert [delta["content"] for delta in deltas if "role" in delta] == [first] * more.get("n", 1)
    said = [delta["content"] for delta in deltas if delta.get("content") is not None]
    assert (said == []) == (first is None)
    assert any("tool_calls" in delta for delta in deltas) == (choice != "none")


@pytest.mark.parametrize(("before", "behind", "text"), [
    ("hello ", "\nbye", "hello\nbye"), ("hello ", "bye", "hello bye"), ("hello\n\n", " bye", "hello bye"),
    ("hello", "\n\nbye\n", "hello\n\nbye\n"), ("", "\nbye", "bye"), ("hello\n", "\n", "hello"),
])  # fmt: skip
def test_words_around_a_call_stay_apart(
    url: str, scripted: ScriptedEngine, before: str, behind: str, text: str
) -> None:
    scripted.script = f"{before}{written(('now', {}))}{behind}"
    body = {"messages": HI, "tools": TOOLS}
    whole = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    chunks = events(httpx.post(f"{url}/v1/chat/completions", json=body | {"stream": True}).text)
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert whole["content"] == streamed == text and len(whole["tool_calls"]) == 1


def test_tokens_of_a_conversation_with_tools(url: str, scripted: ScriptedEngine) -> None:
    """/tokenize has the prompt of the chat completion, as vLLM's clients count it."""
    scripted.script = "x"
    for tools in (None, [], TOOLS):
        body: dict[str, Any] = {"messages": HI} | ({} if tools is None else {"tools": tools})
        said = httpx.post(f"{url}/tokenize", json=body).json()
        assert httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 2}).status_code == 200
        assert said["tokens"] == scripted.requests[-1].prompt_ids and said["token_strs"] is None
        assert ("get_weather" in scripted.prompt) == bool(tools)
