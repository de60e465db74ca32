"""How an answer was made, as each dialect tells it: cached tokens, and what benchmark clients read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from scripted import client_of
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.server.openai.completions import timings_and_metrics
from draftwing.server.telemetry.observer import AnswerRecord
from draftwing.text.answer import Answer

CHAT, COMPLETION, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "a prompt"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 4},
    COMPLETION: {"prompt": "a prompt", "max_tokens": 4},
    MESSAGES: {"model": "m", "messages": HI, "max_tokens": 4},
    RESPONSES: {"input": "a prompt", "max_output_tokens": 4},
}


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = client.post(path, json=body | {"stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def counts(path: str, usage: dict[str, Any]) -> tuple[int, int]:
    """(prompt tokens, those of them that were cached)"""
    if path == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        assert usage["cache_creation_input_tokens"] == 0
        return usage["input_tokens"] + cached, cached
    if path == RESPONSES:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def streamed_usage(client: TestClient, path: str) -> dict[str, Any]:
    asked = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETION) else {}
    every = events(client, path, BODIES[path] | asked)
    if path == MESSAGES:
        (usage,) = [one["usage"] for one in every if one["type"] == "message_delta"]
    elif path == RESPONSES:
        usage = every[-1]["response"]["usage"]
    else:
        usage = every[-1]["usage"]
    return usage


@pytest.mark.parametrize("path", BODIES)
def test_cached_tokens_are_told_by_all(client: TestClient, engine: FakeEngine, path: str) -> None:
    first = counts(path, client.post(path, json=BODIES[path]).json()["usage"])
    size = len(engine.requests[0].prompt_ids)
    assert first == (size, 0)
    assert counts(path, client.post(path, json=BODIES[path]).json()["usage"]) == (size, size - 1)
    assert counts(path, streamed_usage(client, path)) == (size, size - 1)


def test_a_message_begins_with_what_is_known_then(client: TestClient, engine: FakeEngine) -> None:
    client.post(MESSAGES, json=BODIES[MESSAGES])
    start, *_, delta, _ = events(client, MESSAGES, BODIES[MESSAGES])
    size = len(engine.requests[0].prompt_ids)
    assert start["message"]["usage"]["input_tokens"] == size
    assert delta["usage"] == {
        "input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": size - 1, "output_tokens": 4
    }  # fmt: skip


def test_a_prompt_counts_once(client: TestClient) -> None:
    """Others of its answers take over its prefill, which was not cached before."""
    body = {"prompt": ["abcd", "xy"], "n": 3, "max_tokens": 2}
    usages = [client.post(COMPLETION, json=body).json()["usage"] for _ in range(2)]
    assert [counts(COMPLETION, usage) for usage in usages] == [(6, 0), (6, 4)]


@pytest.mark.parametrize("limit", [1, 8])
def test_usage_of_a_stream_before_its_end(client: TestClient, limit: int) -> None:
    """The role comes before all tokens; of the cache nothing is known yet."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    long = {"messages": [{"role": "user", "content": "a prompt" * 50}], "stream_options": options, "max_tokens": limit}
    first, *_, last, total = events(client, CHAT, long)
    assert first["usage"]["prompt_tokens_details"] is None
    assert first["choices"][0]["delta"]["role"] and first["usage"]["completion_tokens"] == 0
    assert first["usage"]["total_tokens"] == first["usage"]["prompt_tokens"] == total["usage"]["prompt_tokens"]
    assert last["usage"]["prompt_tokens_details"] == total["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.fixture(scope="module")
def drafts() -> Iterator[TestClient]:
    engine = FakeEngine(Options(random_seed=7, speculative_algorithm="NGRAM"))
    with client_of(engine) as client:
        yield client


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_timings_as_llama_cpp_has_them(client: TestClient, drafts: TestClient, path: str) -> None:
    body = BODIES[path] | {"max_tokens": 12, "ignore_eos": True}
    timings = client.post(path, json=body).json()["timings"]
    names = [f"{what}_{of}" for what in ("prompt", "predicted") for of in ("n", "ms", "per_token_ms", "per_second")]
    assert set(timings) == {"cache_n", *names} and all(timings[name] > 0 for name in names)
    assert timings["predicted_n"] == 12 and timings["cache_n"] == 0
    again = client.post(path, json=body).json()
    assert again["timings"]["cache_n"] + again["timings"]["prompt_n"] == again["usage"]["prompt_tokens"]
    assert again["timings"]["prompt_n"] == 1 and "metrics" not in again
    with_drafts = drafts.post(path, json=body).json()["timings"]
    assert (with_drafts["draft_n"], with_drafts["draft_n_accepted"]) == (7, 3)
    # In the last event of a stream, and there alone.
    for options in (None, {"include_usage": True}):
        *rest, last = events(drafts, path, body | {"stream_options": options})
        assert set(last["timings"]) == set(with_drafts) and not any("timings" in one for one in rest)
        assert bool(last["choices"]) == (options is None)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_several_answers_have_no_timings(drafts: TestClient, path: str) -> None:
    whole = drafts.post(path, json=BODIES[path] | {"n": 2}).json()
    assert len(whole["choices"]) == 2 and not {"timings", "metrics"} & set(whole)
    assert not any({"timings", "metrics"} & set(one) for one in events(drafts, path, BODIES[path] | {"n": 2}))


class _Meta:
    """What `timings_and_metrics` reads of an answer."""

    def __init__(self, meta: dict[str, Any], tokens: int) -> None:
        self.meta, self.token_ids = meta, [0] * tokens
        self.request: Any = type("Request", (), {"prompt_ids": [0] * 30})


def test_acceptance_as_vllm_has_it() -> None:
    """By the identities that its clients check: they leave out what does not add up."""
    meta = {
        "cached_tokens": 10, "e2e_latency": 3.5, "queue_time": 0.5, "spec_correct_drafts_histogram": [2, 0, 3, 1],
        "spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 18,
    }  # fmt: skip
    answer: Answer = _Meta(meta, 15)  # type: ignore[assignment]
    record = AnswerRecord(None, 100.0, first=101.5, ended=103.5)  # type: ignore[arg-type]
    found = timings_and_metrics(answer, record, speculates=True)
    drafted = found["metrics"]["speculative_decoding"]
    histogram = drafted["acceptance_histogram"]
    assert sum(histogram) == drafted["num_spec_steps"] == 6
    assert sum(accepted * steps for accepted, steps in enumerate(histogram)) == drafted["num_accepted_draft_tokens"]
    assert drafted["num_draft_tokens"] == 18 and drafted["draft_acceptance_rate"] == 0.5
    assert drafted["mean_acceptance_length"] == 2.5 and drafted["num_spec_tokens"] is None
    timings = found["timings"]  # 3.5 s, of which 0.5 s waiting and 2 s decoding
    assert (timings["prompt_n"], timings["prompt_ms"], timings["prompt_per_second"]) == (20, 1000.0, 20.0)
    assert (timings["predicted_n"], timings["predicted_ms"], timings["predicted_per_second"]) == (15, 2000.0, 7.5)
    assert timings["predicted_per_token_ms"] == pytest.approx(2000 / 15)
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (18, 9)
    assert timings_and_metrics(answer, record, speculates=False).keys() == {"timings"}
    never = AnswerRecord(None, 100.0, ended=101.0, reason="abort")  # type: ignore[arg-type]
    assert timings_and_metrics(_Meta({}, 0), never, speculates=True) == {}  # type: ignore[arg-type]


def test_a_service_tier_is_answered_by_the_one_there_is(client: TestClient) -> None:
    for asked in ("auto", "priority"):
        response = client.post(CHAT, json=BODIES[CHAT] | {"service_tier": asked})
        assert response.json()["service_tier"] == "default"
    assert "service_tier" not in client.post(CHAT, json=BODIES[CHAT]).json()
