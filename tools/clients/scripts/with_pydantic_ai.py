import asyncio
import os
import sys
from pathlib import Path

# set-up
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, key, model = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
openai = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
models = {
    "chat": lambda: OpenAIChatModel(model, provider=openai),
    "responses": lambda: OpenAIResponsesModel(model, provider=openai),
    "anthropic": lambda: AnthropicModel(
        model, provider=AnthropicProvider(base_url=url, api_key=key), settings={"max_tokens": 1000}
    ),
}
# end

agent = Agent(models[os.environ["DIALECT"]]())


@agent.tool_plain
def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


async def main() -> None:
    async with agent.iter(os.environ["PROMPT"]) as run:
        async for node in run:
            if not Agent.is_model_request_node(node):
                continue
            async with node.stream(run.ctx) as stream:
                deltas = 0
                async for text in stream.stream_text(delta=True, debounce_by=None):
                    print(text, end="", flush=True)
                    deltas += 1
                    if sys.argv[1] == "cancel" and deltas == 5:
                        return


asyncio.run(main())
