"""/v1/chat/completions and /v1/completions: responses, streams, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import CONTEXT, EOS, FakeEngine
from scripted import events
from starlette.testclient import TestClient

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "héllo 😀"}]}
ECHO = "user:héllo 😀\n"  # what the template makes of it


def test_chat_response_has_the_documented_keys(client: TestClient) -> None:
    data = client.post("/v1/chat/completions", json=CHAT).json()
    assert set(data) == {
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "metadata",
        "timings",
        "system_fingerprint",
    }
    assert data["object"] == "chat.completion" and data["metadata"] == {"weight_version": "default"}
    (choice,) = data["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": ECHO, "reasoning_content": None},
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": EOS,
    }
    size = len(ECHO.encode())
    assert data["usage"] == {
        "prompt_tokens": size,
        "completion_tokens": size + 1,  # the stop token is counted, not shown
        "total_tokens": 2 * size + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
        "reasoning_tokens": 0,
    }


def test_chat_stream_gives_role_text_reason_and_usage(client: TestClient) -> None:
    text = "héllo 😀 " * 20
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    first, *middle, last, usage = events(response.text)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert len(middle) > 2, "hardly any pieces: nothing was streamed"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == f"user:{text}\n"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in middle)
    assert last["choices"][0]["finish_reason"] == "stop" and last["choices"][0]["matched_stop"] == EOS
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(text.encode()) + 7
    assert {chunk["usage"] is None for chunk in (first, *middle, last)} == {True}
    assert len({chunk["id"] for chunk in (first, last, usage)}) == 1


@pytest.mark.parametrize(("path", "trim", "stop"), [
    ("/v1/chat/completions", True, {"stop": ["345", "zzz"]}), ("/v1/completions", False, {"stop": ["345", "zzz"]}),
    ("/v1/completions", True, {"stop_regex": r"\d{3}"}), ("/v1/chat/completions", False, {"stop_regex": r"\d{3}"}),
])  # fmt: skip
def test_stops_in_stream_and_plain_agree(client: TestClient, path: str, trim: bool, stop: dict[str, Any]) -> None:
    prompt, matched = "one 12 two 345 four", "345" if "stop" in stop else stop["stop_regex"]
    body: dict[str, Any] = {**stop, "no_stop_trim": not trim, "max_tokens": 100}
    body |= {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    choice = client.post(path, json=body).json()["choices"][0]
    plain = choice["text"] if "text" in choice else choice["message"]["content"]
    assert plain.endswith("one 12 two " if trim else "two 345")
    assert choice["finish_reason"] == "stop" and choice["matched_stop"] == matched
    chunks = [c["choices"][0] for c in events(client.post(path, json=body | {"stream": True}).text)]
    streamed = "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in chunks)
    assert streamed == plain and chunks[-1]["matched_stop"] == matched


def test_completions_take_all_forms_of_prompt(client: TestClient, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("abc")
    for prompt, texts in (
        ("abc", ["abc"]),
        (["abc", "de"], ["abc", "de"]),
        (ids, ["abc"]),
        ([ids, ids[:1]], ["abc", "a"]),
    ):
        data = client.post("/v1/completions", json={"prompt": prompt}).json()
        assert [choice["text"] for choice in data["choices"]] == texts
        assert [choice["index"] for choice in data["choices"]] == list(range(len(texts)))
    assert data["object"] == "text_completion" and data["usage"]["prompt_tokens"] == 4


def test_streamed_batch_keeps_choices_apart(client: TestClient) -> None:
    body = {"prompt": ["abcdef", "ghijklmno"], "n": 2, "stream": True}
    texts: dict[int, str] = {}
    for chunk in events(client.post("/v1/completions", json=body).text):
        choice = chunk["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "abcdef", 1: "abcdef", 2: "ghijklmno", 3: "ghijklmno"}


def test_default_lengths(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/completions", json={"prompt": "a"})
    client.post("/v1/chat/completions", json=CHAT)
    client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 5})
    client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 5, "max_completion_tokens": 4})
    assert [r.params.max_new_tokens for r in engine.requests] == [16, None, 5, 4]


def test_sampling_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "seed": 11, "stop": "x", "stop_token_ids": [3],
        "min_tokens": 2, "max_tokens": 9, "ignore_eos": True, "skip_special_tokens": False,
        "spaces_between_special_tokens": False, "no_stop_trim": True, "priority": 3, "cache_salt": "tenant",
    }  # fmt: skip
    assert client.post("/v1/completions", json={"prompt": "a", **fields}).status_code == 200
    (request,) = engine.requests
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 7, 0.125)
    assert (params.sampling_seed, params.stop, params.stop_token_ids) == (11, ("x",), (3,))
    assert (params.min_new_tokens, params.max_new_tokens, params.ignore_eos) == (2, 9, True)
    assert (params.skip_special_tokens, params.spaces_between_special_tokens, params.no_stop_trim) == (
        False,
        False,
        True,
    )
    assert (request.priority, request.cache_salt, params.n) == (3, "tenant", 1)


def test_defaults_are_openais(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/chat/completions", json=CHAT)
    params = engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.n) == (1.0, 1.0, -1, 0.0, 1)


def test_n_answers_have_their_own_seeds(client: TestClient, engine: FakeEngine) -> None:
    for _ in range(2):
        data = client.post("/v1/chat/completions", json=CHAT | {"n": 3, "seed": 5}).json()
        assert [choice["index"] for choice in data["choices"]] == [0, 1, 2]
    assert data["usage"]["prompt_tokens"] == len(ECHO.encode())  # the prompt counts once
    seeds = [r.params.sampling_seed for r in engine.requests]
    assert seeds[:3] == seeds[3:] and seeds[0] == 5 and len(set(seeds)) == 3
    client.post("/v1/chat/completions", json=CHAT | {"seed": 6, "n": 2})
    assert engine.requests[-1].params.sampling_seed not in seeds


def test_content_parts_and_developer_role(client: TestClient) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    data = client.post("/v1/chat/completions", json={"messages": messages}).json()
    assert data["choices"][0]["message"]["content"] == "system:be brief\nuser:ab\nassistant:\n"
    assert data["model"] == "echo"


def test_known_models_are_listed(client: TestClient) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "echo" and card["object"] == "model" and card["max_model_len"] == CONTEXT
    assert client.get("/v1/models/echo").json() == card
    missing = client.get("/v1/models/org/other")
    assert missing.status_code == 404 and missing.json()["code"] == "model_not_found"
