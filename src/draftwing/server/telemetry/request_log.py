"""What is told of each HTTP request when its response is complete: a line of JSON (`--log-requests`), an OpenTelemetry
span (`--otlp-traces-endpoint`).

What is in a line depends on the level, as in SGLang: 0 sizes, times and how it ended; 1 the sampling parameters too;
2 the beginnings of request and answers; 3 all of them. Below 2 nothing that a user or the model wrote is in a line:
of stop strings, bad words and grammars there is the number or the kind. API keys are in none.

Spans are of requests that generate, and hold no text. One begins when the request arrives, under the client's span if
the request has a `traceparent` header; attributes are named as vLLM and the conventions for generative AI name them.
Their packages are an extra, `pip install draftwing[otel]`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from draftwing.config.api_keys import ApiKey
from draftwing.errors import ConfigError
from draftwing.log import visible
from draftwing.requests.grammar_field import Grammar
from draftwing.requests.sampling_params import LogitsProcessorSpec, SamplingParams
from draftwing.server.telemetry.observer import AnswerRecord, HttpRecord, Watcher

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

LONGEST_KEY = 1024  # bytes of one that comes later
BEGINNING = 2048  # characters of a text at level 2
_MAX_LENGTH = 200  # characters of what a client chooses: paths, ids and names; names in a list


class RequestLog(Watcher):
    """Writes the lines."""

    def __init__(
        self, level: int = 0, secrets: Sequence[str] = (), stream: TextIO | None = None, form: str = "text"
    ) -> None:
        """secrets: keys that are in no line.  stream: standard error if not given.  form: of the whole log; of `json`
        these lines have the fields that all have."""
        self._json = form == "json"
        self._level, self._secrets = level, list[str]()
        self._hide(secrets)
        # At level 2 more than is shown: a key that is cut off at the end would not be recognised.
        self.body_bytes = (0, 0, 4 * BEGINNING + max(map(len, (*secrets, " " * LONGEST_KEY))), None)[level]
        # A logger of its own, for its handling of streams that fail; it is not among those that have names.
        self._log = logging.Logger("draftwing.requests", logging.INFO)
        self._log.addHandler(logging.StreamHandler(stream or sys.stderr))

    def _hide(self, secrets: Sequence[str]) -> None:
        # The longest first: another one may be a part of it. Those that were keys stay secret.
        self._secrets = sorted({*self._secrets, *secrets}, key=len, reverse=True)

    def rekeyed(self, keys: Sequence[ApiKey]) -> None:
        self._hide([one.key for one in keys])

    def responded(self, record: HttpRecord) -> None:
        line = metadata(record)
        if self._level >= 1:
            every = [sampling(answer.request.params) for answer in record.answers]
            line["sampling"] = every[:1] if all(one == every[0] for one in every) else every
        if self._level >= 2:
            line["request"] = record.body.decode(errors="replace")
            line["output"] = [answer.answer.text if answer.answer is not None else "" for answer in record.answers]
        if self._json:
            said = f"{line['method']} {line['path']} {line['status']}"
            about = {"level": "info", "logger": self._log.name, "message": said, "request_id": line["id"]}
            line = {"time": line["time"]} | about | line
        self._log.info("%s", visible(json.dumps(self._clean(line), ensure_ascii=False)))

    def _clean(self, value: Any) -> Any:
        """Removes the API key, and cuts texts to what the level allows."""
        if isinstance(value, str):
            for secret in self._secrets:
                value = value.replace(secret, "***")
            return value if self._level > 2 or len(value) <= BEGINNING else value[:BEGINNING] + "..."
        if isinstance(value, dict):
            return {key: self._clean(one) for key, one in value.items()}
        return [self._clean(one) for one in value] if isinstance(value, list) else value


def metadata(record: HttpRecord) -> dict[str, Any]:
    """Returns what a line of level 0 says. Seconds are from the arrival of the request."""
    answers = record.answers
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.arrived_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "id": record.id[:_MAX_LENGTH],
        "method": record.method,
        "path": record.path[:_MAX_LENGTH],
        **({"client": record.client} if record.client else {}),
        "status": record.status,
        "seconds": round(record.ended - record.arrived, 6),
        "request_bytes": record.received,
        "response_bytes": record.sent,
    }
    if record.ignored:
        line["ignored"] = [name[:_MAX_LENGTH] for name in record.ignored[:_MAX_LENGTH]]
    if answers:
        line |= {
            "prompt_tokens": prompt_tokens(answers),
            "completion_tokens": sum(answer.tokens for answer in answers),
            "first_token_seconds": first_token_seconds(record),
            # What is unfinished when the response ends is aborted.
            "finish_reasons": [answer.reason or "abort" for answer in answers],
            "cached_tokens": sum(answer.meta.get("cached_tokens", 0) for answer in answers),
            "retractions": sum(answer.meta.get("num_retractions", 0) for answer in answers),
            "accept_length": accept_length(answers),
        }
    return line


def prompt_tokens(answers: list[AnswerRecord]) -> int:
    """Counts as `usage` does: n answers to one prompt count it once."""
    return sum(
        len(ids) for ids in {id(answer.request.prompt_ids): answer.request.prompt_ids for answer in answers}.values()
    )


def first_token_seconds(record: HttpRecord) -> float | None:
    """Returns the seconds from the arrival to the first token of any answer."""
    first = min((answer.first for answer in record.answers if answer.first is not None), default=None)
    return round(first - record.arrived, 6) if first is not None else None


def accept_length(answers: list[AnswerRecord]) -> float | None:
    """Returns tokens per verify step; None where none ran to its end."""
    steps = sum(answer.meta.get("spec_verify_ct", 0) for answer in answers)
    drafts = sum(answer.meta.get("spec_num_correct_drafts", 0) for answer in answers)
    return round(1 + drafts / steps, 3) if steps else None


def sampling(params: SamplingParams) -> dict[str, Any]:
    """Parameters that were set, without the texts among them."""
    out: dict[str, Any] = {}
    for name, field in SamplingParams.model_fields.items():
        value = getattr(params, name)
        if value == field.default and name not in ("temperature", "max_new_tokens"):
            continue
        if isinstance(value, Grammar):
            value = value.kind
        elif isinstance(value, LogitsProcessorSpec):
            value = value.name
        elif isinstance(value, tuple):
            value = len(value)  # texts, or token ids, which spell a text as well
        out[name] = value
    return out


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
