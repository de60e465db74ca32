"""What many connections without a key send, as fast as they can, and what others feel of it meanwhile.

`python -m attackers NAME PORT SECONDS CONNECTIONS` attacks a server of this machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from draftwing.machine import yield_processors

HOST = "127.0.0.1"
BLOCK = 65_536  # bytes that are sent at once, about


class Attack(NamedTuple):
    """first: what a connection begins with.  unit: what it repeats then.  asks: whether it waits for an answer each
    time.  leaves: whether the connection ends after `first`, and a new one comes.  reads: whether it reads at all."""

    first: bytes
    unit: bytes = b""
    asks: bool = False
    leaves: bool = False
    reads: bool = True

    @property
    def block(self) -> bytes:
        return self.unit if self.asks else self.unit * max(BLOCK // max(len(self.unit), 1), 1)


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([f"{line} HTTP/1.1", "host: 127.0.0.1", *headers, "", ""]).encode()


JSON, CHUNKED = "content-type: application/json", "transfer-encoding: chunked"
WRONG_KEY = "authorization: Bearer nobody"
TINY, LARGE = b"1\r\nx\r\n", b"%x\r\n" % 4096 + b"x" * 4096 + b"\r\n"
PREFLIGHT = head("OPTIONS /v1/chat/completions", "origin: http://evil.example", "access-control-request-method: POST")
ATTACKS = {
    "chunks of a byte, without a key": Attack(head("POST /generate", JSON, CHUNKED), TINY),
    "chunks of a byte, to /health": Attack(head("GET /health", CHUNKED), TINY),
    "chunks of 64 bytes": Attack(head("POST /generate", JSON, CHUNKED), b"40\r\n" + b"x" * 64 + b"\r\n"),
    "a body after a 401": Attack(head("POST /generate", JSON, CHUNKED, WRONG_KEY), LARGE),
    "a body after a 404": Attack(head("POST /nothing", JSON, CHUNKED), LARGE),
    "a body to /health": Attack(head("GET /health", CHUNKED), LARGE),
    "a stated body of 1 GB": Attack(head("POST /generate", JSON, f"content-length: {10**9}"), b" " * 4096),
    "half a request": Attack(b"POST /generate HTTP/1.1\r\nhost: a\r\n"),
    "headers": Attack(b"GET /health HTTP/1.1\r\n", b"a: b\r\n"), "empty lines": Attack(b"", b"\r\n"),
    "nonsense": Attack(b"", b"\x00\xff\r\n"), "requests that do not wait": Attack(b"", head("GET /health")),
    "/health": Attack(b"", head("GET /health"), asks=True), "the page": Attack(b"", head("GET /"), asks=True),
    "preflights": Attack(b"", PREFLIGHT, asks=True), "401": Attack(b"", head("GET /v1/models", WRONG_KEY), asks=True),
    "404": Attack(b"", head("GET /nothing"), asks=True), "connections that say nothing": Attack(b"", leaves=True),
    "connections that ask for /health and leave": Attack(head("GET /health"), leaves=True),
}  # fmt: skip
STREAMED = json.dumps({"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}})
# Where nobody has a key: `UNREAD` takes rows of the engine, as clients may that have one.
UNREAD = Attack(head("POST /generate", JSON, f"content-length: {len(STREAMED)}") + STREAMED.encode(), reads=False)
FLUSHES = Attack(head("POST /flush_cache?timeout=3600", "content-length: 0"), leaves=True)  # where nobody has a key


OPEN = {"flushes": FLUSHES, "streams that nobody reads": UNREAD}


class Sender:
    """A connection of an attack; a new one where it is closed."""

    def __init__(self, attack: Attack, port: int) -> None:
        self._attack, self._port = attack, port
        self.sock: socket.socket | None = None
        self._left = memoryview(b"")
        self._first = False
        self.sent = 0

    def open(self) -> None:
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.connect_ex((HOST, self._port))
        self._left, self._first = memoryview(self._attack.first or self._attack.block), bool(self._attack.first)

    def go_on(self, readable: bool, writable: bool) -> bool:
        """Whether the connection is there still."""
        assert self.sock is not None
        try:
            if readable:
                if not self.sock.recv(BLOCK):
                    return False
                if self._attack.asks and not self._left:
                    self._left = memoryview(self._attack.block)
            if writable and self._left:
                count = self.sock.send(self._left)
                self.sent += count
                self._left = self._left[count:]
            if writable and not self._left:
                if self._attack.leaves:
                    return False
                if not self._attack.asks or self._first:
                    self._left = memoryview(self._attack.block)
                self._first = False
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    @property
    def wanted(self) -> int:
        writes = self._left or (self._attack.leaves and not self._attack.first)
        return (selectors.EVENT_READ if self._attack.reads else 0) | (selectors.EVENT_WRITE if writes else 0)


def attack(name: str, port: int, seconds: float, connections: int) -> None:
    from picture_attacks import picture_attack  # late: it is made of this module's parts

    chosen = OPEN.get(name) or ATTACKS.get(name) or picture_attack(name)
    senders = [Sender(chosen, port) for _ in range(connections)]
    yield_processors(19)
    print(flush=True)
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for sender in senders:
            sender.open()
            waiting.register(sender.sock, sender.wanted, sender)  # type: ignore[arg-type]
        while time.monotonic() < end:
            for key, mask in waiting.select(0.1):
                sender = key.data
                there = sender.go_on(bool(mask & selectors.EVENT_READ), bool(mask & selectors.EVENT_WRITE))
                if not there:
                    waiting.unregister(sender.sock)
                    sender.sock.close()
                    sender.open()
                    waiting.register(sender.sock, sender.wanted, sender)
                elif not sender.wanted:
                    waiting.unregister(sender.sock)
                elif sender.wanted != key.events:
                    waiting.modify(sender.sock, sender.wanted, sender)
        for sender in senders:
            sender.sock.close()  # type: ignore[union-attr]


@contextlib.contextmanager
def attacking(name: str, port: int, seconds: float, connections: int = 64) -> Iterator[None]:
    """An attack by a process of low priority, so that what it takes of the processors is not taken for the server's."""
    paths = os.pathsep.join([str(Path(__file__).parent), *(path or os.getcwd() for path in sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "attackers", name, str(port), str(seconds), str(connections)],
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        with process.stdout as said:
            said.readline()  # it begins: what it sends is made
        yield
    finally:
        process.kill()
        process.wait()


class Felt(NamedTuple):
    """Seconds: gaps between the events of a stream, and until /health was answered."""

    gaps: list[float]
    health: list[float]

    @property
    def late(self) -> float:
        """The gaps' 99th percentile; infinite where nothing came."""
        return math.inf if not self.gaps else sorted(self.gaps)[int(0.99 * (len(self.gaps) - 1))]


def feel(port: int, seconds: float, key: str = "") -> Felt:
    """What a client feels that streams answers one after the other, and who asks for /health on a new connection ten
    times a second."""
    felt, end = Felt([], []), time.monotonic() + seconds
    asking = threading.Thread(target=_ask_health, args=(port, end, felt.health))
    asking.start()
    while time.monotonic() < end:
        _stream(port, end, key, felt.gaps)
    asking.join()
    return felt


def _stream(port: int, end: float, key: str, gaps: list[float]) -> None:
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 0}
    body = json.dumps({"text": "Once upon a time", "sampling_params": sampling, "stream": True}).encode()
    keys = [f"authorization: Bearer {key}"] if key else []
    with socket.create_connection((HOST, port), 60) as sock:
        sock.sendall(head("POST /generate", JSON, f"content-length: {len(body)}", *keys) + body)
        last = 0.0
        while (data := sock.recv(BLOCK)) and time.monotonic() < end:
            now = time.perf_counter()
            if b"data: " in data and last:
                gaps.append(now - last)
            last = now if b"data: " in data else last
            if b"[DONE]" in data:
                return


def _ask_health(port: int, end: float, health: list[float]) -> None:
    while time.monotonic() < end:
        begun = time.perf_counter()
        with socket.create_connection((HOST, port), 60) as sock:
            sock.sendall(head("GET /health", "connection: close"))
            assert sock.recv(BLOCK).startswith(b"HTTP/1.1 200 ")
        health.append(time.perf_counter() - begun)
        time.sleep(max(0.1 - health[-1], 0))


if __name__ == "__main__":
    attack(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
