"""Who may use the server, and how much: checked for every route and method, before anything else is done."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwing.config.api_keys import ApiKey
from draftwing.errors import ConfigError
from draftwing.server.http import error_response
from draftwing.server.telemetry.observer import AnswerRecord, Watcher

logger = logging.getLogger(__name__)
ADMIN_PATHS = frozenset(
    {
        "/abort_request",
        "/flush_cache",
        "/sleep",
        "/wake_up",
        "/delete_traffic",
        "/lora-adapters",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/models/load",
        "/models/unload",
        "/api/pull",
        "/api/delete",
    }
)  # they concern what other clients do
FREE_PATHS = frozenset({"/health", "/health_generate", "/liveness", "/readiness"})
METRICS_PATHS = frozenset({"/metrics", "/v1/loads"})
DOCS_PATHS = frozenset({"/docs", "/redoc", "/openapi.json"})

client: ContextVar[ApiKey | None] = ContextVar("draftwing_client", default=None)
"""The key of the current HTTP request; None where none was needed."""


def client_name() -> str:
    """Returns the name of the current HTTP request's key; an empty one where none was needed, or none was right."""
    key = client.get()
    return "" if key is None else key.name


class Bucket:
    """What is left of an allowance that comes back evenly, and of which a minute's worth may be kept."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._capacity, self._clock = float(per_minute), clock
        self._left, self._at = self._capacity, clock()

    def same(self, other: Bucket) -> bool:
        """Returns whether both allow as much."""
        return self._capacity == other._capacity

    def take(self, amount: float) -> None:
        """Takes so much, even if that leaves less than nothing."""
        self._left = self._now() - amount

    def wait(self, amount: float) -> float:
        """Returns seconds until so much is there."""
        self._left = self._now()
        return max(amount - self._left, 0) * 60 / self._capacity

    def _now(self) -> float:
        before, self._at = self._at, self._clock()
        return min(self._left + (self._at - before) * self._capacity / 60, self._capacity)


class Allowances(Watcher):
    """What is left of each key's limits. Tokens are counted as they come: the prompt when a request begins, those of
    answers one by one; each answer is a request. So a request is let in while there is something left, and those after
    it pay what it took."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self.rekeyed(keys)
        self._prompt: list[int] | None = None  # the newest one: n answers to a prompt count it once

    def rekeyed(self, keys: Sequence[ApiKey]) -> None:
        """Has the limits of these keys from now on; what was used of one that stays counts on."""

        def buckets(before: dict[str, Bucket], limits: dict[str, int | None]) -> dict[str, Bucket]:
            made = {name: Bucket(limit, self._clock) for name, limit in limits.items() if limit}
            return {name: old if (old := before.get(name)) and old.same(new) else new for name, new in made.items()}

        self._requests = buckets(self._requests, {key.name: key.requests_per_minute for key in keys})
        self._tokens = buckets(self._tokens, {key.name: key.tokens_per_minute for key in keys})

    def ask(self, name: str) -> tuple[float, str]:
        """Counts a request of this key. Returns the seconds after which to try again, 0 for now, and what is used up;
        then it does not count."""
        requests, tokens = self._requests.get(name), self._tokens.get(name)
        if requests is not None and (seconds := requests.wait(1)) > 0:
            return seconds, "requests"
        if tokens is not None and (seconds := tokens.wait(1)) > 0:
            return seconds, "tokens"
        if requests is not None:
            requests.take(1)
        return 0, ""

    def began(self, answer: AnswerRecord) -> None:
        requests = self._requests.get(answer.request.client)
        if requests is not None and answer.further:  # the first one was asked for
            requests.take(1)
        prompt, bucket = answer.request.prompt_ids, self._tokens.get(answer.request.client)
        if bucket is not None and prompt is not self._prompt:
            bucket.take(len(prompt))
        self._prompt = prompt

    def progressed(self, answer: AnswerRecord, before: float | None, now: float, tokens: int) -> None:
        bucket = self._tokens.get(answer.request.client)
        if bucket is not None:
            bucket.take(tokens)


class Keyring:
    """The keys of a server, which change when their file is read again."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.take(keys)

    def take(self, keys: Sequence[ApiKey]) -> None:
        """Has these keys from now on."""
        self.keys = {one.name: one for one in keys}
        self._digests = [(_digest(one.key.encode()), one) for one in keys]

    def reload(self, read: Callable[[], Sequence[ApiKey]]) -> bool:
        """Takes the keys that `read` returns, unless it raises ConfigError: then those before stay, and the log says
        why. Returns whether they were taken."""
        before = self.keys
        try:
            self.take(read())
        except ConfigError as error:
            logger.error("the keys were read again and stay as they were: %s", error)
            return False
        changed = [name for name, one in self.keys.items() if before.get(name, one) != one]
        parts = {"new": self.keys.keys() - before.keys(), "gone": before.keys() - self.keys.keys(), "changed": changed}
        said = [f"{what}: {', '.join(sorted(names))}" for what, names in parts.items() if names]
        logger.info("the keys were read again; %s", "; ".join(said) or "none changed")
        return True

    def find(self, sent: bytes) -> ApiKey | None:
        """Returns the key that was sent, if it is one."""
        digest, found = _digest(sent), None
        for known, key in self._digests:  # all of them, whichever it is: how long it takes shows nothing
            if hmac.compare_digest(digest, known):
                found = key
        return found


class KeyCheck:
    """Answers 401 to who has no key and needs one, 403 to a key that may not do this, 429 to one that has used up its
    limits. A key comes as `Authorization: Bearer KEY` or, as Anthropic's clients send it, as `x-api-key: KEY`."""

    def __init__(
        self, app: ASGIApp, keys: Keyring, closed: bool, allowances: Allowances, free: Callable[[str], bool]
    ) -> None:
        """closed: whether every client needs a key, or only what `ADMIN_PATHS` has.  free: whether a path may be read
        without one in any case."""
        self._app, self._keys, self._allowances, self._free = app, keys, allowances, free
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, key = scope["path"], self._find(scope)
        client.set(key)
        guarded = path in ADMIN_PATHS
        if scope["method"] in ("GET", "HEAD") and self._free(path) and not guarded:
            await self._app(scope, receive, send)
            return
        if key is None and (self._closed or guarded):
            response = error_response(Request(scope), 401, "a valid API key is needed: Authorization: Bearer KEY")
            response.headers["www-authenticate"] = "Bearer"
        elif guarded and key is not None and not key.admin:
            response = error_response(Request(scope), 403, f"the key may not use {path}: it is for operators")
        else:
            seconds, what = (0.0, "")
            if key is not None and scope["method"] != "GET":
                seconds, what = self._allowances.ask(key.name)
            if seconds == 0:
                await self._app(scope, receive, send)
                return
            response = error_response(Request(scope), 429, f"the key's {what} of this minute are used up")
            response.headers["retry-after"] = str(math.ceil(seconds))
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> ApiKey | None:
        """Returns the key that was sent, if it is one."""
        found: ApiKey | None = None
        headers = dict(scope["headers"])
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        for given in (headers.get(b"x-api-key", b""), bearer):
            found = self._keys.find(given) or found
        return found


def _digest(key: bytes) -> bytes:
    """Returns as many bytes for each key, so that its length does not show either."""
    return hashlib.sha256(key).digest()
