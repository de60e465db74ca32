"""Requests that ask for another protocol, as Java's client asks for HTTP/2: they are read as if they did not, which is
how a server answers that has no other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httptools

Headers = Sequence[tuple[bytes, bytes]]


class PlainParser(httptools.HttpRequestParser):
    """Reads the requests of a connection. httptools itself ends behind the headers of one that asks for an upgrade: its
    body would be lost, and so would all requests after it.

    Such headers the connection sets aside (`sets_aside`) in place of beginning a request, and hears of them once more
    without `upgrade`, by another parser that it has from then on.
    """

    def __init__(self, connection: Any) -> None:
        """connection: what is told of requests; it has the parser as `parser`."""
        super().__init__(connection)
        if hasattr(self, "set_dangerous_leniencies"):  # since httptools 0.6.3
            self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._connection, self.aside = connection, b""

    def sets_aside(self, target: bytes, headers: Headers) -> bool:
        """Returns whether the request whose headers have come asks for an upgrade, and is not to begin yet."""
        if self.should_upgrade() and any(name == b"upgrade" for name, _ in headers):  # else it is CONNECT
            first = b"%s %s HTTP/%s\r\n" % (self.get_method(), target, self.get_http_version().encode())
            others = (one for one in headers if one[0] != b"upgrade")
            self.aside = first + b"".join(b"%s: %s\r\n" % one for one in others) + b"\r\n"
        return bool(self.aside)

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as error:
            if not self.aside:
                raise
            self._connection.parser = plain = PlainParser(self._connection)
            plain.feed_data(memoryview(self.aside))
            plain.feed_data(data[error.args[0] :])
