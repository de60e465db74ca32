"""Everything that is refused: the status, the shape of the body, and the name of the field."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import httpx
import pytest
from fake_engine import CONTEXT, FakeEngine
from pydantic import BaseModel
from starlette.testclient import TestClient

from draftwing.server import schema, service
from draftwing.server.anthropic_bodies import MessagesRequest
from draftwing.server.generate import GenerateRequest
from draftwing.server.openai.responses.schema import ResponsesRequest
from draftwing.server.openai.schema import ChatRequest, CompletionRequest
from draftwing.server.schema import HINT, NEUTRAL, NotBuilt
from draftwing.text import chat_template

COMPLETION, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]

NEUTRAL_OPENAI = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {},
    "response_format": {"type": "text"}, "stop_regex": [], "return_hidden_states": False, "custom_params": {},
    "bad_words": [], "speculative": "off",
    "user": "u", "metadata": {"a": [1]}, "store": True, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "stop": None, "seed": None, "n": None, "stream": False,
    "temperature": None, "max_tokens": None, "rid": None,
    "include_stop_str_in_output": False, "return_token_ids": False, "prompt_logprobs": None, "use_beam_search": False,
    "kv_transfer_params": None, "request_id": "r", "length_penalty": 1.0, "mm_processor_kwargs": {},
    "guided_json": None, "guided_choice": None, "structured_outputs": None, "truncate_prompt_tokens": None,
    "add_special_tokens": None, "custom_labels": None, "stream_interval": 1, "return_sampling_mask": False,
}  # fmt: skip
NEUTRAL_CHAT = NEUTRAL_OPENAI | {
    "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none", "parallel_tool_calls": True,
    "modalities": ["text"], "separate_reasoning": True, "stream_reasoning": True, "reasoning_effort": None,
    "functions": [], "function_call": "none", "add_generation_prompt": True, "include_reasoning": True, "echo": False,
    "add_special_tokens": False, "documents": None, "chat_template": None,
}  # fmt: skip
NEUTRAL_COMPLETION = NEUTRAL_OPENAI | {"logprobs": None, "best_of": 1, "echo": False, "suffix": ""}


def base(path: str) -> dict[str, Any]:
    bodies: dict[str, dict[str, Any]] = {
        CHAT_PATH: {"messages": MESSAGES},
        COMPLETION: {"prompt": "a"},
        "/generate": {"text": "a"},
        "/v1/messages": {"model": "m", "max_tokens": 5, "messages": MESSAGES},
        "/v1/responses": {"input": "a"},
    }
    return bodies[path]


def refused(client: TestClient, path: str, body: Any, param: str) -> str:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    data = response.json()
    if path.startswith("/v1"):
        assert set(data) == {"error", "object", "message", "type", "param", "code"}
        assert data["error"] == {name: data[name] for name in ("message", "type", "param", "code")}  # OpenAI's shape
        assert (data["object"], data["type"]) == ("error", "BadRequestError")
        assert data["code"] == ("context_length_exceeded" if "maximum context length is" in data["message"] else 400)
        assert data["param"] == param or data["param"].startswith(param + ".")
        return data["message"]
    assert set(data) == {"error"} and set(data["error"]) == {"message"}
    assert param in data["error"]["message"]
    return data["error"]["message"]


@pytest.mark.parametrize(
    ("path", "model"), [(CHAT_PATH, ChatRequest), (COMPLETION, CompletionRequest), ("/generate", GenerateRequest)]
)
def test_what_is_not_built_is_refused_by_name(
    client: TestClient, engine: FakeEngine, path: str, model: type[BaseModel]
) -> None:
    """docs/fields.md lists the names, and is compared with the models."""
    names = [name for name, field in model.model_fields.items() if field.metadata == list(NotBuilt.__metadata__)]
    assert len(names) > 20
    assert not any(schema.asks_for_nothing(name, {"asks": "for something"}) for name in names)
    for name in names[::4]:
        assert name in refused(client, path, base(path) | {name: {"asks": "for something"}}, name)
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "model"),
    [
        (CHAT_PATH, ChatRequest), (COMPLETION, CompletionRequest), ("/generate", GenerateRequest),
        ("/v1/messages", MessagesRequest), ("/v1/responses", ResponsesRequest),
    ],
)  # fmt: skip
def test_hints_are_accepted_and_named(client: TestClient, path: str, model: type[BaseModel]) -> None:
    """docs/fields.md lists the names, and is compared with the models."""
    names = {name for name, field in model.model_fields.items() if HINT in field.metadata} - {"mcp_servers"}
    response = client.post(path, json=base(path) | {name: {"asks": "for something"} for name in names})
    assert response.status_code == 200, response.text
    assert set(response.headers["draftwing-ignored"].split(", ")) == names
    for i in range(-1, max(len(NEUTRAL.get(name, ())) for name in names)):
        neutral = {name: None if i < 0 else NEUTRAL[name][i] for name in names if len(NEUTRAL.get(name, ())) > i}
        response = client.post(path, json=base(path) | neutral)
        assert response.status_code == 200 and "draftwing-ignored" not in response.headers, neutral


@pytest.mark.parametrize(
    ("name", "neutral", "value"),
    [("store", False, 0), ("mirostat", 0, False), ("cache_prompt", True, 1), ("speed", "standard", 0)],
)
def test_a_number_is_no_switch_and_a_switch_no_number(name: str, neutral: Any, value: Any) -> None:
    assert schema.asks_for_nothing(name, neutral) and not schema.asks_for_nothing(name, value)


def test_hints_inside_of_objects_are_named(client: TestClient) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    for path in (CHAT_PATH, "/v1/messages"):
        response = client.post(path, json=base(path) | {"messages": [{"role": "user", "content": parts}]})
        assert response.headers["draftwing-ignored"] == "messages.content.cache_control", response.text
    hidden = {"stream": True, "stream_options": {"include_obfuscation": True}, "store": True}
    response = client.post(CHAT_PATH, json=base(CHAT_PATH) | hidden)
    assert response.headers["draftwing-ignored"] == "store, stream_options.include_obfuscation"
    for params in ({"stream_interval": 8}, [{"stream_interval": 1}, {"stream_interval": 2}]):
        texts = ["a"] * len(params) if isinstance(params, list) else "a"
        response = client.post("/generate", json={"text": texts, "sampling_params": params})
        assert response.headers["draftwing-ignored"] == "sampling_params.stream_interval", response.text


def test_the_header_holds_what_a_header_can(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tools.a\r\nset-cookie: b", "tools.wéb 😀", "tools." + "x" * 10_000)
    monkeypatch.setattr(schema, "ignored_fields", lambda body: names)
    response = client.post(COMPLETION, json={"prompt": "a"})
    assert response.status_code == 200 and "set-cookie" not in response.headers
    found = response.headers["draftwing-ignored"]
    assert found.startswith("tools.aset-cookie: b, tools.wb , tools.x") and len(found) <= 4096


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETION, {"prompt": "a", "max_token": 5}, "max_token is not a known field; did you mean max_tokens?"),
        (COMPLETION, {"prompt": "a", "repetition_penality": 1}, "did you mean repetition_penalty?"),
        (COMPLETION, {"prompt": "a", "max_new_tokens": 1}, "did you mean max_tokens?"),
        (CHAT_PATH, {"messages": MESSAGES, "stream_option": {}}, "did you mean stream_options?"),
        (CHAT_PATH, {"messages": MESSAGES, "function": []}, "function is not a known field"),  # that one is refused
        (CHAT_PATH, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usag": True}},
         "stream_options.include_usag is not a known field; did you mean include_usage?"),
        (CHAT_PATH, {"messages": [{"role": "user", "contents": "a"}]},
         "messages.0.contents is not a known field; did you mean content?"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": "text", "txet": "a"}]}]},
         "messages.0.content.0.txet is not a known field; did you mean text?"),
        (CHAT_PATH, {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
         "tools.0.function.paramters is not a known field; did you mean parameters?"),
        (CHAT_PATH, {"messages": MESSAGES, "structured_outputs": {"jsno": {}}}, "did you mean json?"),
        (CHAT_PATH, {"messages": MESSAGES, "response_format": {"type": "json_object", "schma": {}}},
         "did you mean schema?"),
        (CHAT_PATH, {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {
            "schema": {}, "strickt": True}}}, "did you mean strict?"),
        (CHAT_PATH, {"messages": MESSAGES, "speculative": {"num_step": 1}}, "did you mean num_steps?"),
        ("/generate", {"text": "a", "sampling_param": {}}, "did you mean sampling_params?"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_token": 5}},
         "sampling_params.max_new_token is not a sampling parameter; did you mean max_new_tokens?"),
        ("/generate", {"text": ["a"], "sampling_params": [{"temprature": 5}]}, "did you mean temperature?"),
        ("/tokenize", {"promt": "a"}, "did you mean prompt?"),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": MESSAGES, "stop_sequence": ["a"]},
         "did you mean stop_sequences?"),
    ],
)  # fmt: skip
def test_the_nearest_field_is_named(client: TestClient, path: str, body: Any, message: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"], response.text


def test_of_many_wrong_fields_none_is_looked_at(client: TestClient) -> None:
    """Each takes time, in which nobody else is answered."""
    for count, param in ((900, "x0"), (1100, "body")):
        refused(client, COMPLETION, {"prompt": "a", **{f"x{i}": 1 for i in range(count)}}, param)


def test_what_resembles_nothing_gets_no_guess(client: TestClient) -> None:
    for name in ("bogus", "x" * 5000, "", "max_tokens" * 7, "\x00"):
        response = client.post(COMPLETION, json={"prompt": "a", name: 1})
        assert response.status_code == 400 and "did you mean" not in response.text


@pytest.mark.parametrize(("path", "fields"), [(CHAT_PATH, NEUTRAL_CHAT), (COMPLETION, NEUTRAL_COMPLETION)])
def test_neutral_values_and_bookkeeping_are_accepted(client: TestClient, path: str, fields: dict) -> None:
    response = client.post(path, json=base(path) | fields)
    assert response.status_code == 200, response.text


WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1), ("temperature", "0.5"), ("temperature", True), ("top_k", 1.5), ("top_k", 10**400),
    ("seed", 2**63), ("n", 0), ("n", 129), ("max_tokens", 0), ("max_tokens", CONTEXT), ("max_tokens", 10**30),
    ("stop", [""]), ("stop", ["a"] * 65), ("stop", 5), ("stop", [1]), ("stop_token_ids", [-1]), ("ignore_eos", 1),
    ("stream", "yes"), ("priority", 2**31), ("priority", 0.5), ("cache_salt", 5), ("model", 5), ("bogus", 1),
    ("stream_options", {"include_usage": True}), ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}),
    ("logit_bias", [1]), ("logit_bias", {"257": 1}), ("allowed_token_ids", [257]), ("bad_words", [""]),
    ("bad_words", "a" * 17), ("bad_words", ["a" * 513]), ("bad_words", [f"{i:02}" for i in range(65)]),
    ("bad_words", [5]), ("stop_regex", "a*"), ("stop_regex", "(" * 900), ("json_schema", "{"), ("regex", "("),
    ("ebnf", "root"), ("structural_tag", "{}"), ("response_format", {}), ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema"}), ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "text", "bogus": 1}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {}, "bogus": 1}}),
    ("response_format", {"type": "structural_tag"}), ("custom_logit_processor", "unknown"),
    ("custom_logit_processor", ""), ("custom_params", {"a": 1}), ("speculative", "on"), ("speculative", 5),
    ("speculative", True), ("speculative", {"bogus": 1}), ("prediction", {"type": "tokens"}),
    ("prediction", {"type": "content"}),
    ("prediction", {"type": "content", "content": [{"type": "image"}]}), ("prediction", {}), ("prediction", "ab"),
    ("prediction", {"type": "content", "content": ["a"]}),
    ("prediction", {"type": "content", "content": "a", "more": 1}),
]  # fmt: skip


def test_mistyped_and_out_of_range(client: TestClient) -> None:
    """In the other API every third, for the fields are the same ones."""
    for path, cases in ((CHAT_PATH, WRONG), (COMPLETION, WRONG[::3])):
        for name, value in cases:
            refused(client, path, base(path) | {name: value}, name)


def test_combinations(client: TestClient) -> None:
    assert "max_tokens" in refused(client, COMPLETION, {"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens")
    body = {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": []}}
    field = "response_format.json_schema"
    assert refused(client, CHAT_PATH, body, field) == f"{field} must be an object"
    refused(client, COMPLETION, {"prompt": "a", "seed": 1, "sampling_seed": 1}, "seed")
    refused(client, "/generate", {"text": "a", "input_ids": [1]}, "text")
    refused(client, "/generate", {}, "text")
    refused(client, "/generate", {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params")
    refused(client, "/generate", {"text": ["a", "b"], "rid": ["x"]}, "rid")
    refused(client, "/generate", {"text": ["a", "b"], "sampling_params": [{}, {"top_p": 7}]}, "sampling_params.1.top_p")
    refused(client, COMPLETION, {"prompt": ["a"] * 100, "n": 100}, "n")
    for name, value in (("best_of", 2), ("best_of", 10**400), ("logprobs", 21), ("logprobs", -1), ("logprobs", True)):
        refused(client, COMPLETION, {"prompt": "a", name: value}, name)
    for name, value in (("top_logprobs", 21), ("top_logprobs", -1), ("logprobs", 1), ("top_logprobs", 2)):
        refused(client, CHAT_PATH, {"messages": MESSAGES, name: value}, name)
    for last in ({"role": "user", "content": "a"}, {"role": "assistant", "content": "bad"}):
        field = "continue_final_message" if last["role"] == "user" else "messages"
        body = {"messages": [*MESSAGES, last], "continue_final_message": True}
        if field == "messages":  # what the template refuses comes before the last message
            body["messages"] = [{"role": "user", "content": "bad"}, last]
        refused(client, CHAT_PATH, body, field)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION])
def test_conflicts(client: TestClient, path: str) -> None:
    grammars = {"json_schema": "{}", "regex": "a", "ebnf": 'root ::= "a"', "response_format": {"type": "json_object"}}
    names = list(grammars)
    for first, second in itertools.pairwise(names):
        both = {first: grammars[first], second: grammars[second]}
        message = refused(client, path, base(path) | both, second)
        assert first in message
    assert client.post(path, json=base(path) | {"regex": "a", "response_format": {"type": "text"}}).status_code == 400
    refused(client, path, base(path) | {"regex": "a", "ignore_eos": True}, "ignore_eos")
    refused(client, path, base(path) | {"regex": "a", "min_tokens": 1, "max_tokens": 2}, "min_tokens")
    only = {"allowed_token_ids": [256], "min_tokens": 1, "max_tokens": 2}
    refused(client, path, base(path) | only, "allowed_token_ids")


def test_generate_conflicts_and_log_probabilities(client: TestClient) -> None:
    def said(fields: dict[str, Any], param: str) -> None:
        refused(client, "/generate", {"text": "abc"} | fields, param)

    for name, value in (("top_logprobs_num", 2), ("token_ids_logprob", [1])):
        said({name: value}, name)
    for name, value in (
        ("top_logprobs_num", 129), ("top_logprobs_num", -1), ("token_ids_logprob", [257]),
        ("token_ids_logprob", [1] * 129), ("logprob_start_len", 3), ("logprob_start_len", -2),
        ("return_logprob", [True, True]), ("logprob_start_len", [1, 2]), ("token_ids_logprob", [[1], [2]]),
    ):  # fmt: skip
        said({"return_logprob": True, name: value}, name)
    twice = {"custom_logit_processor": "even", "sampling_params": {"custom_logit_processor": "odd"}}
    said(twice, "custom_logit_processor")
    said({"custom_logit_processor": "none"}, "custom_logit_processor")
    said({"sampling_params": {"grammar": ["regex", "a"]}}, "sampling_params.grammar")
    said({"sampling_params": {"logits_processor": ["even", "{}"]}}, "sampling_params.logits_processor")
    said({"sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema")
    said({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf")
    said({"sampling_params": {"stop_regex": "("}}, "sampling_params.stop_regex")


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], [[1], []], [1, "a"], [True], [1.5], [[[1]]], None, 5, {}, [10**30], "a" * CONTEXT],
)
def test_bad_prompts(client: TestClient, prompt: Any) -> None:
    refused(client, COMPLETION, {"prompt": prompt}, "prompt")


def test_errors_of_the_engine_name_the_fields_of_the_api(client: TestClient) -> None:
    def said(path: str, body: dict[str, Any], param: str, *others: str) -> None:
        message = refused(client, path, base(path) | body, param)
        assert all(name in message for name in (param, *others)), message
        foreign = {"input_ids", "max_new_tokens", "min_new_tokens"} - {param} if path.startswith("/v1") else set()
        assert not any(name in message for name in foreign), message

    stops = list(range(20))  # the stand-in bans 16
    said(COMPLETION, {"prompt": [257]}, "prompt")
    said(COMPLETION, {"max_tokens": CONTEXT}, "max_tokens")
    said(COMPLETION, {"min_tokens": 17}, "min_tokens", "max_tokens")  # the default, 16, is less
    said(COMPLETION, {"min_tokens": 2, "stop_token_ids": stops}, "stop_token_ids", "min_tokens")
    said(CHAT_PATH, {"max_tokens": CONTEXT}, "max_tokens")
    said(CHAT_PATH, {"max_completion_tokens": CONTEXT}, "max_completion_tokens")
    said(CHAT_PATH, {"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "max_completion_tokens")
    said("/generate", {"sampling_params": {"max_new_tokens": CONTEXT}}, "max_new_tokens")
    stopped = {"min_new_tokens": 2, "stop_token_ids": stops}
    said("/generate", {"sampling_params": stopped}, "stop_token_ids", "min_new_tokens")


def test_one_refused_prompt_of_a_batch_leaves_none_behind(client: TestClient, engine: FakeEngine) -> None:
    refused(client, COMPLETION, {"prompt": ["abc" * 100, "a" * CONTEXT], "max_tokens": 1500}, "prompt")
    assert client.post(COMPLETION, json={"prompt": "a"}).status_code == 200
    assert len(engine.requests) == 1 and not engine.running


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "a"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"content": "a"}, "messages.0.role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "messages.0.tool_call_id"),
        ({"role": "tool", "content": "a"}, "messages.0.tool_call_id"),
        ({"role": "function", "content": "a"}, "messages.0.role"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.function"),
        ({"role": "user", "content": "a", "bogus": 1}, "messages.0.bogus"),
        ({"role": "user", "content": "bad"}, "messages"),  # the template refuses it
    ],
)
def test_bad_messages(client: TestClient, message: dict[str, Any], param: str) -> None:
    refused(client, CHAT_PATH, {"messages": [message]}, param)


def test_template_variables_cannot_replace_the_messages(client: TestClient) -> None:
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        body = {"messages": MESSAGES, "chat_template_kwargs": {name: 1}}
        refused(client, CHAT_PATH, body, "chat_template_kwargs")
    refused(client, CHAT_PATH, {"messages": []}, "messages")


def test_variables_of_a_template_are_few(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied to another process, all others waiting: more are never copied."""
    copied: list[Any] = []
    dumps = chat_template.pickle.dumps
    monkeypatch.setattr(chat_template.pickle, "dumps", lambda job: copied.append(job) or dumps(job))
    few: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"about": list(range(16_383))}},
        {"chat_template_kwargs": {"about": [{"a": [1]}] * 5_461}},
        {"documents": [{"text": "x" * 20_000}]},
    ]
    many: list[dict[str, Any]] = [
        {"chat_template_kwargs": {"about": list(range(16_384))}},
        {"chat_template_kwargs": {"about": [{"a": [1]}] * 5_462}},
        {"documents": [{"text": [1] * 16_384}]},
    ]
    for body in few:
        assert client.post(CHAT_PATH, json={"messages": MESSAGES, "max_tokens": 1} | body).status_code == 200
    assert len(copied) == 3
    for body in many:
        assert "16384 values" in refused(client, CHAT_PATH, {"messages": MESSAGES} | body, "chat_template_kwargs")
    assert len(copied) == 3


BODIES = [
    b"", b"{", b"[]", b"null", b"5", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
    b'{"text": "\\udc00 a"}', b'{"user": "\\ud800"}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"chat_template_kwargs": {"shout": "\\ud800"}}', b'{"temperature": NaN}', b'{"temperature": 1e999}',
    b'{"seed": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"a\\u0000": 1}', b'{"sampling_params": {"stop": "\\ud800"}}', b'{"sampling_params": {"temperature": NaN}}',
    b'{"text": "a", "sampling_params": {"temperature": NaN, "n": 1e400}}',
]  # fmt: skip


def test_bodies_that_are_not_what_they_should_be(client: TestClient) -> None:
    for raw, path in zip(BODIES, itertools.cycle([CHAT_PATH, COMPLETION, "/generate", "/generate"])):
        response = client.post(path, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400 and "message" in response.json()["error"], (path, raw, response.text)


def test_a_mark_before_the_body_is_passed_over(client: TestClient, engine: FakeEngine) -> None:
    headers = {"content-type": "application/json"}
    for path, body in (
        (CHAT_PATH, {"messages": MESSAGES, "max_tokens": 1}), (COMPLETION, {"prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"input": "a"}), ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": MESSAGES}),
        ("/api/generate", {"model": "m", "prompt": "a", "stream": False}), ("/generate", {"text": "a"}),
        ("/tokenize", {"prompt": "\ufeffa"}), (COMPLETION, {"prompt": "a" * 9, "user": "u" * 70_000}),
    ):  # fmt: skip
        plain = json.dumps(body).encode()
        answers = [client.post(path, content=mark + plain, headers=headers) for mark in (b"", b"\xef\xbb\xbf")]
        assert [one.status_code for one in answers] == [200, 200], path
        tokens = [one.json().get("tokens") for one in answers]
        assert tokens[0] == tokens[1] and len({(*one.prompt_ids,) for one in engine.requests[-2:]}) < 2, path
        for wrong in (b"\xef\xbb\xbf" * 2 + plain, b"\xef\xbb" + plain, plain + b"\xef\xbb\xbf", b"\xef\xbb\xbf{"):
            assert client.post(path, content=wrong, headers=headers).status_code == 400, (path, wrong)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ";"])
def test_other_content_types(client: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = client.post(COMPLETION, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 400 and response.json()["param"] == "content-type"
    good = client.post(
        COMPLETION, content=b'{"prompt": "a"}', headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert good.status_code == 200


def test_abort_request_needs_a_name(client: TestClient) -> None:
    assert client.post("/abort_request", json={}).status_code == 400
    assert client.post("/abort_request", json={"rid": "nobody"}).status_code == 200


@pytest.mark.slow
def test_what_is_too_long_is_said_to_be(client: TestClient) -> None:
    """Whatever the other members of a union say."""
    many = [{"type": "text", "text": "a"}] * 17_000
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/generate", {"text": "a", "rid": "r" * 1025}, "rid"),
        (COMPLETION, {"prompt": "a", "request_id": "r" * 1025}, "request_id"),
        ("/generate", {"text": ["a"] * 17_000}, "text"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": many}]}, "messages.0.content"),
    ]
    for path, body, field in cases:
        assert "should have at most" in refused(client, path, body, field)


def test_a_long_path_is_not_repeated(client: TestClient) -> None:
    assert len(client.get("/v1/" + "a" * 50_000).content) < 2000


@pytest.mark.slow
def test_lists_of_ids_that_fit_no_context_are_not_parsed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser would hold up everybody; lists that are short each are taken."""
    monkeypatch.setattr(service, "MAX_COUNTED", 2**13)

    def post(path: str, field: str, ids: str) -> httpx.Response:
        return client.post(path, content=f'{{"{field}":{ids}}}', headers={"content-type": "application/json"})

    longest = 2 * 2**13
    for path, field in (("/generate", "input_ids"), (COMPLETION, "prompt"), ("/detokenize", "tokens")):
        refused = post(path, field, f"[{'1,' * (longest + 1)}1]")
        assert refused.status_code == 400 and f"a list of {longest + 2} entries" in refused.text
    short = ",".join([f"[{'1,' * 3000}1]"] * 20)
    assert post("/detokenize", "tokens", f"[{short}]").status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "wrong"),
    [
        (CHAT_PATH, "top_logprobs", [21, -1, 10**30, 1.5, "x", True]),
        (CHAT_PATH, "prompt_logprobs", [21, -1]),
        (CHAT_PATH, "priority", [2**31, -(2**31) - 1]),
        (CHAT_PATH, "reasoning.max_tokens", [-1, 10**9]),
        (CHAT_PATH, "thinking.budget_tokens", [-1, 10**9]),
        (COMPLETION, "logprobs", [21, -1]),
        (COMPLETION, "prompt", [7, {"a": 1}]),
        ("/v1/responses", "top_logprobs", [21, -1]),
        ("/v1/messages", "priority", [2**31, 0.5]),
        ("/generate", "priority", [2**31, "1"]),
        ("/api/chat", "top_logprobs", [21, -1]),
    ],
)
def test_what_a_number_must_be_and_what_was_found(client: TestClient, path: str, field: str, wrong: list[Any]) -> None:
    """Of numbers longer than Python reads, too."""
    own = {"/api/chat": {"model": "m", "messages": MESSAGES, "stream": False}}.get(path) or base(path)
    name, _, inner = field.partition(".")
    for value in wrong:
        given = {inner: value} | ({"type": "enabled"} if name == "thinking" else {}) if inner else value
        error = client.post(path, json=own | {name: given}).json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith(f"{field} must be ") and message.count("; found ") == 1, message
        begin, _, end = message.rpartition("; found ")[2].partition("...")
        assert repr(value).startswith(begin) and repr(value).endswith(end) and len(begin) >= min(10, len(repr(value)))
        bounds = [int(one) for one in re.findall(r"-?\d+", message.partition(";")[0])]
        assert type(value) is not int or not bounds or any(value >= one > 1 or value < one <= 0 for one in bounds)
    digits = "9" * 4000
    body = json.dumps(own | {name: {inner: "@"} if inner else "@"}).replace('"@"', digits)
    if name != "thinking" and wrong[0] != 7:
        text = client.post(path, content=body, headers={"content-type": "application/json"}).text
        assert "; found 9" in text and len(text) < 400
