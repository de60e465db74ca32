import os
import sys
from pathlib import Path
from typing import Annotated

# set-up
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

generators = {"chat": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}
generator = generators[os.environ["DIALECT"]](
    model=os.environ["MODEL"],
    api_base_url=f"{os.environ['BASE_URL']}/v1",
    api_key=Secret.from_env_var("API_KEY"),
    max_retries=0,
)
# end


class Enough(Exception):
    pass


@tool
def read_file(path: Annotated[str, "of the file"]) -> str:
    """Reads a file."""
    return Path(path).read_text()


deltas = 0


def show(chunk) -> None:
    global deltas
    print(chunk.content or "", end="", flush=True)
    deltas += bool(chunk.content)
    if sys.argv[1] == "cancel" and deltas == 5:
        raise Enough


agent = Agent(chat_generator=generator, tools=[read_file], streaming_callback=show, max_agent_steps=5)
try:
    agent.run(messages=[ChatMessage.from_user(os.environ["PROMPT"])])
except Exception as error:
    if "Enough" not in repr([error, error.__cause__, error.__context__]):
        raise
