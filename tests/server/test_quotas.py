"""How many answers may wait, what they cost, and that they are let go of together."""

from __future__ import annotations

import asyncio
import pickle
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, local
from scripted import asking, keys_file
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.core import Output, TokenLogprobs
from draftwing.engine.process.link import Abort
from draftwing.requests.request import GenerationRequest, LogprobParams
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server import dispatch, quotas
from draftwing.server import service as service_module
from draftwing.server.app import create_app
from draftwing.server.dispatch import MAX_REQUESTS, PAUSE_SECONDS, DispatchQueue
from draftwing.server.edge.keys import client_name
from draftwing.server.generate import Generated
from draftwing.server.http import Whole
from draftwing.server.quotas import AdmissionQuota, QueueFull
from draftwing.server.service import Service

KEYS = '[alice]\nkey = "sk-alice"\n\n[bob]\nkey = "sk-bob"\n\n[carol]\nkey = "sk-carol"\nrequests_per_minute = 10\n'


def asked(uid: str, client: str) -> GenerationRequest:
    return GenerationRequest(uid, [1], SamplingParams(), client=client, name="x")


def test_answers_of_a_client_and_of_all() -> None:
    waiting = AdmissionQuota(max_answers=10, max_per_key=4)
    for client in "abc":
        for i in range(3):
            waiting.add([asked(client + str(i), client)])
    with waiting.reserve("a", 1), pytest.raises(QueueFull, match="4 answers of this key wait"), waiting.reserve("a", 1):
        pass  # what is being made counts
    with pytest.raises(QueueFull, match=r"3 answers of this key wait, of at most 4 .*for 2 more") as own:
        waiting.reserve("a", 2).__enter__()
    with pytest.raises(QueueFull, match=r"9 answers wait, of at most 10 .*for 2 more") as others:
        waiting.reserve("", 2).__enter__()  # without keys nobody has a limit of its own
    assert own.value.own and not others.value.own
    waiting.started("a0")
    waiting.started("a0")
    with waiting.reserve("a", 2):
        pass
    for client in "abc":
        for i in range(3):
            waiting.started(client + str(i))
    assert not len(waiting) and not waiting._counts and not waiting._made


class Silent(FakeEngine):
    """Answers the requests of bob alone, and none of health checks; the others wait for ever."""

    def _advance(self, uid: str) -> Output:
        request, _, _ = self.running[uid]
        return super()._advance(uid) if request.client == "bob" else Output(uid, [])


def options(folder: Path, **more: Any) -> Options:
    return Options(random_seed=7, api_key_file=keys_file(folder, KEYS), **more)


def test_who_asks_for_too_much_waits_and_others_do_not(tmp_path: Path) -> None:
    engine = Silent(options(tmp_path, max_queued_requests=20, max_queued_requests_per_key=8))
    linked = local(engine)

    async def run() -> None:
        async with asking(create_app(linked, engine.tokenizer)) as client:
            await scenes(client)

    async def scenes(client: httpx.AsyncClient) -> None:
        def ask(key: str, n: int) -> Any:
            body = {"prompt": ["ab"] * 2, "n": n // 2, "max_tokens": 2}
            headers = {"authorization": f"Bearer sk-{key}"}
            return asyncio.ensure_future(client.post("/v1/completions", json=body, headers=headers))

        async def waits(count: int) -> None:
            while len(linked.quota) != count:
                await asyncio.sleep(0.001)

        too_many = await ask("alice", 10)
        assert too_many.status_code == 400 and "at most 8 answers" in too_many.text
        first = ask("alice", 6)
        await waits(6)
        refused = await ask("alice", 4)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "--max-queued-requests-per-key" in refused.json()["message"]
        assert (await ask("bob", 8)).status_code == 200

        async def asked_wrongly() -> set[int]:
            headers = {"authorization": "Bearer sk-alice", "content-type": "application/json"}
            paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")
            return {(await client.post(path, content=b"no JSON", headers=headers)).status_code for path in paths}

        assert await asked_wrongly() == {400}
        more = ask("alice", 2)
        await waits(8)
        assert await asked_wrongly() == {429}, "without room for one more, nobody looks at what is asked"
        others = [more, ask("carol", 8)]
        await waits(16)
        refused = await ask("bob", 6)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "at most 20 (--max-queued-requests)" in refused.json()["message"]
        # carol's eight answers were eight requests of her ten in a minute.
        more = ask("carol", 4)
        assert (await more).status_code in (429, 503)
        for _ in range(2):
            refused = await ask("carol", 2)
        assert refused.status_code == 429
        # The engine is asked, and gives tokens to somebody: that is health enough.
        health = asyncio.ensure_future(client.get("/health_generate"))
        while not any(request.client == "/health_generate" for request in engine.requests):
            await asyncio.sleep(0.001)
        assert not health.done() and not engine.requests[-1].learn, "nothing is to be learnt or checked of it"
        assert (await ask("bob", 2)).status_code == 200
        assert (await health).status_code == 200
        for one in (first, *others):
            one.cancel()
        await waits(0)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert len(engine.aborted) == 6 + 2 + 8 + 1  # with that of the health check


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"]
)
def test_what_is_prepared_counts_as_waiting(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a key could have any number of expressions compiled and texts tokenized at once."""
    engine = FakeEngine(options(tmp_path, max_queued_requests=20, max_queued_requests_per_key=4))
    linked, begun = local(engine), list[str]()
    sampling, go = Service.sampling, asyncio.Event()

    async def slow(service: Service, body: Any, check: Any) -> Any:
        begun.append(client_name())
        await go.wait()
        return await sampling(service, body, check)

    monkeypatch.setattr(Service, "sampling", slow)
    messages = [{"role": "user", "content": "ab"}]
    prompt = {"/v1/completions": {"prompt": "ab"}, "/v1/responses": {"input": "ab"}, "/generate": {"text": "ab"}}
    body = prompt.get(path, {"model": "x", "messages": messages, "max_tokens": 2})

    async def run() -> None:
        async with asking(create_app(linked, engine.tokenizer)) as client:

            def ask(key: str) -> Any:
                headers = {"authorization": f"Bearer sk-{key}"}
                return asyncio.ensure_future(client.post(path, json=body, headers=headers))

            first = [ask("alice") for _ in range(4)]
            while len(begun) < 4:
                await asyncio.sleep(0.001)
            refused = await ask("alice")
            assert refused.status_code == 429 and "4 answers of this key wait" in refused.text
            others = ask("bob")
            while len(begun) < 5:
                await asyncio.sleep(0.001)
            go.set()
            assert [(await one).status_code for one in [*first, others]] == [200] * 5, "all of a key's room"
            assert (await ask("alice")).status_code == 200
            wrong = await client.post(path, json={}, headers={"authorization": "Bearer sk-alice"})
            assert wrong.status_code == 400
            assert not linked.quota._made and not linked.quota._counts

    asyncio.run(asyncio.wait_for(run(), 20))
    assert begun == ["alice"] * 4 + ["bob", "alice"]


def test_answers_that_were_left_count_for_a_while() -> None:
    """Among those of their key alone: nobody else has less room for that."""
    now = [0.0]
    waiting = AdmissionQuota(max_answers=10, max_per_key=4, clock=lambda: now[0])
    waiting.add([asked(f"a{i}", "a") for i in range(3)])
    waiting.started("a2")
    waiting.abandoned(["a0", "a1", "a2", "of another time"])
    for uid in ("a0", "a1"):
        waiting.started(uid)  # the engine has let go
    waiting.check("a", 2)
    waiting.check("b", 4)
    with pytest.raises(QueueFull, match="2 answers of this key wait"):
        waiting.check("a", 3)
    now[0] = 9.9
    waiting.abandoned([])
    with pytest.raises(QueueFull):
        waiting.check("a", 3)
    now[0] = 10.1
    waiting.check("a", 4)
    assert not waiting._counts and not waiting._abandoned


async def test_requests_are_sent_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part at once, one of another client too; what is dropped before its part is never sent."""
    monkeypatch.setattr(dispatch, "PAUSE_SECONDS", 0.0)
    sent: list[list[str]] = []

    box = DispatchQueue(lambda requests: sent.append([request.uid for request in requests]))
    box.put([asked(f"a{i}", "a") for i in range(200)])
    box.put([asked("b0", "b")])
    assert [len(part) for part in sent] == [64, 1]
    box.put([asked("a200", "a")])
    assert box.drop(["a0", "b0", *(f"a{i}" for i in range(64, 130)), "unknown"]) == [f"a{i}" for i in range(64, 130)]
    while len(sent) < 4:
        await asyncio.sleep(0)
    assert sent[2:] == [[f"a{i}" for i in range(130, 194)], [f"a{i}" for i in range(194, 201)]]
    box.put([asked(f"a{i}", "a") for i in range(300, 400)])
    assert len(box.drop([f"a{i}" for i in range(400)])) == 36
    box.put([asked("a500", "a")])
    while len(sent) < 6:
        await asyncio.sleep(0)
    assert sent[5:] == [["a500"]] and not box._unsent and not box._pauses

    # Who takes back all that waits, and asks again, has no more messages in a pause than others.
    for turn in range(5):
        box.put([asked(f"{turn} {i}", "a") for i in range(100)])
        box.drop([f"{turn} {i}" for i in range(100)])
    assert len(sent) == 7 and len(box._pauses) == 1
    box.clear()
    assert not box._pauses


def test_answers_by_the_thousand_are_made_and_left_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have turns of the event loop meanwhile, and nine tenths of the time; no message is large but the one that
    ends them all."""
    rests: list[float] = []
    engine = FakeEngine()
    linked = local(engine)
    sent: list[Any] = []
    linked.link.send = sent.append  # type: ignore[method-assign]

    async def run() -> int:
        service, turns = Service(linked, engine.tokenizer), 0
        linked.start()
        sleep = asyncio.sleep

        async def rest(seconds: float) -> None:
            mine = seconds == service_module._PAUSE_SECONDS
            rests.extend([seconds] * mine)
            await sleep(0 if mine else seconds)

        # A time that no other event loop of this process sleeps for.
        monkeypatch.setattr(service_module, "_PAUSE_SECONDS", 0.0107)
        monkeypatch.setattr(service_module.asyncio, "sleep", rest)

        async def tick() -> None:
            nonlocal turns
            while True:
                turns += 1
                await sleep(0)

        ticking = asyncio.ensure_future(tick())
        await sleep(0)
        turns = 0
        request = GenerationRequest("", [1, 2], SamplingParams(n=128))
        (await service.submit([request], Asking())).close()
        assert not rests, "nobody else is served"
        await service.submit([request._replace(params=SamplingParams())], Asking())
        await sleep(2 * PAUSE_SECONDS)  # until more may be sent of the client, half of whose requests are dropped
        sent.clear()
        before = len(linked.quota)
        generation = await service.submit([request] * 16, Asking())
        made = turns
        assert [len(message) for message in sent if isinstance(message, list)] == [MAX_REQUESTS], "the rest goes later"
        generation.close()
        assert len(linked.quota) == before + MAX_REQUESTS, "they count until the engine has let go of them"
        ticking.cancel()
        return made

    class Asking:
        predicted = asked_id = body = cache_salt = priority = length = speculative = learnable = lora = slot = None
        ignored = ()
        id_prefix, traced, wants_receipt, place = "", False, False, ExitStack()

        def adapters(self, prompts: int) -> list[None]:
            return [None] * prompts

    assert asyncio.run(run()) >= 2048 / 64
    assert len(rests) >= 2048 / 64 and sum(rests) >= 2048 * 0.0003, "each takes some 0.03 ms"
    (requests,) = [message for message in sent if isinstance(message, list)]
    (abort,) = [message for message in sent if isinstance(message, Abort)]
    assert abort.uids == tuple(request.uid for request in requests)[::-1], "the newest first"


def asked_logprobs(prompt: int, new: int | None, n: int = 1, **wanted: Any) -> GenerationRequest:
    params = SamplingParams(n=n, max_new_tokens=new)
    return GenerationRequest("", [1] * prompt, params, logprobs=LogprobParams(**wanted))


def test_lengths_that_nobody_asked_for_leave_room_for_log_probabilities() -> None:
    requests = [asked_logprobs(100, None, 4, top=20), asked_logprobs(100, 2000, 2, top=1, start=0, token_ids=(5,))]
    found = quotas.fit_logprobs(requests, chosen=False, context=131_072)
    room = (quotas.MAX_REQUEST_LOGPROBS - 2 * 3 * 100) // (4 * 21 + 2 * 3)
    assert [one.params.max_new_tokens for one in found] == [room, 2000]
    plain = [GenerationRequest("", [1] * 100, SamplingParams(n=128, max_new_tokens=None))]
    assert quotas.fit_logprobs(plain, chosen=True, context=131_072) == plain


@pytest.mark.parametrize(
    "requests",
    [
        [asked_logprobs(1000, 24, 128, top=128, start=0)],
        [asked_logprobs(1000, 24, top=128, start=0)] * 128,
        [asked_logprobs(10, 130_000, 2, top=20)],
        [asked_logprobs(131_000, 1, top=128, start=0)],
        [asked_logprobs(1000, 1000, start=0, hidden=4096)],
        [asked_logprobs(10, 24, 128, start=0, hidden=4096)],
        [asked_logprobs(130, 24, start=0, hidden=4096)] * 10,
    ],
    ids=["answers", "prompts", "tokens", "prompt", "states", "states of answers", "states of prompts"],
)
def test_more_are_refused(requests: list[GenerationRequest]) -> None:
    with pytest.raises(quotas.RequestError, match=f"at most {quotas.MAX_REQUEST_LOGPROBS} log probabilities"):
        quotas.fit_logprobs(requests, chosen=True, context=131_072)


@pytest.mark.parametrize(("hidden", "prompt", "n"), [(4096, 1000, 1), (2048, 500, 2), (64, 9, 4), (5, 7, 1)])
def test_three_numbers_of_a_hidden_state_count_as_a_log_probability(hidden: int, prompt: int, n: int) -> None:
    """Of the prompt and the answer; a length that nobody asked_logprobs for is what they leave."""
    position = 1 + -(-hidden // 3)
    room = quotas.MAX_REQUEST_LOGPROBS // (n * position) - prompt
    (found,) = quotas.fit_logprobs([asked_logprobs(prompt, None, n, start=0, hidden=hidden)], False, 10**9)
    assert found.params.max_new_tokens == room
    exact = [asked_logprobs(prompt, room, n, start=0, hidden=hidden)]
    assert quotas.fit_logprobs(exact, chosen=True, context=10**9) == exact
    total = n * position * (prompt + room + 1)
    with pytest.raises(quotas.RequestError, match=rf"^return_hidden_states: .* may have {total}: ") as refused:
        quotas.fit_logprobs([asked_logprobs(prompt, room + 1, n, start=0, hidden=hidden)], True, 10**9)
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
    monkeypatch.setattr(quotas, "MAX_REQUEST_LOGPROBS", 200)
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
    monkeypatch.setattr(quotas, "FREE_LOGPROBS", 0)
    monkeypatch.setattr(quotas, "MAX_HELD_LOGPROBS", 700)
    refused = client.post(path, json=BODIES[path] | {"stream": stream})
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1, "it is known before"
    monkeypatch.setattr(service_module, "first_logprobs", lambda _: 0)
    full = client.post(path, json=BODIES[path] | {"stream": stream})
    assert full.status_code == (200 if stream else 503)
    assert "log probabilities, the most they may" in full.text
    assert held.of == {"other": 690} and held.held == 690
    monkeypatch.setattr(quotas, "MAX_HELD_LOGPROBS", 5000)
    assert client.post(path, json=BODIES[path] | {"stream": stream}).text.count("the most they may") == 0
    assert held.held == 690
    held.give_back("other", 690)


def test_who_has_its_share_is_refused_and_who_has_little_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many responses it is spread over."""
    monkeypatch.setattr(quotas, "MAX_HELD_LOGPROBS", 1000)
    monkeypatch.setattr(quotas, "FREE_LOGPROBS", 20)
    held = quotas.LogprobQuota()
    for _ in range(50):
        held.add("alice", 10, 500)
    with pytest.raises(quotas.LogprobQuotaFull, match="of this key hold 500") as refused:
        held.add("alice", 10, 500)
    assert refused.value.own
    held.add("bob", 480, 500)
    held.add("carol", 20, 500)  # 1,010 with hers
    with pytest.raises(quotas.LogprobQuotaFull, match="to all requests hold 1000") as refused:
        held.add("carol", 1, 500)
    assert not refused.value.own
    held.give_back("alice", 510)
    held.check("alice", 490, 490)
    held.give_back("bob", 480)
    held.give_back("carol", 21)
    assert not held.held and not held.of
    for _ in range(100):
        held.add("", 10, 500)  # without keys all are one client, and have all of it
    with pytest.raises(quotas.LogprobQuotaFull):
        held.add("", 10, 500)


@pytest.mark.parametrize("client", ["", "alice"])
def test_the_large_response_is_the_one_to_fail(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a small one that has the next token; without keys, too. What small ones may add is bounded."""
    monkeypatch.setattr(quotas, "MAX_HELD_LOGPROBS", 1000)
    monkeypatch.setattr(quotas, "FREE_LOGPROBS", 20)
    held, sum_ = quotas.LogprobQuota(), 500 if client else 1000
    held.add(client, sum_, sum_)
    held.check(client, 20, 20)
    held.add(client, 1, 20)
    with pytest.raises(quotas.LogprobQuotaFull):
        held.check(client, sum_ + 1, 1)
    with pytest.raises(quotas.LogprobQuotaFull):
        held.check(client, 21, 1)
    held.add(client, sum_ // 4 - 1, 20)
    with pytest.raises(quotas.LogprobQuotaFull):
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
    held, share = client.app.state.service.engine.logprob_quota, quotas.MAX_HELD_LOGPROBS // quotas.SHARE  # type: ignore[attr-defined]
    monkeypatch.setattr(service_module, "client_name", lambda: "alice")
    held.add("alice", share, 1)
    monkeypatch.setattr(quotas, "FREE_LOGPROBS", 0)
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
