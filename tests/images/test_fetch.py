"""Which addresses pictures are fetched from, and which never: with servers of this machine that play others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from draftwing.errors import RequestError
from draftwing.images import fetch
from draftwing.images.fetch import Fetcher, is_open
from draftwing.images.processing import MAX_BYTES
from draftwing.images.reader import Picture

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.5.5", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:c0a8:1::", "240.0.0.1",
]  # fmt: skip
OPEN = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_open(address)


@pytest.mark.parametrize("address", OPEN)
def test_open_addresses(address: str) -> None:
    assert is_open(address)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path = self.path
        if path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", path.removeprefix("/to/"))
            self.end_headers()
            return
        if path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        if path == "/large":
            for _ in range(MAX_BYTES // (1 << 20) + 2):
                self.wfile.write(bytes(1 << 20))
        elif path == "/slow":
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        else:
            self.wfile.write(f"{path} of {self.headers['Host']}".encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of an open network that this machine plays, and how often they were resolved."""
    asked: list[str] = []
    addresses = {"good.example": "93.184.215.14", "other.example": "93.184.215.15", "inside.example": "10.0.0.1",
                 "mapped.example": "::ffff:127.0.0.1"}  # fmt: skip

    def resolve(host: str, port: int, **how: Any) -> list[Any]:
        asked.append(host)
        if host not in addresses:
            raise socket.gaierror("there is no such host")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], port))]

    def connected(address: tuple[str, int], timeout: float) -> socket.socket:
        assert address[0].startswith("93.184."), "connected to an address that nobody may reach"
        sock = socket.socket()
        sock.settimeout(timeout)
        sock.connect(("127.0.0.1", address[1]))
        return sock

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(fetch.socket, "create_connection", connected)
    return asked


def fetched(url: str, *hosts: str, seconds: float = 5) -> bytes | str:
    return Fetcher(hosts, seconds)(Picture(url, "messages.0")).data


def refusal(url: str, *hosts: str, seconds: float = 5) -> str:
    with pytest.raises(RequestError) as error:
        fetched(url, *hosts, seconds=seconds)
    assert error.value.param == "messages.0" and "\n" not in str(error.value)
    return str(error.value)


def test_allowed_hosts(port: int, network: list[str]) -> None:
    url = f"http://good.example:{port}/a.png?b=1"
    assert fetched(url, "good.example") == f"/a.png?b=1 of good.example:{port}".encode()
    assert fetched(url, "*") == fetched(url, "GOOD.example")
    assert "not one of --allow-image-urls" in refusal(url, "other.example")
    assert len(network) == 3, "a name is resolved once for each picture"
    assert fetched(url) == url  # nothing is allowed: it is refused elsewhere
    assert fetched("data:image/png;base64,AA==", "*") == "data:image/png;base64,AA=="


def test_private_names_and_addresses(port: int, network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("inside.example", "mapped.example"):
        assert "private network" in refusal(f"http://{host}:{port}/", "*")
    as_written = lambda host, port, **how: [(0, 0, 0, "", (host, port))]  # noqa: E731
    monkeypatch.setattr(fetch.socket, "getaddrinfo", as_written)
    for host in ("127.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]"):
        assert "private network" in refusal(f"http://{host}:{port}/", "*")


def test_one_private_address_of_several(port: int, network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(0, 0, 0, "", (address, port)) for address in ("93.184.215.14", "127.0.0.1")]
    monkeypatch.setattr(fetch.socket, "getaddrinfo", lambda *args, **how: both)
    assert "private network" in refusal(f"http://good.example:{port}/", "*")


def test_redirects(port: int, network: list[str]) -> None:
    good = f"http://good.example:{port}"
    assert fetched(f"{good}/to//b.png", "good.example") == f"/b.png of good.example:{port}".encode()
    moved = f"{good}/to/http://other.example:{port}/c"
    assert fetched(moved, "good.example", "other.example") == f"/c of other.example:{port}".encode()
    assert "not one of" in refusal(moved, "good.example")
    assert "private network" in refusal(f"{good}/to/http://inside.example:{port}/", "*")
    assert "expected http://" in refusal(f"{good}/to/file:///etc/passwd", "*")
    around = f"{good}/to/" * 6
    assert "more than 3 redirects" in refusal(f"{around}x", "*")


def test_limits(port: int, network: list[str]) -> None:
    good = f"http://good.example:{port}"
    assert "status 404" in refusal(f"{good}/missing", "*")
    assert "more than 20 MiB" in refusal(f"{good}/large", "*", seconds=30)
    begun = time.monotonic()
    assert "longer than 0.3 s" in refusal(f"{good}/slow", "*", seconds=0.3)
    assert time.monotonic() - begun < 3
    assert "cannot be fetched" in refusal("http://nowhere.example/", "*")
    assert "without a name and password" in refusal("http://user:secret@good.example/", "*")
    assert "cannot be fetched" in refusal("http://good.example:99999/", "*")


def test_a_name_whose_addresses_change(port: int, network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked at is what is connected to, and each redirect is looked at anew."""
    asked: list[str] = []

    def resolve(host: str, port: int, **how: Any) -> list[Any]:
        asked.append(host)
        return [(0, 0, 0, "", ("93.184.215.14" if len(asked) == 1 else "127.0.0.1", port))]

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    good = f"http://good.example:{port}"
    assert fetched(f"{good}/a", "*") == f"/a of good.example:{port}".encode() and len(asked) == 1
    asked.clear()
    assert "private network" in refusal(f"{good}/to/{good}/b", "*") and len(asked) == 2


def test_names_that_take_long(port: int, network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits is answered in time, however many names never come; the next one is looked up again."""
    quick, answered = fetch.socket.getaddrinfo, threading.Event()

    def slow(host: str, port: int, **how: Any) -> list[Any]:
        if host == "slow.example":
            answered.wait()
        return quick(host, port, **how)

    monkeypatch.setattr(fetch.socket, "getaddrinfo", slow)
    monkeypatch.setattr(fetch, "_LOOKUPS", 2)
    fetcher, before = Fetcher("*", 0.2), threading.active_count()
    for _ in range(4):
        begun = time.monotonic()
        with pytest.raises(RequestError, match=r"longer than 0\.2 s"):
            fetcher(Picture("http://slow.example/", "messages.0"))
        assert time.monotonic() - begun < 2
    assert threading.active_count() <= before + 2, "threads are left for more names than may be asked at once"
    answered.set()
    good = Picture(f"http://good.example:{port}/a", "messages.0")
    while threading.active_count() > before:
        time.sleep(0.01)
    assert fetcher(good).data == f"/a of good.example:{port}".encode()


def test_names_that_redirects_take_long(port: int, network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    quick = fetch.socket.getaddrinfo

    def slow(host: str, port: int, **how: Any) -> list[Any]:
        time.sleep(0.2)
        return quick(host, port, **how)

    monkeypatch.setattr(fetch.socket, "getaddrinfo", slow)
    good = f"http://good.example:{port}"
    begun = time.monotonic()
    assert "longer than 0.5 s" in refusal(f"{good}/to/{good}/to/{good}/to/{good}/a", "*", seconds=0.5)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("address", ["[::ffff:127.0.0.1]", "[::ffff:169.254.169.254]", "[::ffff:a00:1]", "127.0.0.1"])
def test_redirects_to_private_addresses(
    port: int, network: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = fetch.socket.getaddrinfo

    def resolve(host: str, port: int, **how: Any) -> list[Any]:
        return known(host, port, **how) if host.endswith("example") else [(0, 0, 0, "", (host, port))]

    monkeypatch.setattr(fetch.socket, "getaddrinfo", resolve)
    for kind in ("http", "https"):
        assert "private network" in refusal(f"http://good.example:{port}/to/{kind}://{address}:{port}/", "*")
