"""`/metrics`: its text, its names and types, and its values against hand counts."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_engine import CONTEXT, FakeEngine, local
from prometheus_client import parser
from scripted import client_of, wait_until
from starlette.testclient import TestClient

from draftwing.core import Output
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.app import create_app
from draftwing.server.telemetry.metrics import SERIES, Metrics, RequestMetrics
from draftwing.server.telemetry.observer import AnswerRecord, Observer

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"
CAPACITY = 4 * CONTEXT
ENGINE = FakeEngine  # whose server has counted nothing yet

# As `Engine.stats` of an engine that has drafted with two drafters.
STATS: dict[str, Any] = {
    "running": 3, "waiting": 2, "free_tokens": 500, "cached_tokens": 300, "accept_length": 2.5,
    "output_steps": {"0": 30, "256": 10}, "output_accepted": {"0": 50, "256": 10}, "verified_rows": 40,
    "context_drafts": {"0": 20, "2048": 15}, "context_first": {"0": 12, "2048": 3},
    "committed_tokens": 100, "steps": {"prefill": 4, "plain": 5, "speculative": 6},
    "step_seconds": {"prefill": 0.4, "plain": 0.5, "speculative": 0.9}, "host_seconds": 0.125,
    "stage_seconds": {"draft": 0.1, "verify": 0.6, "commit": 0.2}, "staged_steps": 6, "queried_tokens": 80,
    "hit_tokens": 60, "prefilled_tokens": 20, "retractions": 7, "stale_rows": 1, "graph_replays": 18,
    "drafters": {
        "EAGLE": {"drafts": 9, "proposed": 60, "accepted": 14, "proposed_at": [0, 0], "accepted_at": [8, 6]},
        "prediction": {"drafts": 4, "proposed": 9, "accepted": 6, "proposed_at": [4, 3, 2], "accepted_at": [3, 2, 1]},
    },
    "drafted": {"drafts": 12, "proposed": 69, "accepted": 20, "proposed_at": [4, 3, 2], "accepted_at": [11, 8, 1]},
    "last": {"accept_length": 2.25, "accept_rate": 0.5, "gen_throughput": 80.0, "cache_hit_rate": 0.75},
    "state_slots": 30, "snapshots": 12, "snapshot_bytes": 2400, "snapshot_hits": 9, "snapshot_evictions": 3,
    "host_cache_bytes": 8000, "host_cache_tokens": 640,
    "plain_seconds": 3.0, "timed_seconds": 2.0, "speedup": 1.75, "drafts_suspended": True,
}  # fmt: skip


class Page:
    """A scrape, parsed."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in parser.text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        common = {"model_name": "echo"} | ({"engine": "0"} if name.startswith("vllm:") else {})
        return self.samples[name, frozenset((common | labels).items())]


def scrape(client: TestClient) -> Page:
    response = client.get("/metrics")
    assert response.status_code == 200
    return Page(response.text)


def value_of(requests: RequestMetrics, name: str, **labels: str) -> float | None:
    common = {"model_name": "echo"} | ({"engine": "0"} if name.startswith("vllm:") else {})
    return requests.registry.get_sample_value(name, common | labels)


async def answering(stats: dict[str, Any]) -> dict[str, Any]:
    return stats


def rendered(metrics: Metrics) -> Page:
    text, content_type = asyncio.run(metrics.render())
    assert content_type.startswith("text/plain")
    return Page(text.decode())


# -- through the application ------------------------------------------------------------------------------------------


def test_scripted_traffic(client: TestClient) -> None:
    """An echo of n bytes gives n + 1 tokens, three a step."""
    before = scrape(client)
    assert before("vllm:request_success_total", finished_reason="stop") == 0 == before("sglang:prompt_tokens_total")
    client.post("/generate", json={"text": "abcdefgh"})  # 9 tokens in 3 steps
    client.post("/v1/completions", json={"prompt": ["abc", "xy"], "n": 2, "max_tokens": 2})  # 4 answers of 2 in 1 step
    body = {"messages": [{"role": "user", "content": "y"}], "stream": True}
    prompt = len("user:y\n")
    assert client.post("/v1/chat/completions", json=body).text.endswith("data: [DONE]\n\n")  # 8 tokens in 3 steps
    assert client.post("/generate", json={"text": ""}).status_code == 400
    assert client.get("/health_generate").status_code == 200
    page = scrape(client)
    for name in ("sglang:prompt_tokens_total", "vllm:prompt_tokens_total"):
        assert page(name) == 8 + 2 * (3 + 2) + prompt
    for name in ("sglang:generation_tokens_total", "vllm:generation_tokens_total"):
        assert page(name) == 9 + 4 * 2 + prompt + 1
    assert page("vllm:request_success_total", finished_reason="stop") == 2
    assert page("vllm:request_success_total", finished_reason="length") == 4
    assert page("sglang:num_requests_total") == 6 and page("sglang:num_aborted_requests_total") == 0
    for engine in ("sglang", "vllm"):
        assert page(f"{engine}:time_to_first_token_seconds_count") == 6
        assert page(f"{engine}:e2e_request_latency_seconds_count") == 6
        assert page(f"{engine}:e2e_request_latency_seconds_sum") >= page(f"{engine}:time_to_first_token_seconds_sum")
    assert page("sglang:inter_token_latency_seconds_count") == (9 - 3) + (prompt + 1 - 3), "tokens after the first step"
    assert page("vllm:inter_token_latency_seconds_count") == 2 + 2, "steps after the first"
    gaps = page("sglang:inter_token_latency_seconds_sum")
    assert gaps == pytest.approx(page("vllm:inter_token_latency_seconds_sum")) and gaps > 0
    assert page("draftwing:http_responses_total", status="200") == 3, "probes and scrapes are not among them"
    assert page("draftwing:http_responses_total", status="400") == 1
    assert page("draftwing:engine_up") == 1
    assert page("sglang:max_total_num_tokens") == CAPACITY and page("sglang:num_running_reqs") == 0
    assert page("sglang:spec_verify_calls_total") == 0, "this engine does not speculate"


def test_an_abort() -> None:
    engine = FakeEngine(burst=1, pause=0.005)
    endless = {"text": "abc", "rid": "mine", "sampling_params": {"ignore_eos": True, "max_new_tokens": 1900}}
    with client_of(engine) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/generate", json=endless)
        wait_until(lambda: scrape(client)("vllm:generation_tokens_total") > 0)
        client.post("/abort_request", json={"rid": "mine"})
        assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        page = scrape(client)
    assert page("vllm:request_success_total", finished_reason="abort") == 1 == page("draftwing:aborts_total")
    assert page("sglang:num_aborted_requests_total") == 1 and page("sglang:num_requests_total") == 0
    assert page("sglang:e2e_request_latency_seconds_count") == 0


def test_a_dead_engine() -> None:
    """Its requests have ended by an error, and a scrape says what the server knows."""
    engine, successor = FakeEngine(), FakeEngine()
    with TestClient(create_app(local(engine, successor), engine.tokenizer), raise_server_exceptions=False) as client:
        client.post("/generate", json={"text": "abc"})
        for one in (engine, successor):
            one.crash = RuntimeError("boom")
            client.post("/generate", json={"text": "abc"})
            wait_until(lambda alive=one is engine: scrape(client)("draftwing:engine_up") == alive)
        page = scrape(client)
    assert page("draftwing:engine_up") == 0 and "sglang:num_running_reqs" not in page.families
    assert page("vllm:request_success_total", finished_reason="stop") == 1
    assert page("vllm:request_success_total", finished_reason="error") == 2
    assert page("draftwing:http_responses_total", status="503") == 2


# -- the engine's side ------------------------------------------------------------------------------------------------


def test_what_the_engine_counts() -> None:
    page = rendered(Metrics("echo", lambda: 1000, lambda: answering(STATS)))
    expected = {
        "sglang:num_running_reqs": 3, "sglang:num_queue_reqs": 2, "sglang:num_used_tokens": 200,
        "sglang:token_usage": 0.2, "sglang:gen_throughput": 80, "sglang:cache_hit_rate": 0.75,
        "sglang:spec_accept_length": 2.25, "sglang:spec_accept_rate": 0.5, "sglang:num_retracted_requests_total": 7,
        "vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2, "vllm:kv_cache_usage_perc": 0.2,
        "vllm:num_preemptions_total": 7, "vllm:prefix_cache_queries_total": 80, "vllm:prefix_cache_hits_total": 60,
        "vllm:spec_decode_num_drafts_total": 12, "vllm:spec_decode_num_draft_tokens_total": 69,
        "vllm:spec_decode_num_accepted_tokens_total": 20, "draftwing:estimated_speedup": 1.75,
        "draftwing:drafts_suspended": 1,
        "draftwing:equivalent_plain_seconds_total": 3, "draftwing:timed_decode_seconds_total": 2,
        "draftwing:host_seconds_total": 0.125, "draftwing:graph_replays_total": 18, "draftwing:retractions_total": 7,
        "draftwing:snapshots": 12, "draftwing:snapshot_bytes": 2400, "draftwing:snapshot_hits_total": 9,
        "draftwing:snapshot_evictions_total": 3,
        "draftwing:host_cache_bytes": 8000, "draftwing:host_cache_tokens_total": 640,
        "draftwing:verified_rows_total": 40, "draftwing:committed_tokens_total": 100,
    }  # fmt: skip
    assert {name: page(name) for name in expected} == expected
    accepted = [page("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert accepted == [11, 8, 1]
    for drafter, proposed, at in (("EAGLE", 60, [8, 6]), ("prediction", 9, [3, 2, 1])):
        assert page("draftwing:spec_proposed_tokens_total", drafter=drafter) == proposed
        for i, count in enumerate(at):
            name = "draftwing:spec_accepted_tokens_per_pos_total"
            assert page(name, drafter=drafter, position=str(i)) == count
    per_depth = {dict(labels)["drafter"] for name, labels in page.samples if "proposed_tokens_per_pos" in name}
    assert per_depth == {"prediction"}, "of EAGLE's trees the depths are not known"
    for start, steps, accepted in (("0", 30, 50), ("256", 10, 10)):
        assert page("draftwing:output_verifications_total", **{"from": start}) == steps
        assert page("draftwing:output_accepted_tokens_total", **{"from": start}) == accepted
    for start, drafts, right in (("0", 20, 12), ("2048", 15, 3)):
        assert page("draftwing:context_drafts_total", **{"from": start}) == drafts
        assert page("draftwing:context_first_accepted_total", **{"from": start}) == right
    assert page("draftwing:steps_total", kind="speculative") == 6
    assert page("draftwing:step_seconds_total", kind="plain") == 0.5
    assert page("draftwing:stage_seconds_total", stage="verify") == 0.6


def test_without_speculation() -> None:
    stats = STATS | {"drafters": {}, "speedup": None, "snapshots": None}
    page = rendered(Metrics("echo", lambda: 1000, lambda: answering(stats), speculative=False))
    assert page("sglang:spec_accept_length") == 0 == page("sglang:spec_accept_rate")
    assert "draftwing:estimated_speedup" not in page.families
    assert "draftwing:snapshots" not in page.families, "the model has no recurrent layers"
    assert not any(name.startswith("vllm:spec") for name in page.families)


# -- the requests' side -----------------------------------------------------------------------------------------------


def test_latencies() -> None:
    """Tokens at 0.5 s, three more at 0.56 s, the last one at 0.66 s."""
    clock = [10.0]
    requests = RequestMetrics("echo")
    observer = Observer([requests], clock=lambda: clock[0])
    params = SamplingParams(grammar=Grammar("regex", "a+"))
    observer.begin("job", [GenerationRequest("u", [1, 2, 3], params)])
    for at, ids, reason in (
        (10.5, [7], None),
        (10.5625, [7, 8, 9], None),
        (10.625, [], None),
        (10.65625, [1], {"type": "stop", "matched": 1}),
    ):
        clock[0] = at
        observer.output(Output("u", ids, reason, {"spec_verify_ct": 2} if reason else {}))
    observer.output(Output("stranger", [1], {"type": "stop"}))
    observer.lost()

    def found(name: str) -> tuple[float | None, float | None]:
        return value_of(requests, f"{name}_count"), value_of(requests, f"{name}_sum")

    for engine in ("sglang:", "vllm:"):
        assert found(engine + "time_to_first_token_seconds") == (1, 0.5)
        assert found(engine + "e2e_request_latency_seconds") == (1, 0.65625)
    assert found("sglang:inter_token_latency_seconds") == (4, pytest.approx(0.15625))
    assert found("vllm:inter_token_latency_seconds") == (2, 0.15625)
    assert value_of(requests, "sglang:spec_verify_calls_total") == 2
    assert value_of(requests, "sglang:num_so_requests_total") == 1
    assert value_of(requests, "draftwing:constrained_requests_total", kind="regex") == 1
    assert value_of(requests, "vllm:request_success_total", finished_reason="error") == 0


def test_a_duration_that_is_a_bound_belongs_below_it() -> None:
    requests = RequestMetrics("echo")
    answer = AnswerRecord(GenerationRequest("u", [1], SamplingParams()), arrived=0.0)
    requests.progressed(answer, None, 0.1, 1)
    requests.progressed(answer, None, 0.15, 1)
    counts = [
        value_of(requests, "vllm:time_to_first_token_seconds_bucket", le=bound) for bound in ("0.1", "0.2", "+Inf")
    ]
    assert counts == [1, 2, 2]


# -- names and text ---------------------------------------------------------------------------------------------------


def test_names_and_types() -> None:
    found = {series.name.removesuffix("_total"): series.kind for series in SERIES}
    assert len(found) == len(SERIES)
    for series in SERIES:
        assert re.fullmatch(r"[a-z]+:[a-z0-9_]+", series.name)
        assert series.name.endswith("_total") == (series.kind == "counter")
    families = rendered(Metrics("echo", lambda: 1000, lambda: answering(STATS))).families
    assert {name: families[name].type for name in found if name in families} == {
        name: kind for name, kind in found.items() if name in families
    }
    assert len(families) > 40


def test_names_are_the_same_for_every_scraper(client: TestClient) -> None:
    def samples(accept: str) -> set[str]:
        response = client.get("/metrics", headers={"accept": accept})
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return set(re.findall(r"^[a-z_:]+", response.text, re.MULTILINE))

    plain = samples("text/plain;version=0.0.4")
    assert {"vllm:num_requests_running", "draftwing:engine_up"} <= plain
    for accept in (
        "application/openmetrics-text; version=1.0.0", "",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3",
    ):  # fmt: skip
        assert samples(accept) == plain


def test_a_model_name_cannot_break_the_text() -> None:
    name = 'a "quoted"\nname\\'
    text, _ = asyncio.run(Metrics(name, lambda: 1000, lambda: answering(STATS)).render())
    for family in parser.text_string_to_metric_families(text.decode()):
        assert {sample.labels["model_name"] for sample in family.samples} == {name}


def test_the_page_lists_them_all() -> None:
    rows = re.findall(
        r"^\| `([a-z]+:[^`{]+)(?:\{([^}]*)\})?` \| (\w+) \| (.+) \|$", PAGE.read_text("utf8"), re.MULTILINE
    )
    assert [(name, tuple(filter(None, labels.split(", "))), kind, help) for name, labels, kind, help in rows] == [
        (series.name, series.labels, series.kind, series.help) for series in SERIES
    ]
