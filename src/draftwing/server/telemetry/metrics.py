"""`GET /metrics`: what Prometheus asks for, under the names of SGLang and of vLLM where they have one.

Requests are counted here, as the engine answers them; what the engine counts itself is asked of it, once for each
scrape. `SERIES` lists everything there is. A name of SGLang or vLLM means what it means there: `sglang:` token totals
grow when a request ends, `vllm:` ones as tokens come; SGLang spreads the time between two steps over the tokens of the
step, vLLM does not.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from draftwing.engine.process.link import EngineDead
from draftwing.server.telemetry.observer import AnswerRecord, HttpRecord, Idle

ASK_SECONDS = 0.5  # how long a scrape waits for the engine before it says what it knew
LATENCY = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, *LATENCY)
BETWEEN_TOKENS = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4,
    0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
REASONS = ("stop", "length", "abort", "error")


class Series(NamedTuple):
    """help: also the words of the documentation."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram, without infinity


def _c(name: str, help: str, *labels: str) -> Series:
    return Series(name, "counter", help, labels)


def _g(name: str, help: str, *labels: str) -> Series:
    return Series(name, "gauge", help, labels)


def _h(name: str, help: str, bounds: tuple[float, ...]) -> Series:
    return Series(name, "histogram", help, (), bounds)


SERIES = (
    _g("sglang:num_running_reqs", "requests that run"),
    _g("sglang:num_queue_reqs", "requests that wait"),
    _g("sglang:num_used_tokens", "tokens in the KV pool that running requests hold"),
    _g("sglang:max_total_num_tokens", "tokens that the KV pool can hold"),
    _g("sglang:token_usage", "share of the KV pool that running requests hold"),
    _g("sglang:gen_throughput", "tokens per second over the last 40 decode steps; 0 when nothing runs"),
    _g("sglang:cache_hit_rate", "share of the last prefill's prompt tokens that was cached"),
    _c("sglang:prompt_tokens_total", "prompt tokens of requests that have ended"),
    _c("sglang:generation_tokens_total", "generated tokens of requests that have ended"),
    _c("sglang:num_requests_total", "requests that have ended, but for aborted ones"),
    _c("sglang:num_so_requests_total", "requests with a grammar that have ended, but for aborted ones"),
    _c("sglang:num_aborted_requests_total", "requests that were aborted"),
    _c("sglang:num_retracted_requests_total", "times that a running request went back to the queue for want of memory"),
    _h("sglang:time_to_first_token_seconds", "from the request's arrival to its first token", FIRST_TOKEN),
    _h(
        "sglang:inter_token_latency_seconds",
        "between tokens, the time of a step spread over its tokens",
        BETWEEN_TOKENS,
    ),
    _h(
        "sglang:e2e_request_latency_seconds",
        "from the request's arrival to its last token",
        (*LATENCY, 600, 1200, 1800, 2400),
    ),
    _g("sglang:spec_accept_length", "tokens per row and step over the last 40 decode steps; 0 without speculation"),
    _g("sglang:spec_accept_rate", "accepted drafts per proposed one over the last 40 decode steps; all branches count"),
    _c("sglang:spec_verify_calls_total", "verify steps of requests that have ended"),
    _g("vllm:num_requests_running", "requests that run"),
    _g("vllm:num_requests_waiting", "requests that wait"),
    _g("vllm:kv_cache_usage_perc", "share of the KV pool that running requests hold; 1 is all of it"),
    _c("vllm:num_preemptions_total", "times that a running request went back to the queue for want of memory"),
    _c("vllm:prefix_cache_queries_total", "prompt tokens that were looked up in the prefix cache"),
    _c("vllm:prefix_cache_hits_total", "prompt tokens that were found in the prefix cache"),
    _c("vllm:prompt_tokens_total", "prompt tokens, when the first token comes"),
    _c("vllm:generation_tokens_total", "generated tokens, as they come"),
    _c("vllm:request_success_total", "requests that have ended, by how", "finished_reason"),
    _h("vllm:time_to_first_token_seconds", "from the request's arrival to its first token", FIRST_TOKEN),
    _h("vllm:inter_token_latency_seconds", "between two steps that gave tokens, however many", BETWEEN_TOKENS),
    _h(
        "vllm:e2e_request_latency_seconds",
        "from the request's arrival to its last token",
        (*LATENCY, 600, 1200, 1800, 2400),
    ),
    _c("vllm:spec_decode_num_drafts_total", "drafts, one for each row and step in which any token was proposed"),
    _c("vllm:spec_decode_num_draft_tokens_total", "proposed tokens: all live nodes of the trees"),
    _c("vllm:spec_decode_num_accepted_tokens_total", "accepted drafts"),
    _c("vllm:spec_decode_num_accepted_tokens_per_pos_total", "accepted drafts by depth, from 0", "position"),
    _g("draftwing:engine_up", "1 while the engine's process lives"),
    _g("draftwing:engine_stats_age_seconds", "age of the engine's numbers; a moment, unless it is too busy to answer"),
    _c("draftwing:http_responses_total", "responses by status; 499: the client went away", "status"),
    _c("draftwing:constrained_requests_total", "requests with a grammar that were let in, by its kind", "kind"),
    _c("draftwing:aborts_total", "requests that were aborted, by client or server"),
    _c("draftwing:retractions_total", "times that a running request went back to the queue for want of memory"),
    _c("draftwing:stale_rows_total", "rows of steps whose request had ended when the result came"),
    _c("draftwing:spec_drafts_total", "drafts, one for each row and step in which any token was proposed", "drafter"),
    _c("draftwing:spec_proposed_tokens_total", "proposed tokens: all live nodes of the trees", "drafter"),
    _c("draftwing:spec_accepted_tokens_total", "accepted drafts", "drafter"),
    _c("draftwing:spec_proposed_tokens_per_pos_total", "proposed tokens by depth, from 0", "drafter", "position"),
    _c("draftwing:spec_accepted_tokens_per_pos_total", "accepted drafts by depth, from 0", "drafter", "position"),
    _c("draftwing:verified_rows_total", "rows of decode steps: one for each request and step"),
    _c("draftwing:committed_tokens_total", "tokens that decode steps gave, past the end of an answer included"),
    _c("draftwing:prefill_tokens_total", "prompt tokens that were computed"),
    _c("draftwing:steps_total", "steps: of prompts (prefill), of one token per row (plain), with drafts", "kind"),
    _c("draftwing:step_seconds_total", "seconds of steps, launch to result", "kind"),
    _c("draftwing:host_seconds_total", "seconds between a result and the next launch, while there was work"),
    _c("draftwing:stage_seconds_total", "seconds of the stages of those steps that were measured", "stage"),
    _c("draftwing:staged_steps_total", "steps whose stages were measured"),
    _c("draftwing:graph_replays_total", "CUDA graphs, or on a CPU recorded stages, that were replayed"),
    _c(
        "draftwing:timed_decode_seconds_total", "seconds of decode steps of batch sizes that plain steps were timed for"
    ),
    _c("draftwing:equivalent_plain_seconds_total", "seconds that plain steps would have taken for the same tokens"),
    _g(
        "draftwing:estimated_speedup",
        "equivalent plain seconds per timed one, over the last 40 decode steps; absent without any",
    ),
)

# Totals that the engine keeps, by their names in `Engine.stats`.
_ENGINE_COUNTERS = {
    "sglang:num_retracted_requests_total": "retractions",
    "vllm:num_preemptions_total": "retractions",
    "vllm:prefix_cache_queries_total": "queried_tokens",
    "vllm:prefix_cache_hits_total": "hit_tokens",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "proposed",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "draftwing:retractions_total": "retractions",
    "draftwing:stale_rows_total": "stale_rows",
    "draftwing:verified_rows_total": "verified_rows",
    "draftwing:committed_tokens_total": "committed_tokens",
    "draftwing:prefill_tokens_total": "prefilled_tokens",
    "draftwing:host_seconds_total": "host_seconds",
    "draftwing:staged_steps_total": "staged_steps",
    "draftwing:graph_replays_total": "graph_replays",
    "draftwing:timed_decode_seconds_total": "timed_seconds",
    "draftwing:equivalent_plain_seconds_total": "plain_seconds",
}


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, by upper bound."""
        out, total = [], 0
        for bound, count in zip([*map(float, self._bounds), float("inf")], self._counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return out


class RequestMetrics(Idle):
    """What is known of requests: a watcher."""

    def __init__(self, speculative: bool = True) -> None:
        """speculative: whether the engine drafts for everybody."""
        self._speculative = speculative
        self.values: dict[str, dict[tuple[str, ...], float]] = defaultdict(lambda: defaultdict(float))
        self.histograms = {series.name: Histogram(series.bounds) for series in SERIES if series.kind == "histogram"}
        for series in SERIES:  # totals start at 0, so that the first request is an increase
            if series.kind == "counter" and not series.labels and series.name not in _ENGINE_COUNTERS:
                self.values[series.name][()] = 0
        for reason in REASONS:
            self.values["vllm:request_success_total"][(reason,)] = 0

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        self.values[name][labels] += amount

    def began(self, answer: AnswerRecord) -> None:
        grammar = answer.request.params.grammar
        if grammar is not None:
            self.add("draftwing:constrained_requests_total", 1, grammar.kind)

    def progressed(self, answer: AnswerRecord, before: float | None, now: float, tokens: int) -> None:
        self.add("vllm:generation_tokens_total", tokens)
        if before is None:
            self.add("vllm:prompt_tokens_total", len(answer.request.prompt_ids))
            self._observe("time_to_first_token_seconds", now - answer.arrived)
            return
        self.histograms["sglang:inter_token_latency_seconds"].observe((now - before) / tokens, tokens)
        self.histograms["vllm:inter_token_latency_seconds"].observe(now - before)

    def finished(self, answer: AnswerRecord) -> None:
        reason = answer.reason or "error"
        self.add("vllm:request_success_total", 1, reason)
        self.add("sglang:prompt_tokens_total", len(answer.request.prompt_ids))
        self.add("sglang:generation_tokens_total", answer.tokens)
        if self._speculative or answer.request.prediction:
            self.add("sglang:spec_verify_calls_total", answer.meta.get("spec_verify_ct", 0))
        if reason == "abort":
            self.add("sglang:num_aborted_requests_total")
            self.add("draftwing:aborts_total")
            return
        self.add("sglang:num_requests_total")
        if answer.request.params.grammar is not None:
            self.add("sglang:num_so_requests_total")
        assert answer.ended is not None
        self._observe("e2e_request_latency_seconds", answer.ended - answer.arrived)

    def responded(self, record: HttpRecord) -> None:
        self.add("draftwing:http_responses_total", 1, str(record.status))

    def _observe(self, name: str, seconds: float) -> None:
        for engine in ("sglang:", "vllm:"):
            self.histograms[engine + name].observe(seconds)


# -- what the engine says ---------------------------------------------------------------------------------------------

Sample = tuple[str, tuple[str, ...], float]


def engine_samples(stats: dict[str, Any], capacity: int) -> Iterator[Sample]:
    """Series of `Engine.stats`, and of what is missing there none. capacity: tokens in the KV pool."""
    drafters: dict[str, dict[str, Any]] = stats.get("drafters", {})
    last = stats.get("last", {})
    totals = {key: sum(one[key] for one in drafters.values()) for key in ("drafts", "proposed", "accepted") if drafters}
    flat = stats | totals
    for name, key in _ENGINE_COUNTERS.items():
        if key in flat:
            yield name, (), flat[key]
    used = capacity - stats["free_tokens"] - stats["cached_tokens"]
    gauges = {
        "sglang:num_running_reqs": stats["running"],
        "sglang:num_queue_reqs": stats["waiting"],
        "sglang:num_used_tokens": used,
        "sglang:max_total_num_tokens": capacity,
        "sglang:token_usage": used / capacity,
        "sglang:gen_throughput": last.get("gen_throughput"),
        "sglang:cache_hit_rate": last.get("cache_hit_rate"),
        "sglang:spec_accept_length": last.get("accept_length", 0.0) if drafters else 0.0,
        "sglang:spec_accept_rate": last.get("accept_rate", 0.0) if drafters else 0.0,
        "vllm:num_requests_running": stats["running"],
        "vllm:num_requests_waiting": stats["waiting"],
        "vllm:kv_cache_usage_perc": used / capacity,
        "draftwing:estimated_speedup": stats.get("speedup"),
    }
    yield from ((name, (), value) for name, value in gauges.items() if value is not None)
    for kind, steps in stats.get("steps", {}).items():
        yield "draftwing:steps_total", (kind,), steps
        yield "draftwing:step_seconds_total", (kind,), stats["step_seconds"][kind]
    for stage, seconds in stats.get("stage_seconds", {}).items():
        yield "draftwing:stage_seconds_total", (stage,), seconds
    yield from _drafter_samples(drafters)


def _drafter_samples(drafters: dict[str, dict[str, Any]]) -> Iterator[Sample]:
    accepted_at: dict[int, int] = defaultdict(int)
    for drafter, counts in drafters.items():
        yield "draftwing:spec_drafts_total", (drafter,), counts["drafts"]
        yield "draftwing:spec_proposed_tokens_total", (drafter,), counts["proposed"]
        yield "draftwing:spec_accepted_tokens_total", (drafter,), counts["accepted"]
        if sum(counts["proposed_at"]) == counts["proposed"]:
            for position, count in enumerate(counts["proposed_at"]):
                yield "draftwing:spec_proposed_tokens_per_pos_total", (drafter, str(position)), count
        for position, count in enumerate(counts["accepted_at"]):
            accepted_at[position] += count
            yield "draftwing:spec_accepted_tokens_per_pos_total", (drafter, str(position)), count
    for position, count in sorted(accepted_at.items()):
        yield "vllm:spec_decode_num_accepted_tokens_per_pos_total", (str(position),), count


# -- the endpoint -----------------------------------------------------------------------------------------------------


class Metrics:
    """What `/metrics` says. `requests` is to be a watcher of the observer."""

    def __init__(
        self,
        model: str,
        capacity: Callable[[], int],
        ask: Callable[[], Awaitable[dict[str, Any]]],
        speculative: bool = True,
    ) -> None:
        """model: the label of every series.  capacity: tokens in the KV pool.  ask: `AsyncEngine.stats`.
        speculative: whether the engine drafts for everybody."""
        self.requests = RequestMetrics(speculative)
        self._model, self._capacity, self._ask = model, capacity, ask
        self._known: tuple[float, dict[str, Any]] | None = None  # what the engine said last, and when

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type. accept: the header of the request."""
        up, samples = True, list[Sample]()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                self._known = time.monotonic(), await self._ask()
        except EngineDead:
            up, self._known = False, None
        except TimeoutError:
            pass  # it is busy: what it said last has to do
        samples.append(("draftwing:engine_up", (), float(up)))
        if self._known is not None:
            at, stats = self._known
            samples += engine_samples(stats, self._capacity())
            samples.append(("draftwing:engine_stats_age_seconds", (), time.monotonic() - at))
        samples += ((name, labels, value) for name, by in self.requests.values.items() for labels, value in by.items())
        registry = CollectorRegistry()
        registry.register(_Families(list(self._families(samples))))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def _families(self, samples: Iterable[Sample]) -> Iterator[Metric]:
        by_name: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            by_name[sample[0]].append(sample)
        for series in SERIES:
            # vLLM tells engines of one server apart; here is one.
            common = {"model_name": self._model} | ({"engine": "0"} if series.name.startswith("vllm:") else {})
            names, values = [*common, *series.labels], list(common.values())
            if series.kind == "histogram":
                histogram = self.requests.histograms[series.name]
                family = HistogramMetricFamily(series.name, series.help, labels=names)
                family.add_metric(values, histogram.buckets(), histogram.sum)
                yield family
                continue
            kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
            flat = kind(series.name, series.help, labels=names)
            for _, labels, value in by_name.get(series.name, ()):
                flat.add_metric([*values, *labels], value)
            if flat.samples:
                yield flat


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def add_metrics_route(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def scrape(request: Request) -> Response:
        text, content_type = await metrics.render(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})
