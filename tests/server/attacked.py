"""A server around the stand-in engine in a process of its own, with little memory, for tests that attack it.

`python -m attacked JSON` prints its port. JSON: {"options": of Options, "memory": bytes of address space beyond those
of the start, "template": in place of the tokenizer's, "pause": of the engine, "limits": of LimitedConnection}.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MEMORY = 1 << 30


class Attacked:
    """The process, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"

    def connect(self, timeout: float = 20.0) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    @property
    def seconds(self) -> float:
        """Of processors, since its start."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident(self) -> int:
        """Bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def attacked(**settings: Any) -> Iterator[Attacked]:
    """Starts one; afterwards it is still there, or has ended because it was asked to."""
    paths = [str(HERE), *(path or os.getcwd() for path in sys.path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "attacked", json.dumps(settings)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "the server did not start"
        yield Attacked(process, int(line))
        assert process.poll() is None or process.returncode == 0, "the server died"
        process.terminate()
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main(settings: dict[str, Any]) -> None:
    from fake_engine import FakeEngine, local

    from draftwing.config.options import Options
    from draftwing.server.edge.connections import LimitedConnection
    from draftwing.server.uvicorn_server import make_server
    from draftwing.text.tokenizer import Tokenizer

    for name, value in settings.get("limits", {}).items():
        setattr(LimitedConnection, name, value)
    options = {"random_seed": 7, "drain_timeout": 0, "log_level": "critical", "allowed_hosts": "*"} | settings.get(
        "options", {}
    )
    engine = FakeEngine(Options(**options), pause=settings.get("pause", 0.0005))
    tokenizer = engine.tokenizer
    if "template" in settings:
        tokenizer = Tokenizer(tokenizer.backend, tokenizer.special_tokens, settings["template"])
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        server = make_server(local(engine), tokenizer, [], 1.0, port)
        started = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (started + settings.get("memory", MEMORY),) * 2)
        sock.listen(128)
        print(port, flush=True)
        server.run(sockets=[sock])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
