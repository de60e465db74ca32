"""Spans of requests, as an exporter in memory gets them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine, local
from scripted import client_of
from starlette.testclient import TestClient

from draftwing.config.options import Options
from draftwing.core import Output
from draftwing.errors import ConfigError
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.app import create_app
from draftwing.server.run import open_watchers
from draftwing.server.telemetry import tracing as module
from draftwing.server.telemetry.observer import Observer
from draftwing.server.telemetry.request_log import BEGINNING, RequestLog
from draftwing.server.telemetry.tracing import Tracing, open_tracing

EXTRA = "needs draftwing[otel]"
export = pytest.importorskip("opentelemetry.sdk.trace.export", reason=EXTRA)
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=EXTRA)
api = pytest.importorskip("opentelemetry.trace", reason=EXTRA)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> Any:
    return memory.InMemorySpanExporter()


@pytest.fixture
def client(exporter: Any) -> Iterator[TestClient]:
    engine = FakeEngine()
    tracing = Tracing(export.SimpleSpanProcessor(exporter), "echo")
    with client_of(engine, tracing) as client:
        yield client


def only(exporter: Any) -> Any:
    (span,) = exporter.get_finished_spans()
    return span


def test_attributes(client: TestClient, exporter: Any) -> None:
    body = {
        "model": "somebody", "messages": [{"role": "user", "content": "xyzzy"}], "max_tokens": 4, "temperature": 0.25,
        "top_p": 0.5, "n": 2, "rid": "mine",
    }  # fmt: skip
    begin = time.time_ns()
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    end = time.time_ns()
    span = only(exporter)
    found = dict(span.attributes or {})
    first, whole = (found.pop(f"gen_ai.latency.{name}") for name in ("time_to_first_token", "e2e"))
    assert isinstance(first, float) and isinstance(whole, float) and 0 < first <= whole
    assert found == {
        "gen_ai.operation.name": "chat", "gen_ai.request.id": "mine", "gen_ai.request.model": "somebody",
        "gen_ai.response.model": "echo", "gen_ai.request.max_tokens": 4, "gen_ai.request.temperature": 0.25,
        "gen_ai.request.top_p": 0.5, "gen_ai.request.n": 2, "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.prompt_tokens": len("user:xyzzy\n"), "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.input_tokens": len("user:xyzzy\n"), "gen_ai.usage.output_tokens": 8,
        "draftwing.accept_length": 1.0, "http.request.method": "POST", "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }  # fmt: skip
    assert span.name == "llm_request" and span.kind is api.SpanKind.SERVER and span.parent is None
    assert span.start_time and span.end_time and begin <= span.start_time < span.end_time <= end + 10**7
    assert span.resource.attributes["service.name"] == "draftwing"
    assert "xyzzy" not in span.to_json()


def test_a_request_belongs_to_the_clients_trace(client: TestClient, exporter: Any) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    client.post("/generate", json={"text": "abc", "stream": True}, headers=headers)
    span = only(exporter)
    assert span.context is not None and span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state.get("vendor") == "1"
    assert (span.attributes or {})["gen_ai.request.model"] == "echo"


@pytest.mark.parametrize("header", ["", "00-nonsense", f"00-{TRACE}-{PARENT}", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_wrong_traceparent_begins_a_trace(client: TestClient, exporter: Any, header: str) -> None:
    client.post("/generate", json={"text": "abc"}, headers={"traceparent": header})
    span = only(exporter)
    assert span.parent is None and span.context is not None and f"{span.context.trace_id:032x}" != TRACE


def test_what_the_client_does_not_sample_is_not_sent(client: TestClient, exporter: Any) -> None:
    client.post("/generate", json={"text": "abc"}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert not exporter.get_finished_spans()


def test_only_what_generates(client: TestClient, exporter: Any) -> None:
    client.get("/v1/models")
    client.get("/health_generate")
    client.post("/generate", json={"text": ""})
    assert not exporter.get_finished_spans()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_is_an_error(exporter: Any, stream: bool) -> None:
    engine = FakeEngine()
    tracing = Tracing(export.SimpleSpanProcessor(exporter), "echo")
    with TestClient(create_app(local(engine, FakeEngine()), engine.tokenizer, 5.0, [tracing])) as client:
        engine.crash = RuntimeError("boom")
        status = client.post("/generate", json={"text": "abc", "stream": stream}).status_code
    assert status == (200 if stream else 503), "a stream has begun"
    span = only(exporter)
    assert span.status.status_code is api.StatusCode.ERROR
    assert (span.attributes or {})["gen_ai.response.finish_reasons"] == ("error",)


def test_time_in_queue(exporter: Any) -> None:
    """Where the engine tells it."""
    observer = Observer([Tracing(export.SimpleSpanProcessor(exporter), "echo")])

    async def app(scope: object, receive: object, send: object) -> None:
        observer.begin("job", [GenerationRequest(uid, [1], SamplingParams()) for uid in "ab"])
        for uid, waited in (("a", 0.25), ("b", 0.5)):
            observer.output(Output(uid, [5], {"type": "stop"}, {"queue_time": waited}))

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    asyncio.run(observer.middleware(app)(scope, None, None))  # type: ignore[arg-type]
    assert (only(exporter).attributes or {})["gen_ai.latency.time_in_queue"] == 0.5


def test_options() -> None:
    assert open_watchers(Options()) == []
    options = Options(log_requests=True, log_requests_level=2, otlp_traces_endpoint="http://127.0.0.1:1")
    log, tracing = open_watchers(options)
    assert isinstance(log, RequestLog) and log.body_bytes >= 4 * BEGINNING
    assert isinstance(tracing, Tracing)
    tracing.close()


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(
        ConfigError, match=r"--otlp-traces-endpoint needs OpenTelemetry.*pip install 'draftwing\[otel\]'"
    ):
        open_tracing("http://127.0.0.1:1", "echo")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    """Requests are answered all the same, and the server ends in time."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason=EXTRA)
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    engine = FakeEngine()
    tracing = open_tracing("http://127.0.0.1:1/v1/traces", "echo")
    begin = time.monotonic()
    with client_of(engine, tracing) as client:
        assert client.post("/generate", json={"text": "abc"}).status_code == 200
    assert time.monotonic() - begin < 15  # it would try for a minute
