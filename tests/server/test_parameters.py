"""What requests may ask besides the plain sampling fields: that it reaches the engine, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import CONTEXT, FakeEngine, drafting_options
from scripted import client_of, ok, streamed
from starlette.testclient import TestClient

from draftwing.requests import stop_regex
from draftwing.requests.request import SpecLimits
from draftwing.requests.sampling_params import LogitsProcessorSpec

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PATHS = [CHAT, COMPLETION]


def base(path: str, text: str = "abc") -> dict[str, Any]:
    return {"prompt": text} if path == COMPLETION else {"messages": [{"role": "user", "content": text}]}


@pytest.fixture(scope="module")
def speculating() -> Iterator[tuple[FakeEngine, TestClient]]:
    engine = FakeEngine(drafting_options(5, 4, 8))
    with client_of(engine) as client:
        yield engine, client


@pytest.fixture
def drafting(speculating: tuple[FakeEngine, TestClient]) -> FakeEngine:
    speculating[0].forget()
    return speculating[0]


@pytest.fixture
def drafts(drafting: FakeEngine, speculating: tuple[FakeEngine, TestClient]) -> TestClient:
    return speculating[1]


EDITS: dict[str, Any] = {
    "frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"7": -100, "3": 1.5},
    "allowed_token_ids": [5, 6, 256], "bad_words": ["no", "never"], "stop_regex": ["x+", "y"], "min_p": 0.125,
    "custom_logit_processor": "even", "custom_params": {"a": [1, None]},
}  # fmt: skip


@pytest.mark.parametrize("path", [*PATHS, "/generate"])
def test_edits_reach_the_engine(client: TestClient, engine: FakeEngine, path: str) -> None:
    if path == "/generate":
        ok(client, path, text="abc", sampling_params=EDITS)
    else:
        ok(client, path, **base(path), **EDITS)
    params = engine.requests[0].params
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -1.0, 1.5)
    assert params.logit_bias == ((3, 1.5), (7, -100.0)) and params.allowed_token_ids == (5, 6, 256)
    assert params.bad_words == ("no", "never") and params.stop_regex == ("x+", "y") and params.min_p == 0.125
    assert params.logits_processor == LogitsProcessorSpec("even", '{"a": [1, null]}')
    assert params.edited and params.guided


def test_generate_takes_a_processor_for_each(client: TestClient, engine: FakeEngine) -> None:
    ok(client, "/generate", text=["a", "b"], custom_logit_processor=["odd", None])
    ok(client, "/generate", text="a", custom_logit_processor="even", sampling_params={"custom_params": {"x": 1}})
    found = [request.params.logits_processor for request in engine.requests]
    assert found == [LogitsProcessorSpec("odd", "{}"), None, LogitsProcessorSpec("even", '{"x": 1}')]


@pytest.mark.slow
def test_a_stop_regex_that_takes_too_long_ends_the_request(client: TestClient, engine: FakeEngine) -> None:
    text = "a" * 60
    choice = ok(client, COMPLETION, prompt=text, stop_regex="(?:a|aa)+c(?:a|aa)+d", max_tokens=100)["choices"][0]
    assert choice["finish_reason"] == "abort" and text.startswith(choice["text"]) and choice["text"]
    info = ok(client, "/generate", text=text, sampling_params={"stop_regex": "(?:a|aa)+c(?:a|aa)+d"})["meta_info"]
    assert info["finish_reason"]["type"] == "abort" and "stop_regex" in info["finish_reason"]["message"]
    assert ok(client, COMPLETION, prompt="abc")["choices"][0]["text"] == "abc"


def test_echo(client: TestClient, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("dé")
    data = ok(client, COMPLETION, prompt=["abc", "dé"], echo=True, n=2)
    assert [choice["text"] for choice in data["choices"]] == ["abcabc"] * 2 + ["dédé"] * 2
    assert ok(client, COMPLETION, prompt=ids, echo=True)["choices"][0]["text"] == "dédé"
    chunks = streamed(client, COMPLETION, prompt="abcdef", echo=True)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts[0].startswith("abcdef") and "".join(texts) == "abcdefabcdef"


def test_the_answers_to_a_prompt_come_together_and_share_its_prefill(client: TestClient, engine: FakeEngine) -> None:
    data = ok(client, "/generate", text=["abcd", "xy"], sampling_params={"n": 3})
    assert [d["meta_info"]["cached_tokens"] for d in data] == [0, 3, 3, 0, 1, 1]
    ok(client, CHAT, **base(CHAT), n=2, cache_salt="other")
    assert [r.cache_salt for r in engine.requests[-2:]] == ["other"] * 2


LIMITS: list[tuple[Any, SpecLimits | None, tuple[Any, ...]]] = [
    ("off", SpecLimits(0, 1, 1), ("none", 0, 1, 1)),
    ({"algorithm": "none"}, SpecLimits(0, 1, 1), ("none", 0, 1, 1)),
    ({"algorithm": "off", "num_steps": 0}, SpecLimits(0, 1, 1), ("none", 0, 1, 1)),
    ({"num_steps": 0}, SpecLimits(0, 1, 1), ("none", 0, 1, 1)),
    ({"num_draft_tokens": 1}, SpecLimits(0, 1, 1), ("none", 0, 1, 1)),
    ({}, None, ("EAGLE", 5, 4, 8)),
    ({"algorithm": "eagle"}, None, ("EAGLE", 5, 4, 8)),
    ({"num_steps": 5, "topk": 4, "num_draft_tokens": 8}, None, ("EAGLE", 5, 4, 8)),
    ({"num_steps": 2}, SpecLimits(2, 4, 8), ("EAGLE", 2, 4, 8)),
    ({"num_draft_tokens": 3}, SpecLimits(2, 4, 3), ("EAGLE", 2, 4, 3)),
    ({"topk": 1}, SpecLimits(5, 1, 6), ("EAGLE", 5, 1, 6)),
]


@pytest.mark.parametrize(("wish", "limits", "used"), LIMITS)
def test_speculation_per_request(
    drafts: TestClient, drafting: FakeEngine, wish: Any, limits: SpecLimits | None, used: tuple[Any, ...]
) -> None:
    reported = dict(zip(("algorithm", "num_steps", "topk", "num_draft_tokens"), used, strict=True))
    for path in PATHS if "num_steps" in wish else PATHS[:1]:
        data = ok(drafts, path, **base(path), speculative=wish)
        assert data["speculative"] == reported
        counts = data["usage"]["completion_tokens_details"]
        off = limits == SpecLimits(0, 1, 1)
        assert counts == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0 if off else 3,
            "rejected_prediction_tokens": 0 if off else 4,
        }
        stream = streamed(drafts, path, **base(path), speculative=wish)
        assert all(chunk["speculative"] == reported for chunk in stream)
    assert ok(drafts, "/generate", text="a", speculative=wish)["meta_info"]["speculative"] == reported
    assert {request.limits for request in drafting.requests} == {limits}


def test_what_was_used_is_told_without_a_wish(drafts: TestClient, client: TestClient) -> None:
    data = ok(drafts, COMPLETION, prompt=["abc", "de"], n=2)
    assert "speculative" not in data
    assert data["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 12
    assert data["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 16
    info = ok(drafts, "/generate", text="a")["meta_info"]
    assert info["speculative"] == {"algorithm": "EAGLE", "num_steps": 5, "topk": 4, "num_draft_tokens": 8}
    # A server that drafts nothing says nothing of it, unless it is asked.
    assert "completion_tokens_details" not in ok(client, COMPLETION, prompt="abc")["usage"]
    assert "speculative" not in ok(client, "/generate", text="a")["meta_info"]
    assert ok(client, COMPLETION, prompt="abc", speculative="off")["speculative"]["algorithm"] == "none"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"num_steps": 6}, "num_steps"), ({"topk": 5}, "topk"), ({"num_draft_tokens": 9}, "num_draft_tokens"),
        ({"num_steps": -1}, "num_steps"), ({"topk": 0}, "topk"), ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"algorithm": "NGRAM"}, "algorithm"), ({"algorithm": "none", "num_steps": 3}, "num_steps"),
        ({"num_steps": 1.5}, "num_steps"), ({"bogus": 1}, "bogus"), ({"topk": True}, "topk"),
        ({"algorithm": 5}, "algorithm"),
    ],
)  # fmt: skip
def test_speculation_that_is_refused(drafts: TestClient, drafting: FakeEngine, wish: Any, field: str) -> None:
    for path in (*PATHS, "/generate"):
        body = {"text": "a"} if path == "/generate" else base(path)
        response = drafts.post(path, json=body | {"speculative": wish})
        assert response.status_code == 400 and f"speculative.{field}" in response.text, response.text
        if path != "/generate":
            assert response.json()["param"] == f"speculative.{field}"
    assert not drafting.requests


def test_prediction(drafts: TestClient, drafting: FakeEngine) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    for content in ("hello", parts):
        ok(drafts, CHAT, **base(CHAT), n=2, prediction={"type": "content", "content": content})
    ids = tuple(drafting.tokenizer.encode("hello"))
    assert [request.prediction for request in drafting.requests] == [ids] * 4
    body = base(CHAT) | {"prediction": {"type": "content", "content": "a"}, "speculative": "off"}
    response = drafts.post(CHAT, json=body)
    assert response.status_code == 400 and response.json()["param"] == "prediction"


def test_defaults_of_the_model() -> None:
    engine = FakeEngine(defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    with client_of(engine) as client:
        ok(client, CHAT, **base(CHAT))
        ok(client, COMPLETION, **base(COMPLETION), temperature=0, top_k=None)
        ok(client, "/generate", text="a", sampling_params={"top_k": 5, "temperature": None})
    found = [(r.params.temperature, r.params.top_k, r.params.repetition_penalty) for r in engine.requests]
    assert found == [(0.6, 20, 1.1), (0.0, 20, 1.0), (0.6, 5, 1.1)]


SAID = {"messages": [{"role": "user", "content": "a"}], "model": "m"}


SAID_TO: list[tuple[str, dict[str, Any]]] = [
    (CHAT, SAID), (COMPLETION, {"prompt": "a"}), ("/v1/responses", {"input": "a"}),
    ("/v1/messages", SAID | {"max_tokens": 8}), ("/api/chat", SAID | {"stream": False}),
    ("/api/generate", {"prompt": "a", "model": "m", "stream": False}), ("/generate", {"text": "a"}),
]  # fmt: skip


def test_greedy_is_the_likeliest_token_unless_the_request_has_penalties() -> None:
    engine = FakeEngine(defaults={"repetition_penalty": 1.1, "dry_multiplier": 0.8, "top_k": 5, "temperature": 0.7})
    with client_of(engine) as client:
        for path, body in SAID_TO:
            place = "sampling_params" if path == "/generate" else "options" if path.startswith("/api") else ""
            penalty = "repeat_penalty" if place == "options" else "repetition_penalty"
            own = {} if path == "/v1/messages" else {penalty: 1.2}  # which has no such field
            for asked in ({}, {"temperature": 0}, {"temperature": 0.0, **own}, {"temperature": 0.4}):
                ok(client, path, **body, **({place: asked} if place else asked))
            params = [request.params for request in engine.requests[-4:]]
            found = [(one.temperature, one.repetition_penalty, one.dry_multiplier) for one in params]
            kept = 1.2 if own else 1.0
            assert found == [(0.7, 1.1, 0.8), (0.0, 1.0, 0.0), (0.0, kept, 0.0), (0.4, 1.1, 0.8)], path


def test_a_length_of_the_model_holds_where_nothing_else_limits_the_answer() -> None:
    engine = FakeEngine(defaults={"max_new_tokens": 300})
    messages = {"messages": [{"role": "user", "content": "a"}]}
    with client_of(engine) as client:
        ok(client, CHAT, **messages)
        ok(client, CHAT, **messages, max_tokens=400)
        ok(client, "/v1/responses", input="a")
        ok(client, "/v1/messages", **messages, model="m", max_tokens=400)
        ok(client, "/api/chat", **messages, model="m", stream=False)
        ok(client, "/api/chat", **messages, model="m", stream=False, options={"num_predict": -1})
        ok(client, COMPLETION, prompt="a")
        ok(client, "/generate", text="a")
        ok(client, CHAT, messages=[{"role": "user", "content": "a" * (CONTEXT - 100)}])
        assert client.get("/ui/info").json()["sampling_defaults"]["max_tokens"] == 300
    *found, cut = [request.params.max_new_tokens for request in engine.requests]
    assert found == [300, 400, 300, 400, 300, None, 16, 128] and cut is not None and cut < 100


def test_expressions_are_compiled_once_and_in_a_thread(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, compile_one = list[str](), stop_regex.compile_stop

    def spy(pattern: str) -> Any:
        threads.append(threading.current_thread().name)
        return compile_one(pattern)

    monkeypatch.setattr(stop_regex, "compile_stop", spy)
    for path in (CHAT, COMPLETION):
        ok(client, path, **base(path), n=8, stop_regex=[f"never {path}[x]", f"no {path}[y]"])
    ok(client, "/generate", text="a", sampling_params={"n": 8, "stop_regex": ["never [x]", "no[y]"]})
    ours = [name for name in threads if name.startswith("draftwing-")]
    assert len(ours) == 6
    # The stand-in for the engine, in a thread of its own, compiles them once for each request at most.
    assert "MainThread" not in threads and len(threads) <= 12


def test_expressions_of_all_prompts_count(client: TestClient) -> None:
    params = [{"stop_regex": f"{letter}{{9000}}"} for letter in "abc"]
    response = client.post("/generate", json={"text": [*"abc"], "sampling_params": params})
    assert response.status_code == 400 and "sampling_params.2.stop_regex has 27" in response.text
    assert client.post("/generate", json={"text": [*"ab"], "sampling_params": params[:2]}).status_code == 200
    # In another order they are compiled again, so they count again; where they are the same they are not.
    both = ["a{5000}", "b{5000}"]
    response = client.post("/generate", json={"text": [*"abc"], "sampling_params": [{"stop_regex": both}] * 3})
    assert response.status_code == 200
    turned = [{"stop_regex": both[:: (-1) ** i]} for i in range(2)] + [{"stop_regex": both[:1]}]
    response = client.post("/generate", json={"text": [*"abc"], "sampling_params": turned})
    assert response.status_code == 400 and "sampling_params.2.stop_regex has 25" in response.text
