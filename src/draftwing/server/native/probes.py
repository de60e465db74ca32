"""What machines ask again and again: whether the server lives, whether it may get requests, and how busy it is."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

import draftwing
from draftwing.engine.admission import EngineInfo
from draftwing.engine.process.link import EngineDead
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.engine_client import AsyncEngine
from draftwing.server.telemetry.metrics import engine_numbers

HEALTH_SECONDS = 20  # how long /health_generate waits for its token
PROBE_SECONDS = 1.0  # how long a token is proof enough
FIRST = 2**31 - 1  # the highest priority
CLIENT = "/health_generate"  # who asks for it, so that it has a share of the rows


class Probe:
    """Asks the engine for a token. Needs no key, so it costs no more than one at a time, and one a second."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._running: asyncio.Task[bool] | None = None
        self._ended = -math.inf

    async def ask(self) -> bool:
        """Returns whether a token came, now or within the last second."""
        fresh = time.monotonic() - self._ended < PROBE_SECONDS and self._engine.healthy
        if self._running is None or (self._running.done() and not fresh):
            self._running = asyncio.ensure_future(self._try())
        return await asyncio.shield(self._running)  # whoever leaves does not end it for the others

    async def _try(self) -> bool:
        """Tokens for anybody are proof: all rows may be others', for as long as their answers last."""
        request = GenerationRequest(
            uuid.uuid4().hex, [0], SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
            priority=FIRST, client=CLIENT,
        )  # fmt: skip
        try:
            self._engine.news.clear()
            stream = self._engine.submit([request])
            try:
                async with asyncio.timeout(HEALTH_SECONDS):
                    await self._engine.news.wait()
            finally:
                stream.close()
        except (EngineDead, TimeoutError):
            return False
        self._ended = time.monotonic()
        return self._engine.healthy


def add_probes(app: FastAPI, engine: AsyncEngine) -> None:
    probe = Probe(engine)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.healthy else 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """As /health, but the engine has to give tokens, to anybody; it is asked once a second at most."""
        return Response(status_code=200 if await probe.ask() else 503)

    @app.get("/liveness")
    async def liveness() -> Response:
        """200 as long as the server answers: it starts a dead engine again by itself, and need not be killed."""
        return Response()

    @app.get("/readiness")
    async def readiness() -> Response:
        """200 while new requests are taken: not while the engine starts again, nor once the server is to end."""
        return Response(status_code=200 if engine.healthy and not engine.draining else 503)

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """Returns how busy the engine is, as routers that balance by load read it."""
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": draftwing.__version__,
            "dp_rank_count": 1,
            "loads": [load(await engine.stats(), engine.info)],
        }


def load(stats: Mapping[str, Any], info: EngineInfo) -> dict[str, Any]:
    """Returns an entry of /v1/loads, in SGLang's words. stats: as `Engine.stats`."""
    numbers = engine_numbers(stats, info.max_total_tokens)
    running, waiting, max_running = stats["running"], stats["waiting"], info.options.max_running_requests
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_waiting_uncached_tokens": stats["uncomputed_tokens"],
        "num_used_tokens": numbers["used"],
        "num_total_tokens": numbers["used"] + stats["waiting_tokens"],
        "max_total_num_tokens": info.max_total_tokens,
        "max_running_requests": max_running,
        "token_usage": numbers["usage"],
        "gen_throughput": numbers.get("gen_throughput", 0.0),
        "cache_hit_rate": numbers.get("cache_hit_rate", 0.0),
        "utilization": running / max_running if max_running else 0.0,
    }
