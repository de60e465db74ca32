"""A server that gives a client what its case needs: a text, JSON or a tool call."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from scripted import ScriptedEngine, serving

CITY = {"name": "Paris", "people": 2}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCRIPTS = {"text": "It is sunny.", "json": json.dumps(CITY), "call": CALL}


@pytest.fixture(scope="session")
def engine() -> ScriptedEngine:
    return ScriptedEngine(tools="hermes")


@pytest.fixture(scope="session")
def root(engine: ScriptedEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture
def base(root: str) -> str:
    """Address of OpenAI's dialect."""
    return f"{root}/v1"


@pytest.fixture
def say(engine: ScriptedEngine) -> Iterator[object]:
    """Picks one of SCRIPTS, or sets a text of its own."""

    def set_script(name: str) -> None:
        engine.script = SCRIPTS.get(name, name)

    set_script("text")
    yield set_script
    engine.script = ""
