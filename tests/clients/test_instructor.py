"""instructor, in its modes for JSON and for tools."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

instructor = pytest.importorskip("instructor", reason="draftwing[clients] is not installed")
HI: list[Any] = [{"role": "user", "content": "hi"}]


class City(BaseModel):
    name: str
    people: int


@pytest.mark.parametrize("mode", ["JSON", "JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_modes(base: str, say: Any, mode: str) -> None:
    if mode.startswith("TOOLS"):
        say('<tool_call>\n{"name": "City", "arguments": {"name": "Paris", "people": 2}}\n</tool_call>')
    else:
        say("json")
    plain = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
    made = client.chat.completions.create(model="m", messages=HI, response_model=City, max_retries=0)
    assert made.model_dump() == {"name": "Paris", "people": 2}  # of a class that instructor makes
