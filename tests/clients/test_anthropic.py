"""The tool runner of Anthropic's own client; tests/server/test_anthropic.py has the rest of it."""

from __future__ import annotations

from typing import Any

import pytest

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.mark.slow
def test_the_tool_runner(root: str, say: Any) -> None:
    import anthropic  # of which most processes of `make test` need nothing: it takes a second

    client = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0)

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather."""
        return f"{city}: sun"

    say("text")
    runner = client.beta.messages.tool_runner(model="m", max_tokens=500, messages=HI, tools=[get_weather])
    assert [message.stop_reason for message in runner] == ["end_turn"]
