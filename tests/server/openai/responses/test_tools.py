"""Namespaces, custom tools, hosted tools and choices among them in /v1/responses, through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine, written

SCRIPTED = dict(tools="hermes")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
PATCH = 'start: "*** Begin" LF line+ "*** End" LF?\nline: ("+" | "-") /.*/ LF\n%import common.LF\n'
EDIT: dict[str, Any] = {
    "type": "custom",
    "name": "edit",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
}
DAY: dict[str, Any] = {
    "type": "custom",
    "name": "day",
    "format": {"type": "grammar", "syntax": "regex", "definition": r"^\d+/\d+$"},
}
SAY: dict[str, Any] = {"type": "custom", "name": "say"}
AGENTS: dict[str, Any] = {
    "type": "namespace", "name": "agents", "description": "Other agents.",
    "tools": [
        {
            "type": "function", "name": "spawn", "description": "Starts one.", "strict": False,
            "parameters": {"type": "object"},
        },
        {"type": "function", "name": "weather", "strict": False, "parameters": {"type": "object"}},
        {"type": "custom", "name": "tell", "description": "Tells one."},
    ],
}  # fmt: skip
ALL = [WEATHER, EDIT, DAY, SAY, AGENTS]
TEXT = '*** Begin\n+a "b" \\ é 😀\n-\t\n*** End\n'


def offered(scripted: ScriptedEngine) -> dict[str, Any]:
    """The functions that the model saw."""
    tools = json.loads(scripted.prompt.split("<tools>")[1].split("</tools>")[0])
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def test_the_model_is_told_of_all(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "Fine."
    response = api.responses.create(model="m", input="hi", tools=ALL)
    offers = offered(scripted)
    assert list(offers) == ["weather", "edit", "day", "say", "agents.spawn", "agents.weather", "agents.tell"]
    assert offers["agents.spawn"]["description"] == "agents: Other agents.\n\nStarts one."
    assert "description" not in offers["agents.weather"] and offers["agents.tell"]["description"] == "Tells one."
    for name in ("edit", "day", "say", "agents.tell"):
        assert offers[name]["parameters"]["required"] == ["input"]
    assert PATCH in offers["edit"]["parameters"]["properties"]["input"]["description"]
    shown = [tool.to_dict() for tool in response.tools]
    assert [tool["type"] for tool in shown] == ["function", "custom", "custom", "custom", "namespace"]
    assert shown[1] == EDIT and shown[3]["format"] == {"type": "text"} and len(shown[4]["tools"]) == 3


def test_calls_come_back_as_their_clients_dispatch_them(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = written(
        ("weather", {"city": "Paris"}),
        ("agents.weather", {}),
        ("edit", {"input": TEXT}),
        ("agents.tell", {"input": ""}),
    )
    whole = api.responses.create(model="m", input="hi", tools=ALL)
    with api.responses.stream(model="m", input="hi", tools=ALL) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        first, second, third, fourth = response.output
        assert first.type == second.type == "function_call" and third.type == fourth.type == "custom_tool_call"
        assert [(one.name, one.namespace) for one in response.output] == [  # type: ignore[union-attr]
            ("weather", None), ("weather", "agents"), ("edit", None), ("tell", "agents"),
        ]  # fmt: skip
        assert json.loads(first.arguments) == {"city": "Paris"} and (third.input, fourth.input) == (TEXT, "")
        assert len({one.call_id for one in response.output}) == 4  # type: ignore[union-attr]
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(event.delta for event in deltas) == TEXT and len(deltas) > 5
    assert {event.item_id for event in deltas} == {streamed.output[2].id}
    done = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done == [TEXT, ""]
    ended = [e.item.to_dict() for e in events if e.type == "response.output_item.done"]
    parsed = {"parsed_arguments": None}  # the client's own
    assert [item | parsed for item in ended] == [item.to_dict() | parsed for item in streamed.output]


def test_calls_and_results_go_back_to_the_model(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = written(("agents.spawn", {"a": 1}), ("edit", {"input": TEXT}))
    first = api.responses.create(model="m", input="hi", tools=ALL)
    one, two = first.output
    results: list[Any] = [
        {
            "type": "function_call_output",
            "call_id": one.call_id,
            "output": "started",
            "name": "spawn",
            "namespace": "agents",
        },
        {"type": "custom_tool_call_output", "call_id": two.call_id, "output": [{"type": "input_text", "text": "done"}]},
    ]
    scripted.script = "Well."
    expected = (
        f'<call {one.call_id}>agents.spawn {{"a": 1}}<call {two.call_id}>'
        f"edit {json.dumps({'input': TEXT}, ensure_ascii=False)}</assistant>\n"
        f"<tool>started by agents.spawn for {one.call_id}</tool>\n<tool>done by edit for {two.call_id}</tool>"
    )
    for items in (
        [item.to_dict() for item in first.output],
        [{"type": "item_reference", "id": i.id} for i in first.output],
    ):
        api.responses.create(model="m", input=[{"role": "user", "content": "hi"}, *items, *results])
        assert expected in scripted.prompt
    api.responses.create(model="m", input=results, previous_response_id=first.id)
    assert expected in scripted.prompt


def test_input_that_is_none_is_given_as_it_is(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = written(("say", {"text": "x"}))
    (item,) = api.responses.create(model="m", input="hi", tools=[SAY]).output
    assert item.type == "custom_tool_call" and json.loads(item.input) == {"text": "x"}
    scripted.script = scripted.script.replace('"text": "x"', '"input": "x\\n')
    cut = api.responses.create(model="m", input="hi", tools=[SAY], max_output_tokens=len(scripted.script) - 15)
    assert cut.status == "incomplete" and cut.output[0].input == "x\n"  # type: ignore[union-attr]


def ignored(url: str, **body: Any) -> list[str]:
    response = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "hi"} | body)
    assert response.status_code == 200, response.text
    return [name for name in response.headers.get("draftwing-ignored", "").split(", ") if name]


HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview", "search_context_size": "low"},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "computer_use_preview", "display_width": 9, "display_height": 9, "environment": "linux"},
    {"type": "image_generation", "size": "auto"},
    {"type": "mcp", "server_label": "l", "server_url": "u", "require_approval": "never"},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}},
]


@pytest.mark.slow
@pytest.mark.parametrize("tool", HOSTED, ids=lambda tool: tool["type"])
def test_hosted_tools(url: str, scripted: ScriptedEngine, tool: dict[str, Any]) -> None:
    scripted.script, kind = "Fine.", tool["type"]
    assert ignored(url, tools=[tool, WEATHER, tool]) == [f"tools.{kind}"] and list(offered(scripted)) == ["weather"]
    body = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "hi", "tools": [WEATHER, tool]}).json()
    assert [one["type"] for one in body["tools"]] == ["function"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [tool]}, "tools.0.type"),
        ({"tools": [WEATHER, tool], "tool_choice": {"type": kind}}, "tool_choice"),
        (
            {
                "tools": [WEATHER, tool],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]},
            },
            "tool_choice.tools.0",
        ),
    ]
    for fields, param in wrong:
        response = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "hi"} | fields)
        assert (response.status_code, response.json()["param"]) == (400, param)


def test_allowed_tools(api: openai.OpenAI, scripted: ScriptedEngine) -> None:
    scripted.script = "Fine."
    for mode, forced in (("auto", False), ("required", True)):
        for named, names in (
            ([{"type": "function", "name": "weather"}], ["weather"]),
            ([{"type": "namespace", "name": "agents"}], ["agents.spawn", "agents.weather", "agents.tell"]),
            ([{"type": "function", "name": "spawn", "namespace": "agents"}, SAY], ["say", "agents.spawn"]),
        ):
            choice: Any = {"type": "allowed_tools", "mode": mode, "tools": named}
            response = api.responses.create(model="m", input="hi", tools=ALL, tool_choice=choice)
            assert list(offered(scripted)) == names
            assert response.tool_choice.to_dict() == choice  # type: ignore[union-attr]
            grammar = scripted.requests[-1].params.grammar
            assert (grammar is not None and "triggered_tags" not in grammar.text) == forced


def test_tools_that_come_with_the_input(api: openai.OpenAI, scripted: ScriptedEngine, url: str) -> None:
    scripted.script = written(("agents.tell", {"input": "x"}))
    added: Any = {"type": "additional_tools", "role": "developer", "tools": [AGENTS, {"type": "web_search"}, WEATHER]}
    first = api.responses.create(model="m", input=[added, {"role": "user", "content": "hi"}], tools=[SAY])
    assert list(offered(scripted)) == ["say", "agents.spawn", "agents.weather", "agents.tell", "weather"]
    assert (first.output[0].name, first.output[0].namespace) == ("tell", "agents")  # type: ignore[union-attr]
    scripted.script = "Fine."
    later = {**added, "tools": [WEATHER | {"description": "Newer."}]}
    api.responses.create(model="m", input=[later, {"role": "user", "content": "x"}], previous_response_id=first.id)
    assert "agents.spawn" in offered(scripted) and offered(scripted)["weather"]["description"] == "Newer."
    assert ignored(url, input=[added, {"role": "user", "content": "hi"}]) == ["tools.web_search"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "functoin", "name": "f"}]}, "tools.0.type"),
    ({"tools": [WEATHER | {"format": {"type": "text"}}]}, "tools.0.format"),
    ({"tools": [SAY | {"parameters": {}}]}, "tools.0.parameters"),
    ({"tools": [SAY | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools.0.format.definition"),
    (
        {"tools": [SAY | {"format": {"type": "grammar", "syntax": "regex", "definition": "(?=a)"}}]},
        "tools.0.format.definition",
    ),
    ({"tools": [WEATHER | {"allowed_callers": ["programmatic"]}]}, "tools.0.allowed_callers"),
    ({"tools": [WEATHER | {"tools": []}]}, "tools.0.tools"),
    ({"tools": [AGENTS | {"tools": []}]}, "tools.0.tools"),
    ({"tools": [AGENTS | {"tools": [AGENTS]}]}, "tools.0.tools.0.type"),
    ({"tools": [AGENTS | {"tools": [WEATHER | {"name": ""}]}]}, "tools.0.tools.0.name"),
    ({"tools": [AGENTS, WEATHER | {"name": "agents.spawn"}]}, "tools.1.name"),
    ({"tools": [WEATHER, WEATHER]}, "tools.1.name"),
    ({"tools": ALL, "tool_choice": {"type": "function", "name": "say"}}, "tool_choice"),
    ({"tools": ALL, "tool_choice": {"type": "namespace", "name": "agents"}}, "tool_choice"),
    (
        {"tools": ALL, "tool_choice": {"type": "allowed_tools", "tools": [{"type": "custom", "name": "say"}]}},
        "tool_choice",
    ),
    ({"tools": ALL, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    (
        {"tools": ALL, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER] * 513}},
        "tool_choice.tools",
    ),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input.0"),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
    ({"input": [{"type": "additional_tools", "tools": [{"type": "odd"}]}]}, "input.0.tools.0.type"),
    ({"input": [{"type": "local_shell_call_output", "id": "x", "output": "y"}]}, "input.0.call_id"),
    ({"input": [{"type": "message_call", "role": "user", "content": "x"}]}, "input.0.type"),
    (
        {
            "input": [
                {"type": "computer_call", "call_id": "c", "action": {}},
                {
                    "type": "computer_call_output",
                    "call_id": "c",
                    "output": {"type": "computer_screenshot", "image_url": "u"},
                },
            ]
        },
        "input.1.output.0",
    ),
]


@pytest.mark.parametrize("body, param", REFUSED)
def test_refusals_name_the_field(url: str, body: dict[str, Any], param: str) -> None:
    response = httpx.post(f"{url}/v1/responses", json={"model": "m", "input": "hi"} | body)
    assert response.status_code == 400, response.text
    assert response.json()["param"] == param and param in response.json()["message"]


HINTS: list[tuple[dict[str, Any], str]] = [
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools.defer_loading"),
    ({"tools": [AGENTS | {"tools": [WEATHER | {"output_schema": SCHEMA}]}]}, "tools.tools.output_schema"),
    (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"a": 1}}]}
            ]
        },
        "input.content.prompt_cache_breakpoint",
    ),
    ({"service_tier": "auto", "truncation": "disabled", "text": {"verbosity": "medium"}, "store": True}, ""),
    ({"reasoning": {"context": "auto", "mode": "standard", "summary": None}, "metadata": {"a": "b"}, "user": "u"}, ""),
    ({"max_tool_calls": 3, "previous_response_id": None, "tools": [WEATHER | {"defer_loading": False}]}, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize("body, name", HINTS)
def test_hints_are_accepted_and_named(url: str, scripted: ScriptedEngine, body: dict[str, Any], name: str) -> None:
    scripted.script = "Fine."
    assert ignored(url, **body) == ([name] if name else [])


def test_what_another_server_ran_is_left_out_and_what_the_client_ran_is_a_call(
    url: str, scripted: ScriptedEngine
) -> None:
    scripted.script = "Fine."
    logs = [{"stdout": "out", "stderr": "err", "outcome": {}}, {"stdout": "put", "stderr": "", "outcome": {}}]
    items = [
        {"role": "user", "content": "a"},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [{"name": "x", "input_schema": {}}]},
        {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True, "reason": "r"},
        {"type": "mcp_call", "id": "m", "name": "n", "arguments": "{}", "output": "o", "server_label": "s"},
        {"type": "image_generation_call", "id": "i", "status": "completed", "result": "aGk=", "revised_prompt": "x"},
        {"type": "code_interpreter_call", "id": "i", "code": "1", "container_id": "c", "outputs": None},
        {"type": "file_search_call", "id": "i", "queries": ["q"], "results": None},
        {"type": "compaction", "id": "i", "encrypted_content": "gAAA"},
        {"type": "shell_call", "id": "s", "call_id": "s", "action": {"commands": ["ls"]}, "status": "completed"},
        {"type": "shell_call_output", "call_id": "s", "output": logs, "max_output_length": None},
        {"type": "local_shell_call", "id": "l", "call_id": "l", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "l", "output": "x"},
        {"type": "apply_patch_call", "id": "p", "call_id": "p", "operation": {"type": "delete_file", "path": "f"}},
        {"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": None},
        {"role": "user", "content": "b"},
    ]
    assert ignored(url, input=items) == []
    assert scripted.prompt == (
        '<user>a</user>\n<assistant><call s>shell {"action": {"commands": ["ls"]}}</assistant>\n'
        "<tool>outerrput by shell for s</tool>\n"
        '<assistant><call l>local_shell {"action": {"type": "exec", "command": ["ls"]}}</assistant>\n'
        "<tool>x by local_shell for l</tool>\n"
        '<assistant><call p>apply_patch {"operation": {"type": "delete_file", "path": "f"}}</assistant>\n'
        "<tool> by apply_patch for p</tool>\n<user>b</user>\n<assistant>"
    )


def test_what_comes_back_in_a_history_asks_for_nothing(url: str, scripted: ScriptedEngine) -> None:
    scripted.script = "Fine."
    hidden = {"encrypted_content": "gAAA", "status": "completed"}
    summary = [{"type": "summary_text", "text": text} for text in "SU"]
    said = [
        {"type": "output_text", "text": "b", "annotations": [{"type": "citation"}], "logprobs": [], "parsed": None},
        {"type": "refusal", "refusal": " no"},
    ]
    offers = {"status": "completed", "caller": {"type": "direct"}, "async": False, "created_by": "x"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}], **hidden},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "content": said,
            "phase": "final_answer",
            "status": "completed",
        },
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}, "status": "completed"},
        {"type": "reasoning", "id": "r", "summary": summary, **hidden},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "parsed_arguments": None, **offers},
        {"type": "function_call_output", "id": "o", "call_id": "c", "output": "r", "status": "completed"},
        {"type": "reasoning", "id": "r", "summary": [], **hidden},
        {"role": "user", "content": "d"},
    ]
    assert ignored(url, input=items) == []
    assert scripted.prompt == (
        "<user>a</user>\n<assistant>[TS\n\nU]b no<call c>f {}</assistant>\n<tool>r by f for c</tool>\n<user>d</user>\n"
        "<assistant>"
    )


@pytest.mark.parametrize(
    "parts, shown",
    [
        ([("refusal", "No.")], "No."),
        ([("refusal", "")], ""),
        ([("output_text", "a"), ("refusal", " é\n")], "a é\n"),
        ([("refusal", "I "), ("refusal", "cannot"), ("output_text", ".")], "I cannot."),
    ],
)
def test_a_refusal_in_a_history_is_text(
    url: str, scripted: ScriptedEngine, parts: list[tuple[str, str]], shown: str
) -> None:
    scripted.script = "Fine."
    content = [{"type": kind, "text" if kind == "output_text" else kind: text} for kind, text in parts]
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    assert ignored(url, input=[*items, {"role": "user", "content": "b"}]) == []
    assert scripted.prompt == f"<user>a</user>\n<assistant>{shown}</assistant>\n<user>b</user>\n<assistant>"


def test_large_grammars_are_read_in_a_thread(url: str) -> None:
    def edit(size: int) -> dict[str, Any]:
        rules = "\n".join(f'r{i}: "{i:099}"' for i in range(size // 107))
        names = " | ".join(f"r{i}" for i in range(size // 107))
        return EDIT | {"format": {"type": "grammar", "syntax": "lark", "definition": f"start: {names}\n{rules}"}}

    asked: Any = {"model": "m", "input": "hi", "tools": [edit(20_000)]}
    response = httpx.post(f"{url}/v1/responses", json=asked)  # the model sees it, and has a short context
    assert (response.status_code, response.json()["param"]) == (400, "input")
    both = [edit(250_000), edit(250_000) | {"name": "other"}]
    response = httpx.post(f"{url}/v1/responses", json=asked | {"tools": [AGENTS | {"tools": both}]})
    assert (response.status_code, response.json()["param"]) == (400, "tools")
    wrong = edit(20_000)
    wrong["format"] |= {"definition": wrong["format"]["definition"] + " @"}
    response = httpx.post(f"{url}/v1/responses", json=asked | {"tools": [WEATHER, wrong]})
    assert (response.status_code, response.json()["param"]) == (400, "tools.1.format.definition")
