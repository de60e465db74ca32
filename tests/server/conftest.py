"""The application around a stand-in for the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine, local
from starlette.testclient import TestClient

from draftwing.server.app import create_app


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, TestClient]]:
    """One server for all tests of a module: what is refused leaves nothing behind."""
    engine = FakeEngine()
    with TestClient(create_app(local(engine), engine.tokenizer), raise_server_exceptions=False) as client:
        yield engine, client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(local(engine), engine.tokenizer), raise_server_exceptions=False) as client:
        yield client
