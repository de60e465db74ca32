"""Makes a running server of options: port, engine, application, in this order, so that what is cheap fails first."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from draftwing.config.api_keys import ApiKey, read_keys
from draftwing.config.options import Options
from draftwing.engine.process.link import EngineLink
from draftwing.errors import ConfigError
from draftwing.machine import keep_tidy
from draftwing.models.hub import model_tokenizer, resolve_model
from draftwing.server.signals import Hangup, terminable
from draftwing.version import __version__

if TYPE_CHECKING:
    from draftwing.server.engine_client import AsyncEngine
    from draftwing.server.telemetry.observer import Watcher
    from draftwing.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
STOP_SECONDS = 5.0  # for the engine to end its last step, then it is killed


def serve(
    options: Options, private: socket.socket | None = None, ready: Callable[[AsyncEngine], None] = lambda engine: None
) -> None:
    """Serves until SIGINT, SIGTERM or the end of the terminal, see `Hangup`. Raises ConfigError, CheckpointError or
    EngineDead before it listens, and SystemExit with code 1 when the engine is lost for good: whoever runs the server
    may start another one.

    private: to listen on in place of the address, bound to a path.  ready: is called when requests are taken,
    with the engine, on its event loop.
    """
    hangup = Hangup(reloads=options.api_key_file is not None)
    with terminable(hangup), private or bind(options.host, options.port) as sock:
        logger.info("draftwing %s: model %s, device %s", __version__, options.model, options.device)
        if options.trust_remote_code:
            logger.warning("--trust-remote-code has no effect: code that comes with a checkpoint is never executed")
        watchers = open_watchers(options, read_keys(options))
        with opened(options) as (engine, tokenizer):
            from draftwing.server.uvicorn_server import make_server

            keep_tidy()
            port = None if private is not None else sock.getsockname()[1]
            server = make_server(engine, tokenizer, watchers, STOP_SECONDS, port, hangup)
            server.ready = partial(ready, engine)
            server.run(sockets=[sock])
            if server.lost:
                raise SystemExit(1)


@contextlib.contextmanager
def opened(options: Options) -> Iterator[tuple[AsyncEngine, Tokenizer]]:
    """The engine's process, ready, and the tokenizer; at the end the process is gone, whatever happened.

    Raises ConfigError, CheckpointError or EngineDead.
    """
    # Here, so that only one process downloads; the engine's then finds the files.
    path = resolve_model(options.model, options.revision, weights=not options.dummy)
    spawn = partial(EngineLink, options)
    link = spawn()
    engine = None
    try:
        # Not before: the other process loads the engine while these are imported.
        import draftwing.server.uvicorn_server  # noqa: F401
        from draftwing.server.engine_client import AsyncEngine

        tokenizer = model_tokenizer(options, path)
        engine = AsyncEngine(link.wait_ready(), link, spawn)
        yield engine, tokenizer
    finally:
        # After a graceful end it is gone already.
        (engine.link if engine is not None else link).close(0)


def open_watchers(options: Options, keys: Sequence[ApiKey] = ()) -> list[Watcher]:
    """Returns who watches requests besides the metrics. keys: that no log shows. Raises ConfigError."""
    watchers: list[Watcher] = []
    if options.log_requests:
        from draftwing.server.telemetry.request_log import RequestLog

        watchers.append(RequestLog(options.log_requests_level, [one.key for one in keys], form=options.log_format))
    if options.otlp_traces_endpoint is not None:
        from draftwing.server.telemetry.request_log import open_tracing

        watchers.append(open_tracing(options.otlp_traces_endpoint, options.model_names[0]))
    return watchers


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address but not listening yet. Raises ConfigError, so that a busy port is known at
    once."""
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
