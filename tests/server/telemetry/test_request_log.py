"""Lines of the request log: what is in them, and what is not."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine, local
from scripted import client_of
from starlette.testclient import TestClient

from draftwing.config.api_keys import ApiKey
from draftwing.config.options import Options
from draftwing.core import Output
from draftwing.errors import ConfigError
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.app import create_app
from draftwing.server.run import open_watchers
from draftwing.server.telemetry import request_log as module
from draftwing.server.telemetry.observer import HttpRecord, Observer, Watcher
from draftwing.server.telemetry.request_log import BEGINNING, RequestLog, Tracing, open_tracing, sampling

KEY = "sekrit-\u00fc"
SECRET = "xyzzy"  # the content that must not be seen


def log_of(
    level: int, *bodies: dict[str, Any], path: str = "/generate", key: str | None = None, form: str = "text"
) -> list[dict[str, Any]]:
    engine = FakeEngine(Options(random_seed=7, api_key=key))
    stream = io.StringIO()
    headers = {"authorization": f"Bearer {key}".encode()} if key else {}
    with client_of(engine, RequestLog(level, [key] if key else [], stream, form), headers=headers) as client:
        for body in bodies:
            client.post(path, json=body)
        client.get("/health")
        client.get("/metrics")
    text = stream.getvalue()
    assert key is None or key not in text
    return [json.loads(line) for line in text.splitlines()]


def test_metadata() -> None:
    (line,) = log_of(0, {"text": "abcdefgh", "rid": "mine"})
    assert line["id"] == "mine" and line["path"] == "/generate" and line["method"] == "POST" and line["status"] == 200
    assert (line["prompt_tokens"], line["completion_tokens"]) == (8, 9)
    assert line["finish_reasons"] == ["stop"] and line["accept_length"] == 1.0 and line["retractions"] == 0
    assert line["request_bytes"] == len('{"text":"abcdefgh","rid":"mine"}') and line["response_bytes"] > 100
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert line["time"].endswith("+00:00") and "sampling" not in line and "output" not in line


def test_batches_streams_and_refusals() -> None:
    batch = {"text": ["ab", "cdef"], "sampling_params": {"n": 2, "max_new_tokens": 2}}
    stream = {"text": "ab", "stream": True}
    many, streamed, refused = log_of(0, batch, stream, {"text": "ab", "nonsense": 1})
    assert (many["prompt_tokens"], many["completion_tokens"]) == (6, 8), "two answers share a prompt"
    assert many["finish_reasons"] == ["length"] * 4
    assert (streamed["status"], streamed["completion_tokens"], streamed["finish_reasons"]) == (200, 3, ["stop"])
    assert refused["status"] == 400 and "prompt_tokens" not in refused


@pytest.mark.parametrize(("level", "path"), [(0, "/v1/completions"), (1, "/generate"), (1, "/v1/chat/completions")])
def test_no_content_below_level_2(level: int, path: str) -> None:
    stop = [f"{SECRET}-stop"]
    body = {
        "/generate": {"text": f"a {SECRET}", "sampling_params": {"stop": stop, "temperature": 0.5}},
        "/v1/completions": {"prompt": f"a {SECRET}", "stop": stop, "temperature": 0.5},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": SECRET}], "stop": stop, "temperature": 0.5,
        },
    }[path]  # fmt: skip
    lines = log_of(level, body, body | {"stream": True}, body | {SECRET: 1}, path=path)
    assert [line["status"] for line in lines] == [200, 200, 400] and SECRET not in json.dumps(lines)
    if level:
        (params,) = lines[0]["sampling"]
        assert params["temperature"] == 0.5 and params["stop"] == 1


def test_parameters_without_their_texts() -> None:
    params = SamplingParams(
        temperature=0.0, max_new_tokens=9, stop=("a", "b"), bad_words=("c",), logit_bias=((5, 1.0),),
        grammar=Grammar("regex", SECRET), stop_token_ids=(1, 2, 3), presence_penalty=0.5,
    )  # fmt: skip
    assert sampling(params) == {
        "temperature": 0.0, "max_new_tokens": 9, "stop": 2, "bad_words": 1, "logit_bias": 1, "grammar": "regex",
        "stop_token_ids": 3, "presence_penalty": 0.5,
    }  # fmt: skip


@pytest.mark.slow
def test_level_2_is_cut_off_and_level_3_is_not() -> None:
    body = {"text": "0123456789" * 190, "sampling_params": {"max_new_tokens": 1}}
    body["padding"] = " " * BEGINNING  # refused, after it was read
    for level in (2, 3):
        (line,) = log_of(level, body)
        whole = json.dumps(body, separators=(",", ":"))
        assert line["status"] == 400 and line["output"] == []
        assert line["request"] == (whole[:BEGINNING] + "..." if level == 2 else whole)
    (line,) = log_of(2, {"text": "hello"})
    assert json.loads(line["request"]) == {"text": "hello"} and line["output"] == ["hello"]
    (chat,) = log_of(2, {"messages": [{"role": "user", "content": "hello"}]}, path="/v1/chat/completions")
    assert chat["output"] == ["user:hello\n"]


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_never_the_key(level: int) -> None:
    for lead in ("", "x" * (BEGINNING - 15)):  # the second one is cut off within the key
        bodies = [{"text": text, "rid": KEY} for text in (f"{lead}{KEY}", {"nested": KEY})]
        lines = log_of(level, *bodies, key=KEY)
        assert len(lines) == 2 and KEY[:7] not in json.dumps(lines, ensure_ascii=False)


def test_the_key_at_the_end_of_what_is_kept() -> None:
    """Characters of four bytes before a long key: more has to be kept than is shown, to know it."""
    key, stream, engine = "sekrit-" + "k" * 40, io.StringIO(), FakeEngine()
    body = ("\U0001f600" * (BEGINNING - 7) + key).encode()
    with client_of(engine, RequestLog(2, [key], stream)) as client:
        client.post("/generate", content=body, headers={"content-type": "application/json"})
    line = json.loads(stream.getvalue())
    assert line["request"].startswith("\U0001f600") and "sekrit" not in line["request"]


def test_a_key_that_another_one_begins_with_is_hidden_whole() -> None:
    stream, engine = io.StringIO(), FakeEngine()
    with client_of(engine, RequestLog(2, ["sekrit", "sekrit-and-more"], stream)) as client:
        client.post("/generate", json={"text": "sekrit-and-more"})
    assert json.loads(json.loads(stream.getvalue())["request"]) == {"text": "***"}


@pytest.mark.slow
def test_no_more_is_kept_than_is_wanted() -> None:
    class Curious(Watcher):
        def __init__(self, body_bytes: int | None) -> None:
            self.body_bytes = body_bytes

        def responded(self, record: HttpRecord) -> None:
            kept.append(bytes(record.body))

    kept: list[bytes] = []
    for wanted in ((), (0,), (0, 9), (9, None)):
        engine = FakeEngine()
        with client_of(engine, *map(Curious, wanted)) as client:
            client.post("/generate", json={"text": "abcdef"})
    assert kept == [b"", *[b'{"text":"'] * 2, *[b'{"text":"abcdef"}'] * 2]


def test_unauthorized_requests_are_logged() -> None:
    stream = io.StringIO()
    engine = FakeEngine(Options(random_seed=7, api_key=KEY))
    with client_of(engine, RequestLog(0, [KEY], stream)) as client:
        client.post("/generate", json={"text": "x"}, headers={"authorization": "Bearer wrong-key"})
    line = json.loads(stream.getvalue())
    assert line["status"] == 401 and "wrong-key" not in stream.getvalue()


def test_a_client_that_goes_away() -> None:
    """An answer that is unfinished when the response ends is aborted."""
    stream = io.StringIO()
    observer = Observer([RequestLog(0, [], stream)])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        observer.begin("job", [GenerationRequest("u", [1, 2], SamplingParams())])
        observer.output(Output("u", [5, 6]))
        raise asyncio.CancelledError

    async def scenario() -> None:
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        await observer.middleware(app)(scope, None, None)  # type: ignore[arg-type]

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())
    line = json.loads(stream.getvalue())
    assert line["status"] == 499 and line["finish_reasons"] == ["abort"] and line["completion_tokens"] == 2


def test_what_fails_to_write_harms_nobody() -> None:
    class Broken(RequestLog):
        def responded(self, record: Any) -> None:
            raise OSError("disk full")

    engine = FakeEngine()
    with client_of(engine, Broken()) as client:
        assert client.post("/generate", json={"text": "abc"}).status_code == 200


def test_what_does_not_print_is_escaped() -> None:
    hostile = "a\x9b\x7f\u2028\u202e\u2066é"
    (line,) = log_of(3, {"text": hostile})
    assert hostile in line["request"] and line["output"] == [hostile]  # as JSON reads it; what is written is below
    stream = io.StringIO()
    engine = FakeEngine(Options(random_seed=7))
    with client_of(engine, RequestLog(3, [], stream)) as client:
        client.post("/generate?%C2%9B%E2%80%AE", content=json.dumps({"text": hostile}, ensure_ascii=False).encode())
        client.post("/%C2%9B%7F%E2%80%AE", json={})
    assert len(stream.getvalue().splitlines()) == 2
    assert all(line.isprintable() for line in stream.getvalue().splitlines())


def test_lines_of_a_log_in_json_have_the_fields_of_all() -> None:
    path, body = "/v1/completions", {"prompt": "ab"}
    (line,) = log_of(0, body, path=path, form="json")
    (plain,) = log_of(0, body, path=path)
    assert {*line} - {*plain} == {"level", "logger", "message", "request_id"} and {*plain} <= {*line}
    assert line["message"] == f"POST {path} 200" and line["level"] == "info" and line["logger"] == "draftwing.requests"
    assert line["request_id"] == line["id"] and line["id"]


def test_keys_that_come_later_are_in_no_line() -> None:
    stream = io.StringIO()
    log = RequestLog(3, ["old-key"], stream)
    log.rekeyed([ApiKey("a", "new-key"), ApiKey("b", "new-key-2")])
    with client_of(FakeEngine(Options(random_seed=7)), log) as client:
        client.post("/generate", json={"text": "old-key new-key new-key-2"})
    assert "key" not in stream.getvalue() and stream.getvalue().count("*** *** ***") >= 1


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


@pytest.mark.parametrize("header", ["00-nonsense", f"00-{'0' * 32}-{PARENT}-01"])
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
    logging.getLogger("opentelemetry").propagate = False  # its threads still try, and say so beside later tests
    engine = FakeEngine()
    tracing = open_tracing("http://127.0.0.1:1/v1/traces", "echo")
    begin = time.monotonic()
    with client_of(engine, tracing) as client:
        assert client.post("/generate", json={"text": "abc"}).status_code == 200
    assert time.monotonic() - begin < 15  # it would try for a minute
