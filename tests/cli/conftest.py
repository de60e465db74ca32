"""A server with the stand-in engine, which answers with an echo of the conversation."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from fake_engine import FakeEngine, local

from draftwing.config.options import Options
from draftwing.server.app import create_app
from draftwing.server.run import bind


@pytest.fixture
def echo() -> FakeEngine:
    return FakeEngine(Options(api_key="key", random_seed=1))


@pytest.fixture
def url(echo: FakeEngine) -> Iterator[str]:
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(local(echo), echo.tokenizer), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    sock.close()
