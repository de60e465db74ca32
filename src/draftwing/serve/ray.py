"""Replicas of an engine by Ray Serve: `serve run draftwing.serve.ray:app model=... num_replicas=2`.

Ray starts, counts, watches and ends the replicas, on as many machines as it has. Each is an engine with all endpoints
of `draftwing serve`, and answers over HTTP itself. With Ray's HAProxy no Python stands between it and the client, and
Ray's own router for cached prefixes chooses the replica; without, Ray's proxies pass everything on, and take the less
busy of two.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from types import SimpleNamespace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from draftwing.config.api_keys import read_keys
from draftwing.config.options import Options
from draftwing.engine.process.link import EngineDead
from draftwing.errors import ConfigError
from draftwing.log import configure_logging
from draftwing.serve.settings import Scaling, beginning, read_args

try:
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.handle import DeploymentHandle
except ImportError as error:
    raise ConfigError(f"Ray Serve cannot be imported ({error}): pip install 'draftwing[ray]'") from None

ROUTER = "draftwing.serve.prefixes.PrefixRouter"
NAME = "replicas"  # of the deployment
REMEMBERED = 4_000_000  # characters of prompts that the router keeps
MAX_ONGOING = 2048  # requests that Ray hands to a replica, whose engine lets them wait
HEALTH_SECONDS = 5.0  # between checks; after the third that fails in a row Ray replaces the replica


@serve.ingress()
class Replica:
    """An engine in a process of its own, and its endpoints."""

    async def __init__(self, options: Options) -> None:  # type: ignore[misc]
        """Loads everything. Raises CheckpointError or EngineDead, and ConfigError for what only the machine shows."""
        # Only where it runs: whoever builds the application needs neither.
        from draftwing.server.run import open_watchers, opened

        configure_logging(options.log_level, options.log_format)
        self._watchers = open_watchers(options, read_keys(options))
        self._stack = contextlib.ExitStack()
        self._engine, self._tokenizer = await asyncio.to_thread(self._stack.enter_context, opened(options))
        self._engine.lost = self._stack.close  # nobody starts it again: from now on `check_health` fails

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns what Ray serves; its lifespan starts the engine's supervision and ends the engine."""
        from draftwing.server.app import create_app, paced

        return paced(create_app(self._engine, self._tokenizer, watchers=self._watchers), self._engine.info.options)

    async def check_health(self) -> None:
        """Raises EngineDead while the engine's process is dead or starts again."""
        if not self._engine.healthy:
            raise self._engine.error or EngineDead("the engine is not running")


@serve.ingress()
class Choice:
    """Tells HAProxy which replica gets a request: the one that Ray's router chooses."""

    async def __init__(self, replicas: DeploymentHandle) -> None:  # type: ignore[misc]
        self._replicas = replicas
        replicas._init()  # to know the replicas before the first request

    async def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/internal/route", self._route, methods=["POST"])])

    async def _route(self, request: Request) -> Response:
        text = beginning(await request.body())
        args = [SimpleNamespace(prompt=text)] if text else []  # without it, the less busy replica is chosen
        # No slot is reserved: the request itself goes to the replica by HTTP, and its engine lets it wait.
        async with self._replicas.choose_replica(*args, _reserve=False) as chosen:
            replica = chosen._replica
            if replica.backend_http_endpoint is None:
                return Response(status_code=503)
            host, port = replica.backend_http_endpoint
            return JSONResponse({"host": host, "port": port, "replica_id": replica.replica_id.to_full_id_str()})


def app(args: dict[str, Any]) -> serve.Application:
    """Returns the application of these arguments: options of `draftwing serve`, and fields of `Scaling`. Raises
    ConfigError."""
    options, scaling = read_args(args)
    haproxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    settings: dict[str, Any] = {
        "ray_actor_options": _resources(options, scaling),
        "max_ongoing_requests": MAX_ONGOING,
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": options.drain_timeout,
        "max_constructor_retry_count": 2,
        **scaling.count,
    }
    if not haproxy:
        return serve.deployment(Replica, name=NAME, **settings).bind(options)
    settings["request_router_config"] = _router(scaling)
    replicas = serve.deployment(Replica, name=NAME, **settings).bind(options)
    choosers: dict[str, Any] = {"max_ongoing_requests": MAX_ONGOING, "ray_actor_options": {"num_cpus": 0}}
    return replicas._with_ingress_request_router(serve.deployment(Choice, **choosers).bind(replicas))


def _router(scaling: Scaling) -> RequestRouterConfig:
    kwargs: dict[str, Any] = {
        "imbalanced_threshold": scaling.imbalanced_threshold,
        "do_eviction": True,
        "eviction_threshold_chars": REMEMBERED,
        "eviction_target_chars": REMEMBERED * 9 // 10,
    }
    return RequestRouterConfig(**{"request_router_class": ROUTER, "request_router_kwargs": kwargs})


def _resources(options: Options, scaling: Scaling) -> dict[str, float]:
    """CPUs and GPUs of a replica. An actor's are all of one machine, as the processes of one engine must be."""
    resources: dict[str, float] = {"num_cpus": scaling.num_cpus or options.num_threads or 1}
    if options.device == "cuda" or (options.device == "auto" and _has_gpus()):
        resources["num_gpus"] = options.tp_size
    return resources


def _has_gpus() -> bool:
    """Returns whether any machine has a GPU, not only this one."""
    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
