"""Ollama's API through its own client's requests: a server with a stand-in engine, streaming and not."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import httpx
import pytest
from scripted import ScriptedEngine, client_of
from timed import least_seconds

from draftwing.server.ollama_bodies import OllamaChatRequest

SCRIPTED = dict(reasoning="qwen3", tools="hermes")

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'


def lines(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = httpx.post(f"{url}{path}", json={"model": "m"} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def whole(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{url}{path}", json={"model": "m", "stream": False} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def refused(url: str, path: str, body: dict[str, Any]) -> str:
    response = httpx.post(f"{url}{path}", json={"model": "m"} | body)
    assert response.status_code == 400, response.text
    error: str = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("script", "text", "thinking"),
    [("Grüße 👋 there", "Grüße 👋 there", None), ("<think>\nhm\n</think>\n\nyes", "yes", "hm"), ("", "", None)],
)
def test_a_chat_is_the_same_in_lines_and_whole(
    scripted: ScriptedEngine, url: str, script: str, text: str, thinking: str | None
) -> None:
    scripted.script = script
    once = whole(url, "/api/chat", {"messages": HI})
    assert once["message"]["content"] == text and once["message"].get("thinking") == thinking
    assert once["done"] is True and once["done_reason"] == "stop" and once["model"] == "echo"
    assert once["prompt_eval_count"] == len(scripted.requests[-1].prompt_ids) and once["total_duration"] >= 0
    parts = lines(url, "/api/chat", {"messages": HI})
    assert "".join(part["message"]["content"] for part in parts) == text
    assert "".join(part["message"].get("thinking", "") for part in parts) == (thinking or "")
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["eval_count"] == once["eval_count"]
    for reported in (once, parts[-1]):  # clients divide counts by them
        assert reported["prompt_eval_duration"] > 0 and reported["eval_duration"] > 0
        assert reported["total_duration"] >= reported["prompt_eval_duration"] + reported["eval_duration"] - 2


def test_the_answer_s_time_is_told_without_a_stream(scripted: ScriptedEngine, url: str) -> None:
    scripted.script, scripted.pause = "a" * 60, 0.02  # twenty steps
    try:
        reported = whole(url, "/api/chat", {"messages": HI})
        # The first ones may be read together: half are enough to tell it from an answer without a time.
        assert 10e9 * scripted.pause < reported["eval_duration"] <= reported["total_duration"]
    finally:
        scripted.pause = 0.0005


def test_calls_are_whole_and_come_back(scripted: ScriptedEngine, url: str) -> None:
    scripted.script = f"Let me see. {CALL}\n{CALL}"
    body: dict[str, Any] = {"messages": HI, "tools": [TOOL]}
    once = whole(url, "/api/chat", body)
    parts = lines(url, "/api/chat", body)
    streamed = [call for part in parts for call in part["message"].get("tool_calls", [])]
    for calls in (once["message"]["tool_calls"], streamed):
        assert [call["function"] for call in calls] == [
            {"index": i, "name": "get_weather", "arguments": {"city": "Paris é"}} for i in range(2)
        ]
    # As Ollama's client sends them back: with or without ids.
    history = [*HI, once["message"], {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    history.append({"role": "tool", "tool_call_id": once["message"]["tool_calls"][1]["id"], "content": "rain"})
    scripted.script = "ok"
    assert whole(url, "/api/chat", {"messages": history, "tools": [TOOL]})["message"]["content"] == "ok"
    first, second = (call["id"] for call in once["message"]["tool_calls"])
    assert (
        f"sunny by get_weather for {first}" in scripted.prompt
        and f"rain by get_weather for {second}" in scripted.prompt
    )
    for call in once["message"]["tool_calls"]:
        del call["id"]
    history[-1] = {"role": "Tool", "content": "rain"}
    whole(url, "/api/chat", {"messages": history, "tools": [TOOL]})
    assert (
        "sunny by get_weather for call00000" in scripted.prompt and "rain by get_weather for call00" in scripted.prompt
    )


def test_results_belong_to_the_calls_that_have_none(scripted: ScriptedEngine, url: str) -> None:
    def call(name: str, id: str | None = None) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {}}} | ({"id": id} if id else {})

    def result(text: str, **named: str) -> dict[str, str]:
        return {"role": "tool", "content": text, **named}

    scripted.script = "ok"
    calls = [call("get", "one"), call("set"), call("get"), call("get", "four"), call("put", "five")]
    results = [result("A", tool_call_id="one"), result("B", tool_name="get"), result("C", tool_call_id="five")]
    results += [result("D", tool_name="none"), result("E", name="get")]
    whole(url, "/api/chat", {"messages": [*HI, {"role": "assistant", "tool_calls": calls}, *results]})
    said = re.findall(r"(\w) by (\w+) for (\w+)", scripted.prompt)
    wanted = [("A", "get", "one"), ("B", "get", "call00002"), ("C", "put", "five"), ("D", "set", "call00001")]
    assert said == [*wanted, ("E", "get", "four")]
    more = {"messages": [*HI, {"role": "assistant", "tool_calls": calls}, *results, result("F")]}
    assert "messages.7" in refused(url, "/api/chat", more)


@pytest.mark.timing
def test_results_of_many_calls_are_found_in_linear_time() -> None:
    def seconds(count: int) -> float:
        calls = [{"function": {"name": f"f{i % 3}"}} for i in range(count)]
        results = [{"role": "tool", "tool_name": "f1" if i % 2 else "none"} for i in range(count)]
        messages = [{"role": "assistant", "tool_calls": calls}, *results]
        body = OllamaChatRequest.model_validate({"model": "m", "messages": messages})
        assert len(body.chat().messages) == count + 1
        return least_seconds(body.chat)

    few, many = seconds(1_000), seconds(8_000)
    assert many < 25 * few, f"{few} s, then {many} s of eight times as many"


def test_options_become_sampling_parameters(scripted: ScriptedEngine, url: str) -> None:
    scripted.script = "abc"
    options = {"seed": 3, "temperature": 0, "top_k": 5, "repeat_penalty": 1.1, "num_predict": 2, "stop": ["x"]}
    response = httpx.post(
        f"{url}/api/chat",
        json={
            "model": "m", "stream": False, "messages": HI, "keep_alive": "5m", "options": options | {"num_ctx": 4096},
        },
    )  # fmt: skip
    assert response.json()["done_reason"] == "length" and response.json()["eval_count"] == 2
    params = scripted.requests[-1].params
    assert (params.sampling_seed, params.temperature, params.top_k, params.stop) == (3, 0, 5, ("x",))
    assert params.repetition_penalty == 1.1
    assert set(response.headers["draftwing-ignored"].split(", ")) == {"options.num_ctx", "keep_alive"}
    for most in (0, -1, -2):
        whole(url, "/api/chat", {"messages": HI, "options": {"num_predict": most, "seed": -1}})
        assert scripted.requests[-1].params.max_new_tokens is None
        assert scripted.requests[-1].params.sampling_seed != -1, "it asks for any seed"


def large(name: str) -> dict[str, Any]:
    """A tool with the largest grammar that one may have, nearly."""
    grammar = {"syntax": "lark", "definition": 'start: "x"\n' + " " * 390_000}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"num_predict": 10**6}}, "options.num_predict"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"format": {"type": "nonsense"}}, "format"), ({"format": "xml"}, "format"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages.0.images"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [large("a"), large("b")]}, "tools"), ({"think": "never"}, "think"),
        ({"top_logprobs": 3}, "top_logprobs"), ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(url: str, body: dict[str, Any], param: str) -> None:
    assert param in refused(url, "/api/chat", {"messages": HI} | body)


def test_formats_are_grammars(scripted: ScriptedEngine, url: str) -> None:
    scripted.script = '{"a": 1}'
    form: Any
    for form, kind in (("json", "json_object"), ({"type": "object"}, "json_schema"), ("", None)):
        whole(url, "/api/chat", {"messages": HI, "format": form, "think": False})
        grammar = scripted.requests[-1].params.grammar
        assert (grammar and grammar.kind) == kind


def test_a_prompt_is_put_into_the_template_unless_it_is_raw(scripted: ScriptedEngine, url: str) -> None:
    scripted.script = "hello"
    once = whole(url, "/api/generate", {"prompt": "hi", "system": "be brief"})
    assert once["response"] == "hello" and "be brief" in scripted.prompt and "<user>hi" in scripted.prompt
    parts = lines(url, "/api/generate", {"prompt": "hi", "raw": True})
    assert "".join(part["response"] for part in parts) == "hello" and "<user>" not in scripted.prompt
    assert parts[-1]["done_reason"] == "stop"
    scripted.script = "<think>a</think>b"  # a raw prompt's answer is text as it is
    assert whole(url, "/api/generate", {"prompt": "hi", "raw": True})["response"] == scripted.script
    assert "context" in refused(url, "/api/generate", {"prompt": "hi", "context": [1]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "named", "refused_field"),
    [
        ({}, None, None),
        ({"think": True}, "think", None),
        ({"think": "low", "keep_alive": 5}, "keep_alive, think", None),
        ({"system": "be brief"}, None, "system"),
        ({"template": "{{ .Prompt }}"}, None, "template"),
    ],
)
def test_what_only_a_template_knows_is_refused_or_named_beside_raw(
    scripted: ScriptedEngine, url: str, more: dict[str, Any], named: str | None, refused_field: str | None
) -> None:
    scripted.script = "hello"
    for stream in (False, True):
        body = {"prompt": "hi", "raw": True, "stream": stream} | more
        if refused_field is not None:
            assert refused(url, "/api/generate", body).startswith(refused_field)
            continue
        response = httpx.post(f"{url}/api/generate", json={"model": "m"} | body)
        assert response.status_code == 200 and scripted.prompt == "hi"
        assert response.headers.get("draftwing-ignored") == named


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, None),
        ({"verbose": True}, "verbose"),
        ({"verbose": True, "options": {"num_ctx": 5}}, "options, verbose"),
    ],
)
def test_hints_to_show_are_named(url: str, more: dict[str, Any], named: str | None) -> None:
    response = httpx.post(f"{url}/api/show", json={"model": "m"} | more)
    assert response.status_code == 200 and response.json()["capabilities"]
    assert response.headers.get("draftwing-ignored") == named


def test_errors_of_a_format_name_it(url: str) -> None:
    reported = refused(url, "/api/chat", {"messages": HI, "format": {"type": "object", "not": {}}})
    assert "format" in reported and "format.schema" not in reported


def test_models_are_loaded_and_freed_without_a_prompt(url: str) -> None:
    loaded = httpx.post(f"{url}/api/generate", json={"model": "m", "keep_alive": "5m"})
    assert loaded.headers["draftwing-ignored"] == "keep_alive"
    for path in ("/api/chat", "/api/generate"):
        for body in ({}, {"keep_alive": "soon"}, {"keep_alive": False}):
            assert whole(url, path, body)["done_reason"] == "load"
        for kept in (0, 0.0, "0s", "0h0m"):  # the second is how Ollama's own client writes 0
            empty = {"messages": []} if "chat" in path else {}
            assert whole(url, path, {**empty, "keep_alive": kept})["done_reason"] == "unload"


def test_logprobs(scripted: ScriptedEngine, url: str) -> None:
    scripted.script = "abc"
    once = whole(url, "/api/chat", {"messages": HI, "logprobs": True, "top_logprobs": 1})
    parts = lines(url, "/api/chat", {"messages": HI, "logprobs": True})
    streamed = [entry["token"] for part in parts for entry in part.get("logprobs", [])]
    assert [entry["token"] for entry in once["logprobs"]] == streamed and streamed[:3] == ["a", "b", "c"]


def test_what_clients_ask_before_they_chat(scripted: ScriptedEngine, url: str) -> None:
    assert tuple(map(int, httpx.get(f"{url}/api/version").json()["version"].split("."))) >= (0, 6, 4)
    for path in ("tags", "ps"):
        (card,) = httpx.get(f"{url}/api/{path}").json()["models"]
        assert card["name"] == scripted.info.model_name and len(card["digest"]) == 64
    shown = httpx.post(f"{url}/api/show", json={"model": "m"}).json()
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == scripted.info.context_length
    assert shown["capabilities"] == ["completion", "tools", "thinking"]


def test_curl_sends_json_as_a_form_and_pages_may_not(url: str) -> None:
    body, form = (
        b'{"model": "m", "prompt": "hi", "stream": false}',
        {"content-type": "application/x-www-form-urlencoded"},
    )
    assert httpx.post(f"{url}/api/generate", content=body, headers=form).status_code == 200
    for page in ({"origin": "http://127.0.0.1"}, {"sec-fetch-site": "same-site"}):
        assert httpx.post(f"{url}/api/generate", content=body, headers=form | page).status_code == 400
    chat = b'{"model": "m", "messages": []}'
    assert httpx.post(f"{url}/v1/chat/completions", content=chat, headers=form).status_code == 400


def test_an_unknown_path_and_a_broken_body(url: str) -> None:
    assert isinstance(httpx.post(f"{url}/api/pull", json={"model": "m"}).json()["error"], str)
    assert isinstance(httpx.post(f"{url}/api/chat", content=b"{", headers={}).json()["error"], str)


@pytest.mark.parametrize(
    "options",
    [
        {"num_gqa": 8}, {"rope_frequency_base": 1e6}, {"foo": [1, {"a": None}]}, {"temprature": 1, "é": 2},
        {"rope_frequency_scale": 0.5, "embedding_only": False},
    ],
)  # fmt: skip
def test_options_that_are_not_known_are_named_and_have_no_effect(
    scripted: ScriptedEngine, url: str, options: dict[str, Any]
) -> None:
    scripted.script = "abc"
    for path, prompt in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi"})):
        body = {"model": "m", "stream": False, "options": options | {"seed": 3}} | prompt
        response = httpx.post(f"{url}{path}", json=body)
        named = {name.removeprefix("options.") for name in response.headers["draftwing-ignored"].split(", ")}
        assert response.status_code == 200 and named == {name.replace("é", "") for name in options}
        assert scripted.requests[-1].params.sampling_seed == 3


@pytest.mark.parametrize(("given", "taken"), [(2.0, 2), (5, 5), (2.9, 2), (1e1, 10)])
def test_floats_are_cut_where_integers_are_wanted(scripted: ScriptedEngine, url: str, given: float, taken: int) -> None:
    scripted.script = "abcdefghijklmnop"
    options = {"num_predict": given, "seed": given, "top_k": given}
    once = whole(url, "/api/chat", {"messages": HI, "options": options})
    params = scripted.requests[-1].params
    assert (params.max_new_tokens, params.sampling_seed, params.top_k) == (taken, taken, taken)
    assert once["eval_count"] == taken
    assert "options.seed" in refused(url, "/api/chat", {"messages": HI, "options": {"seed": "3"}})
    assert "options.top_k" in refused(url, "/api/chat", {"messages": HI, "options": {"top_k": 1e300}})


def test_the_most_thinking_is_that_of_max(scripted: ScriptedEngine, url: str) -> None:
    scripted.script = "<think>a</think>b"
    for effort in ("low", "high", "max"):
        for path, prompt in (("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi"})):
            assert whole(url, path, prompt | {"think": effort})["done"]


STORED = [
    ({"format": "gguf", "values": 134_515_008, "type": "Q4_1", "bytes": 98_765}, "134.52M", "Q4_1", 98_765),
    ({"format": "gguf", "values": 7_615_616_512, "type": "Q4_K", "bytes": 5}, "7.6B", "Q4_K", 5),
    ({"format": "safetensors", "values": 494_032_768, "type": ""}, "494.03M", "Q8_0", 34),
    ({}, "", "Q8_0", 34),
]


@pytest.mark.parametrize(("stored", "parameters", "level", "size"), STORED)
def test_a_model_is_described_as_it_is_stored(stored: dict[str, Any], parameters: str, level: str, size: int) -> None:
    engine = ScriptedEngine()
    for on_device in (False, True)[level == "Q8_0" :]:
        engine.info = dataclasses.replace(engine.info, stored=stored | {"on_device": on_device})
        with client_of(engine) as client:
            (card,), (running,) = (client.get(f"/api/{path}").json()["models"] for path in ("tags", "ps"))
            shown = client.post("/api/show", json={"model": "m"}).json()
        assert card["details"] == running["details"] == shown["details"]
        details = card["details"]
        assert (details["parameter_size"], details["quantization_level"]) == (parameters, level)
        assert details["format"] == stored.get("format", "safetensors") and details["families"] == [details["family"]]
        assert running["size"] == card["size"] == size and running["size_vram"] == (size if on_device else 0)
