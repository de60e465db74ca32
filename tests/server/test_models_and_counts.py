"""Which model answers, what is listed to whom, and counts of tokens without an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import CONTEXT, FakeEngine
from scripted import client_of
from starlette.testclient import TestClient

from draftwing.config.options import Options

MESSAGES = [{"role": "user", "content": "ab"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3}, "/v1/completions": {"prompt": "ab"},
    "/v1/responses": {"input": "ab"}, "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/api/chat": {"messages": MESSAGES, "stream": False}, "/api/generate": {"prompt": "ab", "stream": False},
}  # fmt: skip
OTHERS = {
    "/v1/messages/count_tokens": {"messages": MESSAGES}, "/v1/responses/input_tokens": {"input": "ab"},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES}, "/api/show": {}, "/tokenize": {"prompt": "ab"},
}  # fmt: skip
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def strict() -> Iterator[TestClient]:
    with client_of(FakeEngine(Options(random_seed=7, strict_model_name=True))) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_names_the_model_that_gave_it(client: TestClient, path: str) -> None:
    for asked, named in (("gpt-4o", "echo"), ("echo:latest", None)):
        answer = client.post(path, json=BODIES[path] | {"model": asked}).json()
        assert answer["model"] == (named or asked), asked
    stream = client.post(path, json=BODIES[path] | {"model": "gpt-4o", "stream": True}).text
    assert '"model":"echo"' in stream and "gpt-4o" not in stream


@pytest.mark.parametrize("path", [*BODIES, *OTHERS])
def test_another_model_is_refused_where_that_is_asked_for(strict: TestClient, path: str) -> None:
    body = (BODIES | OTHERS)[path]
    for asked in ("Echo", "echo:7b" if "v1" in path else ""):
        response = strict.post(path, json=body | {"model": asked})
        assert response.status_code == 404 and "'echo'" in response.text, asked
        if path.startswith("/v1/messages"):
            assert response.json()["error"]["type"] == "not_found_error"
        elif path.startswith("/v1/"):
            assert response.json()["error"]["code"] == "model_not_found"
            assert response.json()["error"]["param"] == "model"
    for asked in ("echo", "echo:latest"):
        assert strict.post(path, json=body | {"model": asked}).status_code == 200


def test_a_request_that_names_no_model_is_answered_all_the_same(strict: TestClient) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert strict.post(path, json=BODIES[path]).json()["model"] == "echo"
    assert strict.post("/generate", json={"text": "ab"}).status_code == 200


def test_models_have_anthropic_s_shape_for_its_clients(client: TestClient) -> None:
    for path in ("/v1/models", "/models", "/v1/models?limit=5"):
        listed = client.get(path, headers=VERSION).json()
        (card,) = listed["data"]
        assert (card["type"], card["id"], card["max_input_tokens"]) == ("model", "echo", CONTEXT)
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "echo", "echo")
        assert client.get(path).json()["object"] == "list"
    assert client.get("/v1/models/echo", headers=VERSION).json() == card
    missing = client.get("/v1/models/other", headers=VERSION)
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "ab"}, {"input": "ab", "instructions": "be brief"}, {"input": [*MESSAGES, *MESSAGES]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Grüße"}]}]},
        {"input": "ab", "max_output_tokens": 7, "temperature": 0, "store": False},
    ],
)  # fmt: skip
def test_the_count_of_a_response_s_input_is_that_of_its_usage(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    counted = client.post("/v1/responses/input_tokens", json=fields)
    assert not engine.requests
    count = client.post("/v1/responses", json=fields).json()["usage"]["input_tokens"]
    assert counted.status_code == 200
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": count}
    assert client.post("/responses/input_tokens", json=fields).json() == counted.json()


def test_the_count_of_a_response_has_what_it_goes_on_from(client: TestClient) -> None:
    first = client.post("/v1/responses", json={"input": "ab"}).json()
    more = {"input": "cd", "previous_response_id": first["id"]}
    count = client.post("/v1/responses/input_tokens", json=more).json()["input_tokens"]
    assert count == client.post("/v1/responses", json=more).json()["usage"]["input_tokens"] > 10
    gone = client.post("/v1/responses/input_tokens", json=more | {"previous_response_id": "resp_0"})
    assert gone.status_code == 400 and gone.json()["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": MESSAGES}, {"messages": [{"role": "system", "content": "x"}, *MESSAGES]},
        {"messages": MESSAGES, "chat_template_kwargs": {"shout": "!"}},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}], "continue_final_message": True},
    ],
)  # fmt: skip
def test_a_chat_s_prompt_and_its_length(client: TestClient, engine: FakeEngine, fields: dict[str, Any]) -> None:
    prompt = client.post("/apply-template", json=fields).json()["prompt"]
    counted = client.post("/v1/chat/completions/input_tokens", json=fields).json()["input_tokens"]
    answer = client.post("/v1/chat/completions", json=fields | {"max_tokens": 1}).json()
    assert engine.tokenizer.decode(engine.requests[-1].prompt_ids) == prompt
    assert counted == answer["usage"]["prompt_tokens"] == len(prompt)


def test_properties_as_llama_cpp_s_clients_read_them(client: TestClient, engine: FakeEngine) -> None:
    found = client.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == CONTEXT and found["model_alias"] == "echo"
    assert found["total_slots"] == engine.options.max_running_requests
    assert found["chat_template"] == engine.tokenizer.chat_template and found["eos_token"] == "<eos>"
