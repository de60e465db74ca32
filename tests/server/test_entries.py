"""Log probabilities are bounded: of a request before anything is made, and of all responses while they are held."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server import entries
from draftwing.server.native.rendering import Generated
from draftwing.server.service import Service


def asked(prompt: int, new: int | None, n: int = 1, **wanted: Any) -> GenerationRequest:
    params = SamplingParams(n=n, max_new_tokens=new)
    return GenerationRequest("", [1] * prompt, params, logprobs=LogprobParams(**wanted))


def test_lengths_that_nobody_asked_for_leave_room_for_log_probabilities() -> None:
    requests = [asked(100, None, 4, top=20), asked(100, 2000, 2, top=1, start=0, token_ids=(5,))]
    found = entries.fit_entries(requests, chosen=False, context=131_072)
    room = (entries.MOST_ENTRIES - 2 * 3 * 100) // (4 * 21 + 2 * 3)
    assert [one.params.max_new_tokens for one in found] == [room, 2000]
    plain = [GenerationRequest("", [1] * 100, SamplingParams(n=128, max_new_tokens=None))]
    assert entries.fit_entries(plain, chosen=True, context=131_072) == plain


@pytest.mark.parametrize(
    "requests",
    [
        [asked(1000, 24, 128, top=128, start=0)],
        [asked(1000, 24, top=128, start=0)] * 128,
        [asked(10, 130_000, 2, top=20)],
        [asked(131_000, 1, top=128, start=0)],
    ],
    ids=["answers", "prompts", "tokens", "prompt"],
)
def test_more_are_refused(requests: list[GenerationRequest]) -> None:
    with pytest.raises(entries.RequestError, match=f"at most {entries.MOST_ENTRIES} log probabilities"):
        entries.fit_entries(requests, chosen=True, context=131_072)


BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a" * 50, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 9},
    "/v1/completions": {"prompt": "a" * 50, "logprobs": 5, "echo": True, "max_tokens": 50},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "max_tokens": 50,
    },
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_a_request_for_too_many_is_a_400_before_the_engine_has_it(
    path: str, client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = dict(BODIES[path])
    assert client.post(path, json=body).status_code == 200
    count = len(engine.requests)
    monkeypatch.setattr(entries, "MOST_ENTRIES", 200)
    refused = client.post(path, json=body)
    assert refused.status_code == 400 and "at most 200 log probabilities" in refused.text
    assert len(engine.requests) == count


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_response_is_ended_where_all_hold_too_many(
    path: str, stream: bool, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    monkeypatch.setattr(entries, "FEW_ENTRIES", 20)
    monkeypatch.setattr(entries, "ALL_ENTRIES", 100)
    service.engine.entries.held = 90  # somebody else's
    full = client.post(path, json=BODIES[path] | {"stream": stream})
    assert full.status_code == (200 if stream else 503)
    assert "log probabilities, the most they may" in full.text
    assert service.engine.entries.held == 90
    small = client.post("/generate", json={"text": "ab", "return_logprob": True})
    assert small.status_code == 200, "a response that holds few goes on"
    service.engine.entries.held = 0
    monkeypatch.setattr(entries, "ALL_ENTRIES", 5000)
    assert client.post(path, json=BODIES[path] | {"stream": stream}).text.count("the most they may") == 0
    assert service.engine.entries.held == 0


def test_answers_to_a_prompt_hold_its_log_probabilities_once(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    body = Generated.body

    def spied(self: Generated) -> Any:
        found.extend(self.generation.answers)
        return body(self)

    monkeypatch.setattr(Generated, "body", spied)
    wanted = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 3, "max_new_tokens": 2}}
    response = client.post("/generate", json={"text": ["abc", "abd"], **wanted})
    assert response.status_code == 200
    first, second = found[:3], found[3:]
    assert len(second) == 3
    for answers in (first, second):
        assert len(answers[0].prompt_logprobs) == 3
        assert all(answer.prompt_logprobs is answers[0].prompt_logprobs for answer in answers)
    assert first[0].prompt_logprobs is not second[0].prompt_logprobs
