"""A server with the stand-in engine, which answers with an echo of the conversation."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from scripted import serving

from draftwing.config.options import Options


@pytest.fixture(scope="package")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(Options(api_key="key", random_seed=1))
    with pytest.MonkeyPatch.context() as patch, serving(engine) as url:
        patch.setattr(logging.getLogger("uvicorn"), "handlers", [])  # a command's, for a standard error that is gone
        yield engine, url


@pytest.fixture
def echo(served: tuple[FakeEngine, str]) -> FakeEngine:
    served[0].forget()
    return served[0]


@pytest.fixture
def url(echo: FakeEngine, served: tuple[FakeEngine, str]) -> str:
    return served[1]
