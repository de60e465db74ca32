"""Which names and pages may reach a server that is there for this machine alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwing.server.http import error_response


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's alone."""
    address = _address(host)
    return address.is_loopback if address else host == "localhost" or host.endswith(".localhost")


class HostCheck:
    """Answers 403 to what a page of another site asks through its visitor's browser.

    Such a page can let its own name stand for 127.0.0.1 (DNS rebinding), and is of the same origin then; or it sends a
    form to where it may not read. The first one shows in `Host`, which is no address then, the second one in `Origin`.
    Programs send no `Origin`, and extensions of browsers one that is not http's: both may do what they like.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        """allowed: names beside addresses and `localhost`."""
        self._app, self._allowed = app, frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = self._wrong(Request(scope)) if scope["type"] == "http" else ""
        if not wrong:
            await self._app(scope, receive, send)
            return
        why = (
            f"{wrong} is none of this server's names, and it has no key; name it with --allowed-hosts, or set --api-key"
        )
        await error_response(Request(scope), 403, why)(scope, receive, send)

    def _wrong(self, request: Request) -> str:
        """What may not ask."""
        host, origin = request.headers.get("host", ""), request.headers.get("origin", "")
        name = _name(f"//{host}")
        if host and not (_address(name) or self._known(name)):
            return f"the host {host[:80]!r}"
        scheme = origin.partition(":")[0].lower()
        if origin == "null" or (scheme in ("http", "https") and not self._same(origin, name)):
            return f"the origin {origin[:80]!r}"
        return ""

    def _same(self, origin: str, host: str) -> bool:
        """Whether a page is of the host that it asks, or of another program of this machine."""
        name = _name(origin)
        return name == host or self._known(name)

    def _known(self, name: str) -> bool:
        return is_loopback(name) or name in self._allowed


def _name(url: str) -> str:
    """The host of a URL, in lower case and without its port; empty where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
