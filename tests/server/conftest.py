"""The application around a stand-in for the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from draftwing.server.app import create_app

sys.path.insert(0, str(Path(__file__).parent))  # tests are no package: this is how they share fake_engine.py

from fake_engine import FakeEngine, local


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(local(engine), engine.tokenizer), raise_server_exceptions=False) as client:
        yield client
