"""From options to a running server: port, engine, application, in this order, so that what is cheap fails first."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType

import uvicorn

from draftwing.config.options import Options
from draftwing.engine.process.link import EngineLink
from draftwing.errors import ConfigError
from draftwing.models.hub import resolve_model
from draftwing.server.app import create_app
from draftwing.server.engine_client import AsyncEngine
from draftwing.server.telemetry.observer import Watcher
from draftwing.server.telemetry.request_log import RequestLog
from draftwing.server.telemetry.tracing import open_tracing
from draftwing.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)
ABORT_SECONDS = 2.0  # for aborted requests to answer, after the drain
STOP_SECONDS = 5.0  # for the engine to end its last step, then it is killed


def serve(options: Options) -> None:
    """Serves until SIGINT or SIGTERM. Raises ConfigError, CheckpointError or EngineDead before it listens, and
    SystemExit with code 1 when the engine is lost for good: whoever runs the server may start another one."""
    with terminable(), bind(options.host, options.port) as sock:
        if options.trust_remote_code:
            logger.warning("trust_remote_code has no effect: code that comes with a checkpoint is never executed")
        watchers = open_watchers(options)
        # Here, so that only one process downloads; the engine's then finds the files.
        path = resolve_model(options.model, options.revision, weights=not options.dummy)
        spawn = partial(EngineLink, options)
        link = spawn()
        engine = None
        try:
            tokenizer_path = path
            if options.tokenizer_path:
                tokenizer_path = resolve_model(options.tokenizer_path, options.revision, weights=False)
            tokenizer = load_tokenizer(tokenizer_path, options.chat_template)
            engine = AsyncEngine(link.wait_ready(), link, spawn)
            config = uvicorn.Config(
                create_app(engine, tokenizer, STOP_SECONDS, watchers),
                log_level=options.log_level,
                log_config=None,
                timeout_graceful_shutdown=int(options.drain_timeout + ABORT_SECONDS) + 1,
            )
            address = url(options.host, sock.getsockname()[1])
            server = Server(config, engine, options.drain_timeout, address)
            server.run(sockets=[sock])
            if server.lost:
                raise SystemExit(1)
        finally:
            # Whatever happened, no process is left. After a graceful end it is gone already.
            (engine.link if engine is not None else link).close(0)


def open_watchers(options: Options) -> list[Watcher]:
    """Who watches requests beside the metrics. Raises ConfigError."""
    watchers: list[Watcher] = []
    if options.log_requests:
        watchers.append(RequestLog(options.log_requests_level, options.api_key))
    if options.otlp_traces_endpoint is not None:
        watchers.append(open_tracing(options.otlp_traces_endpoint, options.served_model_name or options.model))
    return watchers


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that what is to be cleaned up is."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address but not listening yet. Raises ConfigError, so that a busy port is known at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is not an address of this machine: {error}") from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is in use by another process; stop it or choose another one with --port"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return sock


def url(host: str, port: int) -> str:
    """Where a client on this machine finds the server."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


class Server(uvicorn.Server):
    """Says where to point a client once requests are answered, and ends in an orderly way.

    The first signal stops new requests; those that run have `drain` seconds, then they are aborted. The second signal
    ends the process at once. It ends by itself when the engine is lost for good; `lost` tells.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain: float, url: str) -> None:
        super().__init__(config)
        self._engine, self._drain, self._url = engine, drain, url
        self.lost = False
        engine.lost = self._end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            model = self._engine.info.model_name
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
            logger.info("ready: %s/v1", self._url)
            has_key = self._engine.info.options.api_key is not None
            logger.info(
                "try: curl %s/v1/chat/completions %s-H 'Content-Type: application/json' -d '%s'",
                self._url,
                "-H 'Authorization: Bearer YOUR_API_KEY' " if has_key else "",  # the log is no place for the key
                body.replace("'", "'\\''"),
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.draining = True
        if self._engine.active and not self.lost:
            logger.info("%d requests are running; they have %g seconds", self._engine.active, self._drain)
        timer = asyncio.get_running_loop().call_later(self._drain, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._engine.link.process.kill()
            os._exit(128 + sig)
        self._engine.draining = True
        if sig == signal.SIGINT:
            super().handle_exit(sig, frame)
        else:  # how a server is meant to end: it is not raised again afterwards
            self.should_exit = True

    def _end(self) -> None:
        self.lost = self.should_exit = True

    def _abort(self) -> None:
        if self._engine.active:
            logger.warning("%d requests are aborted: the time to drain is over", self._engine.active)
            self._engine.abort(None)
