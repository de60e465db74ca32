"""Receipts over HTTP: each route, whole and streamed, asked for by a field or a header."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from scripted import client_of, launched, ok
from starlette.testclient import TestClient
from tiny_checkpoint import write_checkpoint

from draftwing.engine.engine import Engine
from draftwing.engine.provenance import Digests
from draftwing.engine.receipt_replay import replay
from draftwing.engine.receipts import check_files, options_for, read_receipt
from draftwing.errors import GenerationError
from draftwing.server import quotas

CHAT, COMPLETION, RESPONSES, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate"
HEADER = "x-draftwing-receipt"
PROMPT = "abcd"


def body(path: str, **more: Any) -> dict[str, Any]:
    asked = {
        CHAT: {"messages": [{"role": "user", "content": PROMPT}]}, COMPLETION: {"prompt": PROMPT},
        RESPONSES: {"input": PROMPT}, GENERATE: {"text": PROMPT},
    }  # fmt: skip
    return asked[path] | more


def receipts(path: str, response: Any) -> list[Any]:
    """Of a whole response; None for an answer without one."""
    if path == RESPONSES:
        return [response.get("receipt")]
    if path == GENERATE:
        every = response if isinstance(response, list) else [response]
        return [one["meta_info"].get("receipt") for one in every]
    return [choice.get("receipt") for choice in response["choices"]]


def streamed_receipts(client: httpx.Client | TestClient, path: str, **more: Any) -> list[Any]:
    """Of a stream, whose other events have none."""
    text = client.post(path, json=body(path, stream=True, **more)).text
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        *others, last = (event.get("response", {}) for event in data)
        assert not any("receipt" in one for one in others)
        return receipts(path, last)
    found = []
    for event in data:
        for choice in event.get("choices", [event]):
            ended = choice.get("finish_reason") or (choice.get("meta_info") or {}).get("finish_reason")
            one = receipts(path, {"choices": [choice]} if "choices" in event else event)[0]
            assert (one is not None) == bool(ended)
            found += [] if one is None else [one]
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, GENERATE])
def test_each_route_whole_and_streamed(client: TestClient, engine: FakeEngine, path: str) -> None:
    (whole,) = receipts(path, ok(client, path, **body(path, receipt=True)))
    (from_stream,) = streamed_receipts(client, path, receipt=True)
    for one in (whole, from_stream):
        read_receipt(json.dumps(one))
        (asked, *_) = engine.requests
        assert one["request"]["prompt_ids"] == asked.prompt_ids and one["device"] == "cpu"
        assert one["answer"]["token_ids"] == [*asked.prompt_ids, 256] and one["answer"]["finish_reason"] == "stop"
    seeds = [one["request"]["sampling"].pop("sampling_seed") for one in (whole, from_stream)]
    assert seeds == [str(request.params.sampling_seed) for request in engine.requests]
    assert whole["request"] == from_stream["request"] and whole["answer"] == from_stream["answer"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, GENERATE])
def test_who_does_not_ask_has_none(client: TestClient, engine: FakeEngine, path: str) -> None:
    for more in ({}, {"receipt": False}, {"receipt": None}):
        response = client.post(path, json=body(path, **more))
        assert "receipt" not in response.text and response.is_success
    assert not any(request.receipt for request in engine.requests)


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, GENERATE])
def test_a_header_stands_for_the_field(client: TestClient, path: str) -> None:
    def asked(value: str, **more: Any) -> Any:
        return client.post(path, json=body(path, **more), headers={HEADER: value})

    assert receipts(path, asked("true").json()) != [None] and receipts(path, asked("True ").json()) != [None]
    assert receipts(path, asked("false").json()) == [None]
    assert receipts(path, asked("true", receipt=False).json()) == [None], "the body counts"
    refused = asked("please")
    assert refused.status_code == 400 and f"{HEADER} must be true or false; found 'please'" in refused.text


@pytest.mark.parametrize("path", [CHAT, COMPLETION, RESPONSES, GENERATE])
def test_nonsense_is_refused_by_name(client: TestClient, path: str) -> None:
    for value in ("yes", 1, [True], {}):
        refused = client.post(path, json=body(path, receipt=value))
        assert refused.status_code == 400 and "receipt must be a valid boolean" in refused.text


def test_other_dialects_say_that_they_have_none(client: TestClient) -> None:
    chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    for path, message in (("/v1/messages", chat | {"max_tokens": 5}), ("/api/chat", chat)):
        assert client.post(path, json=message | {"receipt": True}).status_code == 400
        refused = client.post(path, json=message, headers={HEADER: "true"})
        assert refused.status_code == 400 and f"{path} has no receipts" in refused.text
        assert client.post(path, json=message).is_success


def test_each_of_several_answers_has_its_own(client: TestClient) -> None:
    for path, more in ((CHAT, {"n": 3}), (COMPLETION, {"n": 3}), (GENERATE, {"sampling_params": {"n": 3}})):
        whole = receipts(path, ok(client, path, **body(path, receipt=True, **more)))
        every = [whole, streamed_receipts(client, path, receipt=True, **more)]
        for found in every:
            assert len({one["request"]["sampling"]["sampling_seed"] for one in found}) == 3
    several = ok(client, GENERATE, text=["ab", "abc"], receipt=True)
    assert [len(one["request"]["prompt_ids"]) for one in receipts(GENERATE, several)] == [2, 3]


@pytest.mark.parametrize("path", [CHAT, COMPLETION, GENERATE])
def test_how_much_of_prompts_they_hold_is_bounded(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Nothing bounds n times a long prompt else: 128 of 128 Ki tokens are 100 MB, and 2,048 answers are possible."""

    def asked(n: int, **more: Any) -> httpx.Response:
        some = {"sampling_params": {"n": n}} if path == GENERATE else {"n": n}
        return client.post(path, json=body(path, **some, **more))

    assert asked(1, receipt=True).is_success
    size = len(engine.requests[0].prompt_ids)
    monkeypatch.setattr(quotas, "MAX_RECEIPT_TOKENS", 2 * size)
    assert asked(2, receipt=True).is_success and asked(3).is_success
    sent = len(engine.requests)
    refused = asked(3, receipt=True)
    assert refused.status_code == 400 and f"at most {2 * size} tokens" in refused.text
    assert f"found {3 * size}" in refused.text and '"receipt' in refused.text and len(engine.requests) == sent


def test_prompts_that_come_together_count_together(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_RECEIPT_TOKENS", 5)
    assert client.post(GENERATE, json={"text": ["ab", "abc"], "receipt": True}).is_success
    assert client.post(GENERATE, json={"text": ["abc", "abc"], "receipt": True}).status_code == 400


def test_an_answer_that_was_aborted_has_none(client: TestClient, engine: FakeEngine) -> None:
    params = {"stop_regex": "(?:a|aa)+c(?:a|aa)+d", "max_new_tokens": 100}
    found = ok(client, GENERATE, text="a" * 60, sampling_params=params, receipt=True)["meta_info"]
    assert found["finish_reason"]["type"] == "abort" and "receipt" not in found


def test_a_stored_response_keeps_it(client: TestClient) -> None:
    made = ok(client, RESPONSES, **body(RESPONSES, receipt=True))
    assert client.get(f"{RESPONSES}/{made['id']}").json()["receipt"] == made["receipt"]


def test_an_engine_with_made_up_weights_refuses() -> None:
    engine = FakeEngine()
    engine.info = dataclasses.replace(engine.info, provenance=None)
    with client_of(engine) as client:
        refused = client.post(COMPLETION, json=body(COMPLETION, receipt=True))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "receipt"
        assert client.post(COMPLETION, json=body(COMPLETION)).is_success


def test_digests_are_begun_with_the_request_and_waited_for_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a stream does not wait; what cannot be had is an error that says why."""
    engine, digests = FakeEngine(pause=0.05), Future[dict[str, str]]()
    begun: list[int] = []
    monkeypatch.setattr(Digests, "begin", lambda self, info: (begun.append(len(engine.requests)), digests)[1])
    with client_of(engine) as client:
        ok(client, COMPLETION, **body(COMPLETION))
        assert not begun
        digests.set_exception(GenerationError("there is no receipt: weights has changed"))
        response = client.post(COMPLETION, json=body(COMPLETION, receipt=True))
        assert response.status_code == 500 and "weights has changed" in response.text and len(begun) == 1
        asked = {"prompt": "abcdefghijklm", "receipt": True, "stream": True}
        *_, before, error, done = client.post(COMPLETION, json=asked).text.split("data: ")
        assert '"text":"' in before and "weights has changed" in error and "[DONE]" in done


def test_a_request_whose_digests_cannot_be_begun_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def begin(self: Digests, provenance: Any) -> Any:
        raise GenerationError("there is no thread for them")

    with client_of(engine) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Digests, "begin", begin)
            refused = client.post(COMPLETION, json=body(COMPLETION, receipt=True))
        assert refused.status_code == 500 and "there is no thread" in refused.text
        ok(client, COMPLETION, **body(COMPLETION))
    assert len(engine.requests) == 1, "the second one"


def test_others_do_not_wait_for_the_receipt_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last event of the one that is complete does, until digests are there or nothing else runs."""
    engine, digests = FakeEngine(pause=0.05), Future[dict[str, str]]()
    monkeypatch.setattr(Digests, "begin", lambda self, info: digests)
    step = engine.step

    def last(block: bool = False) -> Any:
        news = step(block)
        if news and not engine.running:
            digests.set_result({"weights": "0" * 64})
        return news

    monkeypatch.setattr(engine, "step", last)
    with client_of(engine) as client:
        asked = {"prompt": ["ab", "abcdefghijkl"], "receipt": True, "stream": True}
        text = client.post(COMPLETION, json=asked).text
    events = [json.loads(line[6:])["choices"][0] for line in text.splitlines() if line.startswith("data: {")]
    ends = {one["index"]: i for i, one in enumerate(events) if one["finish_reason"]}
    before = "".join(one["text"] for one in events[: ends[0]] if one["index"] == 1)
    assert len(before) > 6, "it has three tokens, the other one 13"
    assert all("receipt" in events[end] for end in ends.values()) and len(ends) == 2
    assert "".join(one["text"] for one in events if one["index"] == 0) == "ab"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    with launched(f"--model {model} --speculative-algorithm NGRAM --chat-template chatml_tools") as (_, url):
        yield url


@pytest.mark.exhaustive  # as tests/engine/test_receipts.py, and the tests above in one process
@pytest.mark.slow
def test_a_whole_server(url: str) -> None:
    """Its receipts are checked by an engine of theirs, with tools and grammars, whole and streamed."""
    more: dict[str, dict[str, Any]] = {
        CHAT: {"temperature": 1, "max_tokens": 20, "n": 2, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]},
        COMPLETION: {"temperature": 0, "max_tokens": 20, "response_format": {"type": "json_object"}},
        RESPONSES: {"temperature": 2, "max_output_tokens": 20},
        GENERATE: {"sampling_params": {"temperature": 0.5, "max_new_tokens": 20, "ignore_eos": True}},
    }  # fmt: skip
    found = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for path, asked in more.items():
            response = client.post(path, json=body(path, **asked), headers={HEADER: "true"})
            assert response.is_success, response.text
            found += receipts(path, response.json())
            found += streamed_receipts(client, path, receipt=True, **asked)
    assert len(found) == 10
    read = [read_receipt(json.dumps(one)) for one in found]
    options = options_for(read[0], {"max_total_tokens": 2048})
    check_files(read[0], options)
    engine = Engine(options)
    try:
        assert all(replay(one, engine).same for one in read)
    finally:
        engine.close()
