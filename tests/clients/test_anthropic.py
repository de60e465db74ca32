"""Anthropic's own client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

HI: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(root: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)


def test_messages(client: anthropic.Anthropic, say: Any) -> None:
    (block,) = client.messages.create(model="m", max_tokens=500, messages=HI).content
    assert block.type == "text" and block.text == "It is sunny."
    with client.messages.stream(model="m", max_tokens=500, messages=HI) as stream:
        assert stream.get_final_text() == "It is sunny."
    assert client.messages.count_tokens(model="m", messages=HI).input_tokens > 0


def test_a_round_of_tools(client: anthropic.Anthropic, say: Any) -> None:
    say("call")
    first = client.messages.create(model="m", max_tokens=500, messages=HI, tools=[WEATHER])
    call = first.content[-1]
    assert first.stop_reason == "tool_use" and call.type == "tool_use" and call.input == {"city": "Paris"}
    say("text")
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]}
    history: list[Any] = [*HI, {"role": "assistant", "content": first.content}, result]
    second = client.messages.create(model="m", max_tokens=500, messages=history, tools=[WEATHER])
    assert second.stop_reason == "end_turn"


def test_the_tool_runner(client: anthropic.Anthropic, say: Any) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather."""
        return f"{city}: sun"

    say("text")
    runner = client.beta.messages.tool_runner(model="m", max_tokens=500, messages=HI, tools=[get_weather])
    assert [message.stop_reason for message in runner] == ["end_turn"]
