"""/generate and the native endpoints."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import EOS, FakeEngine, local
from scripted import asking, ok, streamed, watched_sizes
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.server import endpoints, generate
from draftwing.server.app import create_app

KEYS = {
    "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens",
    "completion_tokens", "cached_tokens", "e2e_latency", "spec_verify_ct",
    "spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_accept_length", "spec_accept_rate",
    "spec_correct_drafts_histogram",
}  # fmt: skip


def test_single_text(client: TestClient, engine: FakeEngine) -> None:
    data = client.post("/generate", json={"text": "abc"}).json()
    assert data["text"] == "abc" and data["output_ids"] == [*engine.tokenizer.encode("abc"), EOS]
    assert set(data["meta_info"]) == KEYS
    assert data["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert data["meta_info"]["prompt_tokens"] == 3 and data["meta_info"]["completion_tokens"] == 4
    assert engine.requests[0].params.max_new_tokens == 128


def test_batch_with_params_for_each(client: TestClient, engine: FakeEngine) -> None:
    body = {
        "input_ids": [engine.tokenizer.encode("abcdef"), engine.tokenizer.encode("ghijkl")],
        "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 4, "seed": 3}],
        "rid": ["first", "second"],
    }
    data = client.put("/generate", json=body).json()
    assert [d["text"] for d in data] == ["ab", "ghij"]
    assert [d["meta_info"]["id"] for d in data] == ["first", "second"]
    assert [d["meta_info"]["finish_reason"] for d in data] == [{"type": "length", "length": n} for n in (2, 4)]
    assert engine.requests[1].params.sampling_seed == 3


def test_batch_of_one_and_n_give_lists(client: TestClient) -> None:
    assert len(client.post("/generate", json={"text": ["abc"]}).json()) == 1
    assert len(client.post("/generate", json={"text": "abc", "sampling_params": {"n": 2}}).json()) == 2


def test_stream_is_cumulative(client: TestClient, engine: FakeEngine) -> None:
    prompt = "abcdefgh" * 20
    news = streamed(client, "/generate", text=prompt, rid="mine", sampling_params={"max_new_tokens": 500})
    texts = [chunk["text"] for chunk in news]
    assert texts[-1] == prompt and len(texts) > 2
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert news[-1]["output_ids"] == [*engine.tokenizer.encode(prompt), EOS]
    assert [c["meta_info"]["finish_reason"] for c in news[:-1]] == [None] * (len(news) - 1)
    assert {c["meta_info"]["id"] for c in news} == {"mine"}
    assert all("index" not in c for c in news)


def test_streamed_batch_has_indices(client: TestClient) -> None:
    news = streamed(client, "/generate", text=["abcd", "efgh"])
    last = {c["index"]: c for c in news}
    assert {i: c["text"] for i, c in last.items()} == {0: "abcd", 1: "efgh"}
    assert all(c["meta_info"]["finish_reason"]["type"] == "stop" for c in last.values())


def test_streams_tell_of_the_prompt_first_and_last(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time else it would be as much as the prompt and all that is reported of it, for one token."""
    sizes = watched_sizes(monkeypatch, "render")
    engine.burst, engine.pause = 1, 0.05  # news that come before earlier ones are taken would be joined with them
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [1]}
    news = streamed(client, "/generate", text=["abcdefgh", "stuvw"], **wanted)
    for index in (0, 1):
        reported = [chunk["meta_info"] for chunk in news if chunk["index"] == index]
        assert len(reported) > 2
        for name in ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"):
            assert not any(name in one for one in reported[1:-1]), "an empty list would say that there are none"
            assert len(reported[0][name]) == reported[0]["prompt_tokens"] and reported[0][name] == reported[-1][name]
        assert [len(one["output_token_logprobs"]) for one in reported] == [one["completion_tokens"] for one in reported]
    of_output = [6 * chunk["meta_info"]["completion_tokens"] for chunk in news]
    of_prompt = [6 * len(chunk["meta_info"].get("input_token_logprobs", [])) for chunk in news]
    assert sizes == [a + b for a, b in zip(of_output, of_prompt, strict=True)]


@pytest.mark.slow
def test_many_log_probabilities_are_not_repeated_by_each_event(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that keeps the longest lists has all of them; the bytes of a stream grow as its answer."""
    monkeypatch.setattr(generate, "REPEATED", 40)
    engine.burst, engine.pause = 1, 0.01
    wanted = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [1]}
    reported = [one["meta_info"] for one in streamed(client, "/generate", text="abcd" * 20, **wanted)]
    names = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
    for one in reported:
        counts = {len(one[name]) if name in one else None for name in names}
        assert counts in ({None}, {one["completion_tokens"]})
        assert one["output_token_logprobs_length"] == one["completion_tokens"]
        assert counts != {None} or one["completion_tokens"] > 8, "few are in each event"
    assert len(reported[-1][names[0]]) == 81
    assert len(reported) < 20 or sum(len(one.get(names[0], [])) for one in reported) < 6 * 81 + 8**2


@pytest.mark.parametrize("answers", [1, 16])
def test_what_events_repeat_is_bounded_for_the_request(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each answer; an event for each token, one log probability a token."""
    monkeypatch.setattr(generate, "REPEATED", 320)
    length = 200
    rendered = 0
    for _ in range(answers):
        sent = generate._Sent(answers)
        for held in range(1, length + 1):
            answer = SimpleNamespace(finish_reason={} if held == length else None, logprob_entries=held)
            rendered += held * sent.next(answer)[1]  # type: ignore[arg-type]
    # Few: at most their square. Beyond: a geometric series, 1 / (1 - 1 / GROWTH) times the last, and the last again.
    assert rendered <= answers * ((320 // answers) ** 2 + 6 * length)


def test_hidden_states(client: TestClient, engine: FakeEngine) -> None:
    """Of the prompt, the last token's with it, then of each token of the answer but the last."""
    ids, size = engine.tokenizer.encode("ab"), engine.info.hidden_size
    found = ok(client, "/generate", text="ab", return_hidden_states=True)["meta_info"]
    states = found["hidden_states"]
    assert "output_token_logprobs" not in found and found["completion_tokens"] == 3
    assert states == [[[float(ids[1])] * size, [float(ids[0])] * size], [float(ids[1])] * size, [float(EOS)] * size]
    each = ok(client, "/generate", text=["ab", "ab"], return_hidden_states=[True, False], return_logprob=[False, True])
    assert each[0]["meta_info"]["hidden_states"] == states and "hidden_states" not in each[1]["meta_info"]
    last = streamed(client, "/generate", text="ab", return_hidden_states=True)[-1]
    assert last["meta_info"]["hidden_states"] == states
    for value in ("yes", [True]):
        response = client.post("/generate", json={"text": ["a", "b"], "return_hidden_states": value})
        assert response.status_code == 400 and "return_hidden_states" in response.text


def test_streams_have_hidden_states_first_and_last(client: TestClient, engine: FakeEngine) -> None:
    """So that the bytes of a stream do not grow as the square of its answer."""
    engine.burst, engine.pause, texts = 1, 0.02, ["stuvw", "abcdefgh"]
    news = streamed(client, "/generate", text=texts, return_hidden_states=True, return_logprob=True)
    for index, text in enumerate(texts):
        found = [chunk["meta_info"] for chunk in news if chunk["index"] == index]
        assert len(found) > 2 and not any("hidden_states" in one for one in found[1:-1])
        sizes = [[len(part) for part in one["hidden_states"]] for one in (found[0], found[-1])]
        width = engine.info.hidden_size
        assert sizes[1] == [len(text), *[width] * len(text)]
        assert sizes[0] == [len(text), *[width] * (found[0]["completion_tokens"] - 1)]


@pytest.mark.parametrize(("n", "text"), [(1, ["ab"]), (3, ["abc", "de"])])
def test_what_is_reported_of_a_prompt_is_made_once_for_its_answers(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, text: list[str], n: int
) -> None:
    bodies: list[Any] = []
    encode = endpoints.encode
    monkeypatch.setattr(endpoints, "encode", lambda data, large=False: bodies.append(data) or encode(data, large))
    asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    params = {"n": n, "max_new_tokens": 2}
    ok(client, "/generate", text=text, return_hidden_states=True, sampling_params=params, **asked)
    (body,), size = bodies, engine.info.hidden_size
    found = [one["meta_info"] for one in body]
    assert len(found) == n * len(text)
    for i, one in enumerate(found):
        first, ids = found[i - i % n], engine.tokenizer.encode(text[i // n])
        assert one["hidden_states"] == [[[float(t)] * size for t in (*ids[1:], ids[0])], [float(ids[1])] * size]
        assert [entry[1] for entry in one["input_token_logprobs"]] == ids
        assert one["input_token_logprobs"] is first["input_token_logprobs"]
        assert one["input_top_logprobs"] is first["input_top_logprobs"]
        pairs = zip(one["hidden_states"][0][:-1], first["hidden_states"][0][:-1], strict=True)
        assert all(state is other for state, other in pairs)


def test_stop_token_is_in_the_ids_but_not_in_the_text(client: TestClient, engine: FakeEngine) -> None:
    c = engine.tokenizer.encode("c")
    for no_trim, text in ((False, "ab"), (True, "abc")):
        sampling = {"stop_token_ids": c, "no_stop_trim": no_trim}
        data = client.post("/generate", json={"text": "abcd", "sampling_params": sampling}).json()
        assert data["text"] == text and data["output_ids"] == engine.tokenizer.encode("abc")
        assert data["meta_info"]["finish_reason"] == {"type": "stop", "matched": c[0]}


def test_snapshots_are_counted(client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage() -> dict[str, Any]:
        return client.get("/server_info").json()["internal_states"][0]["memory_usage"]

    engine_stats = engine.stats
    assert "snapshots" not in usage()
    monkeypatch.setattr(engine, "stats", lambda: {**engine_stats(), "snapshots": 4, "snapshot_bytes": 80})
    assert (usage()["snapshots"], usage()["snapshot_bytes"]) == (4, 80)


@pytest.mark.parametrize(("count", "longest"), [(32, 16_000), pytest.param(100, 1_500, marks=pytest.mark.slow)])
async def test_abort_all_ends_what_runs_and_what_waits_with_its_facts(count: int, longest: int) -> None:
    """With lengths that do not fit, as SGLang's own test asks for them, where the server cuts these."""
    engine = FakeEngine(Options(random_seed=7, allow_auto_truncate=True), burst=1, pause=0.01)
    sampling = {"temperature": 0, "max_new_tokens": longest, "ignore_eos": True}
    async with asking(create_app(local(engine), engine.tokenizer)) as client:
        body = {"text": "The capital of France is", "sampling_params": sampling}
        asked = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(count)]
        while len(engine.running) < min(count, 60):
            await asyncio.sleep(0.01)
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        for response in await asyncio.gather(*asked):
            info = response.json()["meta_info"]
            assert response.status_code == 200 and info["finish_reason"]["type"] == "abort"
            assert info["prompt_tokens"] == 24 and info["id"]
