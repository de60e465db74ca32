"""From options to a running server: port, engine, application, in this order, so that what is cheap fails first."""

from __future__ import annotations

import errno
import json
import logging
import socket
import sys

import uvicorn

from draftwing.config import Options
from draftwing.errors import ConfigError

logger = logging.getLogger(__name__)
DRAIN_SECONDS = 5  # how long running requests may go on after SIGTERM


def serve(options: Options) -> None:
    """Serves until SIGINT or SIGTERM. Raises ConfigError or CheckpointError before it listens."""
    configure_logging(options.log_level)
    with bind(options.host, options.port) as sock:
        if options.trust_remote_code:
            logger.warning("trust_remote_code has no effect: code that comes with a checkpoint is never executed")
        from draftwing.engine.engine import Engine
        from draftwing.server.api import create_app

        engine = Engine(options)
        try:
            config = uvicorn.Config(
                create_app(engine),
                log_level=options.log_level,
                log_config=None,
                timeout_graceful_shutdown=DRAIN_SECONDS,
            )
            _Server(config, url(options.host, sock.getsockname()[1]), engine.model_name).run(sockets=[sock])
        finally:
            engine.close()


def configure_logging(level: str) -> None:
    """One line per message on standard error, for the engine and uvicorn alike."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    for name in ("draftwing", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.setLevel(level.upper())
        log.propagate = False


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


class _Server(uvicorn.Server):
    """Says where to point a client, once requests are answered."""

    def __init__(self, config: uvicorn.Config, url: str, model: str) -> None:
        super().__init__(config)
        self._url, self._model = url, model

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            body = json.dumps({"model": self._model, "messages": [{"role": "user", "content": "Hello"}]})
            logger.info("ready: %s/v1", self._url)
            logger.info(
                "try: curl %s/v1/chat/completions -H 'Content-Type: application/json' -d '%s'",
                self._url,
                body.replace("'", "'\\''"),
            )
