"""A server with the stand-in engine, which answers with an echo of the conversation."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from scripted import serving

from draftwing.config.options import Options


@pytest.fixture
def echo() -> FakeEngine:
    return FakeEngine(Options(api_key="key", random_seed=1))


@pytest.fixture
def url(echo: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(logging.getLogger("uvicorn"), "handlers", [])  # a command's, for a standard error that is gone
    with serving(echo) as url:
        yield url
