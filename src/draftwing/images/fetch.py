"""Fetches pictures from addresses of hosts that the user allows. A name is resolved once, and what is connected to is
that address: never one of a private network, of this machine, or of a group, also not behind a redirect."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from draftwing.errors import RequestError
from draftwing.images.processing import MAX_BYTES
from draftwing.images.reader import Picture
from draftwing.requests.refusals import show

SECONDS: Final = 10.0  # for one picture, redirects included
MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PIECE = 1 << 16
_LOOKUPS = 32  # names that are looked up at once, with those that nobody waits for any more
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Fetcher:
    def __init__(self, hosts: Collection[str], seconds: float = SECONDS) -> None:
        """hosts: names that may be asked, `*`: any."""
        self._hosts, self._seconds = frozenset(host.lower() for host in hosts), seconds
        self._lookups = threading.BoundedSemaphore(_LOOKUPS)

    def __call__(self, picture: Picture) -> Picture:
        """Returns the picture itself in place of its address, and any other as it is. Blocks. Raises RequestError."""
        if not self._hosts or not is_address(picture):
            return picture
        url, where, until = str(picture.data), picture.where, time.monotonic() + self._seconds
        for _ in range(MAX_REDIRECTS + 1):
            try:
                data, moved = self._asked(urlsplit(url), where, until)
            except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
                late = time.monotonic() >= until
                why = f"it takes longer than {self._seconds:g} s" if late else str(error) or type(error).__name__
                raise _refusal(where, url, why) from None
            if data is not None:
                return Picture(data, where)
            url = urljoin(url, moved)
        raise _refusal(where, url, f"there are more than {MAX_REDIRECTS} redirects")

    def _asked(self, url: SplitResult, where: str, until: float) -> tuple[bytes | None, str]:
        """Returns the answer of one server, or where it says that the picture is."""
        host, full = (url.hostname or "").lower(), url.geturl()
        if url.scheme not in ("http", "https") or not host or url.username or url.password:
            raise _refusal(where, full, "expected http://HOST/... or https://HOST/... without a name and password")
        if "*" not in self._hosts and host not in self._hosts:
            raise _refusal(where, full, f"the host {show(host)} is not one of --allow-image-urls")
        port = url.port or (443 if url.scheme == "https" else 80)
        address = self._resolved(host, port, until, where, full)
        sock = socket.create_connection((address, port), max(until - time.monotonic(), 0.01))
        if url.scheme == "https":
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        ended = threading.Timer(max(until - time.monotonic(), 0), _end, [sock])
        ended.start()
        try:
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection = http.client.HTTPConnection(host, port)
            connection.sock = sock
            target = (url.path or "/") + (f"?{url.query}" if url.query else "")
            connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "draftwing"})
            response = connection.getresponse()
            if response.status in _REDIRECTS:
                return None, response.headers.get("Location", "")
            if response.status != 200:
                raise _refusal(where, full, f"the server answers with status {response.status}")
            body = _body(response, where, full)
            if time.monotonic() >= until:
                raise TimeoutError
            return body, ""
        finally:
            ended.cancel()
            sock.close()

    def _resolved(self, host: str, port: int, until: float, where: str, url: str) -> str:
        """Returns the address to connect to. Raises RequestError where any of the host's is none of the open network,
        TimeoutError when it is late."""
        found = [str(one[4][0]) for one in self._looked_up(host, port, until)]
        if not found or not all(map(is_open, found)):
            raise _refusal(where, url, "its host is in a private network, or this machine")
        return found[0]

    def _looked_up(self, host: str, port: int, until: float) -> list[Any]:
        """Does as `getaddrinfo`, which has no limit of time: a thread that is late is left to end by itself."""
        answer: Future[list[Any]] = Future()

        def ask() -> None:
            try:
                answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            except (OSError, ValueError) as error:  # ValueError: a name that cannot be encoded
                answer.set_exception(error)
            finally:
                self._lookups.release()

        if not self._lookups.acquire(timeout=max(until - time.monotonic(), 0)):
            raise TimeoutError
        try:
            threading.Thread(target=ask, name="draftwing-names", daemon=True).start()
        except RuntimeError:  # the system has no thread for it
            self._lookups.release()
            raise
        return answer.result(max(until - time.monotonic(), 0))


def is_address(picture: Picture) -> bool:
    """Returns whether a picture is somewhere else, to be fetched."""
    return isinstance(picture.data, str) and picture.data.lstrip()[:8].lower().startswith(("http://", "https://"))


def is_open(text: str) -> bool:
    """Returns whether an address is one of the open network, whatever it is written or wrapped in."""
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if not all(one is None or is_open(str(one)) for one in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast and not address.is_reserved


def _body(response: http.client.HTTPResponse, where: str, url: str) -> bytes:
    parts, size = list[bytes](), 0
    while part := response.read(_PIECE):
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            raise _refusal(where, url, f"it has more than {MAX_BYTES >> 20} MiB")
    return b"".join(parts)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # whoever reads from it goes on at once


def _refusal(where: str, url: str, why: str) -> RequestError:
    return RequestError(f"{where}: the picture at {show(url)} cannot be fetched: {why}", where)
