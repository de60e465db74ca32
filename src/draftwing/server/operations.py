"""The endpoints of operators and their machines, as SGLang, vLLM and llama.cpp name them: health, load, facts of the
server, aborts, the cache; and the tokenizer's (tokenizing.py)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import shlex
import sys
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import PlainTextResponse, Response

from draftwing.engine.admission import EngineInfo
from draftwing.engine.process.link import EngineDead
from draftwing.errors import RequestError
from draftwing.machine import process_memory
from draftwing.requests.refusals import check_level
from draftwing.requests.request import GenerationRequest
from draftwing.requests.sampling_params import SamplingParams
from draftwing.server.adapters import add_adapter_routes
from draftwing.server.chat import Chats
from draftwing.server.endpoints import read_body, schema, unless_disconnected
from draftwing.server.engine_client import AsyncEngine
from draftwing.server.quotas import QueueFull
from draftwing.server.schema import Body, Name
from draftwing.server.service import Service
from draftwing.server.telemetry.metrics import engine_numbers
from draftwing.server.tokenizing import add_tokenizer_routes
from draftwing.version import __version__

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
        """Returns whether a token came, now or within the last second; of an engine that sleeps, whether it is there:
        nobody wakes it up for this."""
        with contextlib.suppress(EngineDead):
            if (await self._engine.stats())["sleeping"]:
                return self._engine.healthy
        fresh = time.monotonic() - self._ended < PROBE_SECONDS and self._engine.healthy
        if self._running is None or (self._running.done() and not fresh):
            self._running = asyncio.ensure_future(self._try())
        return await asyncio.shield(self._running)  # whoever leaves does not end it for the others

    async def _try(self) -> bool:
        """Tokens for anybody are proof: all rows may be others', for as long as their answers last."""
        request = GenerationRequest(
            uuid.uuid4().hex, [0], SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
            priority=FIRST, client=CLIENT, learn=False,
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
            "version": __version__,
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


MAX_WAITING = 32  # who may wait at once
PAUSE_SECONDS = 0.05  # between two looks whether anything runs


class Flushing:
    """Belongs to the running event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._waiting = 0
        self._trying: asyncio.Task[bool] | None = None
        self._running: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return self._waiting

    async def flush(self, seconds: float) -> bool:
        """Returns whether the cache was flushed within so many seconds; 0: now or not. Raises QueueFull where too many
        wait, or EngineDead."""
        if await self._try():
            return True
        if not seconds:
            return False
        if len(self) >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} clients, the most there may be, wait for the cache to be flushed", own=False
            )
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._running)
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1
            if not self._waiting and self._running is not None:
                self._running.cancel()
                self._running = None

    async def _try(self) -> bool:
        """Asks the engine, once for all who want to know at the same time."""
        if self._trying is None or self._trying.done():
            self._trying = asyncio.ensure_future(self._engine.flush_cache())
        return await asyncio.shield(self._trying)

    async def _run(self) -> None:
        while not await self._try():
            await asyncio.sleep(PAUSE_SECONDS)


class AbortRequest(Body):
    rid: str | None = None
    abort_all: bool | None = None


class DeleteTraffic(Body):
    """Body of /delete_traffic."""

    client: Name  # the name of a key; "anonymous" for requests without one


# Of a model with recurrent layers.
STATE_NUMBERS = ("state_slots", "snapshots", "snapshot_bytes", "snapshot_hits", "snapshot_evictions")


def add_operations(app: FastAPI, service: Service, chats: Chats) -> None:
    engine = service.engine
    add_probes(app, engine)
    add_tokenizer_routes(app, service, chats)
    add_adapter_routes(app, service)
    flushing = Flushing(engine)

    @app.post("/delete_traffic", openapi_extra=schema(DeleteTraffic))
    async def delete_traffic(request: Request) -> dict[str, Any]:
        """Removes what is kept of a client's requests: for training (`--learn`) and for drafts from lookups."""
        body = await read_body(request, DeleteTraffic)
        return await service.delete_traffic(body.client)

    @app.post("/abort_request", openapi_extra=schema(AbortRequest))
    async def abort_request(request: Request) -> Response:
        body = await read_body(request, AbortRequest)
        if body.rid is None and not body.abort_all:
            raise RequestError("give rid, or abort_all: true", "rid")
        service.engine.abort(None if body.abort_all else body.rid)
        return Response(status_code=200)

    async def asleep() -> bool:
        return bool((await engine.stats())["sleeping"])

    @app.post("/sleep")
    async def sleep(request: Request, level: int = Query(1)) -> Response:
        """Has the engine give memory back when requests that run have ended; a later one wakes it up."""
        check_level(level)
        await unless_disconnected(request, engine.sleep())
        return Response()

    @app.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        """Has the engine be awake. vLLM's tags are ignored: all of it wakes up."""
        await unless_disconnected(request, engine.wake_up())
        return Response()

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": await asleep()}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/get_model_info", include_in_schema=False)
    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        options, architecture = service.options, engine.info.architecture
        return {
            "model_path": options.model,
            "served_model_name": service.model,
            "tokenizer_path": options.tokenizer_path or options.model,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "load_format": options.load_format,
            "reasoning_parser": options.reasoning_parser,
            "tool_call_parser": options.tool_call_parser,
            "disaggregation_mode": "null",
            "has_image_understanding": engine.info.images is not None,
            "has_audio_understanding": False,
            "model_type": architecture.removesuffix("ForCausalLM").lower(),
            "architectures": [architecture],
        }

    @app.get("/props")
    async def props() -> dict[str, Any]:
        """Returns what clients of llama.cpp read of it."""
        options, specials = service.options, service.tokenizer.special_tokens
        return {
            "default_generation_settings": {"n_ctx": engine.info.context_length, "params": engine.info.sampling},
            "total_slots": options.max_running_requests,
            "model_alias": service.model,
            "model_path": options.model,
            "modalities": {"vision": engine.info.images is not None, "audio": False},
            "chat_template": service.tokenizer.chat_template or "",
            "bos_token": specials.get("bos_token", ""),
            "eos_token": specials.get("eos_token", ""),
            "build_info": f"draftwing {__version__}",
            "is_sleeping": await asleep(),
        }

    @app.get("/get_server_info", include_in_schema=False)
    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return await _server_info(service)

    @app.get("/flush_cache", include_in_schema=False)  # as scripts for SGLang ask; `SiteCheck` refuses browsers
    @app.post("/flush_cache")
    async def flush_cache(
        request: Request, timeout: float = Query(0.0, ge=0, le=3600, allow_inf_nan=False)
    ) -> Response:
        """timeout: seconds to wait for running requests to end."""
        if await unless_disconnected(request, flushing.flush(timeout)):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("The cache is in use: requests are running or waiting.\n", status_code=400)


async def _server_info(service: Service) -> dict[str, Any]:
    stats = await service.engine.stats()
    info = dataclasses.replace(service.engine.info, read_rate=stats["read_rate"])
    options = dataclasses.asdict(info.options)
    # Masked before they are quoted: quotes inside a key would hide it from the search.
    words = sys.argv
    for key in filter(None, (options.pop("api_key"), options.pop("admin_api_key"))):
        words = [word.replace(key, "***") for word in words]
    return {
        **options,
        **info.options.label,
        "model_path": info.options.model,
        "speculative_draft_model_path": service.draft_model_path,
        "served_model_name": service.model,
        "launch_command": shlex.join(words),
        "dtype": info.dtype,
        "device": info.device,
        "capability": dict(info.capability),
        "weight_bytes": dict(info.weight_bytes),
        "floor": _floor(info.read_rate, info.floor, stats["plain_step"]),
        "context_length": info.context_length,
        "max_total_num_tokens": info.max_total_tokens,
        "max_req_input_len": info.context_length - 1,
        "custom_logit_processors": list(info.processors),
        "sampling_defaults": dict(info.defaults),
        "avg_spec_accept_length": stats["accept_length"],
        "speculative": {"explain": stats["explain"]},
        "internal_states": [
            {
                "avg_spec_accept_length": stats["accept_length"],
                "num_running_reqs": stats["running"],
                "num_waiting_reqs": stats["waiting"],
                "memory_usage": {
                    "token_capacity": info.max_total_tokens,
                    "free_tokens": stats["free_tokens"],
                    "cached_tokens": stats["cached_tokens"],
                    **{name: stats[name] for name in STATE_NUMBERS if name in stats},
                },
                "num_verified_rows": stats["verified_rows"],
                "num_committed_tokens": stats["committed_tokens"],
            }
        ],
        "processes": {"engine": stats["memory"], "server": process_memory()},
        "startup_time": service.started,
        "version": __version__,
    }


def _floor(rate: float, seconds: float, step: float) -> dict[str, float | None]:
    """rate: bytes that memory gives in a second.  seconds: that reading all weights takes at least.  step: those of a
    step of one request without drafts. All 0 where they are not known."""
    return {
        "memory_gb_s": rate / 1e9 or None,
        "read_ms": 1e3 * seconds or None,
        "plain_step_ms": 1e3 * step or None,
        "share": seconds / step if seconds and step else None,
    }
