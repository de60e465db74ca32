import asyncio
import os
import sys
from pathlib import Path

# set-up
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=os.environ["MODEL"],
    api_base=f"{os.environ['BASE_URL']}/v1",
    api_key=os.environ["API_KEY"],
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=32768,
    max_retries=0,
)
# end


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


async def main() -> None:
    handler = FunctionAgent(tools=[read_file], llm=llm).run(user_msg=os.environ["PROMPT"])
    deltas = 0
    async for event in handler.stream_events():
        if isinstance(event, AgentStream):
            print(event.delta, end="", flush=True)
            deltas += 1
            if sys.argv[1] == "cancel" and deltas == 5:
                await handler.cancel_run()
                return
    await handler


asyncio.run(main())
