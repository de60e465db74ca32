"""/v1/messages through Anthropic's own client: a server with a stand-in engine, streaming and not."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_engine import CONTEXT
from scripted import ScriptedEngine

if TYPE_CHECKING:  # it takes a second, and most processes of `make test` need nothing of it
    import anthropic

SCRIPTED = dict(reasoning="qwen3", tools="hermes")

TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def ask(client: anthropic.Anthropic, **more: Any) -> Any:
    """The same message twice: at once, and built by the client from the stream."""
    body: dict[str, Any] = {"model": "m", "max_tokens": 500, "messages": HI} | more
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        built = stream.get_final_message()
    once, streamed = whole.model_dump(), built.model_dump()
    for message in (once, streamed):
        del message["id"]
        for block in message["content"]:
            block.pop("parsed_output", None)
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("call_")
    assert once == streamed
    return whole


def test_a_plain_answer(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = "Hello, wörld!"
    message = ask(client, system="Be kind.")
    assert scripted.prompt == "<system>Be kind.</system>\n<user>hi</user>\n<assistant>"
    (block,) = message.content
    assert (block.type, block.text) == ("text", "Hello, wörld!")
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "echo")
    assert message.usage.input_tokens == len(scripted.prompt.encode())
    assert message.usage.output_tokens == len(scripted.script.encode()) + 1
    assert message.id.startswith("msg_") and message.role == "assistant"


def test_events_come_in_their_order(url: str, scripted: ScriptedEngine) -> None:
    scripted.script = f"<think>hm</think>\n\nSo: {CALL}"
    body = {"model": "m", "max_tokens": 500, "messages": HI, "tools": TOOLS, "stream": True}
    response = httpx.post(f"{url}/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for text in response.text.strip().split("\n\n"):
        name, data = text.split("\n")
        one = json.loads(data.removeprefix("data: "))
        assert name == f"event: {one['type']}"
        events.append(one)
    names = [e["type"] for e in events]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [(e["index"], e["content_block"]["type"]) for e in starts] == [(0, "thinking"), (1, "text"), (2, "tool_use")]
    assert starts[2]["content_block"]["input"] == {} and starts[2]["content_block"]["name"] == "get_weather"
    is_open = None
    for e in events[2:-2]:
        if e["type"] == "content_block_start":
            assert is_open is None
            is_open = e["index"]
        assert e["index"] == is_open
        if e["type"] == "content_block_stop":
            is_open = None
    assert is_open is None
    fragments = [e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"]
    assert json.loads("".join(fragments)) == {"city": "Paris é"} and len(fragments) > 3
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": len(scripted.requests[-1].prompt_ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": len(scripted.script.encode()) + 1,
    }


def test_thinking_and_tools(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = f"<think>\nthe city\n</think>\n\nLooking.\n{CALL}\n{NOW}"
    message = ask(client, tools=TOOLS)
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "the city", "Looking.")
    assert (first.type, first.name, first.input) == ("tool_use", "get_weather", {"city": "Paris é"})
    assert (second.name, second.input) == ("now", {}) and message.stop_reason == "tool_use"
    assert scripted.prompt.startswith("<tools>[{")
    shown = json.loads(scripted.prompt[len("<tools>") : scripted.prompt.index("</tools>")])
    assert shown[0]["function"] == {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": TOOLS[0]["input_schema"],
    }
    one = ask(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]


def test_results_go_back_to_the_model(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = "Sunny."
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "Looking."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    ask(client, messages=messages)
    assert scripted.prompt == (
        "<user>Weather?</user>\n"
        '<assistant>[hm]Looking.<call t1>get_weather {"city": "Paris"}<call t2>now {}</assistant>\n'
        "<tool>sun by get_weather for t1</tool>\n<tool>Error: no clock by now for t2</tool>\n<user>And?</user>\n"
        "<assistant>"
    )


def test_how_answers_end(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = "one two three"
    stopped = ask(client, stop_sequences=["zzz", "thr"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "thr", "one two ")
    cut = ask(client, max_tokens=3)
    assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("max_tokens", None, "one")
    scripted.script = '<tool_call>{"name": "now", "arguments": {"a": [1], "b": "cut'
    partial = ask(client, max_tokens=len(scripted.script), tools=TOOLS)
    assert partial.stop_reason == "max_tokens" and partial.content[0].input == {"a": [1]}
    inside = ask(client, stop_sequences=['"b'], tools=TOOLS)  # a client would make the call without it
    assert (inside.stop_reason, inside.stop_sequence) == ("stop_sequence", '"b')
    scripted.script = f"{CALL}\nand so on"
    assert ask(client, stop_sequences=["so"], tools=TOOLS).stop_reason == "tool_use"
    scripted.script = ""
    assert ask(client).content == []


def test_sampling_fields_reach_the_engine(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = "x"
    extra = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "seed": 3, "cache_salt": "a"}
    ask(client, max_tokens=9, extra_body=extra)
    request = scripted.requests[-1]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.25, 0.5, 7, 9)
    assert (params.sampling_seed, request.cache_salt) == (3, "a")


def test_required_tools_are_a_grammar(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = f"<think>hm</think>{CALL}"
    ask(client, tools=TOOLS, tool_choice={"type": "any"})
    assert "get_weather" in scripted.grammar and "now" in scripted.grammar
    ask(client, tools=TOOLS, tool_choice={"type": "tool", "name": "now"})
    assert "get_weather" not in scripted.grammar and "now" in scripted.grammar
    ask(client, tools=TOOLS, tool_choice={"type": "none"})
    assert not scripted.grammar and "<tools>" not in scripted.prompt
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert '"a"' in scripted.grammar and "</think>" in scripted.grammar
    ask(client, extra_body={"output_format": {"type": "json_schema", "schema": {"enum": ["older"]}}})
    assert '"older"' in scripted.grammar and "</think>" in scripted.grammar


def test_an_answer_goes_on_with_the_last_message(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = "paris"
    message = ask(client, messages=[*HI, {"role": "assistant", "content": "It is "}])
    assert scripted.prompt == "<user>hi</user>\n<assistant>It is " and message.content[0].text == "paris"


def test_thinking_can_be_switched_off(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = "x"
    ask(client, thinking={"type": "disabled"})
    assert scripted.prompt.endswith("<assistant><think>\n\n</think>\n\n")
    ask(client, thinking={"type": "adaptive"})
    assert scripted.prompt.endswith("<assistant>")


def test_count_tokens(client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    scripted.script = "x"
    ask(client, tools=TOOLS, system="s")
    counted = client.messages.count_tokens(model="m", messages=HI, tools=TOOLS, system="s")
    assert counted.input_tokens == len(scripted.requests[-1].prompt_ids)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10**6}, "max_tokens"),
    ({"nonsense": 1}, "nonsense"), ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "name": "y"}]}]}, "content.0.name"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}]},
        "messages.0",
    ),
    ({"system": [{"type": "image", "source": {}}]}, "system.0"),
    ({"system": [{"type": "tool_list", "tool_name": "f"}]}, "found the type 'tool_list'"),
    ({"system": [{"type": "server_tool_use", "id": "x", "name": "f", "input": {}}]}, "the type 'server_tool_use'"),
    ({"system": [{"type": "search_result", "title": "f", "content": [{"type": "image"}]}]}, "'search_result'"),
    ({"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 3}]}, "tools: this server has no web_search"),
    ({"tools": [*TOOLS, {"type": "bash", "name": "w"}]}, "tools.2.type"),
    ({"tools": [*TOOLS, {"type": "bash_20250124", "name": "b"}], "tool_choice": {"type": "tool", "name": "b"}}, "'b'"),
    ({"tools": [TOOLS[0] | {"allowed_callers": ["code_execution_20250825"]}]}, "tools.0.allowed_callers"),
    ({"tools": [*TOOLS, {"type": "w\u00e9b_20250305", "name": "w"}]}, "tools.2.type"),
    (
        {"tools": [TOOLS[0] | {"inputschema": {}}]},
        "tools.0.inputschema is not a known field; did you mean input_schema?",
    ),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "auto", "name": "now"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
    ({"context_management": {"edits": [{"type": "translate_20300101"}]}}, "context_management.edits.0.type"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": {"type": "json_schema",
      "schema": {}}}}, "output_format and output_config.format"),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"), ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": [{"role": "user", "content": "x" * 3000}]}, "prompt is too long: 3025 tokens > 1999 maximum"),
]  # fmt: skip


@pytest.mark.parametrize("body, named", REFUSED, ids=lambda v: v if isinstance(v, str) else None)
def test_refusals_name_the_field(url: str, body: dict[str, Any], named: str) -> None:
    whole = {"model": "m", "max_tokens": 10, "messages": HI} | body
    response = httpx.post(f"{url}/v1/messages", json={k: v for k, v in whole.items() if v is not None})
    data = response.json()
    assert response.status_code == 400 and set(data) == {"type", "error"} and data["type"] == "error"
    assert data["error"]["type"] == "invalid_request_error" and named in data["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_own_tools_are_left_out_beside_functions(url: str, scripted: ScriptedEngine, stream: bool) -> None:
    scripted.script = "x"
    hosted = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5, "allowed_domains": ["a.org"]},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {
            "type": "computer_20250124",
            "name": "computer",
            "display_width_px": 8,
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ]
    own = [{"name": "f", "type": "custom", "input_schema": {"type": "object"}}]
    body = {"model": "m", "max_tokens": 5, "messages": HI, "stream": stream}
    more = {"tools": hosted[:1] + own + hosted[1:], "mcp_servers": [{"type": "url", "name": "s", "url": "x"}]}
    response = httpx.post(f"{url}/v1/messages", json=body | more)
    assert response.status_code == 200, response.text
    names = ("web_search", "text_editor", "computer", "mcp_toolset")
    assert set(response.headers["draftwing-ignored"].split(", ")) == {"mcp_servers", *(f"tools.{n}" for n in names)}
    shown = scripted.prompt
    httpx.post(f"{url}/v1/messages", json=body | {"tools": own})
    assert scripted.prompt == shown, "the model does not see them"
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json={"model": "m", "messages": HI} | more)
    assert counted.json() == {"input_tokens": len(scripted.requests[-1].prompt_ids)}
    assert counted.headers["draftwing-ignored"] == response.headers["draftwing-ignored"]


def test_hints_of_functions_are_named(url: str, scripted: ScriptedEngine) -> None:
    scripted.script = "x"
    hints = {"defer_loading": True, "input_examples": [{}], "allowed_callers": ["direct", "code_execution_20250825"]}
    nothing = {"defer_loading": False, "input_examples": [], "allowed_callers": ["direct"]}
    for given, named in ((hints, set(hints)), (nothing | {"eager_input_streaming": True}, set())):
        tool = {"name": "f", "input_schema": {"type": "object"}} | given
        response = httpx.post(
            f"{url}/v1/messages", json={"model": "m", "max_tokens": 5, "messages": HI, "tools": [tool]}
        )
        assert response.status_code == 200, response.text
        found = response.headers.get("draftwing-ignored", "")
        assert set(filter(None, found.split(", "))) == {f"tools.{name}" for name in named}
        counted = httpx.post(f"{url}/v1/messages/count_tokens", json={"model": "m", "messages": HI, "tools": [tool]})
        assert counted.status_code == 200 and counted.headers.get("draftwing-ignored", "") == found


EDITS: list[tuple[list[dict[str, Any]], bool]] = [
    ([], False),
    ([{"type": "clear_thinking_20251015", "keep": "all"}], False),
    ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}], True),
    (
        [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}, "exclude_tools": []}],
        True,
    ),
    ([{"type": "compact_20260112", "pause_after_compaction": True}], True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("edits", "named"), EDITS)
def test_edits_of_the_context_are_never_applied(
    client: anthropic.Anthropic, url: str, scripted: ScriptedEngine, edits: list[Any], named: bool
) -> None:
    scripted.script = "x"
    said = [
        *HI,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
    ]
    body: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [*said, *HI]}
    httpx.post(f"{url}/v1/messages", json=body)
    whole = scripted.prompt
    response = httpx.post(f"{url}/v1/messages", json=body | {"context_management": {"edits": edits}})
    assert response.json()["context_management"] == {"applied_edits": []} and scripted.prompt == whole
    assert response.headers.get("draftwing-ignored") == ("context_management" if named else None)
    more = {"context_management": {"edits": edits}, "speed": "fast"}
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json={"model": "m", "messages": body["messages"]} | more)
    assert counted.status_code == 200
    assert counted.headers["draftwing-ignored"] == ("speed, context_management" if named else "speed")
    with client.beta.messages.stream(**body, context_management={"edits": edits}) as stream:
        reported = [event.context_management for event in stream if event.type == "message_delta"]
    assert [one is not None and one.applied_edits for one in reported] == [[]]


def test_a_length_beside_a_prompt_is_refused_in_words_that_clients_act_on(
    url: str, client: anthropic.Anthropic, scripted: ScriptedEngine
) -> None:
    scripted.script = "x"
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "y" * 500}]}
    response = httpx.post(f"{url}/v1/messages", json=body | {"max_tokens": CONTEXT})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    found = re.search(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)", error["message"])
    assert found is not None, error
    prompt, asked, context = map(int, found.groups())
    assert (asked, context) == (CONTEXT, CONTEXT)
    assert client.messages.count_tokens(**body).input_tokens == prompt
    again = httpx.post(f"{url}/v1/messages", json=body | {"max_tokens": context - prompt})
    assert again.status_code == 200 and again.json()["usage"]["input_tokens"] == prompt
    # Other dialects keep to their own words.
    response = httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": CONTEXT})
    assert response.json()["code"] == "context_length_exceeded" and "maximum context length" in response.text


def test_threads_are_refused_by_the_code_that_the_tool_runner_knows(url: str) -> None:
    body = {"model": "m", "max_tokens": 10, "messages": HI, "thread": "t"}
    response = httpx.post(f"{url}/v1/messages", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and "thread" in error["message"]
    assert error["details"]["error_code"] == "thread_unsupported_request"


def test_an_aborted_answer_is_an_error(url: str, client: anthropic.Anthropic, scripted: ScriptedEngine) -> None:
    import anthropic

    scripted.script, scripted.pause = "x" * 1500, 0.02
    try:
        with (
            pytest.raises(anthropic.APIStatusError, match="aborted"),
            client.messages.stream(model="m", max_tokens=1500, messages=HI, extra_body={"rid": "r"}) as stream,
        ):
            for number, _ in enumerate(stream):
                if number == 5:
                    httpx.post(f"{url}/abort_request", json={"rid": "r"})
    finally:
        scripted.pause = 0.0005
