"""Answers `GET /metrics` for Prometheus, under the names of SGLang and of vLLM where they have one.

Requests are counted here, as the engine answers them; what the engine counts itself is asked of it, once for each
scrape. `SERIES` lists everything there is. A name of SGLang or vLLM means what it means there: `sglang:` token totals
grow when a request ends, `vllm:` ones as tokens come; SGLang spreads the time between two steps over the tokens of the
step, vLLM does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from draftwing.engine.process.link import EngineDead
from draftwing.server.telemetry.observer import AnswerRecord, HttpRecord, Watcher

LATENCY = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, *LATENCY)
BETWEEN_TOKENS = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4,
    0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
_BUCKETS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": BETWEEN_TOKENS,
    "e2e_request_latency_seconds": (*LATENCY, 600, 1200, 1800, 2400),
}
REASONS = ("stop", "length", "abort", "error")
BLOCK = 16  # tokens in which a router that is told the size of the pool counts prefixes; the pool itself has none


class Series(NamedTuple):
    """key: of its value in `engine_numbers`; "-" if the server counts it.  help: as in the documentation."""

    name: str
    labels: tuple[str, ...]
    key: str
    help: str

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"

    @property
    def buckets(self) -> tuple[float, ...]:
        """Returns the upper bounds of a histogram, without infinity."""
        return _BUCKETS.get(self.name.partition(":")[2], ())

    def common_labels(self, model: str) -> dict[str, str]:
        # vLLM tells engines of one server apart; here is one.
        return {"model_name": model} | ({"engine": "0"} if self.name.startswith("vllm:") else {})


def _series(row: str) -> Series:
    head, _, help = row.partition(": ")
    name, key = head.split()
    name, _, labels = name.rstrip("}").partition("{")
    return Series(name, tuple(filter(None, labels.split(","))), key, help)


# Rows of `name{labels} key: help`, see `Series`.
SERIES = tuple(map(_series, (Path(__file__).parent / "series.txt").read_text(encoding="utf8").splitlines()))


class Histogram(Collector):
    """Counts durations. prometheus-client's own looks at every bucket for every token, under a lock for each."""

    def __init__(self, series: Series, labels: Mapping[str, str]) -> None:
        self._series, self._labels = series, labels
        self._bounds = list(map(float, series.buckets))
        self._counts, self._sum = [0] * (len(self._bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._series.name, self._series.help, labels=list(self._labels))
        buckets = zip([*map(repr, self._bounds), "+Inf"], map(float, accumulate(self._counts)), strict=True)
        family.add_metric(list(self._labels.values()), list(buckets), self._sum)
        yield family


class RequestMetrics(Watcher):
    """Counts requests as they pass; `registry` has the series."""

    def __init__(self, model: str, speculative: bool = True) -> None:
        """speculative: whether the engine drafts for everybody."""
        self.registry = CollectorRegistry()
        self._speculative = speculative
        self._metrics: dict[str, Any] = {}  # those with labels of their own have `labels` still to be called
        for series in SERIES:
            if series.key != "-":
                continue
            common = series.common_labels(model)
            if series.kind == "histogram":
                self._metrics[series.name] = histogram = Histogram(series, common)
                self.registry.register(histogram)
                continue
            counter = Counter(series.name, series.help, [*common, *series.labels], registry=self.registry)
            if series.labels:
                self._metrics[series.name] = partial(counter.labels, *common.values())
            else:  # at 0 from the start, so that the first request is an increase
                self._metrics[series.name] = counter.labels(*common.values())
        for reason in REASONS:
            self._metrics["vllm:request_success_total"](reason)

    def began(self, answer: AnswerRecord) -> None:
        grammar = answer.request.params.grammar
        if grammar is not None:
            self._metrics["draftwing:constrained_requests_total"](grammar.kind).inc()

    def progressed(self, answer: AnswerRecord, before: float | None, now: float, tokens: int) -> None:
        metrics = self._metrics
        metrics["vllm:generation_tokens_total"].inc(tokens)
        if before is None:
            metrics["vllm:prompt_tokens_total"].inc(len(answer.request.prompt_ids))
            self._observe("time_to_first_token_seconds", now - answer.arrived)
            return
        metrics["sglang:inter_token_latency_seconds"].observe((now - before) / tokens, tokens)
        metrics["vllm:inter_token_latency_seconds"].observe(now - before)

    def finished(self, answer: AnswerRecord) -> None:
        metrics, reason = self._metrics, answer.reason or "error"
        metrics["vllm:request_success_total"](reason).inc()
        metrics["sglang:prompt_tokens_total"].inc(len(answer.request.prompt_ids))
        metrics["sglang:generation_tokens_total"].inc(answer.tokens)
        if self._speculative or answer.request.prediction:
            metrics["sglang:spec_verify_calls_total"].inc(answer.meta.get("spec_verify_ct", 0))
        if reason == "abort":
            metrics["sglang:num_aborted_requests_total"].inc()
            metrics["draftwing:aborts_total"].inc()
            return
        metrics["sglang:num_requests_total"].inc()
        if answer.request.params.grammar is not None:
            metrics["sglang:num_so_requests_total"].inc()
        assert answer.ended is not None
        self._observe("e2e_request_latency_seconds", answer.ended - answer.arrived)

    def responded(self, record: HttpRecord) -> None:
        self._metrics["draftwing:http_responses_total"](str(record.status)).inc()

    def _observe(self, name: str, seconds: float) -> None:
        for engine in ("sglang:", "vllm:"):
            self._metrics[engine + name].observe(seconds)


# Or one for each label value; a tuple of them where there are several labels.
Number = float | Mapping[Any, float] | None


def engine_numbers(stats: Mapping[str, Any], capacity: int) -> dict[str, Number]:
    """Returns the values of `Engine.stats` by the keys of `SERIES`. capacity: tokens in the KV pool."""
    drafters: dict[str, dict[str, Any]] = stats.get("drafters", {})
    last = dict(stats.get("last", {}))
    if not drafters:
        last |= {"accept_length": 0.0, "accept_rate": 0.0}
    used = capacity - stats["free_tokens"] - stats["cached_tokens"]
    numbers: dict[str, Number] = {**stats, **last, "used": used, "usage": used / capacity, "capacity": capacity}
    numbers["cache_config"] = {(str(BLOCK), str(capacity // BLOCK)): 1}
    if not drafters:
        return numbers
    drafted: dict[str, Any] = stats["drafted"]  # here once what several drafters have proposed
    for key in ("drafts", "proposed", "accepted"):
        numbers |= {f"{key}_by": {name: counts[key] for name, counts in drafters.items()}, key: drafted[key]}
    # A drafter whose trees' depths are not known says so by counts that do not add up.
    known = {name: counts for name, counts in drafters.items() if sum(counts["proposed_at"]) == counts["proposed"]}
    numbers["proposed_at_by"] = _by_depth(known, "proposed_at")
    numbers["accepted_at_by"] = _by_depth(drafters, "accepted_at")
    numbers["accepted_at"] = {str(depth): count for depth, count in enumerate(drafted["accepted_at"])}
    return numbers


def _by_depth(drafters: Mapping[str, Mapping[str, Any]], key: str) -> dict[tuple[str, str], float]:
    every = drafters.items()
    return {(name, str(depth)): count for name, counts in every for depth, count in enumerate(counts[key])}


class Metrics(Collector):
    """Answers `/metrics`. `requests` has to be among the observer's watchers."""

    def __init__(
        self,
        model: str,
        capacity: Callable[[], int],
        ask: Callable[[], Awaitable[dict[str, Any]]],
        speculative: bool = True,
        more: Callable[[], Mapping[str, Number]] = dict,
    ) -> None:
        """model: the label of every series.  capacity: tokens in the KV pool.  ask: `AsyncEngine.stats`.
        speculative: whether the engine drafts for everybody.  more: numbers of the server, by the keys of `SERIES`."""
        self.requests, self._more = RequestMetrics(model, speculative), more
        self._model, self._capacity, self._ask = model, capacity, ask
        self._numbers: dict[str, Number] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def render(self) -> tuple[bytes, str]:
        """Returns the text and its content type."""
        try:
            self._numbers = {**engine_numbers(await self._ask(), self._capacity()), "engine_up": 1.0}
        except EngineDead:
            self._numbers = {"engine_up": 0.0}
        self._numbers.update(self._more())
        # Every scraper takes plain text. In OpenMetrics the library turns the colons of names into underscores for
        # Prometheus 2, whose queries and dashboards then find nothing.
        encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def collect(self) -> Iterable[Metric]:
        for family in self.requests.registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            if family.samples:
                yield family
        for series in SERIES:
            value = self._numbers.get(series.key)
            if value is None:
                continue
            common = series.common_labels(self._model)
            kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
            flat = kind(series.name, series.help, labels=[*common, *series.labels])
            for own, one in value.items() if isinstance(value, Mapping) else [((), value)]:
                flat.add_metric([*common.values(), *([own] if isinstance(own, str) else own)], one)
            yield flat


def add_metrics_route(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", include_in_schema=False)
    async def scrape() -> Response:
        text, content_type = await metrics.render()
        return Response(text, headers={"content-type": content_type})
