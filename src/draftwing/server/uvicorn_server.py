"""What listens for requests, and how it ends: uvicorn around the application."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwing.config.options import Options
from draftwing.server.app import create_app, paced
from draftwing.server.edge.acceptor import Acceptor
from draftwing.server.edge.connections import (
    LimitedConnection,
    ReadScheduler,
    allow_descriptors,
    check_uvicorn,
)
from draftwing.server.edge.hosts import guarded
from draftwing.server.edge.keys import FREE_PATHS, METRICS_PATHS
from draftwing.server.edge.paths import rooted
from draftwing.server.engine_client import AsyncEngine
from draftwing.server.signals import Hangup, handled
from draftwing.server.telemetry.observer import Watcher
from draftwing.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
ABORT_SECONDS = 2.0  # for the engine to end aborted requests, after the drain; then they end without it
# Of a connection without a request. More than what clients and balancers keep one for (httpx 5, aiohttp 15, many
# balancers 60): with the same time, requests are sent into connections that are being closed, and fail.
IDLE_SECONDS = 75
SEND_SECONDS = 5.0  # for clients to take what is left
TICK_SECONDS = 1.0  # between two times of the header `date`


def make_server(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    watchers: Sequence[Watcher],
    stop_seconds: float,
    port: int | None,
    hangup: Hangup | None = None,
) -> Server:
    """Returns a server of the application.

    watchers: of requests.  stop_seconds: that the engine has to end its last step.  port: that is listened on, None: a
    path.  hangup: what SIGHUP means.
    """
    inner = create_app(engine, tokenizer, stop_seconds, watchers)
    return server_of(inner, engine.info.options, engine, port, hangup, inner.state.reload_keys)


def server_of(
    inner: ASGIApp, options: Options, served: Served, port: int | None, hangup: Hangup | None,
    reload: Callable[[], None],
) -> Server:  # fmt: skip
    """Returns a server of an application that answers for `served`. port: None: it listens at a path, behind a front
    that has looked who asks, and nobody is told.  reload: what SIGHUP does where it reloads something."""
    allow_descriptors(options.max_connections)
    app = inner if port is None else guarded(inner, options)
    app = rooted(paced(app, options), options.root_path)
    config = uvicorn.Config(
        _quiet(app, served),
        http=partial(LimitedConnection, limit=options.max_connections, reads=ReadScheduler()),  # type: ignore[arg-type]
        ws="none",
        log_level=options.log_level,
        log_config=None,
        access_log=port is not None,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(options.drain_timeout + ABORT_SECONDS + SEND_SECONDS),
    )
    check_uvicorn(config)
    logging.getLogger("uvicorn.error").setLevel(max(logging.getLogger("uvicorn").level, logging.WARNING))
    logging.getLogger("uvicorn.access").filters = [_no_probe]
    lines = []
    if port is not None:
        address = url(options.host, port) + (options.root_path or "")
        lines = [*([] if options.disable_ui else [f"page:       {address}"]), f"OpenAI API: {address}/v1"]
    return Server(config, served, options.drain_timeout, lines, hangup or Hangup(), reload)


def _no_probe(record: logging.LogRecord) -> bool:
    """Returns whether a line of the access log is of a request that nobody's machine makes again and again."""
    _, _, path, *_ = cast(tuple[Any, ...], record.args)
    return path.partition("?")[0] not in FREE_PATHS | METRICS_PATHS


def _quiet(app: ASGIApp, served: Served) -> ASGIApp:
    """Returns the application; a response that is cut off at the end of the server, because its client does not read,
    is no error that is worth a traceback."""

    async def ends(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not served.draining:
                raise

    return ends


def url(host: str, port: int) -> str:
    """Returns where a client on this machine finds the server."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


class Served(Protocol):
    """What a server answers for: an engine, or several models.

    draining: no new requests come.  lost: is called where it cannot go on.
    """

    draining: bool
    lost: Callable[[], None]

    @property
    def active(self) -> int:
        """Returns requests that are running or waiting."""

    def abort(self, name: str | None) -> None:
        """Aborts the requests of this name, or all of them for None."""

    def end_all(self, message: str) -> None:
        """Ends all requests with an error."""

    def kill(self) -> None:
        """Ends the process that computes, at once."""


class Server(uvicorn.Server):
    """Says where to point a client once requests are answered, and ends in an orderly way.

    The first signal stops new requests; those that run have `drain` seconds, then they are aborted. The second signal
    ends the process at once. It ends by itself when the engine is lost for good; `lost` says so.
    """

    def __init__(
        self, config: uvicorn.Config, served: Served, drain: float, where: Sequence[str], hangup: Hangup,
        reload: Callable[[], None],
    ) -> None:  # fmt: skip
        """where: lines that tell users where it is."""
        self._loop: asyncio.AbstractEventLoop | None = None  # once it waits for its end
        self._ending = asyncio.Event()
        super().__init__(config)
        self._hangup, self._reload = hangup, reload
        self._served, self._drain, self._where = served, drain, where
        self._acceptors: list[Acceptor] = []
        self.ready: Callable[[], None] = lambda: None  # is called when requests are taken
        self.lost = False
        served.lost = self._end

    @property
    def should_exit(self) -> bool:
        """Returns whether it is to end; may be set in signal handlers and by other threads."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._ending.set)

    async def main_loop(self) -> None:
        """Waits for the end. uvicorn looks ten times a second, which keeps an idle machine awake."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), TICK_SECONDS)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        if self.started:
            one = partial(
                self.config.http_protocol_class,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )  # type: ignore[call-arg]
            self._acceptors = [Acceptor(sock, one) for sock in sockets or ()]
            gc.collect()
            gc.freeze()  # large bodies make the collector look through all there is, while everybody waits
            logger.info("\n".join(["ready", *self._where]))
            self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._served.draining = True
        for acceptor in self._acceptors:
            acceptor.close()
        if self._served.active and not self.lost:
            logger.info("%d requests are running; they have %g seconds", self._served.active, self._drain)
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(self._drain, self._abort),
            loop.call_later(self._drain + ABORT_SECONDS, self._served.end_all, "the server is shutting down"),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            loop = asyncio.get_running_loop()

            def hung_up(sig: int, frame: FrameType | None) -> None:
                if self._hangup.ends:
                    self.handle_exit(sig, frame)
                else:
                    loop.call_soon_threadsafe(self._reload)

            with handled(signal.SIGHUP, hung_up, self._hangup.reloads):
                yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGHUP:
            return  # a shell sends it once more than the terminal that was closed
        if self.should_exit:
            self._served.kill()
            os._exit(128 + sig)
        self._served.draining = True
        if sig == signal.SIGINT:
            super().handle_exit(sig, frame)
        else:  # how a server is meant to end: it is not raised again afterwards
            self.should_exit = True

    def _end(self) -> None:
        self.lost = self.should_exit = True

    def _abort(self) -> None:
        if self._served.active:
            logger.warning("%d requests are aborted: the time to drain is over", self._served.active)
            self._served.abort(None)
