"""OpenAI's own client: what reads answers into classes, and the Responses API."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

HI: list[Any] = [{"role": "user", "content": "hi"}]


class City(BaseModel):
    name: str
    people: int


class GetWeather(BaseModel):
    city: str


@pytest.fixture
def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0)


def test_parse(client: openai.OpenAI, say: Any) -> None:
    say("json")
    parsed = client.chat.completions.parse(model="m", messages=HI, response_format=City).choices[0].message.parsed
    assert parsed == City(name="Paris", people=2)
    with client.chat.completions.stream(model="m", messages=HI, response_format=City) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_parsed_tools(client: openai.OpenAI, say: Any) -> None:
    say("call")
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    message = client.chat.completions.parse(model="m", messages=HI, tools=[tool]).choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")


@pytest.mark.slow
def test_responses(client: openai.OpenAI, say: Any) -> None:
    assert client.responses.create(model="m", input="hi", store=True).output_text == "It is sunny."
    events = list(client.responses.create(model="m", input="hi", stream=True, include=["reasoning.encrypted_content"]))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "It is sunny."
    say("json")
    assert client.responses.parse(model="m", input="hi", text_format=City).output_parsed == City(name="Paris", people=2)
