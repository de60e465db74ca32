"""Decides which names and pages may reach the server, and sends browsers the headers that say so."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwing.config.options import Options
from draftwing.server.edge.keys import ADMIN_PATHS
from draftwing.server.http import error_response

EXPOSED = ("draftwing-ignored", "request-id", "retry-after", "www-authenticate", "x-request-id")
METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
PREFLIGHT_SECONDS = 7200  # for which a browser need not ask again; Chromium's most
SAFE = ("GET", "HEAD", "OPTIONS")  # methods that change nothing, those of `ADMIN_PATHS` apart


def is_loopback(host: str) -> bool:
    """Returns whether a host's name or address is this machine's alone."""
    address = _address(host)
    return address.is_loopback if address else host == "localhost" or host.endswith(".localhost")


def guarded(app: ASGIApp, options: Options) -> ASGIApp:
    """Returns the application behind `SiteCheck` and, where there are pages that may read it, `Sharing`."""
    sites = Sites(options.host_names, own=is_loopback(options.host) and not options.has_key)
    if not options.has_key:
        app = SiteCheck(app, sites)
    return Sharing(app, sites) if sites.any or sites.names or sites.own else app


class Sites:
    """Decides whose pages may use the server.

    names: of hosts besides the server's own.  any: all of them may.  own: the server is there for this machine alone
    and has no key: pages of programs of this machine may.
    """

    def __init__(self, allowed: Collection[str], own: bool) -> None:
        """allowed: names; `*` for any."""
        self.any = "*" in allowed
        self.names = frozenset(name.lower() for name in allowed)
        self.own = own and not self.any

    def has(self, origin: str) -> bool:
        """Returns whether an origin is one whose pages may read what the server answers."""
        return self.any or (_is_page(origin) and self.knows(_name(origin)))

    def knows(self, name: str) -> bool:
        return name in self.names or (self.own and is_loopback(name))


class Sharing(CORSMiddleware):
    """Tells browsers, at every endpoint and with every error, that pages of the allowed sites may ask with any headers
    and read the answers, also from another network than the server's. Cookies are never sent."""

    def __init__(self, app: ASGIApp, sites: Sites) -> None:
        origins = ["*"] if sites.any else []
        super().__init__(app, origins, METHODS, ["*"], expose_headers=EXPOSED, max_age=PREFLIGHT_SECONDS)
        self._sites = sites
        self.allow_private_network = True  # older versions of starlette have no such parameter

    def is_allowed_origin(self, origin: str) -> bool:
        return self._sites.has(origin)

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        allowed = "access-control-allow-private-network"
        if response.status_code == 200 and "access-control-request-private-network" in request_headers:
            response.headers[allowed] = "true"
        elif allowed in response.headers:
            del response.headers[allowed]
        return response


class SiteCheck:
    """Answers 403 to what a page of another site asks through its visitor's browser, where nobody needs a key.

    Such a page can let its own name stand for 127.0.0.1 (DNS rebinding), and is of the same origin then; or it sends a
    form, or shows a picture, to where it may not read. The first one shows in `Host`, which is no address then, the
    others in `Origin` or `Sec-Fetch-Site`. Programs send neither, and extensions of browsers an `Origin` that is not
    http's: they may do what they like. A link to the server may be followed.

    On addresses that others reach `Host` may be anything. There this is so for what a page may send without asking
    first (a preflight) and what it changes by that alone.
    """

    def __init__(self, app: ASGIApp, sites: Sites) -> None:
        self._app, self._sites = app, sites

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = self._wrong(Request(scope)) if scope["type"] == "http" and not self._sites.any else ""
        if not wrong:
            await self._app(scope, receive, send)
            return
        why = (
            f"{wrong} is none of this server's, and it has no key; name its host with --allowed-hosts, or set --api-key"
        )
        await error_response(Request(scope), 403, why)(scope, receive, send)

    def _wrong(self, request: Request) -> str:
        """Returns what may not ask."""
        headers, host = request.headers, request.headers.get("host", "")
        name = _name(f"//{host}")
        if self._sites.own and host and not (_address(name) or self._sites.knows(name)):
            return f"the host {host[:80]!r}"
        changes = _changes(request)
        if not (self._sites.own or changes):
            return ""
        origin = headers.get("origin", "")
        if origin == "null" or (_is_page(origin) and not (_name(origin) == name or self._sites.knows(_name(origin)))):
            return f"the origin {origin[:80]!r}"
        if origin:
            return ""
        site, programs = headers.get("sec-fetch-site"), not headers.get("user-agent", "").startswith("Mozilla/")
        if changes:  # browsers name the site to addresses of this machine and over TLS alone
            elsewhere = site in ("cross-site", "same-site") or (site is None and not programs)
        else:
            elsewhere = site == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        return "the page that asks" if elsewhere else ""


def _changes(request: Request) -> bool:
    """Returns whether a request may change something, and is of a kind that a page may send anywhere. Bodies of JSON
    are not."""
    if request.method in SAFE:
        return request.url.path in ADMIN_PATHS
    return "json" not in request.headers.get("content-type", "").lower()


def _is_page(origin: str) -> bool:
    """Returns whether an origin is a site's; extensions of browsers have other ones."""
    return origin.partition(":")[0].lower() in ("http", "https")


def _name(url: str) -> str:
    """Returns the host of a URL, in lower case and without its port; empty where there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
