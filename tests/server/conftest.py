"""The application around a stand-in for the engine."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from fake_engine import FakeEngine
from scripted import ScriptedEngine, client_of, openai_client, serving
from starlette.testclient import TestClient


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs the tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def plain() -> Iterator[tuple[FakeEngine, TestClient]]:
    """One server for all tests, since it takes a twentieth of a second to make."""
    engine = FakeEngine()
    with client_of(engine) as client:
        yield engine, client


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[tuple[FakeEngine, TestClient]]:
    """A module's ENGINE makes another engine than the plain one."""
    if not hasattr(request.module, "ENGINE"):
        yield request.getfixturevalue("plain")
        return
    engine = request.module.ENGINE()
    with client_of(engine) as client:
        yield engine, client


@pytest.fixture
def engine(served: tuple[FakeEngine, TestClient]) -> FakeEngine:
    """The one that `client` asks, which remembers nothing of earlier tests."""
    served[0].forget()
    return served[0]


@pytest.fixture
def client(engine: FakeEngine, served: tuple[FakeEngine, TestClient]) -> TestClient:
    return served[1]


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
