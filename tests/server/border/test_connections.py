"""What a server has by default; what the limits do, over real sockets, is in tests/server/test_attacks.py."""

from __future__ import annotations

from functools import partial

from fake_engine import FakeEngine, local

from draftwing.server.border.connections import LimitedConnection
from draftwing.server.listen import make_server


def test_the_time_outs_of_a_server_are_those_of_the_docs() -> None:
    """docs/security.md names them."""
    engine = FakeEngine()
    config = make_server(local(engine), engine.tokenizer, [], 5.0, 30000).config
    connection = config.http
    assert isinstance(connection, partial) and connection.func is LimitedConnection
    assert connection.keywords["most"] == 1024 and config.timeout_keep_alive == 75
    limits = LimitedConnection.header_seconds, LimitedConnection.body_seconds, LimitedConnection.write_seconds
    assert limits == (10, 60, 60)
