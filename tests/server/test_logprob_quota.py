"""Log probabilities are bounded: of a request before anything is made, and of all responses while they are held."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from draftwing.core import TokenLogprobs
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server import logprob_quota
from draftwing.server import service as service_module
from draftwing.server.http import Whole
from draftwing.server.native.rendering import Generated
from draftwing.server.service import Service


def asked(prompt: int, new: int | None, n: int = 1, **wanted: Any) -> GenerationRequest:
    params = SamplingParams(n=n, max_new_tokens=new)
    return GenerationRequest("", [1] * prompt, params, logprobs=LogprobParams(**wanted))


def test_lengths_that_nobody_asked_for_leave_room_for_log_probabilities() -> None:
    requests = [asked(100, None, 4, top=20), asked(100, 2000, 2, top=1, start=0, token_ids=(5,))]
    found = logprob_quota.fit_logprobs(requests, chosen=False, context=131_072)
    room = (logprob_quota.MAX_REQUEST_LOGPROBS - 2 * 3 * 100) // (4 * 21 + 2 * 3)
    assert [one.params.max_new_tokens for one in found] == [room, 2000]
    plain = [GenerationRequest("", [1] * 100, SamplingParams(n=128, max_new_tokens=None))]
    assert logprob_quota.fit_logprobs(plain, chosen=True, context=131_072) == plain


@pytest.mark.parametrize(
    "requests",
    [
        [asked(1000, 24, 128, top=128, start=0)],
        [asked(1000, 24, top=128, start=0)] * 128,
        [asked(10, 130_000, 2, top=20)],
        [asked(131_000, 1, top=128, start=0)],
        [asked(1000, 1000, start=0, hidden=4096)],
        [asked(10, 24, 128, start=0, hidden=4096)],
        [asked(130, 24, start=0, hidden=4096)] * 10,
    ],
    ids=["answers", "prompts", "tokens", "prompt", "states", "states of answers", "states of prompts"],
)
def test_more_are_refused(requests: list[GenerationRequest]) -> None:
    with pytest.raises(
        logprob_quota.RequestError, match=f"at most {logprob_quota.MAX_REQUEST_LOGPROBS} log probabilities"
    ):
        logprob_quota.fit_logprobs(requests, chosen=True, context=131_072)


@pytest.mark.parametrize(("hidden", "prompt", "n"), [(4096, 1000, 1), (2048, 500, 2), (64, 9, 4), (5, 7, 1)])
def test_three_numbers_of_a_hidden_state_count_as_a_log_probability(hidden: int, prompt: int, n: int) -> None:
    """Of the prompt and the answer; a length that nobody asked for is what they leave."""
    position = 1 + -(-hidden // 3)
    room = logprob_quota.MAX_REQUEST_LOGPROBS // (n * position) - prompt
    (found,) = logprob_quota.fit_logprobs([asked(prompt, None, n, start=0, hidden=hidden)], False, 10**9)
    assert found.params.max_new_tokens == room
    exact = [asked(prompt, room, n, start=0, hidden=hidden)]
    assert logprob_quota.fit_logprobs(exact, chosen=True, context=10**9) == exact
    total = n * position * (prompt + room + 1)
    with pytest.raises(logprob_quota.RequestError, match=rf"^return_hidden_states: .* may have {total}: ") as refused:
        logprob_quota.fit_logprobs([asked(prompt, room + 1, n, start=0, hidden=hidden)], True, 10**9)
    assert refused.value.param == "return_hidden_states"


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
    monkeypatch.setattr(logprob_quota, "MAX_REQUEST_LOGPROBS", 200)
    refused = client.post(path, json=body)
    assert refused.status_code == 400 and "at most 200 log probabilities" in refused.text
    assert len(engine.requests) == count


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_response_is_ended_where_all_hold_too_many(
    path: str, stream: bool, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    held = service.engine.logprob_quota
    held.add("other", 690, 690)
    monkeypatch.setattr(logprob_quota, "FREE_LOGPROBS", 0)
    monkeypatch.setattr(logprob_quota, "MAX_HELD_LOGPROBS", 700)
    refused = client.post(path, json=BODIES[path] | {"stream": stream})
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1, "it is known before"
    monkeypatch.setattr(service_module, "first_logprobs", lambda _: 0)
    full = client.post(path, json=BODIES[path] | {"stream": stream})
    assert full.status_code == (200 if stream else 503)
    assert "log probabilities, the most they may" in full.text
    assert held.of == {"other": 690} and held.held == 690
    monkeypatch.setattr(logprob_quota, "MAX_HELD_LOGPROBS", 5000)
    assert client.post(path, json=BODIES[path] | {"stream": stream}).text.count("the most they may") == 0
    assert held.held == 690
    held.give_back("other", 690)


def test_who_has_its_share_is_refused_and_who_has_little_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many responses it is spread over."""
    monkeypatch.setattr(logprob_quota, "MAX_HELD_LOGPROBS", 1000)
    monkeypatch.setattr(logprob_quota, "FREE_LOGPROBS", 20)
    held = logprob_quota.LogprobQuota()
    for _ in range(50):
        held.add("alice", 10, 500)
    with pytest.raises(logprob_quota.LogprobQuotaFull, match="of this key hold 500") as refused:
        held.add("alice", 10, 500)
    assert refused.value.own
    held.add("bob", 480, 500)
    held.add("carol", 20, 500)  # 1,010 with hers
    with pytest.raises(logprob_quota.LogprobQuotaFull, match="to all requests hold 1000") as refused:
        held.add("carol", 1, 500)
    assert not refused.value.own
    held.give_back("alice", 510)
    held.check("alice", 490, 490)
    held.give_back("bob", 480)
    held.give_back("carol", 21)
    assert not held.held and not held.of
    for _ in range(100):
        held.add("", 10, 500)  # without keys all are one client, and have all of it
    with pytest.raises(logprob_quota.LogprobQuotaFull):
        held.add("", 10, 500)


@pytest.mark.parametrize("client", ["", "alice"])
def test_the_large_response_is_the_one_to_fail(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a small one that has the next token; without keys, too. What small ones may add is bounded."""
    monkeypatch.setattr(logprob_quota, "MAX_HELD_LOGPROBS", 1000)
    monkeypatch.setattr(logprob_quota, "FREE_LOGPROBS", 20)
    held, sum_ = logprob_quota.LogprobQuota(), 500 if client else 1000
    held.add(client, sum_, sum_)
    held.check(client, 20, 20)
    held.add(client, 1, 20)
    with pytest.raises(logprob_quota.LogprobQuotaFull):
        held.check(client, sum_ + 1, 1)
    with pytest.raises(logprob_quota.LogprobQuotaFull):
        held.check(client, 21, 1)
    held.add(client, sum_ // 4 - 1, 20)
    with pytest.raises(logprob_quota.LogprobQuotaFull):
        held.add(client, 1, 20)


@pytest.mark.slow
@pytest.mark.parametrize(("top", "wanted", "most"), [(0, 0, 132), (1, 0, 352), (5, 2, 520), (20, 0, 640)])
def test_what_a_position_takes_that_came_from_the_engine(top: int, wanted: int, most: int) -> None:
    """docs/security.md names it. Each comes in a message of its own."""
    one = TokenLogprobs.of(-1.5, [(-0.5 * k, k) for k in range(top)], [-2.0] * wanted)
    message = pickle.dumps(one)
    assert pickle.loads(message) == one
    taken: list[int] = []
    for _ in range(3):  # threads that earlier tests left behind may take some meanwhile
        tracemalloc.start()
        try:
            kept = [pickle.loads(message) for _ in range(2000)]
            taken.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert min(taken) / len(kept) < most


def test_a_key_that_has_its_share_is_a_429_before_anything_is_made(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, share = client.app.state.service.engine.logprob_quota, logprob_quota.MAX_HELD_LOGPROBS // logprob_quota.SHARE  # type: ignore[attr-defined]
    monkeypatch.setattr(service_module, "client_name", lambda: "alice")
    held.add("alice", share, 1)
    monkeypatch.setattr(logprob_quota, "FREE_LOGPROBS", 0)
    body = {"text": "ab", "return_logprob": True}
    refused = client.post("/generate", json=body)
    assert refused.status_code == 429 and "of this key" in refused.text and int(refused.headers["retry-after"]) >= 1
    assert not engine.requests
    assert client.post("/generate", json={"text": "ab"}).status_code == 200, "who asks for none of them is let in"
    held.give_back("alice", share)


def test_a_response_counts_until_it_is_sent(client: TestClient) -> None:
    service: Service = client.app.state.service  # type: ignore[attr-defined]
    seen: list[int] = []
    send = Whole.__call__

    async def spied(self: Whole, *args: Any) -> None:
        seen.append(service.engine.logprob_quota.held)
        await send(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Whole, "__call__", spied)
        body = {"text": "abcd", "return_logprob": True, "logprob_start_len": 0}
        assert client.post("/generate", json=body).status_code == 200
    assert seen and seen[0] >= 4 and service.engine.logprob_quota.held == 0


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
