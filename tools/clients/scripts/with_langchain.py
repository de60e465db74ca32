import asyncio
import contextlib
import os
import sys
from pathlib import Path

# set-up
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

url, key, model = (os.environ[name] for name in ("BASE_URL", "API_KEY", "MODEL"))
models = {
    "chat": lambda: ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_retries=0, stream_usage=True),
    "responses": lambda: ChatOpenAI(
        model=model, base_url=f"{url}/v1", api_key=key, max_retries=0, use_responses_api=True, stream_chunk_timeout=0
    ),
    "anthropic": lambda: ChatAnthropic(model=model, base_url=url, api_key=key, max_retries=0, max_tokens=1000),
}
# end


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


async def main() -> None:
    agent = create_agent(models[os.environ["DIALECT"]](), [read_file])
    messages = {"messages": [{"role": "user", "content": os.environ["PROMPT"]}]}
    deltas = 0
    async for message, _ in agent.astream(messages, stream_mode="messages"):
        if message.type == "AIMessageChunk":
            print(message.text, end="", flush=True)
            deltas += 1
            if sys.argv[1] == "cancel" and deltas == 5:
                task = asyncio.current_task()
                assert task
                task.cancel()


with contextlib.suppress(asyncio.CancelledError):
    asyncio.run(main())
