"""The application around a stand-in for the engine."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from fake_engine import FakeEngine
from scripted import ScriptedEngine, client_of, openai_client, serving
from starlette.testclient import TestClient


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, TestClient]]:
    """One server for all tests of a module: what is refused leaves nothing behind."""
    engine = FakeEngine()
    with client_of(engine) as client:
        yield engine, client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[TestClient]:
    with client_of(engine) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(request: pytest.FixtureRequest) -> ScriptedEngine:
    """Says what a test tells it to; a module's SCRIPTED has what it is made with."""
    return ScriptedEngine(**request.module.SCRIPTED)


@pytest.fixture(scope="module")
def url(scripted: ScriptedEngine) -> Iterator[str]:
    with serving(scripted) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> openai.OpenAI:
    return openai_client(url)
