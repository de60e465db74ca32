"""Records each HTTP request and each answer as they pass, and notifies watchers: metrics, traces and the request log.

Everything runs on the event loop. The middleware knows the HTTP request, `begin` its generation (both in the same
task, so a context variable joins them), and `output` gets what the engine says, at the moment it says it: a slow
client does not change what is measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwing.config.api_keys import ApiKey
from draftwing.core import Output
from draftwing.log import current
from draftwing.requests.request import GenerationRequest

if TYPE_CHECKING:
    from draftwing.text.answer import Answer

logger = logging.getLogger(__name__)
# Asked for by machines, again and again.
UNOBSERVED = frozenset({"/health", "/health_generate", "/liveness", "/readiness", "/metrics", "/v1/loads"})


@dataclass(eq=False)
class AnswerRecord:
    """One answer. Times are monotonic seconds; `reason` is a finish reason, or "error" when the engine was lost."""

    request: GenerationRequest
    arrived: float
    answer: Answer | None = None
    tokens: int = 0
    token_ids: list[int] = field(default_factory=list)  # so many, where a watcher wants them
    first: float | None = None  # when its first token came
    latest: float | None = None  # when the newest tokens came
    ended: float | None = None
    reason: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)  # the engine's, once it is finished
    number: int = 0  # of all answers since the start
    further: bool = False  # whether its HTTP request has answers before it


@dataclass(eq=False)
class HttpRecord:
    """One HTTP request. status: 499 when the client went away, 500 when there was no response."""

    method: str
    path: str
    headers: dict[str, str]  # those of a trace alone
    arrived: float
    arrived_ns: int  # of the wall clock
    status: int = 0
    received: int = 0  # bytes of bodies
    sent: int = 0
    body: bytearray = field(default_factory=bytearray)  # its beginning, where a watcher wants it
    ended: float = 0.0
    id: str = ""  # by which the client can abort it
    model: str | None = None  # that was asked for
    client: str = ""  # name of its API key, once it asked the engine
    ignored: Sequence[str] = ()  # fields of the request that have no effect
    answers: list[AnswerRecord] = field(default_factory=list)


class Watcher:
    """Is called with what happens; this one ignores it all, others override what they want.

    Methods run on the event loop and must not block; what they raise is logged and goes no further.
    """

    body_bytes: int | None = 0  # how much of the requests' bodies it wants; None: all
    wants_tokens = False  # whether it reads `AnswerRecord.token_ids`

    def began(self, answer: AnswerRecord) -> None:
        pass

    def progressed(self, answer: AnswerRecord, before: float | None, now: float, tokens: int) -> None:
        """Notes that the engine gave `tokens` more; before: when it last did."""

    def finished(self, answer: AnswerRecord) -> None:
        """Notes that `reason` and `ended` are set."""

    def responded(self, record: HttpRecord) -> None:
        """Notes that the response is complete. Answers may still be unfinished: the engine was asked to abort them."""

    def rekeyed(self, keys: Sequence[ApiKey]) -> None:
        """Notes that clients have these keys from now on."""

    def close(self) -> None:
        """Ends with the server. It may block."""


class Observer:
    """Fills the records, on the event loop, and notifies the watchers."""

    def __init__(self, watchers: Sequence[Watcher] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self.watchers = list(watchers)
        wanted = [watcher.body_bytes for watcher in watchers]
        self._body_bytes = None if None in wanted else max((one for one in wanted if one is not None), default=0)
        self._wants_tokens = any(watcher.wants_tokens for watcher in watchers)
        self.clock = clock
        self._open: dict[str, AnswerRecord] = {}  # by uid
        self._begun = 0

    # -- from the server ----------------------------------------------------------------------------------------------

    @property
    def arrived(self) -> float | None:
        """Returns when the current HTTP request came; None where there is none, or it is not observed."""
        record: HttpRecord | None = current.get()
        return None if record is None else record.arrived

    def asked_for(self, model: str) -> None:
        """Records the model that the current HTTP request names."""
        record = current.get()
        if record is not None:
            record.model = model

    def begin(
        self,
        job_id: str,
        requests: Sequence[GenerationRequest],
        answers: Sequence[Answer] = (),
        ignored: Sequence[str] = (),
    ) -> list[AnswerRecord]:
        """Records what the current HTTP request submitted to the engine, and returns a record for each answer.
        answers: in the order of `requests`.  ignored: fields of the request that have no effect."""
        record = current.get()
        if record is not None:
            record.id, record.ignored = job_id, ignored
        arrived = self.clock() if record is None else record.arrived
        begun = []
        for i, request in enumerate(requests):
            self._begun += 1
            one = AnswerRecord(request, arrived, answers[i] if answers else None, number=self._begun)
            self._open[request.uid] = one
            if record is not None:
                one.further = bool(record.answers)
                record.client = request.client
                record.answers.append(one)
            begun.append(one)
            self._notify("began", one)
        return begun

    def unfinished(self) -> list[AnswerRecord]:
        """Answers that run or wait, the oldest first."""
        return list(self._open.values())

    # -- from the engine ----------------------------------------------------------------------------------------------

    def output(self, output: Output) -> None:
        """Takes an output of any request; those that were not begun here (health checks) are ignored."""
        answer = self._open.get(output.uid)
        if answer is None:
            return
        now = self.clock()
        if output.token_ids:
            before, answer.latest = answer.latest, now
            answer.tokens += len(output.token_ids)
            if self._wants_tokens:
                answer.token_ids += output.token_ids
            if answer.first is None:
                answer.first = now
            self._notify("progressed", answer, before, now, len(output.token_ids))
        if output.finish_reason is not None:
            answer.meta = output.meta
            self._finish(answer, str(output.finish_reason["type"]), now)

    def lost(self) -> None:
        """Ends all open answers by an error: the engine is gone."""
        now = self.clock()
        for answer in list(self._open.values()):
            self._finish(answer, "error", now)

    def _finish(self, answer: AnswerRecord, reason: str, now: float) -> None:
        answer.reason, answer.ended = reason, now
        del self._open[answer.request.uid]
        self._notify("finished", answer)

    def _notify(self, method: str, *args: Any) -> None:
        for watcher in self.watchers:
            try:
                getattr(watcher, method)(*args)
            except Exception:
                logger.exception("%s failed", type(watcher).__name__)

    def rekeyed(self, keys: Sequence[ApiKey]) -> None:
        self._notify("rekeyed", keys)

    def close(self) -> None:
        self._notify("close")

    # -- around the application ---------------------------------------------------------------------------------------

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Returns the application, observed. For `add_middleware`, last, so that it sees what the others refuse."""

        async def observed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in UNOBSERVED or scope["path"].startswith("/ui/"):
                await app(scope, receive, send)
            else:
                await self._observe(app, scope, receive, send)

        return observed

    async def _observe(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        traced = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS}
        record = HttpRecord(scope["method"], scope["path"], traced, self.clock(), time.time_ns())

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body = message.get("body", b"")
                record.received += len(body)
                room = None if self._body_bytes is None else max(self._body_bytes - len(record.body), 0)
                if room != 0:
                    record.body += body[:room]
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif message["type"] == "http.response.body":
                record.sent += len(message.get("body", b""))
            await send(message)

        token = current.set(record)
        try:
            await app(scope, receiving, sending)
        except Exception:
            record.status = record.status or 500
            raise
        finally:
            current.reset(token)
            record.status = record.status or 499  # cancelled
            record.ended = self.clock()
            self._notify("responded", record)


_TRACE_HEADERS = (b"traceparent", b"tracestate")
