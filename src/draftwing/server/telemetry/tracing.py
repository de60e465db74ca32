"""Sends OpenTelemetry traces (`--otlp-traces-endpoint`): a span for each HTTP request that generates.

The packages are an extra, `pip install draftwing[otel]`. A span begins when the request arrives, under the client's
span if the request has a `traceparent` header, and its attributes are named as vLLM and the conventions for generative
AI name them. It holds no text.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from draftwing.errors import ConfigError
from draftwing.server.telemetry.observer import HttpRecord, Watcher
from draftwing.server.telemetry.request_log import accept_length, first_token_seconds, prompt_tokens

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

logger = logging.getLogger(__name__)
SPAN = "llm_request"
_TEXT = ("/generate", "/v1/completions")  # what is asked with a text; all else is a chat
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")  # OpenTelemetry's own variables
_CLOSE_SECONDS = 2.0  # how long the end of the server waits for a collector


class Tracing(Watcher):
    """Makes the spans."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        """processor: gets the spans.  model: the name of the model that serves."""
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # The environment names the service if the user does; nothing is made known to the whole process.
        resource = Resource({SERVICE_NAME: "draftwing"}).merge(OTELResourceDetector().detect())
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("draftwing")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def responded(self, record: HttpRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if not record.answers:
            return
        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(record.headers),
            kind=SpanKind.SERVER,
            start_time=record.arrived_ns,
            attributes=attributes(record, self._model),
        )
        if record.status >= 500 or any(answer.reason == "error" for answer in record.answers):
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.arrived_ns + int((record.ended - record.arrived) * 1e9))

    def close(self) -> None:
        """Sends what is left, and gives up after some seconds."""
        # The packages' own limits are longer, and not all of them are kept where no collector answers.
        last = threading.Thread(target=self._provider.shutdown, name="draftwing-traces", daemon=True)
        last.start()
        last.join(_CLOSE_SECONDS)


def attributes(record: HttpRecord, model: str) -> dict[str, Any]:
    """Returns the attributes of a span. Times are seconds since the request arrived."""
    answers = record.answers
    params = answers[0].request.params
    prompt, completion = prompt_tokens(answers), sum(answer.tokens for answer in answers)
    queued = [answer.meta["queue_time"] for answer in answers if "queue_time" in answer.meta]
    found = {
        "gen_ai.operation.name": "text_completion" if record.path in _TEXT else "chat",
        "gen_ai.request.id": record.id,
        "gen_ai.request.model": record.model or model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": len(answers),
        "gen_ai.response.finish_reasons": [answer.reason or "abort" for answer in answers],
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.completion_tokens": completion,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": completion,
        "gen_ai.latency.time_to_first_token": first_token_seconds(record),
        "gen_ai.latency.time_in_queue": max(queued, default=None),
        "gen_ai.latency.e2e": record.ended - record.arrived,
        "draftwing.accept_length": accept_length(answers),
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
    }
    return {name: value for name, value in found.items() if value is not None}


def open_tracing(endpoint: str, model: str) -> Tracing:
    """Opens traces that are sent to a collector. Raises ConfigError where OpenTelemetry is not installed."""
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

        exporter: SpanExporter
        protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "grpc")
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

            exporter = Grpc(endpoint=endpoint)
        elif protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            exporter = Http(endpoint=endpoint)
        else:
            raise ConfigError(f"{_PROTOCOLS[0]} must be grpc or http/protobuf; found {protocol!r}")
        tracing = Tracing(BatchSpanProcessor(exporter), model)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install it with: pip install 'draftwing[otel]'"
        ) from None
    logger.info("traces go to %s", endpoint)
    return tracing
