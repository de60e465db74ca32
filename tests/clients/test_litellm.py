"""LiteLLM, as it talks to any server of OpenAI's kind."""

from __future__ import annotations

from typing import Any

import pytest

litellm = pytest.importorskip("litellm", reason="draftwing[clients] is not installed")
HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def ask(base: str, **fields: Any) -> Any:
    return litellm.completion(
        model="openai/m", api_base=base, api_key="none", num_retries=0, **({"messages": HI} | fields)
    )


def test_text_and_stream(base: str, say: Any) -> None:
    assert ask(base).choices[0].message.content == "It is sunny."
    chunks = list(ask(base, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "It is sunny."


def test_a_round_of_tools(base: str, say: Any) -> None:
    say("call")
    message = ask(base, tools=TOOLS).choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    say("text")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
    assert ask(base, messages=[*HI, message, result], tools=TOOLS).choices[0].message.content == "It is sunny."
