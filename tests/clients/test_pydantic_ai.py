"""pydantic-ai, with OpenAI's chat and Responses APIs and Anthropic's messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

pydantic_ai = pytest.importorskip("pydantic_ai", reason="draftwing[pydantic-ai] is not installed")


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel", "AnthropicModel"])
def model(request: Any, base: str, root: str) -> Any:
    if request.param == "AnthropicModel":
        models = pytest.importorskip("pydantic_ai.models.anthropic", reason="Anthropic's client is another version")
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return models.AnthropicModel("m", provider=AnthropicProvider(base_url=root, api_key="none"))
    models = pytest.importorskip("pydantic_ai.models.openai", reason="OpenAI's client is another version")
    from pydantic_ai.providers.openai import OpenAIProvider

    return getattr(models, request.param)("m", provider=OpenAIProvider(base_url=base, api_key="none"))


def test_text(model: Any, say: Any) -> None:
    agent = pydantic_ai.Agent(model, model_settings={"max_tokens": 500})
    first = agent.run_sync("hi")
    assert first.output == "It is sunny."
    assert agent.run_sync("so?", message_history=first.all_messages()).output == "It is sunny."


def test_a_round_of_tools(model: Any, say: Any) -> None:
    agent, asked = pydantic_ai.Agent(model, model_settings={"max_tokens": 500}), list[str]()

    @agent.tool_plain
    def get_weather(city: str) -> str:
        asked.append(city)
        say("text")
        return "sun"

    say("call")
    assert agent.run_sync("hi").output == "It is sunny." and asked == ["Paris"]


def test_structured_output(model: Any, say: Any) -> None:
    say("json")
    agent = pydantic_ai.Agent(model, output_type=pydantic_ai.PromptedOutput(City), model_settings={"max_tokens": 500})
    assert agent.run_sync("hi").output == City(name="Paris", people=2)
