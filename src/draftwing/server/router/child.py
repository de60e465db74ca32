"""What `ModelServer` starts: a server of one model, that of `draftwing serve`, at a path in place of a port."""

from __future__ import annotations

import signal
import socket
import sys
from typing import TYPE_CHECKING

from draftwing.config.options import Options
from draftwing.engine.process.spawn import Failed, joined
from draftwing.errors import DraftwingError
from draftwing.log import configure_logging

if TYPE_CHECKING:
    from draftwing.engine.admission import EngineInfo


def host_pool(info: EngineInfo) -> int:
    """Returns what it sends once requests are taken (`Failed` in its place): the bytes of the host's that the KV cache
    takes when all of it has been used. Those of `--hicache-size` beneath a GPU's are taken by then."""
    options = info.options
    return 0 if info.stored["on_device"] else info.pool_bytes * options.tp_size + int(options.hicache_size * 1e9)


def main() -> int:
    (connection,) = joined(sys.argv)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which it is stopped; the server has a handler of its own
    arguments, path = connection.recv()
    configure_logging(arguments.get("log_level", "info"), arguments.get("log_format", "text"))
    try:
        from draftwing.server.run import serve

        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
            serve(Options.from_kwargs(**arguments).resolve(), sock, lambda info: connection.send(host_pool(info)))
    except DraftwingError as error:
        connection.send(Failed.of(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
