"""A server around the stand-in engine in a process of its own, with little memory, for tests that attack it. It is a
fork of one that has imported all that servers are made of, which takes longer than most of the tests."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import resource
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

MEMORY = 1 << 30
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fake_engine", "draftwing.server.uvicorn_server"])


class Attacked:
    """The process, seen from outside."""

    def __init__(self, process: ForkServerProcess, port: int) -> None:
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
    """Starts one; afterwards it is still there, or has ended because it was asked to.

    settings: "options" of Options, "memory": bytes of address space beyond those of the start, "template" in place of
    the tokenizer's, "pause" of the engine, "limits" of LimitedConnection, "pictures": whether the model reads
    pictures, 127.0.0.1 being an address of the open network.
    """
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=main, args=(settings, theirs))
    process.start()
    theirs.close()
    try:
        yield Attacked(process, ours.recv())
        assert process.is_alive() or process.exitcode == 0, "the server died"
        process.terminate()
        process.join(20)
    finally:
        process.kill()
        process.join()
        ours.close()


# A token of the stand-in's vocabulary, which no other text of tests holds, stands for a picture.
PLACE = "\x01"
PICTURES = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '\x01' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)


def read_pictures(engine: Any) -> None:
    """Has a stand-in say that it reads pictures, and fetch them from 127.0.0.1, too."""
    from draftwing.images import fetch
    from draftwing.images.processing import PatchProcessor

    (token,) = engine.tokenizer.encode(PLACE)
    engine.info = dataclasses.replace(engine.info, images=PatchProcessor(token, PLACE, PLACE, most=1 << 18))
    is_open = fetch.is_open
    fetch.is_open = lambda text: text == "127.0.0.1" or is_open(text)


def main(settings: dict[str, Any], conn: Connection) -> None:
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
    if settings.get("pictures"):
        settings = {"template": PICTURES, **settings}
        read_pictures(engine)
    if "template" in settings:
        tokenizer = Tokenizer(tokenizer.backend, tokenizer.special_tokens, settings["template"])
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        server = make_server(local(engine), tokenizer, [], 1.0, port)
        started = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (started + settings.get("memory", MEMORY),) * 2)
        sock.listen(128)
        conn.send(port)
        server.run(sockets=[sock])
