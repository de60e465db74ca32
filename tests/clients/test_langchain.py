"""langchain-openai."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

langchain_openai = pytest.importorskip("langchain_openai", reason="draftwing[clients] is not installed")


class City(BaseModel):
    name: str
    people: int


def get_weather(city: str) -> str:
    """Weather of a city."""
    return "sun in " + city


@pytest.fixture
def chat(base: str) -> Any:
    return langchain_openai.ChatOpenAI(model="m", base_url=base, api_key="none", max_retries=0)


def test_text_and_stream(chat: Any, say: Any) -> None:
    assert chat.invoke("hi").content == "It is sunny."
    assert "".join(chunk.content for chunk in chat.stream("hi")) == "It is sunny."


def test_a_round_of_tools(chat: Any, say: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    say("call")
    bound = chat.bind_tools([get_weather])
    first = bound.invoke("hi")
    assert first.tool_calls[0]["name"] == "get_weather" and first.tool_calls[0]["args"] == {"city": "Paris"}
    say("text")
    result = ToolMessage("sun", tool_call_id=first.tool_calls[0]["id"])
    assert bound.invoke([HumanMessage("hi"), first, result]).content == "It is sunny."


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output(chat: Any, say: Any, method: str) -> None:
    say("json")
    assert chat.with_structured_output(City, method=method).invoke("hi") == City(name="Paris", people=2)


def test_the_responses_api(base: str, say: Any) -> None:
    chat = langchain_openai.ChatOpenAI(model="m", base_url=base, api_key="none", use_responses_api=True)
    first = chat.invoke("hi")
    assert first.text == "It is sunny."
    assert chat.invoke([("user", "hi"), first, ("user", "so?")]).text == "It is sunny."
