"""Requests as clients of SGLang, vLLM and llama.cpp send them."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from fake_engine import CONTEXT, EOS, FakeEngine
from scripted import ok, streamed
from starlette.testclient import TestClient

from draftwing.requests.grammar_field import Grammar
from draftwing.server.parsers.tools import TOOL_STYLES, style_of

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def body_of(path: str) -> dict[str, Any]:
    return ({"messages": HI} if path == CHAT else {"prompt": "hi"}) | {"max_tokens": 8}


TAG = {"type": "structural_tag", "structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]}


GRAMMARS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"json_schema": '{"type": "object"}'}, Grammar("json_schema", '{"type": "object"}')),
    ({"regex": "[ab]+"}, Grammar("regex", "[ab]+")),
    ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"structural_tag": TAG}, Grammar("structural_tag", json.dumps(TAG))),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, Grammar("json_schema", "true")),
    ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG))),
    ({"guided_json": {"type": "object"}}, Grammar("json_schema", '{"type": "object"}')),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a.b", "c"]}, Grammar("regex", r"a\.b|c")),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"choice": ["(x)"]}}, Grammar("regex", r"\(x\)")),
    ({"structured_outputs": {"json": {"type": "object"}}}, Grammar("json_schema", '{"type": "object"}')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
    ({"response_format": {"type": "json_object", "schema": True}}, Grammar("json_schema", "true")),
    ({"guided_json": {}, "guided_whitespace_pattern": "[ ]?"}, Grammar("json_schema", "{}", "[ ]?")),
    (
        {"structured_outputs": {"json_object": True, "whitespace_pattern": r"\s*"}},
        Grammar("json_object", "", r"\s*"),
    ),
    (
        {"structured_outputs": {"disable_any_whitespace": True}, "response_format": {"type": "json_object"}},
        Grammar("json_object", "", ""),
    ),
    (
        {"structured_outputs": {"json": True, "disable_any_whitespace": False, "whitespace_pattern": None}},
        Grammar("json_schema", "true"),
    ),
]


def test_grammars_by_their_names(client: TestClient, engine: FakeEngine) -> None:
    for i, (fields, grammar) in enumerate(GRAMMARS):
        path = (CHAT, COMPLETION)[i % 2]
        ok(client, path, **body_of(path), **fields)
        assert engine.requests[-1].params.grammar == grammar, fields


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 5]}, "guided_choice.1"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"structured_outputs": {"json": {"type": "no"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"nonsense": 1}}, "structured_outputs.nonsense"),
    ({"guided_regex": "a", "regex": "b"}, "guided_regex"),
    ({"guided_json": {}, "guided_whitespace_pattern": "x*"}, "guided_whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "["}}, "structured_outputs.whitespace_pattern"),
    ({"guided_json": {}, "guided_whitespace_pattern": "(" * 4000 + ")" * 4000}, "guided_whitespace_pattern"),
    ({"guided_json": {}, "guided_whitespace_pattern": " {99999999999}"}, "guided_whitespace_pattern"),
    ({"guided_json": {}, "guided_whitespace_pattern": " " * 10_001}, "guided_whitespace_pattern"),
    ({"guided_choice": ["a" * 6000, "b" * 6000]}, "guided_choice"),
]


def test_wrong_grammars_are_refused_by_the_names_that_were_sent(client: TestClient) -> None:
    for i, (fields, param) in enumerate(WRONG):
        path = (CHAT, COMPLETION)[i % 2]
        response = client.post(path, json=body_of(path) | fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
        assert param in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses", "/messages"])
def test_paths_without_v1(client: TestClient, path: str) -> None:
    fields: dict[str, dict[str, Any]] = {
        "/chat/completions": {"messages": HI},
        "/completions": {"prompt": "hi"},
        "/responses": {"input": "hi"},
        "/messages": {"messages": HI, "model": "m", "max_tokens": 5},
    }
    short, whole = (client.post(p, json=fields[path] | {"temperature": 0}) for p in (path, f"/v1{path}"))
    assert short.status_code == whole.status_code == 200 and short.json().keys() == whole.json().keys()
    short, whole = (client.post(p, json=fields[path] | {"temperature": -1}) for p in (path, f"/v1{path}"))
    assert short.status_code == 400 and short.json() == whole.json()


def test_ids_begin_as_openais_do(client: TestClient) -> None:
    assert ok(client, CHAT, **body_of(CHAT))["id"].startswith("chatcmpl-")
    assert ok(client, COMPLETION, **body_of(COMPLETION))["id"].startswith("cmpl-")
    assert ok(client, CHAT, **body_of(CHAT), request_id="mine")["id"] == "mine"
    assert ok(client, CHAT, **body_of(CHAT), rid="mine", request_id="other")["id"] == "mine"


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("name", ["timings_per_token", "return_progress", "verbose"])
def test_what_llama_cpp_tells_of_each_step_is_not_told(client: TestClient, path: str, name: str) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    prompt = {COMPLETION: "prompt", "/v1/responses": "input"}.get(path, "messages")
    body = {"model": "m", prompt: HI if prompt == "messages" else "hi", limit: 8}
    for value, ignored in ((False, None), (True, name)):
        response = client.post(path, json=body | {name: value})
        assert response.status_code == 200, response.text
        assert response.headers.get("draftwing-ignored") == ignored


def test_what_an_answer_held_beside_text_is_refused(client: TestClient) -> None:
    for name, value in (("images", [{"image_url": {"url": "x"}}]), ("audio", {"id": "a"}), ("function_call", {})):
        messages = [*HI, {"role": "assistant", "content": "hm", name: value}, *HI]
        response = client.post(CHAT, json={"messages": messages})
        assert response.status_code == 400 and response.json()["param"] == f"messages.1.{name}", response.text


def test_tokenizer_info_as_remote_tokenizers_read_it(client: TestClient) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>" and info["tokenizer_class"] and "bos_token" not in info
    (eos,) = ok(client, "/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"]
    assert eos == EOS and info["model_max_length"] == CONTEXT
    template = jinja2.Template(info["chat_template"])
    shown = template.render(messages=HI, add_generation_prompt=True)
    ids = ok(client, "/tokenize", messages=HI)["tokens"]
    assert ids == ok(client, "/tokenize", prompt=shown, add_special_tokens=False)["tokens"]


def test_continuing_as_vllm_asks_for_it(client: TestClient, engine: FakeEngine) -> None:
    messages = [*HI, {"role": "assistant", "content": "so"}]
    for more in ({}, {"add_generation_prompt": False}):
        ok(client, CHAT, messages=messages, continue_final_message=True, max_tokens=5, **more)
    first, second = engine.requests[-2:]
    assert first.prompt_ids == second.prompt_ids
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert client.post(CHAT, json=both).json()["param"] == "add_generation_prompt"
    ok(client, CHAT, messages=HI, add_generation_prompt=False, max_tokens=5)
    ok(client, CHAT, messages=HI, max_tokens=5)
    short, whole = (request.prompt_ids for request in engine.requests[-2:])
    assert whole[: len(short)] == short


def test_log_probabilities_of_a_prompt_alone(client: TestClient) -> None:
    ids = client.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
    said = ok(
        client, "/generate", input_ids=ids, sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True, logprob_start_len=0,
    )  # fmt: skip
    info = said["meta_info"]
    assert (said["text"], said["output_ids"], info["completion_tokens"]) == ("", [], 0)
    assert [entry[1] for entry in info["input_token_logprobs"]] == ids and info["output_token_logprobs"] == []
    assert info["finish_reason"] == {"type": "length", "length": 0}
    for stream in (False, True):
        body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
        response = client.post(COMPLETION, json=body)
        assert response.status_code == 200
        if not stream:
            (choice,) = response.json()["choices"]
            assert choice["text"] == "abc" and len(choice["logprobs"]["tokens"]) == len(ids)
            assert choice["finish_reason"] == "length" and response.json()["usage"]["completion_tokens"] == 0
    refused = client.post(COMPLETION, json={"prompt": "abc", "max_tokens": 0})
    assert refused.status_code == 400 and refused.json()["param"] == "max_tokens"


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_token_ids_in_responses(client: TestClient, engine: FakeEngine, path: str) -> None:
    body = body_of(path) | {"return_token_ids": True, "temperature": 0}
    choice = ok(client, path, **body)["choices"][0]
    assert choice["prompt_token_ids"] == engine.requests[-1].prompt_ids and choice["token_ids"]
    found = [event["choices"][0] for event in streamed(client, path, **body)]
    assert found[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [token for event in found for token in event["token_ids"]] == choice["token_ids"]
    assert "token_ids" not in ok(client, path, **body_of(path))["choices"][0]
    whole = ok(client, path, **body)
    assert whole.get("prompt_token_ids") == (choice["prompt_token_ids"] if path == CHAT else None)


def test_generate_as_sglangs_clients_serialise_it(client: TestClient) -> None:
    neutral = {
        "modalities": None, "background": False, "return_bytes": False, "no_logs": False, "custom_labels": None,
        "require_reasoning": False, "routing_key": "r", "conversation_id": "c", "log_metrics": True,
        "logprob_start_len": 5, "return_logprob": False, "use_audio_in_video": False, "mm_processor_kwargs": None,
    }  # fmt: skip
    ok(client, "/generate", text="a", sampling_params={"max_new_tokens": 2}, **neutral)


def test_tokens_by_the_peers_names(client: TestClient) -> None:
    said = ok(client, "/tokenize", content="abc", return_token_strs=True)
    assert said["tokens"] == ok(client, "/tokenize", prompt="abc")["tokens"]
    assert len(said["token_strs"]) == len(said["tokens"])
    back = ok(client, "/detokenize", tokens=said["tokens"])
    assert back["text"] == back["prompt"] == back["content"] == "abc"
    plain, special = (ok(client, "/tokenize", prompt="abc", add_special_tokens=on)["tokens"] for on in (False, True))
    for value, expected in ((None, plain), (False, plain), (True, special)):
        assert ok(client, "/tokenize", content="abc", add_special=value)["tokens"] == expected
    assert ok(client, "/tokenize", prompt="abc", add_special=None)["tokens"] == special
    ok(client, "/tokenize", messages=HI, add_generation_prompt=False)
    ok(client, "/tokenize", messages=[*HI, {"role": "assistant", "content": "a"}], continue_final_message=True)
    assert client.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{"name": <f>, "arguments": {}} <tool_call>', "hermes"),
        ("{{ tool_calls }} <|python_tag|>", "llama3"),
        ("{{ message.tool_calls }} [TOOL_CALLS]", "mistral"),
        ("{{ message.tool_calls }} <tool_call><function=f>", None),
        ("<tool_call>f\n<arg_key>{{ tool_calls }}", None),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_parser_is_found_by_the_chat_template(template: str | None, name: str | None) -> None:
    assert style_of(template) == (None if name is None else TOOL_STYLES[name])
